"""Compilation of prepared models with `torch.compile`, in place, so that names in state dicts do not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.strategies import StepModule
from drivetrain.strategies.wrapping import repeated_blocks

logger = get_logger(__name__)


@dataclass(frozen=True)
class Compilation:
    """Options with which `Accelerator.prepare` compiles models by `torch.compile`."""

    backend: str
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    regional: bool = False
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        from_torch = [*torch.compiler.list_backends(exclude_tags=()), "inductor"]
        if self.backend not in from_torch:
            raise ConfigurationError(
                f"dynamo_backend is {self.backend!r}, which torch {torch.__version__} does not have. Available "
                f"backends: {', '.join(sorted({*from_torch}))}.",
            )

    def apply(self, model: nn.Module) -> None:
        """Compile a model in place with `torch.compile`. For a Trainer's task, compile each submodule.

        A model that is already compiled is left as it is. Of a Trainer's task, each submodule is compiled instead of
        the step methods, so that logging causes no graph breaks.
        """
        whole = _callable_parts(model.task) if isinstance(model, StepModule) else [model]
        if not whole:
            logger.warning_once(
                "Nothing is compiled, because the task has no submodules with parameters. Move its computations into "
                "a torch.nn.Module that is an attribute of the task."
            )
        for part in whole:
            for module in self._regions(part) if self.regional else [part]:
                if getattr(module, "_compiled_call_impl", None) is None:
                    if type(module).__module__.startswith("torch.nn"):
                        # The compiler leaves out frames of torch's own files, so all of such a module (torch 2.13).
                        module._compiled_call_impl = torch.compile(_reached_by_us(module), **self._options())
                    else:
                        module.compile(**self._options())

    def _regions(self, model: nn.Module) -> list[nn.Module]:
        blocks = repeated_blocks(model)
        if blocks:
            return blocks
        found: list[nn.Module] = []
        for module in model.modules():
            if isinstance(module, nn.ModuleList | nn.Sequential):
                kinds = Counter(type(child) for child in module)
                found += [child for child in module if kinds[type(child)] > 1 and any(True for _ in child.parameters())]
        # A block inside another block is compiled together with it.
        inner = {id(part) for block in found for part in block.modules() if part is not block}
        return [block for block in found if id(block) not in inner] or [model]

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"backend": self.backend, "fullgraph": self.fullgraph, "dynamic": self.dynamic}
        if self.options:
            options["options"] = dict(self.options)
        # Torch takes a mode for inductor only.
        return {**options, "mode": self.mode} if self.mode not in (None, "default") else options


def _callable_parts(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            found += _callable_parts(child)
        elif any(True for _ in child.parameters()):
            found.append(child)
    return found


def _reached_by_us(module: nn.Module) -> Callable[..., Any]:
    # `torch.compile` skips frames in torch's files, so the call must come from this one.
    call: Callable[..., Any] = module._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    named = [*module.named_parameters(), *module.named_buffers()]
    tensors = tuple((name, None if is_lazy(each) else each.shape, each.dtype) for name, each in named)
    kind: Any = type(module)
    run.__code__ = _code_of_kind(kind, tensors, run.__code__)
    return run


@cache
def _code_of_kind(kind: type[nn.Module], tensors: tuple[Any, ...], code: CodeType) -> CodeType:
    # Torch caches compiled code by code object, and counts each module with the same one as a recompilation. Beyond
    # eight (`torch._dynamo.config.recompile_limit`), it compiles nothing more. Modules of one class with equal tensor
    # shapes share this code object, all others have their own.
    return code.replace(co_name=f"run_{kind.__name__}")

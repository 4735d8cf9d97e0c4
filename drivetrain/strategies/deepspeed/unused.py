"""Parameters without a gradient in a step: the optimizer leaves them alone, as in one plain process.

DeepSpeed steps flat tensors that hold many parameters, and gives those that took no part in the loss a gradient of
zero. By itself it would decay them, and move them on by their momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.runtime.collectives import reduce
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.strategies.deepspeed.layouts import Layout

_log = get_logger(__name__)

_ELSEWHERE = 'use strategy="ddp" or "fsdp"'


class Participation:
    """Records which of an engine's parameters got a gradient since its last step.

    Args:
        layout: Where the engine keeps what belongs to its parameters.
        grouped: The parameters in the optimizer's groups, by name.
        device: The device of the flags that processes exchange.

    Attributes:
        left_out: By name, how many steps have left a parameter out.
    """

    def __init__(self, layout: Layout, grouped: Mapping[str, nn.Parameter], device: torch.device) -> None:
        self._layout, self._device = layout, device
        trained = {id(parameter) for _, held in layout.holders() for parameter in held}
        self._trained = {name: p for name, p in grouped.items() if id(p) in trained}
        self._frozen_before = {name: p for name, p in grouped.items() if id(p) not in trained and not p.requires_grad}
        self._seen = torch.zeros(len(self._trained), dtype=torch.uint8)
        self._steps = 0
        self._froze: set[str] = set()
        self.left_out: dict[str, int] = {}
        self._handles: list[Any] = []
        self._unwatched = list(enumerate(self._trained.values()))
        self._watch()

    def _watch(self) -> None:
        """Add a hook to each parameter that has none; those that require no gradient cannot take one."""
        for number, parameter in self._unwatched:
            if parameter.requires_grad:
                watched: Any = parameter  # the method has no types
                self._handles.append(watched.register_post_accumulate_grad_hook(_setter(self._seen, number)))
        self._unwatched = [(number, parameter) for number, parameter in self._unwatched if not parameter.requires_grad]

    def require_known(self) -> None:
        """Raise if a parameter of the optimizer is to be trained that the engine does not hold.

        Raises:
            ConfigurationError: Names the parameters.
        """
        if self._unwatched:
            self._watch()
        found = [name for name, parameter in self._frozen_before.items() if parameter.requires_grad]
        if found:
            raise ConfigurationError(
                f"{listed(found)} did not require gradients when the model was prepared, and now requires_grad is "
                "True. DeepSpeed settles which parameters it trains when the model is placed. Leave them frozen, "
                f"prepare the model with requires_grad=True, or {_ELSEWHERE}.",
                code="DT-049",
            )

    def unused(self) -> list[nn.Parameter]:
        """Return the parameters without a gradient on any process since the last step, which is now. Collective.

        Raises:
            ConfigurationError: Parameters are trained again after they were frozen, and the optimizer counts its
                steps for all together.
        """
        seen = reduce(self._seen.to(self._device), "max").tolist()
        self._seen.zero_()
        used = [name for name, flag in zip(self._trained, seen, strict=True) if flag]
        if self.left_out:
            self._check_late([name for name in used if name in self.left_out])
        idle = [name for name, flag in zip(self._trained, seen, strict=True) if not flag]
        for name in idle:
            self.left_out[name] = self.left_out.get(name, 0) + 1
            if not self._trained[name].requires_grad:
                self._froze.add(name)
        self._steps += 1
        return [self._trained[name] for name in idle]

    def _check_late(self, names: list[str]) -> None:
        """Report parameters that the optimizer has not stepped as often as the others of their group."""
        late = [name for name in names if self._layout.counts_steps(self._trained[name])]
        for name in names:
            del self.left_out[name]
        if not late:
            return
        text = (
            f"{listed(late)} had no gradient in earlier steps. DeepSpeed keeps one count of steps for all parameters "
            "of a group, where one process counts each parameter's own, so the optimizer corrects its moments by "
            "another count."
        )
        frozen = [name for name in late if name in self._froze]
        if frozen:
            raise ConfigurationError(
                f"{listed(frozen)} was frozen during training and is trained again. {text} Use an optimizer without "
                f"such a count (SGD), or {_ELSEWHERE}.",
                code="DT-049",
            )
        _log.warning_once(f"{text} The numbers differ from those of one process; to have the same, {_ELSEWHERE}.")

    @property
    def never_stepped(self) -> set[str]:
        """The names of parameters that no step has changed."""
        return {name for name, steps in self.left_out.items() if steps == self._steps}

    def resume(self, without_state: Iterable[str]) -> None:
        """Take parameters that a checkpoint holds no optimizer state of as ones that no step has changed."""
        self._steps, self.left_out = 0, dict.fromkeys((name for name in without_state if name in self._trained), 0)

    def discard(self) -> None:
        """Forget which parameters got a gradient."""
        self._seen.zero_()

    def destroy(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def names_of(parameters: Iterable[Tensor], model: nn.Module) -> list[str]:
    """Return the names of those of the parameters that are the model's."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return [known[id(parameter)] for parameter in parameters if id(parameter) in known]


def _setter(flags: Tensor, number: int) -> Callable[[Tensor], None]:
    def mark(_: Tensor) -> None:
        flags[number] = 1

    return mark


def listed(names: list[str], most: int = 8) -> str:
    """Return names as one text, beyond `most` only how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"

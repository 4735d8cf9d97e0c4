"""Refuses `to`, `half` and the like of models whose weights are not one thing in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.runtime.errors import ConfigurationError


class StreamedModelError(ConfigurationError, RuntimeError):
    """Something was asked of a model over devices, memory and disk that only one in one place can do."""

    code = "DT-067"


class MoveGuard:
    """Stands before what moves or casts modules, and lets pass what changes nothing.

    Args:
        modules: The modules.
        kinds: Dtypes and devices of what they hold, and compute with.
        pass_on: Called with a module and the arguments of its own method for what changes nothing; that method if None.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        kinds: Iterable[tuple[torch.dtype, torch.device]],
        pass_on: Callable[[nn.Module, Callable[[Tensor], Tensor], bool], nn.Module] | None = None,
    ) -> None:
        self._modules, self._kinds, self._pass_on = list(modules), set(kinds), pass_on
        for module in self._modules:
            module.__dict__["_apply"] = partial(self._guarded, module)

    def _guarded(self, module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Called in the place of the module's own method, which `to`, `half` and the like use."""
        for dtype, device in self._kinds:
            probe = torch.empty(0, dtype=dtype, device=device)
            if function(probe) is not probe:
                where = ", ".join(sorted({str(device) for _, device in self._kinds}))
                raise StreamedModelError(
                    f"{type(module).__name__} has weights that come and go, or are on several devices ({where}): `to`, "
                    "`half` and the like cannot move or cast it. Load it with another device_map or dtype, or call "
                    "remove_hook_from_submodules(model) first."
                )
        plain: Any = type(module)._apply if self._pass_on is None else self._pass_on
        return plain(module, function, recurse)  # type: ignore[no-any-return]

    def remove(self) -> None:
        """Let the modules be moved again."""
        for module in self._modules:
            module.__dict__.pop("_apply", None)
        self._modules = []

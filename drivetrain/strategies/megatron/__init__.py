"""Megatron parallelism (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053), through megatron-core.

Names are imported at first use, because they need parts of torch whose import takes longer than torch itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.exports import load_export

# public name -> the module that defines it
_EXPORTS = {
    "Megatron": "drivetrain.strategies.megatron.strategy",
}

__all__ = [*sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    return load_export(name, _EXPORTS, globals())


if TYPE_CHECKING:
    from drivetrain.strategies.megatron.strategy import Megatron as Megatron

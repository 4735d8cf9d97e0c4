"""Tied parameters, which a module has under several names."""

from __future__ import annotations

from torch import nn


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """Return groups of names that refer to the same parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def set_shared_parameters(module: nn.Module, shared_params: list[list[str]]) -> nn.Module:
    """Tie parameters again, as they were before the module was moved or copied."""
    for first, *others in shared_params:
        kept = module.get_parameter(first)
        for name in others:
            path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(path), attribute, kept)
    return module

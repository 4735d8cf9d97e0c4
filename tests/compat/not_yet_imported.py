"""For a script that sees whether bitsandbytes was imported: peft imports it in the process that programs share."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

PACKAGE = "bitsandbytes"


class Held(MetaPathFinder, Loader):
    """Gives modules back, which cannot be imported twice in one process, where they are imported again."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self.modules = modules

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in self.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass


def prepare() -> None:
    names = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
    sys.meta_path.insert(0, Held({name: sys.modules.pop(name) for name in names}))

"""The running script's module in processes that start as new interpreters: imported again, up to what starts them."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, ModuleType

from drivetrain.runtime.state import PartialState

_NAME = "__mp_main__"  # multiprocessing's own, under which both it and pickle find it
_IMPORTS = "imports_script"


class ScriptReached(BaseException):
    """The script has come to what starts processes, in a process that it has started."""


@dataclass(frozen=True)
class ScriptMain:
    """Where the code of `__main__` is.

    Attributes:
        path: Its file.
        module: Its name, where it was started by `python -m`.
    """

    path: str
    module: str | None = None

    @classmethod
    def here(cls) -> ScriptMain | None:
        """That of this process; None where there is no file, as in a notebook, or only that of a package's command."""
        main = sys.modules["__main__"]
        path, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
        if path is None or not os.path.isfile(path):
            return None
        if spec is None:
            return cls(os.path.abspath(path))
        return None if spec.name.rpartition(".")[2] == "__main__" else cls(os.path.abspath(path), spec.name)

    def load(self) -> None:
        """Let the names that the script defines be those of `__main__` here.

        Its top level runs under another name than `"__main__"`, until it comes to what would start processes again.
        """
        module = ModuleType(_NAME)
        module.__file__ = self.path
        sys.modules["__main__"] = sys.modules[_NAME] = module
        PartialState.registry()[_IMPORTS] = True
        try:
            exec(self._code(module), module.__dict__)
        except ScriptReached:
            pass
        finally:
            PartialState.registry().pop(_IMPORTS, None)

    def _code(self, module: ModuleType) -> CodeType:
        if self.module is not None:
            module.__spec__ = importlib.util.find_spec(self.module)
            module.__package__ = self.module.rpartition(".")[0]
        with open(self.path, "rb") as file:
            return compile(file.read(), self.path, "exec")


def stop_at_start_of_processes() -> None:
    """End the top level of the script here, in a process that imports it for what it defines.

    Raises:
        ScriptReached: This is such a process.
    """
    if PartialState.registry().get(_IMPORTS):
        raise ScriptReached


@contextmanager
def script_hidden() -> Iterator[None]:
    """Let multiprocessing not import the script in the processes that the body starts, which do so themselves."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main

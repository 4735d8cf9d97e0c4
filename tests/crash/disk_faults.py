"""A disk that fails at one call of this process: at any write, sync, rename, link or new name below a directory."""

from __future__ import annotations

import ast
import os
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import drivetrain

PACKAGE = Path(drivetrain.__file__).parent
KINDS = ("mkdir", "open", "write", "fsync", "rename", "replace", "link", "symlink")
_SPELLINGS = {"makedirs": "mkdir", **{kind: kind for kind in KINDS}}


class Site(NamedTuple):
    """Where in the package a file operation is called."""

    file: str
    function: str
    kind: str


class DiskFaults:
    """Lets calls of `os` that the package makes for files below a directory fail.

    Args:
        root: the directory.
        only: the call sites that count; all if None.

    Attributes:
        seen: every call site that was reached so far.
    """

    def __init__(self, root: str | Path, only: Collection[Site] | None = None) -> None:
        self.seen: set[Site] = set()
        self._root = f"{os.fspath(root)}{os.sep}"
        self._only = only
        self._open_files: dict[int, str] = {}
        self._lock = threading.Lock()
        self._at = self._count = self._error = 0
        self._lasting = False
        self._hit: Site | None = None
        self._real = {kind: getattr(os, kind) for kind in KINDS}

    def __enter__(self) -> DiskFaults:
        for kind, real in self._real.items():
            setattr(os, kind, self._watched(kind, real))
        return self

    def __exit__(self, *raised: object) -> None:
        for kind, real in self._real.items():
            setattr(os, kind, real)

    def arm(self, at: int, error: int, lasting: bool = False) -> None:
        """Let a call fail.

        Args:
            at: which one, from 1, counted from now; 0 for none.
            error: the error number that it fails with.
            lasting: whether all calls after it fail as well.
        """
        with self._lock:
            self._at, self._error, self._lasting = at, error, lasting
            self._count, self._hit = 0, None

    def disarm(self) -> Site | None:
        """Let the disk be well again, and tell which call failed first, if it was reached."""
        with self._lock:
            self._at = 0
            return self._hit

    def _watched(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            named = args[0] if kind in ("link", "symlink") else first  # what is made anew
            path = self._open_files.get(named, "") if isinstance(named, int) else os.fspath(named)
            if isinstance(path, str) and path.startswith(self._root):
                self._meet(kind, path)
            result = real(first, *args, **kwargs)
            if kind == "open":
                self._open_files[result] = path
            return result

        return call

    def _meet(self, kind: str, path: str) -> None:
        site = _caller(kind)
        if site is None or (self._only is not None and site not in self._only):
            return
        with self._lock:
            self.seen.add(site)
            if not self._at:
                return
            self._count += 1
            if self._count == self._at or (self._lasting and self._count > self._at):
                self._hit = self._hit or site
                if kind != "mkdir" or not os.path.isdir(path):  # that it is there already comes before all else
                    raise OSError(self._error, os.strerror(self._error), path)


def _caller(kind: str) -> Site | None:
    """The function of the package that called, directly or through `os.makedirs`."""
    frame = sys._getframe(3)  # of whoever called what stands in for a function of os
    if frame.f_code.co_name == "makedirs":
        while frame.f_back is not None and frame.f_code.co_name == "makedirs":
            frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return None
    return Site(path.relative_to(PACKAGE).as_posix(), frame.f_code.co_name, kind)


def sites_in(*files: str) -> set[Site]:
    """Every function of these files of the package that calls one of `os`'s functions that can fail so."""
    found = set()
    for file in files:
        for function in ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                found |= {Site(file, function.name, kind) for kind in map(_kind_of, ast.walk(function)) if kind}
    return found


def _kind_of(node: ast.AST) -> str | None:
    call = node.func if isinstance(node, ast.Call) else None
    if isinstance(call, ast.Attribute) and ast.unparse(call.value) in ("os", "self._os"):
        return _SPELLINGS.get(call.attr)
    return None

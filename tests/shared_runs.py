"""Runs that share one set of processes, so that a test module pays for them once.

Starting processes, and importing what a strategy needs in them, costs more than most runs do. A module declares
its runs beside the tests that read them:

    runs = SharedRuns(__name__)

    @runs
    def ties_weights() -> float:
        ...

    def test_tied_weights_stay_tied():
        assert all(gap < EXACT for gap in runs.of(ties_weights))

The first question runs everything that the module declares, in order, in the same processes. If one run fails
there, each run gets processes of its own, so that only the tests of the failing one fail.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from tests.pool import ProcessesFailed, run_in_processes

Run = TypeVar("Run", bound=Callable[..., Any])


class SharedRuns:
    """The runs of one test module.

    Args:
        module: The module's name: the processes import it.
        world_size: How many processes.
        timeout: Seconds for all runs together.
        env: Environment variables to set in the processes, or to remove where the value is None.
    """

    def __init__(
        self,
        module: str,
        world_size: int = 2,
        timeout: float = 180,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        self.module = module
        self.world_size = world_size
        self.timeout = timeout
        self.env = env
        self.functions: dict[str, Callable[..., Any]] = {}
        self.results: dict[str, list[Any]] = {}
        self.together: bool | None = None
        self._root: tempfile.TemporaryDirectory[str] | None = None

    def __call__(self, function: Run) -> Run:
        """Declare a run: a function of nothing, or of a `directory` of its own."""
        self.functions[function.__name__] = function
        return function

    def of(self, function: Callable[..., Any]) -> list[Any]:
        """What a run returned, in rank order."""
        name = function.__name__
        if self.together is None:
            try:
                self.results = self._run(list(self.functions))
                self.together = True
            except ProcessesFailed:
                self.together = False
        if name not in self.results:
            self.results.update(self._run([name]))
        return self.results[name]

    def directory_of(self, function: Callable[..., Any]) -> Path:
        """Where a run wrote its files."""
        return Path(self._directory()) / function.__name__

    def _directory(self) -> str:
        if self._root is None:
            self._root = tempfile.TemporaryDirectory(prefix="shared_runs_")
        return self._root.name

    def _run(self, names: list[str]) -> dict[str, list[Any]]:
        given = (self.module, names, self._directory())
        ranks = run_in_processes(run_declared, self.world_size, args=given, timeout=self.timeout, env=self.env)
        return {name: [results[name] for results in ranks] for name in names}


def run_declared(module: str, names: list[str], directory: str) -> dict[str, Any]:
    """Run what a module declares, in a process of the pool."""
    torch.set_num_threads(1)
    runs: SharedRuns = importlib.import_module(module).runs
    results = {}
    for name in names:
        gc.freeze()  # DeepSpeed collects garbage where it makes an engine, which takes a second with all it imports
        function = runs.functions[name]
        wanted = {"directory": Path(directory) / name} if inspect.signature(function).parameters else {}
        results[name] = function(**wanted)
    return results

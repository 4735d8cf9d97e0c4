"""Profiler of the Python functions in each action."""

from __future__ import annotations

import cProfile
import io
import os
import pstats

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.trainer.profilers.base import Profiler


class AdvancedProfiler(Profiler):
    """Profiler that runs Python's `cProfile` on each action and reports the slowest functions.

    Only one `cProfile` can run at a time. During a nested action, only the inner action is measured. The profiler
    slows a run down several times, so compare shares rather than seconds.

    Args:
        dirpath: Directory of the report. None uses `trainer.log_dir`.
        filename: Name of the report's file. None prints the report.
        line_count_restriction: Length of each action's table, as a number of lines or a fraction of them.
        dump_stats: If True, also write the statistics of each action to `<action>.prof`, for viewers such as
            snakeviz.

    Attributes:
        profiled_actions: `cProfile.Profile` of each action.

    Example:
        ```python
        from drivetrain import AdvancedProfiler, Trainer

        trainer = Trainer(profiler=AdvancedProfiler(filename="functions", line_count_restriction=10), logger="csv")
        ```
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        self.line_count_restriction, self.dump_stats = line_count_restriction, dump_stats
        self.profiled_actions: dict[str, cProfile.Profile] = {}
        self._running: list[str] = []

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self.profiled_actions.clear()
        self._running.clear()

    def start(self, action_name: str) -> None:
        if self._running:
            # Python allows only one active `cProfile` per process.
            self.profiled_actions[self._running[-1]].disable()
        self._running.append(action_name)
        self.profiled_actions.setdefault(action_name, cProfile.Profile()).enable()

    def stop(self, action_name: str) -> None:
        if not self._running or self._running[-1] != action_name:
            raise ConfigurationError(
                f"Attempting to stop recording an action ({action_name}) that is not the one that was started "
                f"last{f' ({self._running[-1]})' if self._running else ''}. Call start first, or use `with "
                "profiler.profile(...)`.",
            )
        self.profiled_actions[self._running.pop()].disable()
        if self._running:
            # The outer action continues to be measured.
            self.profiled_actions[self._running[-1]].enable()

    def summary(self) -> str:
        stage = "" if self._stage is None else f"{self._stage.upper()} "
        parts = [f"{stage}Profiler Report"]
        for name, profile in self.profiled_actions.items():
            text = io.StringIO()
            stats = pstats.Stats(profile, stream=text).strip_dirs().sort_stats("cumulative")
            stats.print_stats(self.line_count_restriction)
            parts.append(f"Profile stats for: {name}\n{text.getvalue().rstrip()}")
        return "\n\n".join(parts) + "\n"

    def describe(self) -> None:
        super().describe()
        if self.dump_stats:
            for name, profile in self.profiled_actions.items():
                profile.dump_stats(self.output_path(".prof", name))

    def teardown(self, stage: str | None) -> None:
        super().teardown(stage)
        self.profiled_actions.clear()  # a `cProfile.Profile` can be neither copied nor pickled

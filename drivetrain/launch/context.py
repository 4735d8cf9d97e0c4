"""The ranks of torch's elastic agent, forked from a process that has imported torch, where that can be done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from drivetrain.launch.preload import Preloader


class PreloadedContext(SubprocessContext):
    """The ranks of one attempt.

    Args:
        preloader: What they are forked from.
        report: Called with the reason where they cannot be.
        **settings: Those of torch's own context.
    """

    def __init__(self, preloader: Preloader, report: Callable[[str], None], **settings: Any) -> None:
        super().__init__(**settings)
        self._preloader = preloader
        self._report = report

    def _start(self) -> None:
        reason = self._preloader.why_not(_environment(self.envs[0]))
        if reason is not None:
            self._report(f"Nothing is preloaded: {reason}.")
            super()._start()  # type: ignore[no-untyped-call]
            return
        for local_rank in range(self.nprocs):
            self.subprocess_handlers[local_rank] = _ForkedHandler(
                self._preloader,
                entrypoint=str(self.entrypoint),
                args=self.args[local_rank],
                env=self.envs[local_rank],
                stdout=self.stdouts[local_rank],
                stderr=self.stderrs[local_rank],
                local_rank_id=local_rank,
                numa_options=None,
            )


class _ForkedHandler(SubprocessHandler):
    """Torch's handle of one rank: it opens the files, and the preloader starts the process."""

    def __init__(self, preloader: Preloader, **settings: Any) -> None:
        self._preloader = preloader
        super().__init__(**settings)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        return self._preloader.fork(env, self._stdout, self._stderr)


@contextmanager
def forking_from(preloader: Preloader, report: Callable[[str], None]) -> Iterator[None]:
    """Let the agent fork the ranks that it starts.

    Args:
        preloader: What they are forked from.
        report: Called with the reason where they cannot be.
    """

    def start(start_method: str = "", **settings: Any) -> PreloadedContext:
        context = PreloadedContext(preloader, report, **settings)
        try:
            context.start()
        except BaseException:
            context.close()
            raise
        return context

    # The agent has no place for another kind of context (torch 2.13): it calls this function of its module.
    module: Any = local_elastic_agent
    before = module.start_processes
    module.start_processes = start
    try:
        yield
    finally:
        module.start_processes = before


def _environment(own: dict[str, str]) -> dict[str, str]:
    return {**os.environ, **own}

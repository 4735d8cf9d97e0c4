"""What a worker of Ray runs: one rank as a process beside it, with its output and how it ends.

The script is a process of its own, as with every launcher: it has its own `__main__`, arguments, signals and exit
handlers, its exit code is its own, and Ray's worker outlives its crash to report it. Imports neither torch nor,
before a worker is there, Ray.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from drivetrain.launch.ranks import STOP_PATIENCE, LocalRanks
from drivetrain.launch.report import ERROR_FILE_VARIABLE, RankFailure
from drivetrain.runtime.errors import LaunchError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# Of the machine that a process is on: that of the launcher means nothing on another one.
_OF_A_MACHINE = ("HOSTNAME", "TMPDIR", "DISPLAY", VISIBLE_DEVICES)
_PREFIXES_OF_A_MACHINE = ("RAY_", "SLURM_", "OMPI_", "PMI_", "SSH_", "XDG_")
_INTERVAL = 0.02
_PIPE = 65536  # bytes


@dataclass(frozen=True)
class Place:
    """Where a worker is.

    Attributes:
        node: Ray's name of the machine.
        host: Its address.
        devices: The GPUs that Ray has given to the worker, by their ids on that machine.
    """

    node: str
    host: str
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """News of a rank.

    Attributes:
        output: What it has written since the last report: 1 or 2, for stdout or stderr, and bytes, in order.
        alive: Whether its process is there.
        failing: Whether it has ended, or is about to end, with another exit code than 0.
        failures: How it failed, if it failed by itself.
    """

    output: tuple[tuple[int, bytes], ...] = ()
    alive: bool = True
    failing: bool = False
    failures: tuple[RankFailure, ...] = ()


class Stream:
    """What a process writes to a pipe, in whole lines; the rest of a line once nothing follows it.

    Args:
        pipe: The end to read.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._lock = threading.Lock()
        self._written = b""
        self._taken_at = 0  # length of an unfinished line when it was last left here
        self._reader = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._reader.start()

    def take(self, *, last: bool = False) -> bytes:
        """What is there, up to the end of a line.

        Args:
            last: Take the rest too, once the writer has ended.
        """
        if last:
            self._reader.join(STOP_PATIENCE)  # a process that it has left behind may hold the pipe
        with self._lock:
            end = self._written.rfind(b"\n") + 1
            if last or len(self._written) - end == self._taken_at:
                end = len(self._written)  # such as a progress bar, which ends no line
            taken, self._written = self._written[:end], self._written[end:]
            self._taken_at = len(self._written)
        return taken

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), _PIPE):
                with self._lock:
                    self._written += data
                while len(self._written) > 64 * _PIPE:
                    time.sleep(_INTERVAL)  # as with a full pipe, the rank waits until this is taken


class RayWorker:
    """One rank on one worker. Ray makes an actor of this class: calls are taken one after the other."""

    def __init__(self) -> None:
        self._ranks: LocalRanks | None = None
        self._streams: dict[int, Stream] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="drivetrain_", ignore_cleanup_errors=True)
        self._last = (True, False)

    def place(self) -> Place:
        """Where this worker is."""
        import ray
        from ray.util import get_node_ip_address

        context = ray.get_runtime_context()
        devices = tuple(context.get_accelerator_ids().get("GPU", ()))
        return Place(context.get_node_id(), get_node_ip_address(), devices)

    def free_port(self) -> int:
        """A port that nothing on this machine listens on."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def start(
        self, command: Sequence[str], variables: Mapping[str, str], directory: str, *, python: bool = True
    ) -> int:
        """Start the rank.

        Args:
            command: What it runs; the options and arguments of Python, where `python`.
            variables: Its environment variables, over those of this worker.
            directory: Its working directory.
            python: Whether it is Python, this worker's.

        Returns:
            Its process id.

        Raises:
            LaunchError: There is no such directory or program on this machine.
        """
        if not os.path.isdir(directory):
            raise LaunchError(
                f"{socket.gethostname()} has no directory {directory}. The script must be at the same path on every "
                "machine of the cluster, such as on a shared file system."
            )
        error_file = os.path.join(self._directory.name, "error.json")
        environment = environment_of_rank(variables, os.environ) | {ERROR_FILE_VARIABLE: error_file}
        # Ray's workers hear no SIGINT, and what they start would not either.
        before = signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            process = subprocess.Popen(
                [sys.executable, *command] if python else list(command),
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"{command[0]} could not be started on {socket.gethostname()}: {error}.") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert process.stdout is not None
        assert process.stderr is not None
        self._streams = {1: Stream(process.stdout), 2: Stream(process.stderr)}
        local, rank = int(variables["LOCAL_RANK"]), int(variables["RANK"])
        self._ranks = LocalRanks({local: process}, {local: rank}, {local: error_file}, signal_all=not python)
        return process.pid

    def poll(self, patience: float) -> Report:
        """Wait for news of the rank, for some seconds at most."""
        ranks = self._running()
        deadline = time.monotonic() + patience
        while True:
            ranks.poll()
            alive, failing = bool(ranks.alive()), ranks.any_failed()
            output = tuple((kind, data) for kind, each in self._streams.items() if (data := each.take(last=not alive)))
            if output or (alive, failing) != self._last or time.monotonic() >= deadline:
                self._last = (alive, failing)
                return Report(output, alive, failing, tuple(ranks.failures()))
            time.sleep(_INTERVAL)

    def forward(self, number: int) -> None:
        """Pass a signal on to the rank."""
        ranks = self._running()
        ranks.forward(ranks.alive(), signal.Signals(number))

    def stop(self, patience: float) -> None:
        """End the rank: ask it, then kill it."""
        ranks = self._running()
        ranks.stop(ranks.alive(), patience)

    def clean_up(self) -> None:
        """End what the rank has left behind."""
        if self._ranks is not None:
            self.stop(0)
            self._ranks.end_what_they_left()
        self._directory.cleanup()

    def _running(self) -> LocalRanks:
        assert self._ranks is not None
        return self._ranks


def environment_of_rank(given: Mapping[str, str], of_machine: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a rank.

    Args:
        given: Those that the launcher gives it.
        of_machine: Those of Ray's worker; one that the launcher gives too is the launcher's.
    """
    environment = {**of_machine, **given}
    if environment.get("PYTHONBREAKPOINT", "").startswith("ray."):
        del environment["PYTHONBREAKPOINT"]  # of Ray's workers alone
    return environment


def variables_to_pass_on(environ: Mapping[str, str], leave: Iterable[str] = ()) -> dict[str, str]:
    """What of the launcher's environment reaches ranks on other machines: all that is not about this machine.

    Args:
        environ: The launcher's variables.
        leave: More that are left out.
    """
    left = {*_OF_A_MACHINE, *leave}
    return {
        name: value
        for name, value in environ.items()
        if name not in left and not name.startswith(_PREFIXES_OF_A_MACHINE)
    }

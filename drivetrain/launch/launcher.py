"""Starts a script as N processes under torch's elastic agent, and turns how they end into an exit code."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

from drivetrain.launch.agent import RankAgent
from drivetrain.launch.context import forking_from
from drivetrain.launch.interpreter import Invocation
from drivetrain.launch.messages import announce, announce_restart, exit_code_after, resumable, write
from drivetrain.launch.options import DEFAULT_PORT, LaunchOptions
from drivetrain.launch.plan import LaunchPlan
from drivetrain.launch.preload import Preloader
from drivetrain.launch.ranks import LOST_AFTER, PREEMPTION_SIGNALS, require_posix
from drivetrain.launch.ray_launcher import launch_with_ray
from drivetrain.launch.report import RankFailure, describe
from drivetrain.launch.watchdog import Watchdog
from drivetrain.runtime.errors import ConfigurationError, LaunchError

_WORKER = "drivetrain.launch.worker"
_LOOPBACK = "127.0.0.1"
_RENDEZVOUS_TIMEOUT = 900  # seconds that machines wait for each other, as with torchrun
_CONNECT_TIMEOUT, _CONNECT_INTERVAL = 5.0, 0.5  # seconds
_LOST = "The others continue: it was taking items from a work queue, and the one that it had is given to another."
_QUIET_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher")


def launch_script(
    options: LaunchOptions, script: str, args: Sequence[str] = (), preloader: Preloader | None = None
) -> int:
    """Run a script as several processes and wait for them.

    The first rank that fails stops the others; its traceback is written to stderr, once.

    Args:
        options: How many processes, where, and with which settings.
        script: The script's path, or a module's or program's name if the options ask for that.
        args: Its arguments, passed on as they are.
        preloader: What the processes are forked from, if it was started before; None starts one.

    Returns:
        0; the exit code of the first rank that failed; 128 + the number of the signal that ended it; the same for
        a signal that ended the launcher (130 for Ctrl-C); 124, `HANG_EXIT_CODE`, where a rank made no progress; or 75,
        `RESUME_EXIT_CODE`, where the run was preempted and has saved its state, so that it can be started again.

    Raises:
        ConfigurationError: The script is not there, or the options do not fit this machine.
        DeviceNotAvailableError: Accelerators were asked for where there are none.
        LaunchError: The machines did not meet, a port is taken, or this is Windows.
    """
    require_posix()
    options.check_script(script)
    if options.launcher == "ray":
        return launch_with_ray(options, script, args)
    if preloader is None:
        with Preloader.start(options, script, args) as preloader:
            return launch_script(options, script, args, preloader)
    plan = LaunchPlan.make(options)
    report = announce if options.debug else _ignore
    report(f"{plan.local_processes} process(es) on this machine, on {plan.kind}")
    for name, value in plan.variables.items():
        report(f"{name}={value}")
    entrypoint, arguments = _command(options, script, args)
    with (
        _quiet_loggers(enabled=not options.debug),
        _log_directory(options) as log_directory,
        _watchdog(options) as watchdog,
        plan.environment(),
    ):
        return _run(options, plan, entrypoint, arguments, log_directory, watchdog, preloader)


def _command(options: LaunchOptions, script: str, args: Sequence[str]) -> tuple[str, list[str]]:
    """The program that each rank is, and its arguments."""
    if options.no_python:
        entrypoint, arguments = script, list(args)
    else:
        entrypoint = sys.executable
        kind = "module" if options.module else "script"
        arguments = [*Invocation.current().options, "-m", _WORKER, kind, script, *args]
    # The agent takes arguments for templates.
    return entrypoint, [argument.replace("$", "$$") for argument in arguments]


def _run(
    options: LaunchOptions,
    plan: LaunchPlan,
    entrypoint: str,
    arguments: list[str],
    log_directory: str,
    watchdog: Watchdog | None,
    preloader: Preloader,
) -> int:
    parameters = _rendezvous(options)
    try:
        _wait_for_machine_0(options, parameters)
        handler = get_rendezvous_handler(parameters)
        if options.max_machines > 1 and parameters.backend == "static":
            _meet(handler, parameters.endpoint)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        raise _rendezvous_failed(options, parameters, error) from error
    address, port = parameters.endpoint.rsplit(":", 1) if parameters.backend == "static" else (None, None)
    agent = RankAgent(
        WorkerSpec(
            role="default",
            local_world_size=plan.local_processes,
            entrypoint=entrypoint,
            args=tuple(arguments),
            rdzv_handler=handler,
            max_restarts=options.max_restarts,
            monitor_interval=options.monitor_interval,
            master_addr=address,
            master_port=int(port) if port is not None else None,
            local_addr=parameters.local_addr,
        ),
        _logs(options, log_directory),
        log_line_prefix_template="[rank${rank}]: ",
        grace_period=options.preemption_grace_period,
        can_shrink=options.min_machines < options.max_machines,
        signal_all=options.no_python,
        on_restart=lambda failure, number: announce_restart(failure, agent.world_size, number, options.max_restarts),
        on_resize=lambda old, new: announce(f"continuing with {new} machine(s) instead of {old}."),
        on_loss=lambda failure: write(describe(failure, agent.world_size, then=_LOST)),
        start_ranks=lambda: forking_from(preloader, announce if options.debug else _ignore),
        on_interrupt=lambda: announce("interrupted: the processes are ending; Ctrl-C again kills them."),
        watchdog=watchdog,
    )
    try:
        return _watch(options, parameters, agent, handler)
    finally:
        agent.restore_signals()


def _watch(
    options: LaunchOptions, parameters: RendezvousParameters, agent: RankAgent, handler: RendezvousHandler
) -> int:
    """Run the agent to its end and turn what happened into an exit code."""
    shut_down = True
    try:
        result = agent.run()
        if agent.ended_by_signal:
            shut_down = False  # it would close the rendezvous for machines that may continue
            return _after_signal(options, agent)
        if agent.preempted:
            return resumable()
        if result is None or not result.is_failed():
            return agent.status_without_lost
        failure = agent.first_failure()
        if failure is None:
            raise LaunchError(_unexplained(agent))
        write(_described(options, failure, agent))
        return failure.status
    except (KeyboardInterrupt, SignalException) as stop:
        shut_down = False
        received = agent.received if agent.received is not None else getattr(stop, "sigval", signal.SIGINT)
        if agent.restarting and received in PREEMPTION_SIGNALS:
            return resumable("stopped before the processes were started again")
        return 128 + int(received)
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        if agent.preempted:
            return resumable()
        raise _rendezvous_failed(options, parameters, error) from error
    finally:
        if shut_down:
            handler.shutdown()


def _after_signal(options: LaunchOptions, agent: RankAgent) -> int:
    """The exit code after a signal was forwarded to the ranks."""
    assert agent.received is not None
    failure = agent.first_failure() if not agent.preempted else None
    return exit_code_after(
        agent.received,
        overdue=agent.overdue,
        grace_period=options.preemption_grace_period,
        preempted=agent.preempted,
        succeeded=agent.all_succeeded(),
        described=_described(options, failure, agent) if failure is not None and failure.text else "",
    )


def _unexplained(agent: RankAgent) -> str:
    if agent.lost_machines:
        return f"Another machine gave no sign of life for {LOST_AFTER:g} s, so the processes here were stopped."
    return "The processes were stopped, and none of them left a reason."


def _described(options: LaunchOptions, failure: RankFailure, agent: RankAgent) -> str:
    early = agent.ended_early()
    then = ""
    if early:
        ranks = ", ".join(str(rank) for rank in early)
        then = f"Already ended, with exit code 0: rank {ranks}. All others were stopped."
    return describe(failure, agent.world_size, then=then, debug=options.compares_calls)


def _rendezvous(options: LaunchOptions) -> RendezvousParameters:
    """Where and how the ranks meet."""
    settings: dict[str, Any] = {"timeout": _RENDEZVOUS_TIMEOUT, **options.rendezvous_settings}
    # A file that was written for several machines may name an address: one machine has no use for it.
    address = options.main_process_ip if options.max_machines > 1 else None
    port = options.main_process_port
    backend, local_address = options.rendezvous_backend, None
    run = "drivetrain"  # the same on every machine
    if options.max_machines == 1:
        run, local_address = uuid.uuid4().hex, _LOOPBACK
        if not port:
            # Port 0: the store binds to a free port and reports it, so that two launches never collide.
            backend, port = "c10d", 0
            settings["is_host"] = True
    if backend == "static":
        settings["rank"] = options.machine_rank
    elif address and options.max_machines > 1:
        local_address = _own_address_towards(address)
        if _is_unnamed_here(address):
            settings.setdefault("is_host", True)
    return RendezvousParameters(
        backend=backend,
        endpoint=f"{address or _LOOPBACK}:{DEFAULT_PORT if port is None else port}",
        run_id=run,
        min_nodes=options.min_machines,
        max_nodes=options.max_machines,
        local_addr=local_address,
        **settings,
    )


def _wait_for_machine_0(options: LaunchOptions, parameters: RendezvousParameters) -> None:
    """Wait until machine 0 listens. Torch would wait in a call that no signal interrupts, and print nothing.

    Raises:
        RendezvousError: It does not within the time that machines wait for each other.
    """
    host, _, port = parameters.endpoint.rpartition(":")
    serves = parameters.get("is_host", False) or _matches_machine_hostname(host)
    if options.max_machines == 1 or (options.machine_rank == 0 if parameters.backend == "static" else serves):
        return
    limit = float(parameters.get("timeout", _RENDEZVOUS_TIMEOUT))
    deadline, announced = time.monotonic() + limit, False
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RendezvousError(f"no answer within {limit:g} s: {error}") from error
        if not announced:
            announce(f"waiting for machine 0 at {parameters.endpoint} ...")
            announced = True
        time.sleep(_CONNECT_INTERVAL)


def _meet(handler: RendezvousHandler, endpoint: str) -> None:
    """Make the handler's store, which waits for all machines in a call that no signal interrupts."""
    failures: list[Exception] = []

    def meet() -> None:
        try:
            handler.next_rendezvous()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    thread.join(_CONNECT_INTERVAL)
    if thread.is_alive():
        announce(f"waiting for the other machines at {endpoint} ...")
    while thread.is_alive():
        thread.join(_CONNECT_INTERVAL)
    if failures:
        raise failures[0]


def _own_address_towards(address: str) -> str | None:
    """This machine's address on the network that another is on; None, for its name, where that is not known.

    The others need not be able to look up its name.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, DEFAULT_PORT))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _is_unnamed_here(address: str) -> bool:
    """Whether an address is this machine's, though its own name does not lead there, as torch expects of the host.

    On a machine with several networks, or in a container, no machine would serve the meeting otherwise.
    """
    if _matches_machine_hostname(address):
        return False
    try:
        wanted = {found[4][0] for found in socket.getaddrinfo(address, None)}
    except OSError:
        return False
    return any(each.address in wanted for found in psutil.net_if_addrs().values() for each in found)


def _rendezvous_failed(options: LaunchOptions, parameters: RendezvousParameters, error: Exception) -> LaunchError:
    reason = f"{type(error).__name__}: {error.__cause__ or error}".splitlines()[0]
    if "in use" in str(error):
        return LaunchError(
            f"The port of {parameters.endpoint} is taken already. Give another with --main_process_port, "
            "or leave it out on one machine for a free one."
        )
    return LaunchError(
        f"Machine {options.machine_rank} of {options.num_machines} did not meet the others at "
        f"{parameters.endpoint} ({reason}). Check that the same command runs on every machine with its own "
        "machine_rank, and that this address and port can be reached."
    )


def _logs(options: LaunchOptions, directory: str) -> DefaultLogsSpecs:
    tee = options.tee if options.tee is not None else "3" if options.log_dir else "0"
    if ":" in tee:
        pairs = (pair.split(":") for pair in tee.split(","))
        return DefaultLogsSpecs(directory, tee={int(rank): Std(int(which)) for rank, which in pairs})
    return DefaultLogsSpecs(directory, tee=Std(int(tee)))


@contextmanager
def _log_directory(options: LaunchOptions) -> Iterator[str]:
    """The user's directory, or one that is gone afterwards."""
    if options.log_dir is not None:
        if os.path.isfile(options.log_dir):
            raise ConfigurationError(f"log_dir {options.log_dir!r} is a file. Name a directory.", code="DT-009")
        yield options.log_dir
        return
    with tempfile.TemporaryDirectory(prefix="drivetrain_", ignore_cleanup_errors=True) as directory:
        yield directory


@contextmanager
def _watchdog(options: LaunchOptions) -> Iterator[Watchdog | None]:
    """What finds ranks that make no progress, with a directory in memory for their heartbeats."""
    limit = options.hang_limit
    if limit == 0:
        yield None
        return
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="drivetrain_", dir=memory, ignore_cleanup_errors=True) as directory:
        yield Watchdog(directory, limit, debug=options.compares_calls)


@contextmanager
def _quiet_loggers(*, enabled: bool) -> Iterator[None]:
    """Keep the agent's messages from the terminal; what matters to users is printed here."""
    loggers = [logging.getLogger(name) for name in _QUIET_LOGGERS] if enabled else []
    silence = logging.NullHandler()
    for logger in loggers:
        logger.addHandler(silence)
        logger.propagate = False
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(silence)
            logger.propagate = True


def _ignore(text: str) -> None:
    pass

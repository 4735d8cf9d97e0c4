"""Launcher that starts a script as several processes under torch's elastic agent and returns their exit code."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

from drivetrain.launch.agent import PREEMPTION_SIGNALS, RankAgent
from drivetrain.launch.interpreter import Invocation
from drivetrain.launch.options import (
    DEFAULT_PORT,
    GROUPS,
    SETTINGS,
    THREADS_VARIABLE,
    Given,
    LaunchOptions,
    variables_of,
)
from drivetrain.launch.report import LOST_AFTER, RankFailure, announce, describe, exit_code_after, resumable, write
from drivetrain.launch.watchdog import Watchdog
from drivetrain.launch.worker import AFFINITY_VARIABLE
from drivetrain.runtime.devices import DeviceKind, detect_device_kind, get_device_kind
from drivetrain.runtime.errors import ConfigurationError, DeviceNotAvailableError, LaunchError

# Plan of a launch


@dataclass(frozen=True)
class LaunchPlan:
    """Processes, device type and environment variables of a launch on this machine."""

    local_processes: int  # on this machine
    kind: str
    variables: dict[str, str]  # pass the options to the processes

    @classmethod
    def make(cls, options: LaunchOptions) -> LaunchPlan:
        kind = _device_kind(options)
        if options.num_processes is not None:
            local_processes = options.num_processes // options.max_machines
        elif options.device_ids is not None:
            local_processes = len(options.device_ids)
        else:
            local_processes = kind.default_processes()
        if kind.name != "cpu":
            count = len(options.device_ids) if options.device_ids is not None else kind.count()
            if local_processes > count:
                raise ConfigurationError(
                    f"{local_processes} processes were requested on this machine, but it has {count} {kind.name} "
                    f"device(s). Request at most {count * options.max_machines} over all machines, or run on the "
                    "CPU with cpu (`--cpu`).",
                )
            if kind.drives_all and local_processes > 1:
                raise ConfigurationError(
                    f"{local_processes} processes were requested on this machine, but one process drives all of its "
                    f"{count} {kind.name} device(s). Omit num_processes. In a notebook, notebook_launcher can start "
                    "one process per device.",
                )
        variables = options.variables
        if options.enable_cpu_affinity:
            if not hasattr(os, "sched_setaffinity"):
                raise ConfigurationError("enable_cpu_affinity works only on Linux. Remove it on this system.")
            variables[AFFINITY_VARIABLE] = "1"
        if options.device_ids is not None:
            if (name := kind.visible_variable) is None:
                raise ConfigurationError(f"gpu_ids cannot select {kind.name} devices. Remove gpu_ids.")
            variables[name] = ",".join(options.device_ids)
        if options.num_cpu_threads_per_process is not None:
            variables[THREADS_VARIABLE] = str(options.num_cpu_threads_per_process)
        elif THREADS_VARIABLE not in os.environ and local_processes > 1:
            # By default torch uses all cores in every process, which is far slower than equal shares.
            variables[THREADS_VARIABLE] = str(max(1, _available_cores() // local_processes))
        return cls(local_processes, kind.name, variables)

    @contextmanager
    def environment(self) -> Iterator[None]:
        before = {name: os.environ.get(name) for name in self.variables}
        os.environ.update(self.variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _device_kind(options: LaunchOptions) -> DeviceKind:
    if options.cpu:
        return get_device_kind("cpu")
    kind = detect_device_kind()
    if options.tpu and not kind.drives_all:
        raise DeviceNotAvailableError(
            f"tpu requires a TPU, but torch_xla finds none on this machine (found: {kind.name}). Remove tpu, or "
            'install torch_xla: pip install "drivetrain[xla]".'
        )
    if kind.name == "cpu" and (options.multi_gpu or options.gpu_ids is not None):
        flag = "multi_gpu" if options.multi_gpu else f"gpu_ids={options.gpu_ids}"
        raise DeviceNotAvailableError(
            f"{flag} requires accelerators, but torch finds none on this machine. Remove {flag} to run on the CPU, or "
            "install a torch build for your devices and check that their driver works."
        )
    return kind


def _available_cores() -> int:
    """Return the number of physical CPU cores that this process may use."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            # A container limits its CPU time by this quota, which the affinity mask does not show.
            quota, period = file.read().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


_WORKER = "drivetrain.launch.worker"
_LOOPBACK = "127.0.0.1"
_RENDEZVOUS_TIMEOUT = 900  # seconds that machines wait for each other, torchrun's default
_CONNECT_TIMEOUT, _CONNECT_INTERVAL = 5.0, 0.5  # seconds
_QUIET_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher")


def launch_script(options: LaunchOptions, script: str, args: Sequence[str] = ()) -> int:
    """Run a script in several processes, and return the run's exit code.

    The first rank that fails stops the others. Its traceback is written to stderr, once.

    Args:
        options: Number of processes, devices, machines and settings.
        script: Path of the script, or the name of a module or program if the options say so.
        args: Arguments of the script.

    Returns:
        The exit code: 0 on success, or the exit code of the first rank that failed. Signals give 128 plus their number
            (130 for Ctrl-C), a hang gives 124 (`HANG_EXIT_CODE`), and a preempted run that has saved its state gives 75
            (`RESUME_EXIT_CODE`).

    Raises:
        ConfigurationError: The script does not exist, or the options do not fit this machine.
        DeviceNotAvailableError: Accelerators were requested, but there are none.
        LaunchError: The machines could not connect, a port is in use, or this is Windows.
    """
    options.check_script(script)
    if options.mpirun_config:
        command, variables = mpi_command(options, script, args)
        return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode
    if options.launcher == "ray":
        from drivetrain.launch.ray_launcher import launch_with_ray

        return launch_with_ray(options, script, args)
    if not (hasattr(signal, "SIGUSR1") and hasattr(os, "fork")):
        raise LaunchError(
            "The launcher starts processes on Linux, macOS and WSL only. On Windows run `python script.py` with "
            "Trainer(devices=1), or with Trainer(strategy='ddp_spawn') for several processes. Or use WSL."
        )
    plan = LaunchPlan.make(options)
    if options.debug:
        announce(f"{plan.local_processes} process(es) on this machine, on {plan.kind}")
        for name, value in plan.variables.items():
            announce(f"{name}={value}")
    if options.log_dir is not None and os.path.isfile(options.log_dir):
        raise ConfigurationError(f"log_dir {options.log_dir!r} is a file. Name a directory.")
    with ExitStack() as stack:
        if not options.debug:
            stack.enter_context(_quiet_loggers())
        temporary = partial(tempfile.TemporaryDirectory, prefix="drivetrain_", ignore_cleanup_errors=True)
        log_dir = options.log_dir or stack.enter_context(temporary())
        watchdog = None
        if options.hang_limit != 0:
            # Ranks write their heartbeats often, so keep these files in memory.
            memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            heartbeats = stack.enter_context(temporary(dir=memory))
            watchdog = Watchdog(heartbeats, options.hang_limit, debug=options.compares_calls)
        return _run(options, plan, [script, *args], log_dir, watchdog)


def _run(options: LaunchOptions, plan: LaunchPlan, script: list[str], log_dir: str, watchdog: Watchdog | None) -> int:
    parameters = _rendezvous(options)
    static = parameters.backend == "static"
    try:
        if options.max_machines > 1:
            _wait_for_machine_0(options, parameters)
        handler = get_rendezvous_handler(parameters)
        if options.max_machines > 1 and static:
            _join_static_rendezvous(handler, parameters.endpoint)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        raise _rendezvous_failed(options, parameters, error) from error
    if not options.no_python:
        kind = "module" if options.module else "script"
        script = [sys.executable, *Invocation.parse().options, "-m", _WORKER, kind, *script]
    program, *arguments = script
    address, port = parameters.endpoint.rsplit(":", 1)
    tee = options.tee if options.tee is not None else "3" if options.log_dir else "0"
    streams: Any = (
        Std(int(tee))
        if ":" not in tee
        else {int(rank): Std(int(which)) for rank, which in (pair.split(":") for pair in tee.split(","))}
    )
    agent = RankAgent(
        WorkerSpec(
            role="default",
            local_world_size=plan.local_processes,
            entrypoint=program,
            args=tuple(argument.replace("$", "$$") for argument in arguments),  # the agent substitutes templates
            rdzv_handler=handler,
            max_restarts=options.max_restarts,
            monitor_interval=options.monitor_interval,
            master_addr=address if static else None,
            master_port=int(port) if static else None,
            local_addr=parameters.local_addr,
        ),
        DefaultLogsSpecs(log_dir, tee=streams),
        log_line_prefix_template="[rank${rank}]: ",
        variables=plan.variables,
        grace_period=options.preemption_grace_period,
        can_shrink=options.min_machines < options.max_machines,
        signal_all=options.no_python,
        watchdog=watchdog,
    )
    try:
        return _watch(options, parameters, agent, handler)
    finally:
        agent.restore_signals()


def _watch(
    options: LaunchOptions, parameters: RendezvousParameters, agent: RankAgent, handler: RendezvousHandler
) -> int:
    shut_down = True
    try:
        result = agent.run()
        if agent.ended_by_signal:
            shut_down = False  # shutting down would close the rendezvous for machines that continue
            return _after_signal(options, agent)
        if agent.preempted:
            return resumable()
        if result is None or not result.is_failed():
            return agent.lost[0].status if 0 in agent.lost else 0  # the exit code of an expendable rank 0 still counts
        failure = agent.first_failure()
        if failure is None:
            if agent.lost_machines:
                raise LaunchError(
                    f"Another machine gave no sign of life for {LOST_AFTER:g} s, so the processes here were stopped."
                )
            raise LaunchError("The processes were stopped, and none of them reported a reason.")
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
    assert agent.received is not None
    failure = agent.first_failure() if not agent.preempted else None
    return exit_code_after(
        agent.received,
        overdue=agent.overdue,
        grace_period=options.preemption_grace_period,
        preempted=agent.preempted,
        succeeded=agent.ranks.all_succeeded(),
        described=_described(options, failure, agent) if failure is not None and failure.text else "",
    )


def _described(options: LaunchOptions, failure: RankFailure, agent: RankAgent) -> str:
    then = ""
    if early := agent.ranks.ended_early():
        then = f"Already ended, with exit code 0: rank {', '.join(map(str, early))}. All others were stopped."
    return describe(failure, agent.world_size, then=then, debug=options.compares_calls)


def _rendezvous(options: LaunchOptions) -> RendezvousParameters:
    settings: dict[str, Any] = {"timeout": _RENDEZVOUS_TIMEOUT, **options.rendezvous_settings}
    # A configuration file for several machines may contain an address, which one machine must ignore.
    address = options.main_process_ip if options.max_machines > 1 else None
    port = options.main_process_port
    backend = options.rdzv_backend or ("static" if options.min_machines == options.max_machines else "c10d")
    local_address = None
    run = "drivetrain"  # must be equal on every machine
    if options.max_machines == 1:
        run, local_address = uuid.uuid4().hex, _LOOPBACK
        if not port:
            # With port 0, the store binds to a free port and reports it, so that two launches never collide.
            backend, port = "c10d", 0
            settings["is_host"] = True
    if backend == "static":
        settings["rank"] = options.machine_rank
    elif address and options.max_machines > 1:
        local_address = _local_address_for(address)
        if _is_unresolved_local_address(address):
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
    """Wait until the first machine accepts connections, and report it if it is missing."""
    host, _, port = parameters.endpoint.rpartition(":")
    serves = parameters.get("is_host", False) or _matches_machine_hostname(host)
    if options.machine_rank == 0 if parameters.backend == "static" else serves:
        return
    limit = float(parameters.get("timeout", _RENDEZVOUS_TIMEOUT))
    deadline, announced = time.monotonic() + limit, False
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RendezvousError(f"Machine 0 did not answer within {limit:g} s: {error}") from error
        if not announced:
            announce(f"waiting for machine 0 at {parameters.endpoint} ...")
            announced = True
        time.sleep(_CONNECT_INTERVAL)


def _join_static_rendezvous(handler: RendezvousHandler, endpoint: str) -> None:
    failures: list[Exception] = []

    def meet() -> None:
        try:
            handler.next_rendezvous()
        except Exception as error:
            failures.append(error)

    # A thread, so that Ctrl-C can interrupt the wait.
    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    thread.join(_CONNECT_INTERVAL)
    if thread.is_alive():
        announce(f"waiting for the other machines at {endpoint} ...")
    while thread.is_alive():
        thread.join(_CONNECT_INTERVAL)
    if failures:
        raise failures[0]


def _local_address_for(address: str) -> str | None:
    """Return this machine's IP address in the network of `address`, or None.

    Other machines may not be able to resolve this machine's name.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, DEFAULT_PORT))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _is_unresolved_local_address(address: str) -> bool:
    if _matches_machine_hostname(address):
        return False
    try:
        wanted = {found[4][0] for found in socket.getaddrinfo(address, None)}
    except OSError:
        return False
    # On machines with several networks and in containers, no machine would serve the rendezvous otherwise.
    return any(each.address in wanted for found in psutil.net_if_addrs().values() for each in found)


def _rendezvous_failed(options: LaunchOptions, parameters: RendezvousParameters, error: Exception) -> LaunchError:
    reason = f"{type(error).__name__}: {error.__cause__ or error}".splitlines()[0]
    if "in use" in str(error):
        return LaunchError(
            f"The port of {parameters.endpoint} is already in use. Set another one with --main_process_port, or omit "
            "the flag on one machine to use a free port."
        )
    return LaunchError(
        f"Machine {options.machine_rank} of {options.num_machines} could not connect to the others at "
        f"{parameters.endpoint} ({reason}). Check that the same command runs on every machine with its own "
        "machine_rank, and that this address and port are reachable."
    )


@contextmanager
def _quiet_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _QUIET_LOGGERS]
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


# Tables of settings


def settings_rows(given: Mapping[str, Given]) -> list[tuple[str, str, str]]:
    rows = []
    for name, setting in SETTINGS.items():
        if name not in given or (setting.refused and not given[name].value):
            continue
        group = GROUPS.get(setting.group)
        idle = setting.inert
        if not idle and group is not None and group.switch and group.switch not in given:
            idle = f"{group.switch} is not set"
        reason = f"; has no effect: {idle}" if idle else ""
        rows.append((name, setting.text(given[name].value), f"{given[name].source}{reason}"))
    return rows or [("(none)", "", "all settings have their defaults")]


def settings_table(options: LaunchOptions, given: Mapping[str, Given]) -> str:
    rows = {name: (name, value, source) for name, value, source in settings_rows(given)}
    lines = []
    for name, setting in SETTINGS.items():
        if name in rows:
            lines.append(rows[name])
        elif hasattr(options, name) and not setting.inert:
            value = getattr(options, name)
            lines.append((name, "-" if value in (None, "") else setting.text(value), "default"))
    return table(("setting", "value", "from"), lines)


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    )


# Preview of a launch


_MOST_PROCESSES = 16  # maximum number of processes to list


def preview(options: LaunchOptions, given: Mapping[str, Given], script: str, args: Sequence[str] = ()) -> str:
    """Return the text of `drivetrain launch --dry_run`, which lists the processes and settings of a launch."""
    plan = _plan_for_ray(options) if options.launcher == "ray" else LaunchPlan.make(options)
    kind = "module" if options.module else "program" if options.no_python else "script"
    processes = plan.local_processes * options.max_machines
    on_machines = f" on {options.num_machines} machines" if options.max_machines > 1 else ""
    parts = [
        f"{processes} process(es){on_machines} would run the {kind} {' '.join((script, *args))}",
        "",
        table(("rank", "local rank", "device"), _processes(options, plan)),
        "",
        table(("setting", "value", "from"), settings_rows(given)),
        "",
        table(("variable", "value", "from"), _variables(options, plan, given)),
    ]
    return "\n".join(parts)


def _plan_for_ray(options: LaunchOptions) -> LaunchPlan:
    variables = options.variables
    if options.num_cpu_threads_per_process is not None:
        variables[THREADS_VARIABLE] = str(options.num_cpu_threads_per_process)
    return LaunchPlan(options.num_processes or 1, "cpu", variables)  # the cluster's devices are not known yet


def _processes(options: LaunchOptions, plan: LaunchPlan) -> list[tuple[str, str, str]]:
    if options.launcher == "ray":
        ranks = f"0 to {plan.local_processes - 1}" if options.num_processes else "one a GPU, or 0"
        return [(ranks, "chosen by Ray", "cpu" if options.cpu else "a GPU if the cluster has any")]
    device = get_device_kind(plan.kind)
    # If machines may join and leave, ranks are assigned in the order of arrival.
    first = plan.local_processes * options.machine_rank if options.min_machines == options.max_machines else 0
    ids = options.device_ids
    rows = []
    for local in range(min(plan.local_processes, _MOST_PROCESSES)):
        at = str(device.device(local))
        named = f" (device {ids[local]} of this machine)" if ids is not None else ""
        rows.append((str(first + local), str(local), at + named))
    left = plan.local_processes - len(rows)
    return [*rows, ("...", "...", f"{left} more")] if left else rows


def _variables(options: LaunchOptions, plan: LaunchPlan, given: Mapping[str, Given]) -> list[tuple[str, str, str]]:
    source = {}
    for name, each in given.items():
        for variable in variables_of({**options.values, name: each.value}):
            if variable == SETTINGS[name].variable:
                source[variable] = each.source
    rows = [(name, value, source.get(name, "the launcher")) for name, value in sorted(plan.variables.items())]
    inherited = [
        (name, os.environ[name], "environment")
        for name in sorted(os.environ)
        if name.startswith(("DRIVETRAIN_", "ACCELERATE_", "OMP_", "CUDA_VISIBLE")) and name not in plan.variables
    ]
    return rows + inherited


# Launch with mpirun


_PROGRAMS = ("mpirun", "mpiexec")


def mpi_command(options: LaunchOptions, script: str, args: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    program = next((found for name in _PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        raise LaunchError(
            f"mpirun_hostfile={options.mpirun_config['mpirun_hostfile']!r} needs mpirun, but neither "
            f"{' nor '.join(_PROGRAMS)} is on PATH. Install Open MPI (apt-get install openmpi-bin) or Intel MPI, or "
            "remove mpirun_hostfile to use drivetrain's launcher."
        )
    if options.min_machines != options.max_machines:
        raise ConfigurationError(
            f"num_machines is {options.num_machines!r}, but mpirun needs a fixed number. Use a single number.",
        )
    plan = LaunchPlan.make(options)
    variables = {
        **plan.variables,
        "MASTER_ADDR": options.main_process_ip or _LOOPBACK,
        "MASTER_PORT": str(options.main_process_port or DEFAULT_PORT),
    }
    total, here = plan.local_processes * options.max_machines, plan.local_processes
    hosts = os.path.expanduser(options.mpirun_config["mpirun_hostfile"])
    if _is_open_mpi(program):
        places = ["--hostfile", hosts, "-n", str(total), "--npernode", str(here), "--bind-to", "none"]
        places += [part for name in sorted(variables) for part in ("-x", name)]
    else:
        places = ["-f", hosts, "-n", str(total), "-ppn", str(here)]
    if options.no_python:
        return [program, *places, script, *args], variables
    interpreter = [sys.executable, *Invocation.parse().options]
    return [program, *places, *interpreter, *(["-m"] if options.module else []), script, *args], variables


def _is_open_mpi(program: str) -> bool:
    try:
        shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{program} --version failed: {error}. Check that MPI is installed.") from None
    return "Open MPI" in shown

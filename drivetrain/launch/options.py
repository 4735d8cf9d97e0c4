"""What a launch is asked to do: every option, checked at once, under the names of Accelerate's launcher."""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import psutil

from drivetrain.launch.settings.sources import Given, merge, variables_of
from drivetrain.launch.settings.table import (
    ALTERNATIVES,
    GROUPS,
    LAUNCHERS,
    MIXED_PRECISIONS,
    RENDEZVOUS_BACKENDS,
    SETTINGS,
    STAND_INS,
    check_grid,
)
from drivetrain.runtime.errors import ConfigurationError, nearest

HANG_TIMEOUT_VARIABLE = "DRIVETRAIN_HANG_TIMEOUT"
# Of machines that this launcher starts processes on by itself.
_NOT_ON_RAY = ("main_process_ip", "hang_timeout", "enable_cpu_affinity", "tee", "log_dir", "tpu", "preload")
DEFAULT_PORT = 29500  # where machines meet when no port is named, as with torchrun


@dataclass(frozen=True)
class LaunchOptions:
    """How many processes to start, where, and with which settings.

    Args:
        num_processes: Processes over all machines together; None starts one per accelerator that is
            visible, or one where there is none.
        num_machines: Machines that take part; the same command runs on each. `"1:2"` for at least one and at most
            two: the run continues when one dies or comes, and `num_processes` counts those of two.
        machine_rank: Which of them this one is, 0 to `num_machines` - 1.
        main_process_ip: Address of machine 0; needed for more than one machine, and not read for one.
        main_process_port: Port on machine 0; a free one (on one machine) or 29500 if None.
        cpu: Run on the CPU, also where there are accelerators.
        multi_gpu: Insist on accelerators: refused where there are none.
        tpu: Insist on a TPU: refused where there is none.
        gpu_ids: Accelerators to use, such as `"0,2"`; None or `"all"` for all.
        mixed_precision: Default number format of the run.
        downcast_bf16: On XLA devices, let `bf16` round 32-bit floats to bfloat16 and compute 64-bit ones in 32 bits.
        gradient_accumulation_steps: Default number of micro-batches in an optimizer step.
        use_fsdp: Train with FSDP, unless the script chooses a strategy.
        use_deepspeed: The same for DeepSpeed.
        use_parallelism_config: The same for a grid of processes; with `use_fsdp`, over which parameters are sharded.
        use_megatron_lm: The same for Megatron.
        fsdp_config: Options of FSDP, by the keys of a configuration file.
        deepspeed_config: Options of DeepSpeed.
        parallelism_config: Sizes of the grid.
        megatron_lm_config: Options of Megatron.
        fp8_config: The recipe for `"fp8"`.
        dynamo_config: How prepared models are compiled.
        mpirun_config: `mpirun_hostfile`: start the processes with mpirun on the hosts of that file.
        module: The script is a module's name, as in `python -m`.
        no_python: The script is a program of its own, not Python.
        stand_in: Framework of which the script and what it imports get drivetrain's own version: `"accelerate"` or
            `"lightning"`.
        launcher: Who starts the processes: `"elastic"`, this machine's own launcher, or `"ray"`, the workers of a Ray
            cluster, which decides where they run.
        ray_address: That cluster: `"host:port"`, `"auto"` for the one that this machine belongs to, or `"local"` to
            start one for the run; None is `"auto"`.
        rdzv_backend: How several machines find each other: `"static"` or `"c10d"` (or torch's `"etcd"`); None is
            static, or c10d where the number of machines may change.
        rdzv_conf: Further settings of that, as `"key=value,key=value"`.
        same_network: Accepted for Accelerate's sake; the rendezvous backend decides how machines meet.
        preload: Modules that are imported once, in a process from which the others are forked, with commas in between;
            None for torch, and what the top of the script imports of packages that are known to be safe.
        no_preload: Each process imports everything by itself.
        max_restarts: How often all processes are started again after a failure.
        preemption_grace_period: Seconds that the processes have to save and end after SIGTERM, SIGUSR1 or Ctrl-C,
            or once one of them has saved and ended.
        hang_timeout: Seconds without progress after which the run is ended with a report of where each rank waits;
            0 never. With None it is DRIVETRAIN_HANG_TIMEOUT, and without that a run ends in which a rank waits in a
            collective for almost as long as the process group's time-out (30 minutes unless the script sets another).
        monitor_interval: Seconds between two checks of the processes.
        num_cpu_threads_per_process: Threads of each process; an equal share of the cores if None.
        enable_cpu_affinity: Give each process of a machine its own equal share of the cores.
        tee: Which output to write to files as well: `"0"` none, `"1"` stdout, `"2"` stderr, `"3"` both, or by
            local rank, as in `"0:3,1:1"`; both if None and `log_dir` is given, else none.
        log_dir: Directory of these files.
        debug: Show what the launcher decides and torch's own messages, and let the processes compare their calls
            before each collective and barrier.
        full_traceback: Show all frames of an error's traceback, also those inside drivetrain.

    Raises:
        ConfigurationError: A value that cannot be, or two that contradict each other.

    Example:
        ```python
        from drivetrain.launch import LaunchOptions

        options = LaunchOptions(num_processes=2, cpu=True, mixed_precision="bf16")
        ```
    """

    num_processes: int | None = None
    num_machines: int | str = 1
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    cpu: bool = False
    multi_gpu: bool = False
    tpu: bool = False
    gpu_ids: str | None = None
    mixed_precision: str | None = None
    downcast_bf16: bool = False
    gradient_accumulation_steps: int | None = None
    module: bool = False
    no_python: bool = False
    preload: str | None = None
    no_preload: bool = False
    stand_in: str | None = None
    launcher: str = "elastic"
    ray_address: str | None = None
    rdzv_backend: str | None = None
    rdzv_conf: str = ""
    same_network: bool = True
    max_restarts: int = 0
    preemption_grace_period: float = 60.0
    hang_timeout: float | None = None
    monitor_interval: float = 0.1
    num_cpu_threads_per_process: int | None = None
    enable_cpu_affinity: bool = False
    tee: str | None = None
    log_dir: str | None = None
    debug: bool = False
    full_traceback: bool = False
    use_fsdp: bool = False
    use_deepspeed: bool = False
    use_parallelism_config: bool = False
    use_megatron_lm: bool = False
    fsdp_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    deepspeed_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    parallelism_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    megatron_lm_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    fp8_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dynamo_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    mpirun_config: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        self._check_groups()
        self._check_counts()
        self._check_machines()
        self._check_devices()
        self._check_choices()
        self._check_ray()

    @classmethod
    def from_sources(cls, *sources: Mapping[str, Any]) -> LaunchOptions:
        """Build the options from several sources, such as the command line and then a file.

        Args:
            sources: Mappings from option to value; of an option that several give, the first one
                counts. None means not given.

        Raises:
            ConfigurationError: An option that does not exist, or a value that cannot be.
        """
        return cls.from_given(merge({name: Given(value, "") for name, value in source.items()} for source in sources))

    @classmethod
    def from_given(cls, given: Mapping[str, Given]) -> LaunchOptions:
        """Build the options from settings that were collected; those that mean nothing here are left out.

        Args:
            given: By name of setting.

        Raises:
            ConfigurationError: A value that cannot be.
        """
        known = {each.name for each in fields(cls)}
        merged: dict[str, Any] = {}
        for name, each in given.items():
            group = SETTINGS[name].group
            if group:
                merged.setdefault(group, {})[name] = each.value
            elif name in known:
                merged[name] = each.value
        machines = merged.get("num_machines")
        if isinstance(machines, str) and machines.isdigit():
            merged["num_machines"] = int(machines)
        return cls(**merged)

    @property
    def values(self) -> dict[str, Any]:
        """What was asked for, by name of setting."""
        found: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in GROUPS:
                found.update(value)
            elif value != each.default:
                found[each.name] = value
        return found

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables through which the options reach the processes."""
        variables = variables_of(self.values)
        for names in ALTERNATIVES:
            if any(getattr(self, name) for name in names):
                # What the environment asks for otherwise would reach the processes too.
                others = {str(SETTINGS[name].variable) for name in names if not getattr(self, name)}
                variables |= {variable: "false" for variable in others if variable in os.environ}
        return variables

    def check_script(self, script: str) -> None:
        """Refuse a script or program that is not there. A module is looked for by the ranks, as `python -m` does.

        Raises:
            ConfigurationError: It is not there.
        """
        self._check_files()
        if self.module:
            return
        if self.no_python:
            if shutil.which(script) is None:
                raise ConfigurationError(
                    f"There is no program {script!r}. Give its path or a name on PATH, or leave no_python out if it "
                    "is Python.",
                    code="DT-035",
                )
        elif not os.path.exists(script):
            beside = glob.glob(os.path.join(glob.escape(os.path.dirname(script)), "*.py"))
            raise ConfigurationError(
                f"There is no script {script!r} in {os.getcwd()}.{nearest(script, beside)} "
                "Give the path of a Python file (or a module's name with -m).",
                code="DT-035",
            )

    def _check_files(self) -> None:
        """Refuse files that are named but are not there."""
        for name in ("deepspeed_config_file", "mpirun_hostfile"):
            file = self.values.get(name)
            if file is not None and not os.path.isfile(os.path.expanduser(file)):
                raise ConfigurationError(
                    f"{name} is {file!r}, but there is no such file. Give its path.", code="DT-010"
                )

    @property
    def min_machines(self) -> int:
        """Machines that are needed."""
        return self._machine_range()[0]

    @property
    def max_machines(self) -> int:
        """Machines that can take part."""
        return self._machine_range()[1]

    @property
    def rendezvous_backend(self) -> str:
        """How machines find each other."""
        return self.rdzv_backend or ("static" if self.min_machines == self.max_machines else "c10d")

    @property
    def compares_calls(self) -> bool:
        """Whether processes compare their calls before each collective: by `debug`, or by the environment."""
        return self.debug or os.environ.get("DRIVETRAIN_DEBUG", "").lower() in {"1", "true", "yes", "on"}

    @property
    def hang_limit(self) -> float | None:
        """Seconds without progress that are a hang: `hang_timeout`, or the environment's; None if neither.

        Raises:
            ConfigurationError: The variable's value is no number of seconds.
        """
        given = os.environ.get(HANG_TIMEOUT_VARIABLE)
        if self.hang_timeout is not None or not given:
            return self.hang_timeout
        try:
            limit = float(given)
        except ValueError:
            limit = -1.0
        if not limit >= 0:
            raise ConfigurationError(
                f"{HANG_TIMEOUT_VARIABLE}={given!r} is no number of seconds. Give one above 0, or 0 for no limit.",
                code="DT-007",
            )
        return limit

    def _machine_range(self) -> tuple[int, int]:
        if isinstance(self.num_machines, int):
            return self.num_machines, self.num_machines
        numbers = self.num_machines.split(":")
        if len(numbers) > 2 or not all(number.strip().isdigit() for number in numbers):
            raise ConfigurationError(
                f'num_machines is {self.num_machines!r}, but must be a number, or "least:most", such as "1:2".',
                code="DT-007",
            )
        return int(numbers[0]), int(numbers[-1])

    @property
    def rendezvous_settings(self) -> dict[str, str]:
        """`rdzv_conf` taken apart."""
        pairs = (pair.split("=", 1) for pair in self.rdzv_conf.split(",") if pair.strip())
        return {key.strip(): value.strip() for key, value in pairs}

    @property
    def device_ids(self) -> tuple[str, ...] | None:
        """`gpu_ids` taken apart; None for all."""
        if self.gpu_ids is None or self.gpu_ids.strip().lower() == "all":
            return None
        return tuple(part.strip() for part in self.gpu_ids.strip().removesuffix(",").split(","))  # "0," is one

    def _check_groups(self) -> None:
        """Check the values of each group, and bring them to the names of their settings."""
        for name, group in GROUPS.items():
            keys, values = group.keys(), {}
            for key, value in getattr(self, name).items():
                if key not in keys:
                    raise ConfigurationError(
                        f"Unknown key {key!r} in {name}. Allowed: {', '.join(sorted(keys))}.{nearest(str(key), keys)}",
                        code="DT-006",
                    )
                parsed = keys[key].parse(value, f"{key} in {name}")
                if parsed is not None:
                    values[keys[key].name] = parsed
            object.__setattr__(self, name, values)
        check_grid(dict(self.parallelism_config), "parallelism_config_sp_size")
        for names in ALTERNATIVES:
            asked = [name for name in names if getattr(self, name)]
            if len(asked) > 1:
                raise ConfigurationError(
                    f"{' and '.join(asked)} contradict each other. Give one of them.", code="DT-004"
                )
        if self.use_parallelism_config and (self.use_deepspeed or self.use_megatron_lm):
            other = "use_deepspeed" if self.use_deepspeed else "use_megatron_lm"
            raise ConfigurationError(
                f"use_parallelism_config and {other} contradict each other: a grid goes with use_fsdp. Give one.",
                code="DT-004",
            )

    def _check_counts(self) -> None:
        minimums = {
            "num_processes": 1,
            "gradient_accumulation_steps": 1,
            "num_cpu_threads_per_process": 1,
            "max_restarts": 0,
            "machine_rank": 0,
        }
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                hint = (
                    " Leave it out for one process per accelerator (or one on the CPU)."
                    if name == "num_processes"
                    else ""
                )
                raise ConfigurationError(f"{name} is {value}, but must be at least {minimum}.{hint}", code="DT-002")
        for name in ("monitor_interval", "preemption_grace_period"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(
                    f"{name} is {getattr(self, name)}, but must be more than 0 seconds.", code="DT-002"
                )
        if self.hang_timeout is not None and not self.hang_timeout >= 0:
            raise ConfigurationError(
                f"hang_timeout is {self.hang_timeout}, but must be at least 0 seconds; 0 is no limit.", code="DT-002"
            )

    def _check_machines(self) -> None:
        least, most = self.min_machines, self.max_machines
        if least < 1:
            raise ConfigurationError(f"num_machines is {self.num_machines}, but must be at least 1.", code="DT-002")
        if most < least:
            raise ConfigurationError(
                f"num_machines is {self.num_machines!r}, but the most cannot be fewer than the least. "
                f'Give "{most}:{least}".',
                code="DT-033",
            )
        if self.machine_rank >= most:
            raise ConfigurationError(
                f"machine_rank is {self.machine_rank}, but with num_machines={self.num_machines} it must be "
                f"0 to {most - 1}. Give each machine its own rank, the first one 0.",
                code="DT-033",
            )
        if most > 1 and not self.main_process_ip:
            raise ConfigurationError(
                f"num_machines is {self.num_machines}, but main_process_ip is not given. "
                "Name the address of machine 0, the same on every machine.",
                code="DT-033",
            )
        if least != most and self.rdzv_backend == "static":
            raise ConfigurationError(
                f"num_machines is {self.num_machines!r}, but with rdzv_backend='static' it cannot change. "
                "Leave rdzv_backend out, or give a single number of machines.",
                code="DT-033",
            )
        if self.num_processes is not None and self.num_processes % most:
            raise ConfigurationError(
                f"num_processes is {self.num_processes} over all machines, which {most} "
                f"machines cannot share equally. Take a multiple of {most}.",
                code="DT-033",
            )
        lowest = 0 if most == 1 else 1
        port = self.main_process_port
        if port is not None and not lowest <= port <= 65535:
            raise ConfigurationError(
                f"main_process_port is {port}, but must be {lowest} to 65535. "
                "Leave it out for a free port on one machine.",
                code="DT-002",
            )

    def _check_devices(self) -> None:
        asked = "gpu_ids" if self.gpu_ids is not None else "multi_gpu" if self.multi_gpu else None
        if self.cpu and asked is not None:
            raise ConfigurationError(f"cpu and {asked} contradict each other. Give one of them.", code="DT-004")
        ids = self.device_ids
        if ids is None:
            return
        if any(not part.isdigit() for part in ids) or len(set(ids)) != len(ids):
            raise ConfigurationError(
                f'gpu_ids is {self.gpu_ids!r}, but must be "all" or different numbers, such as "0,1".', code="DT-007"
            )
        if self.num_processes is not None and self.num_processes // self.max_machines > len(ids):
            raise ConfigurationError(
                f"gpu_ids names {len(ids)} device(s) for {self.num_processes // self.max_machines} processes "
                "on this machine. Name one device for each process, or leave num_processes out.",
                code="DT-018",
            )

    def _check_choices(self) -> None:
        self._check_choice("mixed_precision", self.mixed_precision, MIXED_PRECISIONS)
        self._check_choice("stand_in (--as)", self.stand_in, STAND_INS)
        self._check_choice("launcher", self.launcher, LAUNCHERS)
        self._check_choice("rdzv_backend", self.rdzv_backend, RENDEZVOUS_BACKENDS)
        if any("=" not in pair for pair in self.rdzv_conf.split(",") if pair.strip()):
            raise ConfigurationError(
                f'rdzv_conf is {self.rdzv_conf!r}, but must be "key=value,key=value", such as "timeout=60".',
                code="DT-007",
            )
        if self.tee is not None and not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", self.tee):
            raise ConfigurationError(
                f"tee is {self.tee!r}, but must be 0 (none), 1 (stdout), 2 (stderr), 3 (both), "
                'or these by local rank, such as "0:3,1:1".',
                code="DT-007",
            )

    def _check_ray(self) -> None:
        """Refuse what another launcher decides."""
        if self.launcher != "ray":
            return
        own = {each.name: each.default for each in fields(self)}
        asked = [name for name in _NOT_ON_RAY if getattr(self, name) != own[name]]
        asked += ["gpu_ids"] if self.device_ids is not None else []
        asked += ["num_machines"] if self.max_machines > 1 else []
        asked += ["mpirun_hostfile"] if self.mpirun_config else []
        if asked:
            raise ConfigurationError(
                f"{asked[0]} is {self.values[asked[0]]!r}, which has no effect with launcher='ray': Ray decides which "
                "machines and devices the processes get. Leave one of the two out.",
                code="DT-005",
            )

    @staticmethod
    def _check_choice(name: str, value: str | None, allowed: tuple[str, ...]) -> None:
        if value is not None and value not in allowed:
            raise ConfigurationError(
                f"{name} is {value!r}, but must be one of {', '.join(allowed)}.{nearest(value, allowed)}", code="DT-001"
            )


# The cores of this machine, and each process's share of them. Imports no torch


THREADS_VARIABLE = "OMP_NUM_THREADS"


def available_cores() -> int:
    """Physical cores that this process may use, within its affinity mask and its container's quota."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


def threads_per_process(options: LaunchOptions, local_processes: int) -> int | None:
    """Threads that each process is given; None where the environment sets it, or it takes every core.

    Args:
        options: What was asked for.
        local_processes: Processes on this machine.
    """
    if options.num_cpu_threads_per_process is not None:
        return options.num_cpu_threads_per_process
    if THREADS_VARIABLE in os.environ or local_processes == 1:
        return None
    # Torch takes every core for each process, which is far slower than an equal share.
    return max(1, available_cores() // local_processes)

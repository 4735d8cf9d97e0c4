"""Launch settings and the options of a launch.

Each field of `LaunchOptions`, and each entry of a group, defines a flag of `drivetrain launch`, a key of the
configuration file and an environment variable of the processes.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from drivetrain.launch.settings.setting import (
    DEEPSPEED,
    DYNAMO,
    FP8,
    FSDP,
    GRADIENT_ACCUMULATION,
    GRID,
    MEGATRON,
    MPI,
    Group,
    Setting,
    check_grid,
)
from drivetrain.runtime.environment import COMMAND_VARIABLE, LAUNCHED_VARIABLE, LOG_FORMAT_VARIABLE, LOG_FORMATS
from drivetrain.runtime.errors import FULL_VARIABLE, ConfigurationError, nearest

DEFAULT_PORT = 29500  # port of the rendezvous, torchrun's default
THREADS_VARIABLE = "OMP_NUM_THREADS"
HANG_TIMEOUT_VARIABLE = "DRIVETRAIN_HANG_TIMEOUT"
MIXED_PRECISIONS = (
    "no",
    "fp16",
    "bf16",
    "fp8",
    "32",
    "64",
    "16-mixed",
    "bf16-mixed",
    "fp16-true",
    "bf16-true",
    "16-true",
    "32-true",
    "64-true",
)
STAND_INS = ("accelerate", "lightning")
LAUNCHERS = ("elastic", "ray")
RENDEZVOUS_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_NO_SAGEMAKER = (
    "drivetrain starts no jobs on SageMaker. Run `drivetrain launch` as the entry point of a job, without this setting."
)
_NO_POD = (
    "drivetrain launch does not connect to the machines of a pod. Run it on each of them, such as with "
    '`drivetrain tpu-config --command "drivetrain launch train.py"`, without this setting.'
)
_NO_PRELOADING = "each process imports everything itself"
_OF_A_POD = "it is for TPU pods, where `drivetrain launch` runs on each machine separately"
_STAND_INS = Path(__file__).parents[1] / "compat" / "stand_ins"
# Settings that have no effect under Ray, which chooses machines and devices.
_NOT_ON_RAY = ("main_process_ip", "hang_timeout", "enable_cpu_affinity", "tee", "log_dir", "tpu")

GROUPS: dict[str, Group] = {group.name: group for group in (FSDP, DEEPSPEED, GRID, MEGATRON, FP8, DYNAMO, MPI)}
# Mutually exclusive settings. One of them in a stronger source overrides all others in weaker sources.
ALTERNATIVES = (("use_fsdp", "use_deepspeed", "use_megatron_lm"), ("cpu", "multi_gpu", "tpu"), ("module", "no_python"))


@dataclass(frozen=True)
class Given:
    value: Any
    source: str


def _option(section: str, help: str, kind: str = "text", default: Any = None, **more: Any) -> Any:
    value = False if kind == "switch" and default is None else default
    return field(default=value, metadata={"setting": Setting("", help, kind, section, **more)})


@dataclass(frozen=True)
class LaunchOptions:
    """Options of `drivetrain launch`, such as the number of processes.

    Each argument equals the flag of `drivetrain launch` with the same name. `module`, `stand_in` and `tee` are the
    flags `-m`, `--as` and `-t`. Groups of settings, such as `fsdp_config`, are dicts with the keys of a configuration
    file.

    Raises:
        ConfigurationError: A value is invalid, or two contradict each other.

    Example:
        ```python
        from drivetrain.launch import LaunchOptions

        options = LaunchOptions(num_processes=2, cpu=True, mixed_precision="bf16")
        ```
    """

    num_processes: int | None = _option(
        "Processes",
        "Number of processes over all machines. Default: one per accelerator, or one on the CPU.",
        "int",
        variable="DRIVETRAIN_NUM_PROCESSES",
        of_launcher=True,
    )
    num_machines: int | str = _option(
        "Several machines",
        "Number of machines. Default: 1. With 1:2, the run continues if one of two machines fails or joins.",
        "text",
        1,
        flags=("--nnodes",),
        metavar="N or MIN:MAX",
        variable="DRIVETRAIN_NUM_MACHINES",
        of_launcher=True,
    )
    machine_rank: int = _option(
        "Several machines",
        "Index of this machine, from 0.",
        "int",
        0,
        flags=("--node_rank",),
        variable="DRIVETRAIN_MACHINE_RANK",
        of_launcher=True,
    )
    main_process_ip: str | None = _option(
        "Several machines",
        "Address of machine 0.",
        flags=("--master_addr",),
        metavar="ADDRESS",
        variable="DRIVETRAIN_MAIN_PROCESS_IP",
        of_launcher=True,
    )
    main_process_port: int | None = _option(
        "Several machines",
        "Port on machine 0. Default: 29500, or a free port on a single machine.",
        "int",
        flags=("--master_port",),
        variable="DRIVETRAIN_MAIN_PROCESS_PORT",
        of_launcher=True,
    )
    cpu: bool = _option(
        "Processes",
        "Run on the CPU even if there are accelerators.",
        "switch",
        keys=("use_cpu",),
        flags=("--use_cpu",),
        variable="DRIVETRAIN_USE_CPU",
        theirs="ACCELERATE_USE_CPU",
    )
    multi_gpu: bool = _option("Processes", "Require accelerators: an error if there are none.", "switch")
    tpu: bool = _option("TPU", "Require a TPU: an error if there is none.", "switch")
    gpu_ids: str | None = _option("Processes", 'Accelerators to use, such as "0,2"; "all" for all.', metavar="IDS")
    mixed_precision: str | None = _option(
        "Precision and speed",
        f"Default precision: {', '.join(MIXED_PRECISIONS)}.",
        "choice",
        choices=MIXED_PRECISIONS,
        metavar="NAME",
        variable="DRIVETRAIN_MIXED_PRECISION",
        theirs="ACCELERATE_MIXED_PRECISION",
    )
    downcast_bf16: bool = _option(
        "Precision and speed",
        "On XLA devices under bf16, round float32 to bfloat16 and float64 to float32.",
        "switch",
        variable="DRIVETRAIN_DOWNCAST_BF16",
    )
    gradient_accumulation_steps: int | None = field(default=None, metadata={"setting": GRADIENT_ACCUMULATION})
    module: bool = _option("Script", "SCRIPT is the name of a module, as in python -m.", "switch", flags=("-m",))
    no_python: bool = _option("Script", "SCRIPT is an executable, not a Python file.", "switch")
    preload: str | None = _option("Script", "Deprecated and ignored.", metavar="MODULES", inert=_NO_PRELOADING)
    no_preload: bool = _option("Script", "Deprecated and ignored.", "switch", inert=_NO_PRELOADING)
    stand_in: str | None = _option(
        "Script",
        f"Replace a package by drivetrain in SCRIPT and its imports: {', '.join(STAND_INS)}.",
        "choice",
        flags=("--as",),
        shown="--as",
        choices=STAND_INS,
        metavar="PACKAGE",
    )
    launcher: str = _option(
        "Ray",
        "elastic (default; one launch per machine), or ray (workers of a Ray cluster).",
        "choice",
        "elastic",
        choices=LAUNCHERS,
        metavar="NAME",
    )
    ray_address: str | None = _option(
        "Ray",
        "Address of the Ray cluster: HOST:PORT, auto (this machine's cluster) or local (start one for this run). "
        "Default: RAY_ADDRESS, or auto.",
        metavar="ADDRESS",
        variable="RAY_ADDRESS",
        of_launcher=True,
    )
    rdzv_backend: str | None = _option(
        "Several machines",
        f"Rendezvous backend: {', '.join(RENDEZVOUS_BACKENDS)}. Default: static, or c10d with MIN:MAX.",
        "choice",
        choices=RENDEZVOUS_BACKENDS,
        metavar="NAME",
    )
    rdzv_conf: str = _option(
        "Several machines", "Options of the rendezvous, such as timeout=60.", "text", "", metavar="KEY=VALUE,..."
    )
    same_network: bool = _option("Several machines", "Accepted and ignored. See --rdzv_backend.", "switch", True)
    max_restarts: int = _option(
        "Failures and output", "Maximum restarts of all processes after a failure. Default: 0.", "int", 0
    )
    preemption_grace_period: float = _option(
        "Failures and output",
        "Time to save and exit after SIGTERM, SIGUSR1 or Ctrl-C. Default: 60.",
        "float",
        60.0,
        metavar="SECONDS",
    )
    hang_timeout: float | None = _option(
        "Failures and output",
        "Stop the run if a rank makes no progress for this long, and report where each rank waits. 0 disables it. "
        "Default: just before the time-out of collectives.",
        "float",
        metavar="SECONDS",
    )
    monitor_interval: float = _option(
        "Failures and output", "Seconds between two checks of the processes. Default: 0.1.", "float", 0.1
    )
    num_cpu_threads_per_process: int | None = _option(
        "Processes", "Threads of each process (OMP_NUM_THREADS). Default: an equal share of the cores.", "int"
    )
    enable_cpu_affinity: bool = _option("Processes", "Bind each process to its own equal share of the cores.", "switch")
    tee: str | None = _option(
        "Failures and output",
        "Streams to print: 1 stdout, 2 stderr, 3 both, or by local rank: 0:3,1:1. Default: 3 with --log_dir.",
        flags=("-t",),
        metavar="WHICH",
    )
    log_dir: str | None = _option(
        "Failures and output", "Also write each rank's output to files in this folder.", metavar="DIRECTORY"
    )
    log_format: str = _option(
        "Failures and output",
        "Format of the lines that a run logs: text, or json (one object per line, also for warnings).",
        "choice",
        "text",
        choices=LOG_FORMATS,
        variable=LOG_FORMAT_VARIABLE,
    )
    debug: bool = _option(
        "Failures and output",
        "Print the launch plan, and compare the calls of all processes before each collective and barrier.",
        "switch",
    )
    full_traceback: bool = _option(
        "Failures and output",
        "Show all frames of tracebacks, including those inside drivetrain.",
        "switch",
        variable=FULL_VARIABLE,
    )
    use_fsdp: bool = _option(
        "Strategy",
        "Shard parameters, gradients and optimizer state over the processes.",
        "switch",
        variable="DRIVETRAIN_USE_FSDP",
        theirs="ACCELERATE_USE_FSDP",
    )
    use_deepspeed: bool = _option(
        "Strategy",
        "Train with DeepSpeed.",
        "switch",
        variable="DRIVETRAIN_USE_DEEPSPEED",
        theirs="ACCELERATE_USE_DEEPSPEED",
    )
    use_parallelism_config: bool = _option(
        "Strategy",
        "Use a device mesh: tensor and context parallelism.",
        "switch",
        variable="DRIVETRAIN_USE_PARALLELISM_CONFIG",
        theirs="ACCELERATE_USE_PARALLELISM_CONFIG",
    )
    use_megatron_lm: bool = _option(
        "Strategy",
        "Train with Megatron.",
        "switch",
        variable="DRIVETRAIN_USE_MEGATRON_LM",
        theirs="ACCELERATE_USE_MEGATRON_LM",
    )
    fsdp_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    deepspeed_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    parallelism_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    megatron_lm_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    fp8_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dynamo_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    mpirun_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    # Derived from num_machines
    min_machines: int = field(init=False, repr=False, compare=False)
    max_machines: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.preload is not None or self.no_preload:
            from drivetrain.runtime.errors import warn_ignored

            hint = "Each process imports everything itself."
            warn_ignored("launch", "preload", self.preload, hint, since="0.1.0", removed_in="0.3.0")
            warn_ignored("launch", "no_preload", self.no_preload or None, hint, since="0.1.0", removed_in="0.3.0")
        for setting in TOP:
            if setting.choices:
                where = f"{setting.name} ({setting.shown})" if setting.shown else setting.name
                object.__setattr__(self, setting.name, setting.parse(getattr(self, setting.name), where))
        for name, group in GROUPS.items():
            keys, values = group.keys(), {}
            for key, value in getattr(self, name).items():
                if key not in keys:
                    raise ConfigurationError(
                        f"Unknown key {key!r} in {name}. Allowed: {', '.join(sorted(keys))}.{nearest(str(key), keys)}"
                    )
                parsed = keys[key].parse(value, f"{key} in {name}")
                if parsed is not None:
                    values[keys[key].name] = parsed
            object.__setattr__(self, name, values)
        check_grid(dict(self.parallelism_config), "parallelism_config_sp_size")
        for names in ALTERNATIVES:
            asked = [name for name in names if getattr(self, name)]
            if len(asked) > 1:
                raise ConfigurationError(f"{' and '.join(asked)} contradict each other. Set only one of them.")
        if self.use_parallelism_config and (self.use_deepspeed or self.use_megatron_lm):
            other = "use_deepspeed" if self.use_deepspeed else "use_megatron_lm"
            raise ConfigurationError(
                f"use_parallelism_config and {other} contradict each other. Use a device mesh with use_fsdp only."
            )
        self._check_values()
        self._check_machines()
        self._check_devices()

    @classmethod
    def from_sources(cls, *sources: Mapping[str, Any]) -> LaunchOptions:
        """Create launch options from several dicts, of which the first that has a key wins.

        Args:
            sources: Dicts from option to value, the most important one first. None means not given.

        Raises:
            ConfigurationError: An option does not exist, or a value is invalid.
        """
        return cls.from_given(merge({name: Given(value, "") for name, value in source.items()} for source in sources))

    @classmethod
    def from_given(cls, given: Mapping[str, Given]) -> LaunchOptions:
        known = {each.name for each in fields(cls)}
        merged: dict[str, Any] = {}
        for name, each in given.items():
            group = SETTINGS[name].group
            if group:
                merged.setdefault(group, {})[name] = each.value
            elif name in known:
                merged[name] = each.value
        machines = merged.get("num_machines")
        # The setting is text because it may be "MIN:MAX".
        if isinstance(machines, str) and machines.isdigit():
            merged["num_machines"] = int(machines)
        return cls(**merged)

    @property
    def values(self) -> dict[str, Any]:
        """Launch options that differ from their defaults, as a flat dict."""
        found: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in GROUPS:
                found.update(value)
            elif each.metadata and value != each.default:
                found[each.name] = value
        return found

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables through which launched processes receive these launch options."""
        variables = {LAUNCHED_VARIABLE: "1", COMMAND_VARIABLE: shlex.join(sys.orig_argv), **variables_of(self.values)}
        if self.debug:
            variables["DRIVETRAIN_DEBUG"] = "1"
        if self.stand_in is not None:
            # A path, not an import hook, so that every Python process that a rank starts finds the replacement first.
            paths = [str(_STAND_INS / self.stand_in), os.environ.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        for names in ALTERNATIVES:
            if any(getattr(self, name) for name in names):
                # The processes inherit contradictory variables of the environment unless they are overridden.
                others = {str(SETTINGS[name].variable) for name in names if not getattr(self, name)}
                variables |= {variable: "false" for variable in others if variable in os.environ}
        return variables

    def check_script(self, script: str) -> None:
        """Raise an error if the script, or a file that a launch option names, does not exist.

        Modules (`-m`) are not checked.

        Raises:
            ConfigurationError: A file does not exist.
        """
        for name in ("deepspeed_config_file", "mpirun_hostfile") if self.use_deepspeed else ("mpirun_hostfile",):
            file = self.values.get(name)
            if file is not None and not os.path.isfile(os.path.expanduser(file)):
                raise ConfigurationError(f"{name} is {file!r}, but this file does not exist. Check the path.")
        if self.module:
            return
        if self.no_python:
            if shutil.which(script) is None:
                raise ConfigurationError(
                    f"Program {script!r} does not exist. Pass its path or a name on PATH, or remove no_python for a "
                    "Python script."
                )
        elif not os.path.exists(script):
            beside = glob.glob(os.path.join(glob.escape(os.path.dirname(script)), "*.py"))
            raise ConfigurationError(
                f"Script {script!r} does not exist in {os.getcwd()}.{nearest(script, beside)} Pass the path of a "
                "Python file (or a module's name with -m)."
            )

    @property
    def compares_calls(self) -> bool:
        """True in debug mode, in which processes compare their collective calls to find a mismatch."""
        return self.debug or os.environ.get("DRIVETRAIN_DEBUG", "").lower() in {"1", "true", "yes", "on"}

    @property
    def hang_limit(self) -> float | None:
        """Seconds without progress after which a run is stopped, or None to use the default limit.

        Taken from `hang_timeout`, or else from the environment.

        Raises:
            ConfigurationError: The variable's value is not a number of seconds.
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
                f"{HANG_TIMEOUT_VARIABLE} is {given!r}, but must be a positive number of seconds, or 0."
            )
        return limit

    @property
    def rendezvous_settings(self) -> dict[str, str]:
        """Settings for connecting the machines, such as `timeout`, as a dict."""
        pairs = (pair.split("=", 1) for pair in self.rdzv_conf.split(",") if pair.strip())
        return {key.strip(): value.strip() for key, value in pairs}

    @property
    def device_ids(self) -> tuple[str, ...] | None:
        """IDs of the devices that the run may use on this machine, or None for all."""
        if self.gpu_ids is None or self.gpu_ids.strip().lower() == "all":
            return None
        return tuple(part.strip() for part in self.gpu_ids.strip().removesuffix(",").split(","))  # "0," means one id

    def _check_values(self) -> None:
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
                of_processes = " Omit it for one process per accelerator, or one on the CPU."
                hint = of_processes if name == "num_processes" else ""
                raise ConfigurationError(f"{name} is {value}, but must be at least {minimum}.{hint}")
        for name in ("monitor_interval", "preemption_grace_period"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}, but must be more than 0 seconds.")
        if self.hang_timeout is not None and not self.hang_timeout >= 0:
            raise ConfigurationError(
                f"hang_timeout is {self.hang_timeout}, but must be at least 0 seconds. 0 means no limit."
            )
        if any("=" not in pair for pair in self.rdzv_conf.split(",") if pair.strip()):
            raise ConfigurationError(
                f'rdzv_conf is {self.rdzv_conf!r}, but must be "key=value,key=value", such as "timeout=60".'
            )
        if self.tee is not None and not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", self.tee):
            raise ConfigurationError(
                f"tee is {self.tee!r}, but must be 0 (none), 1 (stdout), 2 (stderr), 3 (both), "
                'or these by local rank, such as "0:3,1:1".'
            )

    def _check_machines(self) -> None:
        numbers = str(self.num_machines).split(":")
        if len(numbers) > 2 or not all(number.strip().removeprefix("-").isdigit() for number in numbers):
            raise ConfigurationError(
                f'num_machines is {self.num_machines!r}, but must be a number or "MIN:MAX", such as "1:2".'
            )
        least, most = int(numbers[0]), int(numbers[-1])
        # The dataclass is frozen.
        object.__setattr__(self, "min_machines", least)
        object.__setattr__(self, "max_machines", most)
        if least < 1:
            raise ConfigurationError(f"num_machines is {self.num_machines}, but must be at least 1.")
        if most < least:
            raise ConfigurationError(
                f"num_machines is {self.num_machines!r}, but the maximum cannot be below the minimum. Use "
                f'"{most}:{least}".'
            )
        if self.machine_rank >= most:
            raise ConfigurationError(
                f"machine_rank is {self.machine_rank}, but with num_machines={self.num_machines} it must be 0 to "
                f"{most - 1}. Set a different rank on each machine, and 0 on the first machine."
            )
        if most > 1 and not self.main_process_ip:
            raise ConfigurationError(
                f"num_machines is {self.num_machines}, but main_process_ip is missing. Set it to the address of "
                "machine 0 on every machine."
            )
        if least != most and self.rdzv_backend == "static":
            raise ConfigurationError(
                f"num_machines is {self.num_machines!r}, but rdzv_backend='static' needs a fixed number. Remove "
                "rdzv_backend, or use a single number of machines."
            )
        if self.num_processes is not None and self.num_processes % most:
            raise ConfigurationError(
                f"num_processes is {self.num_processes} over all machines, which is not divisible by {most} machines. "
                f"Use a multiple of {most}."
            )
        # 0 takes a free port, which other machines could not know.
        lowest = 0 if most == 1 else 1
        port = self.main_process_port
        if port is not None and not lowest <= port <= 65535:
            raise ConfigurationError(
                f"main_process_port is {port}, but must be {lowest} to 65535. On one machine, remove "
                "main_process_port to use a free port."
            )

    def _check_devices(self) -> None:
        if self.launcher == "ray":
            own = {each.name: each.default for each in fields(self)}
            unused = [name for name in _NOT_ON_RAY if getattr(self, name) != own[name]]
            unused += ["gpu_ids"] if self.device_ids is not None else []
            unused += ["num_machines"] if self.max_machines > 1 else []
            unused += ["mpirun_hostfile"] if self.mpirun_config else []
            if unused:
                raise ConfigurationError(
                    f"{unused[0]} is {self.values[unused[0]]!r}, which has no effect with launcher='ray': Ray selects "
                    "the machines and devices. Remove one of the two."
                )
        asked = "gpu_ids" if self.gpu_ids is not None else "multi_gpu" if self.multi_gpu else None
        if self.cpu and asked is not None:
            raise ConfigurationError(f"cpu and {asked} contradict each other. Set only one of them.")
        ids = self.device_ids
        if ids is None:
            return
        if any(not part.isdigit() for part in ids) or len(set(ids)) != len(ids):
            raise ConfigurationError(
                f'gpu_ids is {self.gpu_ids!r}, but must be "all" or different numbers, such as "0,1".'
            )
        if self.num_processes is not None and self.num_processes // self.max_machines > len(ids):
            raise ConfigurationError(
                f"gpu_ids names {len(ids)} device(s) for {self.num_processes // self.max_machines} processes on this "
                "machine. Name one device per process, or remove num_processes."
            )


# Flags and keys without a field in `LaunchOptions`, most of them from other launchers.
_IGNORED = "Accepted and ignored."
_WITHOUT_FIELD = (
    Setting(
        "rdzv_endpoint",
        "--main_process_ip and --main_process_port in one flag.",
        "text",
        "Several machines",
        metavar="ADDRESS:PORT",
    ),
    Setting(
        "quiet",
        "Accepted and ignored: only the traceback of the rank that failed first is shown.",
        "switch",
        "Failures and output",
        flags=("-q",),
        inert="only the traceback of the rank that failed first is shown",
    ),
    Setting("role", "Accepted and ignored.", "text", "Failures and output", inert="ranks are named by their number"),
    Setting(
        "main_training_function",
        "Accepted and ignored: the script runs from its start.",
        "text",
        "TPU",
        inert="the script runs from its start",
    ),
    Setting(
        "tpu_use_cluster",
        "Not supported: run `drivetrain launch` on each machine of the pod.",
        "switch",
        "TPU",
        flags=("--tpu_cluster",),
        refused=_NO_POD,
    ),
    Setting("no_tpu_cluster", _IGNORED, "switch", "TPU", inert="the launcher never connects to a pod"),
    Setting("tpu_use_sudo", _IGNORED, "switch", "TPU", inert=_OF_A_POD),
    Setting("tpu_name", _IGNORED, "text", "TPU", metavar="NAME", inert=_OF_A_POD),
    Setting("tpu_zone", _IGNORED, "text", "TPU", metavar="NAME", inert=_OF_A_POD),
    Setting("tpu_vm", _IGNORED, "words", "TPU", flags=("--vm",), metavar="NAMES", inert=_OF_A_POD),
    Setting("tpu_env", _IGNORED, "words", "TPU", flags=("--env",), metavar="NAME=VALUE", inert=_OF_A_POD),
    Setting("command_file", _IGNORED, "text", "TPU", metavar="FILE", inert=_OF_A_POD),
    Setting("commands", _IGNORED, "words", "TPU", inert=_OF_A_POD),
    Setting("aws_access_key_id", "Not supported: SageMaker.", "text", "SageMaker", refused=_NO_SAGEMAKER),
    Setting("aws_secret_access_key", "Not supported: SageMaker.", "text", "SageMaker", refused=_NO_SAGEMAKER),
)
_SECTIONS = (
    "Script",
    "Processes",
    "Precision and speed",
    "Strategy",
    "Ray",
    "Several machines",
    "Failures and output",
    "TPU",
    "SageMaker",
)
TOP = tuple(
    sorted(
        (
            *(replace(each.metadata["setting"], name=each.name) for each in fields(LaunchOptions) if each.metadata),
            *_WITHOUT_FIELD,
        ),
        key=lambda setting: _SECTIONS.index(setting.section),
    )
)
# All settings by name, in the order of the help.
SETTINGS: dict[str, Setting] = {
    setting.name: setting for setting in (*TOP, *(each for group in GROUPS.values() for each in group.settings))
}


def merge(sources: Iterable[Mapping[str, Given]]) -> dict[str, Given]:
    merged: dict[str, Given] = {}
    for source in sources:
        chosen = {name for name, given in merged.items() if given.value}
        taken = {other for names in ALTERNATIVES if chosen & {*names} for other in names}
        taken |= {"gpu_ids"} if "cpu" in chosen else {"cpu"} if "gpu_ids" in chosen else set()
        for name, given in source.items():
            if name not in SETTINGS:
                raise ConfigurationError(
                    f"There is no launch option {name!r}.{nearest(name, SETTINGS)} "
                    f"Allowed: {', '.join(sorted(SETTINGS))}."
                )
            if given.value is not None and name not in taken:
                merged.setdefault(name, given)
    return merged


def variables_of(values: Mapping[str, Any]) -> dict[str, str]:
    variables = {}
    for name, value in values.items():
        setting = SETTINGS[name]
        switch = GROUPS[setting.group].switch if setting.group else ""
        if value is None or setting.variable is None or setting.of_launcher or setting.inert:
            continue
        if (switch and not values.get(switch)) or (setting.kind == "switch" and not value):
            continue
        variables[setting.variable] = setting.text(value)
    return variables

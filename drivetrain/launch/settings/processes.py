"""Settings of the processes: how many, where, what they run, and what happens when one fails."""

from __future__ import annotations

from drivetrain.launch.settings.setting import Setting
from drivetrain.launch.settings.sharding import GRADIENT_ACCUMULATION
from drivetrain.runtime.tracebacks import FULL_VARIABLE

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
    "drivetrain starts no jobs on SageMaker. Run `drivetrain launch` as the entry point of a job, and leave it out."
)
_NO_POD = (
    "drivetrain launch opens no connection to the machines of a pod. Run it on each of them, such as with "
    '`drivetrain tpu-config --command "drivetrain launch train.py"`, and leave it out here.'
)
_OF_A_POD = "it concerns the machines of a pod, on each of which `drivetrain launch` is run by itself"


def _process(name: str, help: str, kind: str = "text", **more: object) -> Setting:
    return Setting(name, help, kind, "Processes", **more)  # type: ignore[arg-type]


def _machine(name: str, help: str, kind: str = "text", **more: object) -> Setting:
    return Setting(name, help, kind, "Several machines", **more)  # type: ignore[arg-type]


def _failure(name: str, help: str, kind: str = "text", **more: object) -> Setting:
    return Setting(name, help, kind, "Failures and output", **more)  # type: ignore[arg-type]


def _tpu(name: str, help: str, kind: str = "text", **more: object) -> Setting:
    return Setting(name, help, kind, "TPU", **more)  # type: ignore[arg-type]


def _strategy(name: str, help: str) -> Setting:
    variable, theirs = f"DRIVETRAIN_{name.upper()}", f"ACCELERATE_{name.upper()}"
    return Setting(name, help, "switch", "Strategy", variable=variable, theirs=theirs)


TOP = (
    Setting(
        "stand_in",
        f"Give SCRIPT, and what it imports, drivetrain under the name of: {', '.join(STAND_INS)}.",
        "choice",
        "Script",
        flags=("--as",),
        shown="--as",
        choices=STAND_INS,
        metavar="PACKAGE",
    ),
    Setting("module", "SCRIPT is a module's name, as in python -m.", "switch", "Script", flags=("-m",)),
    Setting("no_python", "SCRIPT is a program of its own, not Python.", "switch", "Script"),
    Setting(
        "preload",
        "Import these once, and fork the processes then. Default: torch and the imports at the script's top.",
        section="Script",
        metavar="MODULES",
    ),
    Setting("no_preload", "Each process imports everything by itself.", "switch", "Script"),
    _process(
        "num_processes",
        "Processes over all machines. Default: one per accelerator, or one on the CPU.",
        "int",
        variable="DRIVETRAIN_NUM_PROCESSES",
        of_launcher=True,
    ),
    _process(
        "cpu",
        "Run on the CPU, also where there are accelerators.",
        "switch",
        keys=("use_cpu",),
        flags=("--use_cpu",),
        variable="DRIVETRAIN_USE_CPU",
        theirs="ACCELERATE_USE_CPU",
    ),
    _process("multi_gpu", "Insist on accelerators: an error where there are none.", "switch"),
    _process("gpu_ids", 'Accelerators to use, such as "0,2"; "all" for all.', metavar="IDS"),
    _process(
        "num_cpu_threads_per_process",
        "Threads of each process (OMP_NUM_THREADS). Default: an equal share of the cores.",
        "int",
    ),
    _process("enable_cpu_affinity", "Bind each process to its own equal share of the cores.", "switch"),
    Setting(
        "mixed_precision",
        f"Default number format: {', '.join(MIXED_PRECISIONS)}.",
        "choice",
        "Numbers and speed",
        choices=MIXED_PRECISIONS,
        metavar="NAME",
        variable="DRIVETRAIN_MIXED_PRECISION",
        theirs="ACCELERATE_MIXED_PRECISION",
    ),
    Setting(
        "downcast_bf16",
        "On XLA devices, let bf16 round 32-bit floats to bfloat16 and compute 64-bit ones in 32 bits.",
        "switch",
        "Numbers and speed",
        variable="DRIVETRAIN_DOWNCAST_BF16",
    ),
    GRADIENT_ACCUMULATION,
    _strategy("use_fsdp", "Shard parameters, gradients and optimizer state over the processes."),
    _strategy("use_deepspeed", "Train with DeepSpeed."),
    _strategy("use_parallelism_config", "Arrange the processes in a grid: tensor and context parallelism."),
    _strategy("use_megatron_lm", "Train with Megatron."),
    Setting(
        "launcher",
        "Who starts the processes: elastic (here, or one launch on each machine; the default), or ray (on the workers "
        "of a Ray cluster).",
        "choice",
        "Ray",
        choices=LAUNCHERS,
        metavar="NAME",
    ),
    Setting(
        "ray_address",
        "The cluster: HOST:PORT, auto for the one that this machine is in, or local to start one here for the run. "
        "Default: RAY_ADDRESS, or auto.",
        section="Ray",
        metavar="ADDRESS",
        variable="RAY_ADDRESS",
        of_launcher=True,
    ),
    _machine(
        "num_machines",
        "Machines that take part. Default: 1. With 1:2, the run continues when one of two dies or comes.",
        flags=("--nnodes",),
        metavar="N or MIN:MAX",
        variable="DRIVETRAIN_NUM_MACHINES",
        of_launcher=True,
    ),
    _machine(
        "machine_rank",
        "Which one this is, from 0.",
        "int",
        flags=("--node_rank",),
        variable="DRIVETRAIN_MACHINE_RANK",
        of_launcher=True,
    ),
    _machine(
        "main_process_ip",
        "Address of machine 0.",
        flags=("--master_addr",),
        metavar="ADDRESS",
        variable="DRIVETRAIN_MAIN_PROCESS_IP",
        of_launcher=True,
    ),
    _machine(
        "main_process_port",
        "Port on machine 0. Default: 29500; a free one where there is one machine.",
        "int",
        flags=("--master_port",),
        variable="DRIVETRAIN_MAIN_PROCESS_PORT",
        of_launcher=True,
    ),
    _machine(
        "rdzv_backend",
        f"How machines meet: {', '.join(RENDEZVOUS_BACKENDS)}. Default: static, or c10d with MIN:MAX.",
        metavar="NAME",
    ),
    _machine("rdzv_endpoint", "The same as --main_process_ip and --main_process_port in one.", metavar="ADDRESS:PORT"),
    _machine("rdzv_conf", "Further settings of that, such as timeout=60.", metavar="KEY=VALUE,..."),
    _machine("same_network", "Accepted; --rdzv_backend decides how machines meet.", "switch"),
    _failure("max_restarts", "Start all again after a failure. Default: 0.", "int"),
    _failure(
        "preemption_grace_period",
        "Time to save and end after SIGTERM, SIGUSR1 or Ctrl-C. Default: 60.",
        "float",
        metavar="SECONDS",
    ),
    _failure(
        "hang_timeout",
        "End a run in which a rank makes no progress for so long, and report where each waits; 0 never. "
        "Default: just before the collectives' own time-out.",
        "float",
        metavar="SECONDS",
    ),
    _failure("monitor_interval", "Seconds between two checks of the processes. Default: 0.1.", "float"),
    _failure("log_dir", "Write each rank's output to files there as well.", metavar="DIRECTORY"),
    _failure(
        "tee",
        "Which: 1 stdout, 2 stderr, 3 both, or by local rank: 0:3,1:1. Default: 3 with --log_dir.",
        flags=("-t",),
        metavar="WHICH",
    ),
    _failure(
        "debug",
        "Show what is decided, and compare the calls of all processes before each collective and barrier.",
        "switch",
    ),
    _failure(
        "full_traceback",
        "Show all frames of an error's traceback, also those inside drivetrain.",
        "switch",
        variable=FULL_VARIABLE,
    ),
    _failure(
        "quiet",
        "Accepted: only the traceback of the rank that failed first is shown.",
        "switch",
        flags=("-q",),
        inert="only the traceback of the rank that failed first is shown",
    ),
    _failure("role", "Accepted.", inert="ranks are named by their number"),
    _tpu("tpu", "Insist on a TPU: an error where there is none.", "switch"),
    _tpu("main_training_function", "Accepted: the script runs from its top.", inert="the script runs from its top"),
    _tpu(
        "tpu_use_cluster",
        "A pod: run `drivetrain launch` on each machine.",
        "switch",
        flags=("--tpu_cluster",),
        refused=_NO_POD,
    ),
    _tpu("no_tpu_cluster", "Accepted.", "switch", inert="there is no other way"),
    _tpu("tpu_use_sudo", "Accepted.", "switch", inert=_OF_A_POD),
    _tpu("tpu_name", "Accepted.", metavar="NAME", inert=_OF_A_POD),
    _tpu("tpu_zone", "Accepted.", metavar="NAME", inert=_OF_A_POD),
    _tpu("tpu_vm", "Accepted.", "words", flags=("--vm",), metavar="NAMES", inert=_OF_A_POD),
    _tpu("tpu_env", "Accepted.", "words", flags=("--env",), metavar="NAME=VALUE", inert=_OF_A_POD),
    _tpu("command_file", "Accepted.", metavar="FILE", inert=_OF_A_POD),
    _tpu("commands", "Accepted.", "words", inert=_OF_A_POD),
    Setting("aws_access_key_id", "SageMaker: not here.", section="SageMaker", refused=_NO_SAGEMAKER),
    Setting("aws_secret_access_key", "SageMaker: not here.", section="SageMaker", refused=_NO_SAGEMAKER),
)

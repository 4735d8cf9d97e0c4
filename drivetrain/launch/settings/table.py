"""All settings of a launch, by name, in the order of the help."""

from __future__ import annotations

from functools import partial

from drivetrain.launch.settings.megatron import MEGATRON
from drivetrain.launch.settings.setting import Group, Setting
from drivetrain.runtime.errors import FULL_VARIABLE

# Settings of the strategies that shard a model: FSDP, DeepSpeed and the grid of processes


_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def _fsdp(name: str, help: str, kind: str = "text", theirs: str | None = None, **more: object) -> Setting:
    return Setting(
        f"fsdp_{name}",
        help,
        kind,
        "FSDP (with --use_fsdp)",
        "fsdp_config",
        variable=f"DRIVETRAIN_FSDP_{name.upper()}",
        theirs=theirs or f"FSDP_{name.upper()}",
        **more,  # type: ignore[arg-type]
    )


FSDP = Group(
    "fsdp_config",
    "fsdp_",
    (
        _fsdp("version", "1 or 2.", "choice", choices=("1", "2"), inert="both run on torch's fully_shard"),
        _fsdp("sharding_strategy", f"{', '.join(_STRATEGIES)}.", "choice", choices=_STRATEGIES, metavar="NAME"),
        _fsdp(
            "reshard_after_forward",
            "Whether parameters are freed after the forward: true, false, or a sharding strategy's name.",
            "choice",
            choices=("true", "false", *_STRATEGIES),
            metavar="NAME",
        ),
        _fsdp("offload_params", "Keep parameters and gradients on the CPU.", "bool", keys=("fsdp_cpu_offload",)),
        _fsdp(
            "auto_wrap_policy",
            "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP. Default: the model's repeated blocks.",
            "choice",
            choices=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
            metavar="NAME",
        ),
        _fsdp(
            "transformer_layer_cls_to_wrap",
            "Class names of the layers that are sharded each by itself, by commas.",
            "words",
            theirs="FSDP_TRANSFORMER_CLS_TO_WRAP",
            metavar="NAMES",
        ),
        _fsdp("min_num_params", "Parameters of a unit under SIZE_BASED_WRAP.", "int", least=1),
        _fsdp(
            "backward_prefetch",
            "Accepted: the next unit is always gathered during a backward.",
            "choice",
            choices=("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
            keys=("fsdp_backward_prefetch_policy",),
            metavar="NAME",
            inert="the next unit is always gathered while one computes its backward",
        ),
        _fsdp(
            "state_dict_type",
            "Accepted: checkpoints are always sharded, exports always whole.",
            "choice",
            choices=("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
            metavar="NAME",
            inert="checkpoints are always written in shards that any layout reads, and exports are whole",
        ),
        _fsdp("forward_prefetch", "Gather the next unit early during the forward.", "bool"),
        _fsdp(
            "use_orig_params",
            "Accepted: parameters are always the model's own.",
            "bool",
            inert="parameters are always the model's own",
        ),
        _fsdp("cpu_ram_efficient_loading", "Load weights on rank 0 only, and send the shards from there.", "bool"),
        _fsdp("sync_module_states", "Begin with the values of rank 0 on all processes.", "bool"),
        _fsdp("activation_checkpointing", "Compute activations again during the backward.", "bool"),
        _fsdp(
            "activation_checkpointing_offload",
            "Keep the inputs of checkpointed layers in memory of the CPU.",
            "bool",
        ),
        _fsdp("ignored_modules", "Name, or pattern over names, of modules that are not sharded.", metavar="PATTERN"),
    ),
    switch="use_fsdp",
)


def _deepspeed(
    name: str, help: str, kind: str = "text", variable: str = "", theirs: str | None = None, **more: object
) -> Setting:
    short = variable or name.removeprefix("deepspeed_").upper()
    return Setting(
        name,
        help,
        kind,
        "DeepSpeed (with --use_deepspeed)",
        "deepspeed_config",
        variable=f"DRIVETRAIN_DEEPSPEED_{short}",
        theirs=theirs or f"ACCELERATE_DEEPSPEED_{short}",
        **more,  # type: ignore[arg-type]
    )


_OF_THE_OTHER_LAUNCHER = "processes are started by drivetrain's launcher, on each machine by itself"
_DEVICES = ("none", "cpu", "nvme")

GRADIENT_ACCUMULATION = Setting(
    "gradient_accumulation_steps",
    "Default number of micro-batches in an optimizer step.",
    "int",
    "Numbers and speed",
    least=1,
    auto=True,
    variable="DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS",
    theirs="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
)

DEEPSPEED = Group(
    "deepspeed_config",
    "deepspeed_",
    (
        _deepspeed("deepspeed_config_file", "DeepSpeed's own configuration, a JSON file.", metavar="FILE"),
        _deepspeed("zero_stage", "0, 1, 2 or 3. Default: 2.", "choice", choices=("0", "1", "2", "3"), auto=True),
        _deepspeed(
            "offload_optimizer_device", "none, cpu or nvme.", "choice", choices=_DEVICES, auto=True, metavar="NAME"
        ),
        _deepspeed("offload_param_device", "none, cpu or nvme.", "choice", choices=_DEVICES, auto=True, metavar="NAME"),
        _deepspeed("offload_optimizer_nvme_path", "Folder for that.", auto=True, metavar="FOLDER"),
        _deepspeed("offload_param_nvme_path", "Folder for that.", auto=True, metavar="FOLDER"),
        _deepspeed(
            "gradient_clipping",
            "Total norm to which gradients are clipped.",
            "float",
            theirs="ACCELERATE_GRADIENT_CLIPPING",
            least=0,
            auto=True,
        ),
        _deepspeed(
            "zero3_init_flag",
            "Shard parameters as the model is built, under stage 3.",
            "bool",
            variable="ZERO3_INIT",
            auto=True,
        ),
        _deepspeed("zero3_save_16bit_model", "Save whole 16-bit weights under stage 3.", "bool", auto=True),
        _deepspeed(
            "deepspeed_moe_layer_cls_names",
            "Class names of layers with experts, by commas.",
            "words",
            metavar="NAMES",
        ),
        _deepspeed("deepspeed_hostfile", "Accepted.", metavar="FILE", inert=_OF_THE_OTHER_LAUNCHER),
        _deepspeed("deepspeed_exclusion_filter", "Accepted.", inert=_OF_THE_OTHER_LAUNCHER),
        _deepspeed("deepspeed_inclusion_filter", "Accepted.", inert=_OF_THE_OTHER_LAUNCHER),
        _deepspeed("deepspeed_multinode_launcher", "Accepted.", metavar="NAME", inert=_OF_THE_OTHER_LAUNCHER),
    ),
    switch="use_deepspeed",
    also=(GRADIENT_ACCUMULATION,),
)


def _grid(name: str, help: str, kind: str = "int", **more: object) -> Setting:
    return Setting(
        f"parallelism_config_{name}",
        help,
        kind,
        "Grid of processes (with --use_parallelism_config)",
        "parallelism_config",
        variable=f"DRIVETRAIN_PARALLELISM_CONFIG_{name.upper()}",
        theirs=f"PARALLELISM_CONFIG_{name.upper()}",
        **more,  # type: ignore[arg-type]
    )


_size = partial(_grid, kind="int", least=1)
_NO_ULYSSES = (
    "sequences are split over processes with parallelism_config_cp_size; DeepSpeed's ALST is not used. Set "
    "parallelism_config_sp_size to 1."
)

GRID = Group(
    "parallelism_config",
    "parallelism_config_",
    (
        _size("dp_replicate_size", "Groups of processes that each hold the whole model."),
        _grid("dp_shard_size", "Processes over which a model is sharded; -1 for all that are left."),
        _size("tp_size", "Processes that share the computation of each layer."),
        _size("cp_size", "Processes that share each sequence."),
        _grid(
            "cp_backend", "torch.", "choice", choices=("torch",), inert="context parallelism is drivetrain's own here"
        ),
        _grid(
            "cp_comm_strategy",
            "allgather (keys and values are gathered) or alltoall (they pass from process to process).",
            "choice",
            choices=("allgather", "alltoall"),
            metavar="NAME",
        ),
        _size("sp_size", "1: sequences are split with parallelism_config_cp_size."),
        _grid("sp_backend", "Accepted.", "choice", choices=("deepspeed",), inert=_NO_ULYSSES),
        _grid("sp_seq_length", "Accepted.", "text", inert=_NO_ULYSSES),
        _grid("sp_seq_length_is_variable", "Accepted.", "bool", inert=_NO_ULYSSES),
        _grid("sp_attn_implementation", "Accepted.", "text", inert=_NO_ULYSSES),
    ),
    switch="use_parallelism_config",
)


def check_grid(values: dict[str, object], where: str) -> None:
    """Refuse a size of the grid that has no meaning here.

    Raises:
        ConfigurationError: `parallelism_config_sp_size` is more than 1.
    """
    from drivetrain.runtime.errors import ConfigurationError

    size = values.get("parallelism_config_sp_size")
    if isinstance(size, int) and size > 1:
        raise ConfigurationError(f"{where}={size}: {_NO_ULYSSES}", code="DT-008")


# Settings of the processes: how many, where, what they run, and what happens when one fails


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


# Settings of number formats and of compilation, and of a launch through MPI


def _fp8(name: str, help: str, kind: str, keys: tuple[str, ...] = (), **more: object) -> Setting:
    return Setting(
        f"fp8_{name}",
        help,
        kind,
        "8-bit floats (with --mixed_precision fp8)",
        "fp8_config",
        keys,
        variable=f"DRIVETRAIN_FP8_{name.upper()}",
        theirs=f"ACCELERATE_FP8_{name.upper()}",
        **more,  # type: ignore[arg-type]
    )


FP8 = Group(
    "fp8_config",
    "fp8_",
    (
        _fp8("backend", "ao (torchao), te (TransformerEngine) or msamp.", "choice", choices=("ao", "te", "msamp")),
        _fp8("use_autocast_during_eval", "te: use 8-bit floats in evaluation too.", "switch"),
        _fp8("margin", "te: margin of the scales.", "int"),
        _fp8("interval", "te: accepted; scales are computed in every step.", "int"),
        _fp8("format", "te: HYBRID, E4M3 or E5M2.", "choice", choices=("HYBRID", "E4M3", "E5M2"), metavar="NAME"),
        _fp8("amax_history_len", "te: steps of the history.", "int", ("fp8_amax_history_length",), least=1),
        _fp8(
            "amax_compute_algo",
            "te: max or most_recent.",
            "choice",
            ("fp8_amax_compute_algorithm",),
            choices=("max", "most_recent"),
            metavar="NAME",
        ),
        _fp8(
            "override_linear_precision",
            "te: compute the three products of a layer in more bits; only false,false,false.",
            "bools",
            metavar="BOOL,BOOL,BOOL",
        ),
        _fp8("use_mxfp8_block_scaling", "te: one scale for each block of 32.", "bool"),
        _fp8("opt_level", "msamp: O1 or O2.", "choice", ("fp8_optimization_level",), choices=("O1", "O2")),
        _fp8("enable_fsdp_float8_all_gather", "ao: gather shards in 8-bit floats.", "bool"),
        _fp8("pad_inner_dim", "ao: pad products to multiples of 16.", "bool"),
    ),
)
FP8_SETTINGS_OF = {
    "ao": ("fp8_enable_fsdp_float8_all_gather", "fp8_pad_inner_dim"),
    "te": tuple(each.name for each in FP8.settings[1:9]),
    "msamp": ("fp8_opt_level",),
}

_BACKENDS = (
    *("no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt"),
    *("onnxrt", "tensorrt", "aot_torchxla_trace_once", "torhchxla_trace_once", "torchxla_trace_once", "tvm"),
    *("hpu_backend", "neuron", "openxla"),
)


def _dynamo(name: str, help: str, kind: str, **more: object) -> Setting:
    return Setting(
        f"dynamo_{name}",
        help,
        kind,
        "torch.compile",
        "dynamo_config",
        variable=f"DRIVETRAIN_DYNAMO_{name.upper()}",
        theirs=f"ACCELERATE_DYNAMO_{name.upper()}",
        **more,  # type: ignore[arg-type]
    )


DYNAMO = Group(
    "dynamo_config",
    "dynamo_",
    (
        _dynamo(
            "backend", "Compile prepared models: inductor, aot_eager, ...", "choice", choices=_BACKENDS, metavar="NAME"
        ),
        _dynamo(
            "mode",
            "default, reduce-overhead or max-autotune.",
            "choice",
            choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
            metavar="NAME",
        ),
        _dynamo("use_fullgraph", "Refuse models that are not one graph.", "switch"),
        _dynamo("use_dynamic", "Expect changing shapes.", "switch"),
        _dynamo("use_regional_compilation", "Compile repeated blocks each once.", "switch"),
    ),
)

MPI = Group(
    "mpirun_config",
    "mpirun_",
    (
        Setting(
            "mpirun_hostfile",
            "Start the processes with mpirun on the hosts of this file.",
            section="MPI",
            group="mpirun_config",
            metavar="FILE",
        ),
        Setting(
            "mpirun_ccl",
            "Accepted.",
            section="MPI",
            group="mpirun_config",
            inert="processes meet over gloo, NCCL or the device's own backend",
        ),
    ),
)


GROUPS: dict[str, Group] = {group.name: group for group in (FSDP, DEEPSPEED, GRID, MEGATRON, FP8, DYNAMO, MPI)}
SETTINGS: dict[str, Setting] = {
    setting.name: setting for setting in (*TOP, *(each for group in GROUPS.values() for each in group.settings))
}
# Of each, one: a stronger source that gives one takes the place of a weaker source's others.
ALTERNATIVES = (
    ("use_fsdp", "use_deepspeed", "use_megatron_lm"),
    ("cpu", "multi_gpu", "tpu"),
    ("module", "no_python"),
    ("preload", "no_preload"),
)

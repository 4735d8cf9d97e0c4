"""Settings of the strategies that shard a model: FSDP, DeepSpeed and the grid of processes."""

from __future__ import annotations

from functools import partial

from drivetrain.launch.settings.setting import Group, Setting

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

"""Definition of a launch setting: its flag, its key in a configuration file, its variables and its type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from drivetrain.runtime.errors import ConfigurationError, nearest

_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True)
class Setting:
    """Definition of one launch setting, with its flag and its allowed values."""

    name: str
    help: str
    kind: str = "text"
    section: str = ""
    group: str = ""
    keys: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    shown: str = ""
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    least: float | None = None
    auto: bool = False
    variable: str | None = None
    theirs: str | None = None
    inert: str = ""
    refused: str = ""
    of_launcher: bool = False

    @property
    def flag(self) -> str:
        return self.shown or f"--{self.name}"

    def parse(self, value: Any, where: str) -> Any:
        if value is None or (self.auto and str(value).strip().lower() in ("auto", "none", "")):
            return None
        if isinstance(value, str):
            value = value.strip()
            if value == "" and self.kind != "text":
                return None
        parsed = getattr(self, f"_{self.kind}")(value, where)
        if self.refused and parsed and str(parsed).lower() not in ("no", "none"):
            raise ConfigurationError(f"{where}: {self.refused}")  # the value may be a secret, so do not print it
        return parsed

    def text(self, value: Any) -> str:
        """Format a setting's value for an environment variable, such as `"true"`."""
        if isinstance(value, bool):
            return "1" if value and self.kind == "switch" else "true" if value else "false"
        if isinstance(value, list | tuple):
            return ",".join(self.text(each) for each in value)
        return str(value)

    def _refuse(self, value: Any, where: str, allowed: str) -> ConfigurationError:
        return ConfigurationError(f"{where} is {value!r}, but must be {allowed}.")

    def _bool(self, value: Any, where: str) -> bool:
        known = _TRUTH.get(str(value).lower()) if isinstance(value, bool | int | str) else None
        if known is None:
            raise self._refuse(value, where, "true or false")
        return known

    _switch = _bool

    def _int(self, value: Any, where: str) -> int:
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise ValueError
            number = int(value) if not isinstance(value, str) or "e" not in value.lower() else int(float(value))
            if isinstance(value, float) and number != value:
                raise ValueError
        except (ValueError, OverflowError):
            raise self._refuse(value, where, f"a whole number{self._bound()}") from None
        return int(self._bounded(number, value, where))

    def _float(self, value: Any, where: str) -> float:
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise ValueError
            number = float(value)
            if number != number or number in (float("inf"), float("-inf")):
                raise ValueError
        except (ValueError, OverflowError):
            raise self._refuse(value, where, f"a number{self._bound()}") from None
        return self._bounded(number, value, where)

    def _bound(self) -> str:
        return "" if self.least is None else f" of at least {self.least:g}"

    def _bounded(self, number: float, value: Any, where: str) -> float:
        if self.least is not None and number < self.least:
            raise self._refuse(value, where, f"a number{self._bound()}")
        return number

    def _text(self, value: Any, where: str) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self._refuse(value, where, "text")
        return _printable(str(value), where)

    def _choice(self, value: Any, where: str) -> str:
        if isinstance(value, bool):  # YAML reads a bare `no` as false
            named = ("true" if value else "false") if "true" in self.choices else "no" if not value else "yes"
        elif isinstance(value, str | int):
            named = str(value)
        else:
            raise self._refuse(value, where, f"one of {', '.join(self.choices)}")
        spelled = {choice.lower(): choice for choice in self.choices}
        if named.isdigit() and named not in spelled and 1 <= int(named) <= len(self.choices):
            return self.choices[int(named) - 1]  # older files contain the number of the choice
        if named.lower() not in spelled:
            raise ConfigurationError(
                f"{where} is {_short(value)}, but must be one of {', '.join(self.choices)}."
                f"{nearest(named.lower(), spelled)}"
            )
        return spelled[named.lower()]

    def _words(self, value: Any, where: str) -> list[str]:
        if isinstance(value, str):
            value = value.split(",")
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise self._refuse(value, where, "a list of words or a text with commas")
        return [_printable(each.strip(), where) for each in value if each.strip()]

    def _bools(self, value: Any, where: str) -> list[bool]:
        if isinstance(value, str):
            value = [each.strip() for each in value.strip("()[]").split(",")]
        if isinstance(value, bool):
            value = [value] * 3
        if not isinstance(value, list | tuple) or len(value) != 3:
            raise self._refuse(value, where, "a list of three booleans, such as [false, false, false]")
        return [self._bool(each, where) for each in value]


@dataclass(frozen=True)
class Group:
    """Launch settings of one feature, such as FSDP, which share a section of the configuration file."""

    name: str
    prefix: str
    section: str
    settings: tuple[Setting, ...]
    variables: tuple[str, ...] = ()
    switch: str = ""
    also: tuple[Setting, ...] = ()

    def __post_init__(self) -> None:
        settings = []
        for each in self.settings:
            short = each.name.removeprefix(self.prefix).upper()
            ours, theirs = (f"{start}{short}" for start in self.variables) if self.variables else (None, None)
            ours, theirs = each.variable or ours, each.theirs or theirs
            settings.append(replace(each, group=self.name, section=self.section, variable=ours, theirs=theirs))
        object.__setattr__(self, "settings", tuple(settings))

    def keys(self) -> Mapping[str, Setting]:
        found: dict[str, Setting] = {}
        for setting in (*self.settings, *self.also):
            for key in (setting.name, *setting.keys):
                found[key] = setting
                if self.prefix and key.startswith(self.prefix):
                    found.setdefault(key.removeprefix(self.prefix), setting)
        return found


def _printable(text: str, where: str) -> str:
    if "\0" in text:
        raise ConfigurationError(f"{where} contains a zero byte, which environment variables cannot hold. Remove it.")
    return text


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


# FSDP, DeepSpeed and the device mesh


_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


FSDP = Group(
    "fsdp_config",
    "fsdp_",
    "FSDP (with --use_fsdp)",
    (
        Setting("fsdp_version", "1 or 2.", "choice", choices=("1", "2"), inert="both run on torch's fully_shard"),
        Setting("fsdp_sharding_strategy", f"{', '.join(_STRATEGIES)}.", "choice", choices=_STRATEGIES, metavar="NAME"),
        Setting(
            "fsdp_reshard_after_forward",
            "Free parameters after the forward: true, false, or the name of a sharding strategy.",
            "choice",
            choices=("true", "false", *_STRATEGIES),
            metavar="NAME",
        ),
        Setting("fsdp_offload_params", "Keep parameters and gradients on the CPU.", "bool", keys=("fsdp_cpu_offload",)),
        Setting(
            "fsdp_auto_wrap_policy",
            "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP. Default: the model's repeated blocks.",
            "choice",
            choices=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
            metavar="NAME",
        ),
        Setting(
            "fsdp_transformer_layer_cls_to_wrap",
            "Class names of the layers that form FSDP units, separated by commas.",
            "words",
            theirs="FSDP_TRANSFORMER_CLS_TO_WRAP",
            metavar="NAMES",
        ),
        Setting("fsdp_min_num_params", "Minimum parameters of a unit under SIZE_BASED_WRAP.", "int", least=1),
        Setting(
            "fsdp_backward_prefetch",
            "Accepted and ignored: the next unit is always prefetched during the backward.",
            "choice",
            choices=("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
            keys=("fsdp_backward_prefetch_policy",),
            metavar="NAME",
            inert="the next unit is always prefetched during the backward",
        ),
        Setting(
            "fsdp_state_dict_type",
            "Accepted and ignored: checkpoints are always sharded, exports always full.",
            "choice",
            choices=("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
            metavar="NAME",
            inert="checkpoints are always sharded and readable by any layout, and exports are always full",
        ),
        Setting("fsdp_forward_prefetch", "Prefetch the next unit during the forward.", "bool"),
        Setting(
            "fsdp_use_orig_params",
            "Accepted and ignored: the model's original parameters are always used.",
            "bool",
            inert="the model's original parameters are always used",
        ),
        Setting(
            "fsdp_cpu_ram_efficient_loading", "Load weights on rank 0 only, and send shards to the others.", "bool"
        ),
        Setting("fsdp_sync_module_states", "Start with the parameters of rank 0 on all processes.", "bool"),
        Setting("fsdp_activation_checkpointing", "Recompute activations during the backward.", "bool"),
        Setting(
            "fsdp_activation_checkpointing_offload", "Keep the inputs of checkpointed layers in CPU memory.", "bool"
        ),
        Setting("fsdp_ignored_modules", "Name or pattern of modules that are not sharded.", metavar="PATTERN"),
    ),
    variables=("DRIVETRAIN_FSDP_", "FSDP_"),
    switch="use_fsdp",
)


_OF_THE_OTHER_LAUNCHER = "drivetrain's launcher starts the processes, on each machine separately"
_IGNORED = "Accepted and ignored."
_DEVICES = ("none", "cpu", "nvme")

GRADIENT_ACCUMULATION = Setting(
    "gradient_accumulation_steps",
    "Default number of micro-batches per optimizer step.",
    "int",
    "Precision and speed",
    least=1,
    auto=True,
    variable="DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS",
    theirs="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
)

_NO_ULYSSES = (
    "DeepSpeed's ALST is not supported. Set parallelism_config_sp_size to 1, and split sequences over processes with "
    "parallelism_config_cp_size."
)


DEEPSPEED = Group(
    "deepspeed_config",
    "deepspeed_",
    "DeepSpeed (with --use_deepspeed)",
    (
        Setting("deepspeed_config_file", "JSON configuration file of DeepSpeed.", metavar="FILE"),
        Setting("zero_stage", "0, 1, 2 or 3. Default: 2.", "choice", choices=("0", "1", "2", "3"), auto=True),
        Setting(
            "offload_optimizer_device", "none, cpu or nvme.", "choice", choices=_DEVICES, auto=True, metavar="NAME"
        ),
        Setting("offload_param_device", "none, cpu or nvme.", "choice", choices=_DEVICES, auto=True, metavar="NAME"),
        Setting("offload_optimizer_nvme_path", "Folder for optimizer state on NVMe.", auto=True, metavar="FOLDER"),
        Setting("offload_param_nvme_path", "Folder for parameters on NVMe.", auto=True, metavar="FOLDER"),
        Setting(
            "gradient_clipping",
            "Maximum total norm of gradients.",
            "float",
            theirs="ACCELERATE_GRADIENT_CLIPPING",
            least=0,
            auto=True,
        ),
        Setting(
            "zero3_init_flag",
            "Shard parameters while the model is built, under stage 3.",
            "bool",
            variable="DRIVETRAIN_DEEPSPEED_ZERO3_INIT",
            theirs="ACCELERATE_DEEPSPEED_ZERO3_INIT",
            auto=True,
        ),
        Setting("zero3_save_16bit_model", "Save full 16-bit weights under stage 3.", "bool", auto=True),
        Setting(
            "deepspeed_moe_layer_cls_names",
            "Class names of mixture-of-experts layers, separated by commas.",
            "words",
            metavar="NAMES",
        ),
        Setting("seq_parallel_communication_data_type", _IGNORED, metavar="DTYPE", inert=_NO_ULYSSES),
        Setting("deepspeed_hostfile", _IGNORED, metavar="FILE", inert=_OF_THE_OTHER_LAUNCHER),
        Setting("deepspeed_exclusion_filter", _IGNORED, inert=_OF_THE_OTHER_LAUNCHER),
        Setting("deepspeed_inclusion_filter", _IGNORED, inert=_OF_THE_OTHER_LAUNCHER),
        Setting("deepspeed_multinode_launcher", _IGNORED, metavar="NAME", inert=_OF_THE_OTHER_LAUNCHER),
    ),
    variables=("DRIVETRAIN_DEEPSPEED_", "ACCELERATE_DEEPSPEED_"),
    switch="use_deepspeed",
    also=(GRADIENT_ACCUMULATION,),
)


GRID = Group(
    "parallelism_config",
    "parallelism_config_",
    "Device mesh (with --use_parallelism_config)",
    (
        Setting("parallelism_config_dp_replicate_size", "Number of model replicas.", "int", least=1),
        Setting(
            "parallelism_config_dp_shard_size",
            "Number of processes that each replica is sharded over; -1 for all remaining ones.",
            "int",
        ),
        Setting("parallelism_config_tp_size", "Tensor-parallel size.", "int", least=1),
        Setting("parallelism_config_cp_size", "Context-parallel size.", "int", least=1),
        Setting(
            "parallelism_config_cp_backend",
            "torch.",
            "choice",
            choices=("torch",),
            inert="drivetrain implements context parallelism itself",
        ),
        Setting(
            "parallelism_config_cp_comm_strategy",
            "allgather (gather keys and values) or alltoall (pass them from process to process).",
            "choice",
            choices=("allgather", "alltoall"),
            metavar="NAME",
        ),
        Setting("parallelism_config_sp_size", "Only 1. See parallelism_config_cp_size.", "int", least=1),
        Setting("parallelism_config_sp_backend", _IGNORED, "choice", choices=("deepspeed",), inert=_NO_ULYSSES),
        Setting("parallelism_config_sp_seq_length", _IGNORED, "text", inert=_NO_ULYSSES),
        Setting("parallelism_config_sp_seq_length_is_variable", _IGNORED, "bool", inert=_NO_ULYSSES),
        Setting("parallelism_config_sp_attn_implementation", _IGNORED, "text", inert=_NO_ULYSSES),
    ),
    variables=("DRIVETRAIN_PARALLELISM_CONFIG_", "PARALLELISM_CONFIG_"),
    switch="use_parallelism_config",
)


def check_grid(values: dict[str, object], where: str) -> None:
    size = values.get("parallelism_config_sp_size")
    if isinstance(size, int) and size > 1:
        raise ConfigurationError(f"{where}={size}: {_NO_ULYSSES}")


# FP8, torch.compile and MPI


FP8 = Group(
    "fp8_config",
    "fp8_",
    "FP8 (with --mixed_precision fp8)",
    (
        Setting(
            "fp8_backend", "ao (torchao), te (TransformerEngine) or msamp.", "choice", choices=("ao", "te", "msamp")
        ),
        Setting("fp8_use_autocast_during_eval", "te: use FP8 in evaluation too.", "switch"),
        Setting("fp8_margin", "te: margin of the scales.", "int"),
        Setting("fp8_interval", "te: accepted and ignored; scales are computed in every step.", "int"),
        Setting(
            "fp8_format", "te: HYBRID, E4M3 or E5M2.", "choice", choices=("HYBRID", "E4M3", "E5M2"), metavar="NAME"
        ),
        Setting(
            "fp8_amax_history_len", "te: steps of the amax history.", "int", keys=("fp8_amax_history_length",), least=1
        ),
        Setting(
            "fp8_amax_compute_algo",
            "te: max or most_recent.",
            "choice",
            keys=("fp8_amax_compute_algorithm",),
            choices=("max", "most_recent"),
            metavar="NAME",
        ),
        Setting(
            "fp8_override_linear_precision",
            "te: compute a layer's three matrix products in higher precision; only false,false,false.",
            "bools",
            metavar="BOOL,BOOL,BOOL",
        ),
        Setting("fp8_use_mxfp8_block_scaling", "te: one scale per block of 32 values.", "bool"),
        Setting("fp8_opt_level", "msamp: O1 or O2.", "choice", keys=("fp8_optimization_level",), choices=("O1", "O2")),
        Setting("fp8_enable_fsdp_float8_all_gather", "ao: all-gather FSDP shards in FP8.", "bool"),
        Setting("fp8_pad_inner_dim", "ao: pad matrix products to multiples of 16.", "bool"),
    ),
    variables=("DRIVETRAIN_FP8_", "ACCELERATE_FP8_"),
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


DYNAMO = Group(
    "dynamo_config",
    "dynamo_",
    "torch.compile",
    (
        Setting(
            "dynamo_backend",
            "Compile prepared models: inductor, aot_eager, ...",
            "choice",
            choices=_BACKENDS,
            metavar="NAME",
        ),
        Setting(
            "dynamo_mode",
            "default, reduce-overhead or max-autotune.",
            "choice",
            choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
            metavar="NAME",
        ),
        Setting("dynamo_use_fullgraph", "Require a single graph without breaks.", "switch"),
        Setting("dynamo_use_dynamic", "Expect dynamic shapes.", "switch"),
        Setting("dynamo_use_regional_compilation", "Compile repeated blocks only once.", "switch"),
    ),
    variables=("DRIVETRAIN_DYNAMO_", "ACCELERATE_DYNAMO_"),
)

MPI = Group(
    "mpirun_config",
    "mpirun_",
    "MPI",
    (
        Setting("mpirun_hostfile", "Start the processes with mpirun on the hosts of this file.", metavar="FILE"),
        Setting("mpirun_ccl", _IGNORED, inert="processes communicate over gloo, NCCL or the device's own backend"),
    ),
)


# Megatron


_CHECKPOINTS = "checkpoints always contain the optimizer, and the call that loads one selects its parts"

MEGATRON = Group(
    "megatron_lm_config",
    "megatron_lm_",
    "Megatron (with --use_megatron_lm)",
    (
        Setting("megatron_lm_tp_degree", "Tensor-parallel size.", "int", least=1),
        Setting("megatron_lm_pp_degree", "Number of pipeline stages.", "int", least=1),
        Setting("megatron_lm_context_parallel_size", "Context-parallel size.", "int", least=1),
        Setting("megatron_lm_expert_model_parallel_size", "Expert-parallel size.", "int", least=1),
        Setting("megatron_lm_expert_tensor_parallel_size", "Tensor-parallel size of the experts.", "int", least=1),
        Setting("megatron_lm_num_micro_batches", "Micro-batches per optimizer step.", "int", least=1),
        Setting("megatron_lm_gradient_clipping", "Maximum total norm of gradients; 0 for none.", "float", least=0),
        Setting("megatron_lm_sequence_parallelism", "Use sequence parallelism.", "bool"),
        Setting(
            "megatron_lm_use_distributed_optimizer",
            "Shard the optimizer's state over the data-parallel processes.",
            "bool",
        ),
        Setting("megatron_lm_recompute_activations", "Recompute attention during the backward.", "bool"),
        Setting("megatron_lm_recompute_granularity", "full or selective.", "choice", choices=("full", "selective")),
        Setting("megatron_lm_recompute_method", "uniform or block.", "choice", choices=("uniform", "block")),
        Setting("megatron_lm_recompute_num_layers", "Number of layers to recompute.", "int", least=1),
        Setting("megatron_lm_decoder_last_pipeline_num_layers", "Layers of the last pipeline stage.", "int", least=1),
        Setting("megatron_lm_attention_dropout", "Dropout probability in attention.", "float", least=0),
        Setting("megatron_lm_hidden_dropout", "Dropout probability of hidden states.", "float", least=0),
        Setting("megatron_lm_attention_softmax_in_fp32", "Compute attention's softmax in float32.", "bool"),
        Setting(
            "megatron_lm_calculate_per_token_loss", "Average the loss over tokens instead of micro-batches.", "bool"
        ),
        Setting("megatron_lm_optimizer_cpu_offload", "Keep the optimizer's state on the CPU.", "bool"),
        Setting("megatron_lm_overlap_cpu_optimizer_d2h_h2d", "Overlap the CPU optimizer with copies.", "bool"),
        Setting("megatron_lm_use_precision_aware_optimizer", "Store the optimizer's state in fewer bits.", "bool"),
        Setting(
            "megatron_lm_attention_backend", _IGNORED, "bool", inert="Megatron selects an available implementation"
        ),
        Setting("megatron_lm_eod_mask_loss", _IGNORED, "bool", inert="the task's loss_func defines it"),
        Setting(
            "megatron_lm_use_rotary_position_embeddings", _IGNORED, "bool", inert="the task's model_provider defines it"
        ),
        Setting("megatron_lm_no_load_optim", _IGNORED, "bool", inert=_CHECKPOINTS),
        Setting("megatron_lm_no_save_optim", _IGNORED, "bool", inert=_CHECKPOINTS),
        Setting(
            "megatron_lm_use_custom_fsdp",
            "Only false. Use --use_fsdp to shard parameters.",
            "bool",
            inert="it is off",
            refused="Megatron's own FSDP is not supported. Remove the key, or shard parameters with use_fsdp.",
        ),
        # Keys of older configuration files and plugins
        Setting("megatron_lm_seq_length", _IGNORED, "int", inert="the batches define it"),
        Setting("megatron_lm_train_iters", _IGNORED, "int", inert="the training loop defines it"),
        Setting("megatron_lm_eval_iters", _IGNORED, "int", inert="the training loop defines it"),
        Setting("megatron_lm_eval_interval", _IGNORED, "int", inert="the training loop defines it"),
    ),
    variables=("DRIVETRAIN_MEGATRON_LM_", "MEGATRON_LM_"),
    switch="use_megatron_lm",
)

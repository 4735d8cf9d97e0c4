"""Accelerate's plugin classes, which describe drivetrain's strategies and options under Accelerate's names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from drivetrain.accelerator.compilation import Compilation
from drivetrain.accelerator.megatron_plugin import MegatronLMPlugin
from drivetrain.launch.settings.sources import settings_in_environment
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger
from drivetrain.strategies import Strategy
from drivetrain.strategies.precision import FP8
from drivetrain.strategies.precision.fp8.base import check_choice
from drivetrain.strategies.registry import strategy_class

if TYPE_CHECKING:
    from drivetrain.strategies.fsdp import FSDP


logger = get_logger(__name__)

# Names that Accelerate's configuration writes. They all select the same implementation here.
_CP_BACKENDS, _SP_BACKENDS = (None, "torch"), (None, "deepspeed")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class FullyShardedDataParallelPlugin:
    """Options for sharding a model with FSDP.

    `Accelerator(fsdp_plugin=...)` takes them, as in Accelerate. `Accelerator(strategy=drivetrain.FSDP(...))` takes the
    options directly. Options without a meaning for `fully_shard` are accepted and logged once.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Callable[..., Any] | str | None = None
    cpu_offload: Any = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool | None = None
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None

    def strategy(self) -> FSDP:
        """Create a `drivetrain.FSDP` strategy with the options of this `FullyShardedDataParallelPlugin`.

        Raises:
            ConfigurationError: An option is not supported.
        """
        from drivetrain.strategies.fsdp import FSDP

        options: dict[str, Any] = {}
        if callable(self.auto_wrap_policy):
            options["wrap"] = _wrap_of(self.auto_wrap_policy)
        options.update(_dtypes_of(self.mixed_precision_policy))
        if self.activation_checkpointing_offload:
            options["activation_offload"] = True
        return FSDP.from_config(self._config(), **options)

    def _config(self) -> dict[str, Any]:
        for name in ("state_dict_config", "optim_state_dict_config"):
            if getattr(self, name) is not None:
                logger.warning_once(f"{name} has no effect, because checkpoints are always written in shards.")
        if self.param_init_fn is not None:
            raise ConfigurationError(
                "param_init_fn is not supported. Create the model inside `with accelerator.init_context():`, and its "
                "modules are initialized by their reset_parameters(). To load weights from a file, pass "
                "FSDP(weights=...).",
            )
        offload = self.cpu_offload
        if offload is not None and not isinstance(offload, bool | str):
            offload = bool(getattr(offload, "offload_params", True))  # torch's CPUOffload, or its CPUOffloadPolicy
        # The keys are those of `fsdp_config` in a launcher's YAML file.
        return {
            "version": self.fsdp_version,
            "sharding_strategy": _name_of(self.sharding_strategy),
            "reshard_after_forward": _name_of(self.reshard_after_forward),
            "backward_prefetch": _name_of(self.backward_prefetch),
            "auto_wrap_policy": None if callable(self.auto_wrap_policy) else self.auto_wrap_policy,
            "transformer_layer_cls_to_wrap": self.transformer_cls_names_to_wrap,
            "min_num_params": self.min_num_params,
            "cpu_offload": offload,
            "ignored_modules": self.ignored_modules,
            "state_dict_type": _name_of(self.state_dict_type),
            "limit_all_gathers": self.limit_all_gathers,
            "use_orig_params": self.use_orig_params,
            "sync_module_states": self.sync_module_states,
            "forward_prefetch": self.forward_prefetch,
            "activation_checkpointing": self.activation_checkpointing,
            "cpu_ram_efficient_loading": self.cpu_ram_efficient_loading,
        }


@dataclass
class DeepSpeedPlugin:
    """Options for training with DeepSpeed.

    `Accelerator(deepspeed_plugin=...)` takes them, as in Accelerate. `Accelerator(strategy=drivetrain.DeepSpeed(...))`
    takes the options directly.

    Attributes:
        hf_ds_config: A DeepSpeed configuration, as a dict or a path.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None

    def strategy(self) -> Strategy:
        """Return a `drivetrain.DeepSpeed` strategy that is configured with this plugin's options."""
        strategy: Strategy = strategy_class("deepspeed")(**self.arguments())
        return strategy

    def arguments(self) -> dict[str, Any]:
        names = {"transformer_moe_cls_names": "deepspeed_moe_layer_cls_names"}
        leave_out = ("hf_ds_config", "is_train_batch_min")
        given = {
            names.get(field.name, field.name): value
            for field in fields(self)
            if field.name not in leave_out and (value := getattr(self, field.name)) is not None
        }
        arguments: dict[str, Any] = strategy_class("deepspeed").arguments_from(given)
        if self.hf_ds_config is not None:
            arguments["config"] = getattr(self.hf_ds_config, "config", self.hf_ds_config)
        return arguments


@dataclass
class ParallelismConfig:
    """Sizes of the device mesh, one for each kind of parallelism.

    `Accelerator(strategy=drivetrain.Parallel(...))` takes the sizes directly.

    Attributes:
        cp_handler: A `TorchContextParallelConfig` with the communication of context parallelism.
        tp_plan: The tensor-parallel plan. `"auto"` takes it from the model, as Accelerate does.

    Raises:
        ConfigurationError: Ulysses sequence parallelism is requested. Use context parallelism instead.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None
    tp_plan: Any = "auto"

    def __post_init__(self) -> None:
        if (self.sp_size or 1) > 1:
            raise ConfigurationError(
                f"sp_size={self.sp_size} requests DeepSpeed's Ulysses sequence parallelism, which is not supported. "
                f"Use context parallelism instead: cp_size={self.sp_size}.",
            )
        if self.cp_backend not in _CP_BACKENDS or self.sp_backend not in _SP_BACKENDS:
            raise ConfigurationError(
                f"cp_backend={self.cp_backend!r} and sp_backend={self.sp_backend!r} are not supported. Omit "
                "both: context parallelism always uses torch's implementation.",
            )

    @property
    def total_size(self) -> int:
        """The number of processes in the device mesh: the product of the sizes of all its dimensions."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """The number of processes that get different data: model replicas times shards of each replica."""
        return (self.dp_replicate_size or 1) * (self.dp_shard_size or 1)

    @property
    def non_data_parallel_size(self) -> int:
        """The number of processes that work on the same batch, due to tensor or context parallelism."""
        return (self.tp_size or 1) * (self.cp_size or 1) * (self.sp_size or 1)

    @property
    def dp_replicate_enabled(self) -> bool:
        """True if the device mesh holds several replicas of the model."""
        return (self.dp_replicate_size or 1) > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """True if the parameters of each replica are sharded over several processes, as FSDP does."""
        return (self.dp_shard_size or 1) > 1

    @property
    def tp_enabled(self) -> bool:
        """True if tensor parallelism is on, which splits layers over several processes."""
        return (self.tp_size or 1) > 1

    @property
    def cp_enabled(self) -> bool:
        """True if context parallelism is on, which splits sequences over several processes."""
        return (self.cp_size or 1) > 1

    @property
    def sp_enabled(self) -> bool:
        """Always False, because Ulysses sequence parallelism is not supported. Kept for existing scripts."""
        return False

    def strategy(self, **options: Any) -> Strategy:
        """Return a `drivetrain.Parallel` strategy whose device mesh has the sizes of this `ParallelismConfig`.

        Args:
            **options: Options of `FSDP` for sharding parameters.
        """
        from drivetrain.strategies.parallel import Parallel

        names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")
        sizes = {name: size for name in names if (size := getattr(self, name)) is not None}
        exchange = getattr(self.cp_handler, "cp_comm_strategy", None)
        if exchange is not None:
            options["cp_attention"] = _cp_attention(exchange)
        if (self.tp_size or 1) > 1:
            options["tp_plan"] = self.tp_plan
        return Parallel.from_config(sizes, **options)


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism, which splits sequences over processes.

    `Parallel(cp_attention=...)` is the same setting.

    Attributes:
        cp_comm_strategy: `"allgather"` or `"alltoall"`.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        if self.cp_comm_strategy is not None:
            _cp_attention(self.cp_comm_strategy)


def _cp_attention(exchange: str) -> str:
    known = {"allgather": "gather", "alltoall": "ring"}
    if exchange not in known:
        raise ConfigurationError(
            f"cp_comm_strategy is {exchange!r}, but must be one of {', '.join(known)}.{nearest(exchange, known)}"
        )
    return known[exchange]


def strategy_of_plugins(
    fsdp: FullyShardedDataParallelPlugin | Mapping[str, Any] | None,
    deepspeed: DeepSpeedPlugin | Mapping[str, Any] | None,
    parallelism: ParallelismConfig | None,
    megatron: MegatronLMPlugin | Mapping[str, Any] | None = None,
    grid_options: Mapping[str, Any] | None = None,
) -> Strategy | None:
    if megatron is not None:
        if any(other is not None for other in (fsdp, deepspeed, parallelism)):
            raise ConfigurationError(
                "megatron_lm_plugin cannot be combined with another plugin or with parallelism_config. Pass only one "
                "of them."
            )
        if isinstance(megatron, Mapping):
            return cast("Strategy", strategy_class("megatron").from_config(megatron))
        return megatron.strategy()
    if deepspeed is not None and (fsdp is not None or parallelism is not None):
        raise ConfigurationError(
            "deepspeed_plugin cannot be combined with fsdp_plugin or parallelism_config. Pass only one of them."
        )
    if deepspeed is not None:
        if isinstance(deepspeed, Mapping):
            return cast("Strategy", strategy_class("deepspeed").from_config(deepspeed))
        return deepspeed.strategy()
    if fsdp is None:
        return None if parallelism is None else parallelism.strategy(**(grid_options or {}))
    from drivetrain.strategies.fsdp import FSDP

    sharding = FSDP.from_config(fsdp) if isinstance(fsdp, Mapping) else fsdp.strategy()
    if parallelism is None:
        return sharding
    options = sharding.options
    changed = {one.name: value for one in fields(options) if (value := getattr(options, one.name)) != one.default}
    changed.pop("replicate_size", None)  # that is dp_replicate_size
    return parallelism.strategy(**changed, **(grid_options or {}))


def _name_of(value: Any) -> Any:
    return getattr(value, "name", value)


def _wrap_of(policy: Callable[..., Any]) -> Any:
    known = policy.keywords if isinstance(policy, functools.partial) else {}
    if "transformer_layer_cls" in known:
        return list(known["transformer_layer_cls"])
    if "min_num_params" in known:
        return int(known["min_num_params"])
    raise ConfigurationError(
        f"auto_wrap_policy={policy!r} is a function, which FSDP 2 does not support. Use "
        "transformer_cls_names_to_wrap=[...] or min_num_params=..., or pass a function of a module: "
        "Accelerator(strategy=FSDP(wrap=...)).",
    )


def _dtypes_of(policy: Any) -> dict[str, Any]:
    if policy is None:
        return {}
    if isinstance(policy, str):
        if policy not in _DTYPES:
            raise ConfigurationError(f"mixed_precision_policy is {policy!r}, but must be one of {', '.join(_DTYPES)}.")
        return {"gather_dtype": _DTYPES[policy], "reduce_dtype": _DTYPES[policy]}
    given = policy if isinstance(policy, Mapping) else vars(policy)
    return {"gather_dtype": given.get("param_dtype"), "reduce_dtype": given.get("reduce_dtype")}


# Accelerate's option classes for `"fp8"`. `Accelerator(mixed_precision=FP8(...))` is equivalent.


class FP8Handler:
    """Base class of the options for training in FP8, such as `AORecipeKwargs` and `TERecipeKwargs`."""

    def precision(self) -> FP8:
        raise NotImplementedError


@dataclass
class AORecipeKwargs(FP8Handler):
    """FP8 recipe for torchao, which computes a model's linear layers in 8-bit floating point.

    Attributes:
        config: A torchao `Float8LinearConfig`, which replaces the other options.
        module_filter_func: A function of a layer and its name. Returns True if the layer computes in FP8.
        pad_inner_dim: True or None to pad the inner dimension of matrix products to a multiple of 16.
        enable_fsdp_float8_all_gather: True or None to all-gather FSDP weights in FP8.
    """

    config: Any = None
    module_filter_func: Callable[[nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def precision(self) -> FP8:
        if self.config is not None:
            # A filter takes the place of Accelerate's own, which keeps the first and the last layer.
            return FP8(
                config=self.config,
                filter=self.module_filter_func,
                keep_first_and_last=self.module_filter_func is None,
            )
        return FP8(
            pad_inner_dim=self.pad_inner_dim is not False,
            float8_all_gather=self.enable_fsdp_float8_all_gather is not False,
            filter=self.module_filter_func,
            keep_first_and_last=self.module_filter_func is None,
        )


@dataclass
class TERecipeKwargs(FP8Handler):
    """FP8 recipe for NVIDIA's TransformerEngine.

    Passed to `Accelerator` in `kwargs_handlers`. None means Accelerate's default: HYBRID, history length 1024,
    algorithm "most_recent".
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    def precision(self) -> FP8:
        given = {field.name: getattr(self, field.name) for field in fields(TERecipeKwargs)}
        return FP8.from_config({"backend": "te", **given})


@dataclass
class MSAMPRecipeKwargs(FP8Handler):
    """Options for training in FP8 with the package MS-AMP.

    Attributes:
        opt_level: The optimization level of MS-AMP, `"O1"` or `"O2"` (default).
    """

    opt_level: str | None = None

    def precision(self) -> FP8:
        return FP8.from_config({"backend": "msamp", "opt_level": self.opt_level})


@dataclass
class FP8RecipeKwargs(TERecipeKwargs):
    """FP8 recipe for TransformerEngine or MS-AMP, as selected by `backend`.

    This is Accelerate's older class. `TERecipeKwargs` and `MSAMPRecipeKwargs` replace it.
    """

    opt_level: str | None = None
    backend: str | None = None

    def precision(self) -> FP8:
        if check_choice("FP8RecipeKwargs(backend)", self.backend or "te", ("te", "msamp")) == "msamp":
            return MSAMPRecipeKwargs(self.opt_level).precision()
        return super().precision()


# Small option holders under Accelerate's names, for scripts that move over


Handler = TypeVar("Handler")


class DDPCommunicationHookType(str, Enum):
    """Names of the communication hooks with which DDP can compress gradients before the all-reduce."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs:
    """Options of torch's `DistributedDataParallel`.

    Passed to `Accelerator` in `kwargs_handlers`. `Accelerator(strategy=drivetrain.DDP(...))` takes the options
    directly.

    Attributes:
        dim: Accepted without effect. Batches are never scattered.
        check_reduction: Accepted without effect. Reductions are always checked.
        comm_hook: A member of `DDPCommunicationHookType`, or its value.
        comm_wrapper: `"fp16"` or `"bf16"` to compress the output of `comm_hook` further.
        comm_state_option: Arguments of the PowerSGD state.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: float = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str | None = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType | str | None = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def strategy_options(self) -> dict[str, Any]:
        return {
            "broadcast_buffers": self.broadcast_buffers,
            "bucket_cap_mb": self.bucket_cap_mb,
            "find_unused_parameters": self.find_unused_parameters,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "static_graph": self.static_graph,
            "comm_hook": _hook_named(self.comm_hook),
            "comm_wrapper": _hook_named(self.comm_wrapper),
            "comm_hook_options": self.comm_state_option,
        }


def _hook_named(given: DDPCommunicationHookType | str | None) -> str | None:
    name = given.value if isinstance(given, Enum) else given
    return {None: None, "no": None, "power_sgd": "powersgd", "batched_power_sgd": "batched_powersgd"}.get(name, name)


@dataclass
class GradScalerKwargs:
    """Options of the gradient scaler for precision `"fp16"`.

    Passed to `Accelerator` in `kwargs_handlers`.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs:
    """Options for `torch.distributed.init_process_group`, such as the backend.

    Passed in `kwargs_handlers`.

    Attributes:
        backend: The c10d backend, instead of the device's default.
        init_method: None or `"env://"`. The launcher sets the rendezvous.
        timeout: The longest time that a collective waits for other processes.

    Raises:
        ConfigurationError: Another `init_method` is given.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.init_method not in (None, "env://"):
            raise ConfigurationError(
                f"init_method={self.init_method!r} is not supported, because the launcher sets the address in "
                "MASTER_ADDR and MASTER_PORT. Omit it, or call torch.distributed.init_process_group before you "
                "create an Accelerator.",
            )


@dataclass
class AutocastKwargs:
    """Options of `torch.autocast` for mixed precision.

    Passed to `Accelerator` in `kwargs_handlers`.
    """

    enabled: bool = True
    cache_enabled: bool = True


@dataclass
class ProfileKwargs:
    """Options of `Accelerator.profile`, which are mostly those of `torch.profiler.profile`.

    Attributes:
        activities: The activities to record, such as `["cpu", "cuda"]`. None records all that the machine supports.
        schedule_option: Arguments of `torch.profiler.schedule`. The loop then calls the profiler's `step`.
        on_trace_ready: A function that is called with the profiler at the end of each schedule cycle.
        record_shapes: True to record input shapes.
        profile_memory: True to record memory allocations.
        with_stack: True to record source lines.
        with_flops: True to estimate floating-point operations.
        with_modules: True to record the modules that call operators.
        output_trace_dir: The directory in which each process writes its Chrome trace.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> torch.profiler.profile:
        """Create a `torch.profiler.profile` with the options of this `ProfileKwargs`.

        Raises:
            ConfigurationError: An activity is unknown.
        """
        known = {name.lower(): member for name, member in torch.profiler.ProfilerActivity.__members__.items()}
        unknown = [name for name in self.activities or [] if name not in known]
        if unknown:
            raise ConfigurationError(
                f"ProfileKwargs.activities contains unknown activities: {', '.join(map(str, unknown))}. Allowed: "
                f"{', '.join(known)}."
            )
        return torch.profiler.profile(
            activities=None if self.activities is None else [known[name] for name in self.activities],
            schedule=None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@dataclass
class GradientAccumulationPlugin:
    """Options of gradient accumulation, such as the number of micro-batches for each optimizer step.

    Attributes:
        num_steps: The number of micro-batches per optimizer step.
        adjust_scheduler: Accepted without effect. A prepared scheduler steps when its optimizer does.
        sync_with_dataloader: True if the optimizer always steps at the last batch of a loader.
        sync_each_batch: True to reduce gradients after every micro-batch, which saves memory under sharding.
        average_short_window: True to average gradients over the actual number of micro-batches if the loader ends
            early. False divides by `num_steps`, as Accelerate does.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    average_short_window: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise ConfigurationError(
                f"The number of gradient accumulation steps is {self.num_steps!r}, but must be an integer of at least "
                "1.",
            )


@dataclass
class ProjectConfiguration:
    """Options for a run's output folder, and for checkpoints that are named by number.

    Attributes:
        project_dir: The output directory.
        logging_dir: The directory for trackers' files. None uses `project_dir`.
        automatic_checkpoint_naming: True to let `save_state()` number checkpoints under `project_dir/checkpoints`.
        total_limit: The number of latest numbered checkpoints to keep.
        iteration: The number of the next checkpoint.
        save_on_each_node: True to write files of `Accelerator.save` and `save_model` on each machine, for machines
            without a shared disk.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ConfigurationError(
                f"total_limit is {self.total_limit!r}, but must be at least 1, or None to keep all checkpoints."
            )
        self.logging_dir = self.logging_dir or self.project_dir

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the output folder `project_dir`. Trackers also write to it, unless `logging_dir` is set."""
        self.project_dir = project_dir or self.project_dir
        self.logging_dir = self.logging_dir or self.project_dir


HANDLER_TYPES = (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    AutocastKwargs,
    ProfileKwargs,
    AORecipeKwargs,
    TERecipeKwargs,
    MSAMPRecipeKwargs,
    FP8RecipeKwargs,
)


def checked_handlers(given: Sequence[Any]) -> list[Any]:
    """Return `kwargs_handlers` as a list, or raise if a type is unknown or repeated."""
    handlers = list(given)
    for index, handler in enumerate(handlers):
        if not isinstance(handler, HANDLER_TYPES):
            raise ConfigurationError(
                f"kwargs_handlers contains an object of type {type(handler).__name__}. Allowed types: "
                f"{', '.join(kind.__name__ for kind in HANDLER_TYPES)}.",
            )
        if any(type(handler) is type(other) for other in handlers[:index]):
            raise ConfigurationError(
                f"kwargs_handlers contains two objects of type {type(handler).__name__}. Pass only one."
            )
    recipes = [type(handler).__name__ for handler in handlers if isinstance(handler, FP8Handler)]
    if len(recipes) > 1:
        raise ConfigurationError(
            f"kwargs_handlers contains {' and '.join(recipes)}, but only one FP8 recipe can be used. Pass one of them."
        )
    return handlers


def find_handler(handlers: Sequence[Any], kind: type[Handler]) -> Handler | None:
    """Return the first `kwargs_handlers` object of class `kind`, or None."""
    return next((handler for handler in handlers if isinstance(handler, kind)), None)


def handler_options(handler: Any) -> dict[str, Any]:
    return {} if handler is None else {field.name: getattr(handler, field.name) for field in fields(handler)}


# Accelerate's words for how prepared models are compiled


class DynamoBackend(str, Enum):
    """Names of the backends of `torch.compile`, such as `DynamoBackend.INDUCTOR`."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


@dataclass
class TorchDynamoPlugin:
    """Options of `torch.compile` for prepared models.

    Passed as `Accelerator(dynamo_plugin=...)`. A model is compiled in place (`nn.Module.compile`). Its parameters keep
    their names, and every strategy supports it.

    Attributes:
        backend: A member of `DynamoBackend`, its name, or another `torch.compile` backend. None compiles nothing.
        mode: The `mode` of `torch.compile`.
        fullgraph: True to raise an error for graph breaks.
        dynamic: True to compile for dynamic shapes.
        options: Options of the backend.
        disable: True to compile nothing.
        use_regional_compilation: True to compile each repeated block instead of the full model, which compiles much
            faster.

    Raises:
        ConfigurationError: The backend is unknown.
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        given = self.backend or "NO"
        if isinstance(given, str) and not isinstance(given, DynamoBackend):
            known = DynamoBackend.__members__.get(given.upper())
            if known is None and given not in _registered():
                names = [*(name.lower() for name in DynamoBackend.__members__), *_registered()]
                raise ConfigurationError(
                    f"Unknown dynamo_backend {given!r}. Allowed: {', '.join(names)}.{nearest(given, names)}",
                )
            given = known or given
        self.backend = given

    def compilation(self) -> Compilation | None:
        if self.backend is DynamoBackend.NO or self.disable:
            return None
        return Compilation(
            str(self.to_dict()["backend"]),
            self.mode,
            bool(self.fullgraph),
            self.dynamic,
            bool(self.use_regional_compilation),
            self.options,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return this plugin's fields as a dict by name, with the backend as text, such as `"inductor"`."""
        backend = self.backend.value.lower() if isinstance(self.backend, DynamoBackend) else self.backend
        return {**vars(self), "backend": backend}

    to_kwargs = to_dict


def _registered() -> list[str]:
    return [*torch.compiler.list_backends(exclude_tags=()), "inductor"]


# Settings of the launcher, for everything that the script does not set itself


Sharding = FullyShardedDataParallelPlugin | Mapping[str, Any] | None

# Names of settings without their prefix, and what the plugins call them.
_FIELDS = {
    "offload_params": "cpu_offload",
    "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
    "config_file": "hf_ds_config",
    "moe_layer_cls_names": "transformer_moe_cls_names",
}
_SWITCHES = ("use_fsdp", "use_deepspeed", "use_parallelism_config", "use_megatron_lm")
_CP_ATTENTION = {"allgather": "gather", "alltoall": "ring"}
_UNIT_SIZE = 100_000_000  # of SIZE_BASED_WRAP where none is given, as in Accelerate


@dataclass(frozen=True)
class Launched:
    """Options of the launch command, which this process reads from environment variables."""

    settings: Mapping[str, Any] = field(default_factory=settings_in_environment)

    @property
    def fsdp(self) -> FullyShardedDataParallelPlugin | None:
        """An FSDP plugin with the launcher's settings, or None if the launcher does not select FSDP."""
        if not self.settings.get("use_fsdp"):
            return None
        options = self._options("fsdp_")
        if options.get("auto_wrap_policy") == "SIZE_BASED_WRAP":
            options.setdefault("min_num_params", _UNIT_SIZE)
        return FullyShardedDataParallelPlugin(**options)

    @property
    def deepspeed(self) -> DeepSpeedPlugin | None:
        """A DeepSpeed plugin with the launcher's settings, or None if it does not select DeepSpeed."""
        if not self.settings.get("use_deepspeed"):
            return None
        known = {each.name for each in fields(DeepSpeedPlugin)} - {"gradient_accumulation_steps"}
        options = {name: value for name, value in self.settings.items() if name in known}
        options |= {name: value for name, value in self._options("deepspeed_").items() if name in known}
        return DeepSpeedPlugin(**options)

    @property
    def parallelism(self) -> ParallelismConfig | None:
        """The launcher's device mesh sizes, or None if it configures no device mesh."""
        if not self.settings.get("use_parallelism_config"):
            return None
        sizes = {
            name: value
            for name, value in self._options("parallelism_config_").items()
            if name in {each.name for each in fields(ParallelismConfig)} and name.endswith("_size")
        }
        return ParallelismConfig(**sizes)

    @property
    def megatron(self) -> MegatronLMPlugin | None:
        """A Megatron-LM plugin with the launcher's settings, or None if it does not select Megatron-LM."""
        if not self.settings.get("use_megatron_lm"):
            return None
        return MegatronLMPlugin(**self._options("megatron_lm_"))

    @property
    def fp8_config(self) -> dict[str, Any]:
        """The launcher's settings for FP8, such as `fp8_backend`, as a dict by name."""
        return {name: value for name, value in self.settings.items() if name.startswith("fp8_")}

    @property
    def compilation(self) -> Compilation | None:
        backend = self.settings.get("dynamo_backend", "no")
        if backend == "no":
            return None
        options = self._options("dynamo_")
        return Compilation(
            backend,
            options.get("mode"),
            bool(options.get("use_fullgraph")),
            options.get("use_dynamic"),
            bool(options.get("use_regional_compilation")),
        )

    @property
    def grid_options(self) -> dict[str, Any]:
        given = self.settings.get("parallelism_config_cp_comm_strategy")
        return {} if given is None else {"cp_attention": _CP_ATTENTION[given]}

    def strategy(self) -> Strategy | None:
        """Return the strategy that the launcher's settings select, or None for plain DDP."""
        if not any(self.settings.get(name) for name in _SWITCHES):
            return None
        fsdp, grid = self.fsdp, self.parallelism
        # FSDP without sharding is DDP, the default strategy.
        if grid is None and fsdp is not None and "NO_SHARD" in (fsdp.sharding_strategy, fsdp.reshard_after_forward):
            return None
        return strategy_of_plugins(
            fsdp, self.deepspeed, grid, self.megatron, self.grid_options if grid is not None else None
        )

    def strategy_with(
        self,
        fsdp: Sharding,
        deepspeed: DeepSpeedPlugin | Mapping[str, Any] | None,
        parallelism: ParallelismConfig | None,
        megatron: MegatronLMPlugin | Mapping[str, Any] | None,
    ) -> Strategy | None:
        if parallelism is not None and fsdp is None:
            fsdp = self.fsdp
        elif fsdp is not None and parallelism is None:
            parallelism = self.parallelism
        # Options that a plugin leaves unset come from the launcher.
        return strategy_of_plugins(
            _filled(fsdp, self.fsdp),
            _filled(deepspeed, self.deepspeed),
            parallelism,
            _filled(megatron, self.megatron),
        )

    def _options(self, prefix: str) -> dict[str, Any]:
        short = {name.removeprefix(prefix): value for name, value in self.settings.items() if name.startswith(prefix)}
        return {_FIELDS.get(name, name): value for name, value in short.items()}


def _filled(plugin: Any, launched: Any) -> Any:
    if launched is None or plugin is None or isinstance(plugin, Mapping):
        return plugin
    open_fields = {each.name for each in fields(plugin) if getattr(plugin, each.name) is None}
    # A subclass may have fields that no launcher sets.
    asked = {each.name: getattr(launched, each.name) for each in fields(launched) if each.name in open_fields}
    return replace(plugin, **asked)


# The plugins that an engine was given


@dataclass
class Plugins:
    fsdp_plugin: FullyShardedDataParallelPlugin | Mapping[str, Any] | None = None
    deepspeed_plugin: DeepSpeedPlugin | Mapping[str, Any] | None = None
    deepspeed_plugins: Mapping[str, DeepSpeedPlugin] | None = None
    parallelism_config: ParallelismConfig | None = None
    megatron_lm_plugin: MegatronLMPlugin | Mapping[str, Any] | None = None
    torch_tp_plugin: Any = None

    @classmethod
    def from_arguments(
        cls,
        fsdp: FullyShardedDataParallelPlugin | Mapping[str, Any] | None,
        deepspeed: DeepSpeedPlugin | Mapping[str, Any] | None,
        several: Mapping[str, DeepSpeedPlugin] | None,
        parallelism: ParallelismConfig | Mapping[str, Any] | None,
        megatron: MegatronLMPlugin | Mapping[str, Any] | None,
        tensor: Any = None,
    ) -> Plugins:
        # A dict of plugins by name, not the keys of a single configuration.
        if isinstance(deepspeed, Mapping) and any(map(is_dataclass, deepspeed.values())):
            several, deepspeed = deepspeed, None
        if several and deepspeed is not None:
            raise ConfigurationError("Both deepspeed_plugin and deepspeed_plugins are set. Pass only one of them.")
        if several:
            deepspeed = next(iter(several.values()))
        if isinstance(parallelism, Mapping):
            parallelism = ParallelismConfig(**parallelism)
        if tensor is not None:
            if parallelism is not None:
                raise ConfigurationError("Both torch_tp_plugin and parallelism_config are set. Pass only one of them.")
            parallelism = ParallelismConfig(tp_size=tensor.tp_size)
        return cls(fsdp, deepspeed, several, parallelism, megatron, tensor)

    def each_deepspeed(self, launched: Launched) -> dict[str, Strategy]:
        found = {}
        for name, plugin in (self.deepspeed_plugins or {}).items():
            strategy = launched.strategy_with(None, plugin, None, None)
            if strategy is None:
                raise ConfigurationError(f"deepspeed_plugins[{name!r}] is None, but must be a DeepSpeedPlugin.")
            found[name] = strategy
        return found

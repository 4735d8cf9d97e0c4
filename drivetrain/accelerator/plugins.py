"""Accelerate's plugins: its names for the options of strategies that shard a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drivetrain.accelerator.megatron_plugin import MegatronLMPlugin
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger
from drivetrain.strategies import Strategy

if TYPE_CHECKING:
    from drivetrain.strategies.fsdp import FSDP

logger = get_logger(__name__)

# Names that Accelerate's configuration writes; what is in use here is the same for all.
_CP_BACKENDS, _SP_BACKENDS = (None, "torch"), (None, "deepspeed")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class FullyShardedDataParallelPlugin:
    """Options of the FSDP strategy; see `drivetrain.FSDP`, which `Accelerator(strategy=FSDP(...))` takes directly.

    What means nothing under `fully_shard` is accepted and logged once.
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
        """The strategy that these options mean.

        Raises:
            ConfigurationError: An option cannot be.
        """
        from drivetrain.strategies.fsdp import FSDP
        from drivetrain.strategies.fsdp.accelerate_config import options_from

        options = options_from(self._config())
        if callable(self.auto_wrap_policy):
            options["wrap"] = _wrap_of(self.auto_wrap_policy)
        options.update(_dtypes_of(self.mixed_precision_policy))
        if self.activation_checkpointing_offload:
            options["activation_offload"] = True
        return FSDP(**options)

    def _config(self) -> dict[str, Any]:
        """The same as keys of `fsdp_config`."""
        for name in ("state_dict_config", "optim_state_dict_config"):
            if getattr(self, name) is not None:
                logger.warning_once(f"{name} changes nothing: checkpoints are always written in shards.")
        if self.param_init_fn is not None:
            raise ConfigurationError(
                "param_init_fn is not needed: build the model under accelerator.init_context(), and its modules' "
                "reset_parameters() make their values; or give FSDP(weights=...) a file to read them from.",
                code="DT-008",
            )
        offload = self.cpu_offload
        if offload is not None and not isinstance(offload, bool | str):
            offload = bool(getattr(offload, "offload_params", True))  # torch's CPUOffload, or its CPUOffloadPolicy
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
    """Options of the DeepSpeed strategy; see `drivetrain.DeepSpeed`, which `Accelerator(strategy=...)` takes directly.

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
        """The strategy that these options mean."""
        from drivetrain.strategies.deepspeed import DeepSpeed

        return DeepSpeed(**self.arguments())

    def arguments(self) -> dict[str, Any]:
        """The arguments of that strategy."""
        from drivetrain.strategies.deepspeed.accelerate_config import arguments_from

        names = {"transformer_moe_cls_names": "deepspeed_moe_layer_cls_names"}
        leave_out = ("hf_ds_config", "is_train_batch_min")
        given = {
            names.get(field.name, field.name): value
            for field in fields(self)
            if field.name not in leave_out and (value := getattr(self, field.name)) is not None
        }
        arguments = arguments_from(given)
        if self.hf_ds_config is not None:
            arguments["config"] = getattr(self.hf_ds_config, "config", self.hf_ds_config)
        return arguments


@dataclass
class ParallelismConfig:
    """Sizes of the grid of processes; see `drivetrain.Parallel`, which `Accelerator(strategy=...)` takes directly.

    Attributes:
        cp_handler: A `TorchContextParallelConfig`: how attention exchanges parts of sequences.
        tp_plan: Which layers are split how; Accelerate takes it from the model alone, which is `"auto"`.

    Raises:
        ConfigurationError: It asks for Ulysses' sequence parallelism, which context parallelism takes the place of.
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
                f"sp_size={self.sp_size} asks for DeepSpeed's Ulysses. Split sequences with cp_size={self.sp_size}.",
                code="DT-008",
            )
        if self.cp_backend not in _CP_BACKENDS or self.sp_backend not in _SP_BACKENDS:
            raise ConfigurationError(
                f"cp_backend={self.cp_backend!r}, sp_backend={self.sp_backend!r}: context parallelism here is torch's; "
                "leave both out.",
                code="DT-008",
            )

    @property
    def total_size(self) -> int:
        """Processes of the grid."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Processes along the dimensions that spread data."""
        return (self.dp_replicate_size or 1) * (self.dp_shard_size or 1)

    @property
    def non_data_parallel_size(self) -> int:
        """Processes that share their data."""
        return (self.tp_size or 1) * (self.cp_size or 1) * (self.sp_size or 1)

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether parameters are replicated."""
        return (self.dp_replicate_size or 1) > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether parameters are sharded."""
        return (self.dp_shard_size or 1) > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are split."""
        return (self.tp_size or 1) > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split."""
        return (self.cp_size or 1) > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether Ulysses splits sequences."""
        return False

    def strategy(self, **options: Any) -> Strategy:
        """The strategy that these sizes mean.

        Args:
            **options: Those of `FSDP`, by which parameters are sharded.
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
    """How attention exchanges parts of sequences; `Parallel(cp_attention=...)` in Accelerate's words.

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
            f"cp_comm_strategy={exchange!r}: allowed are {', '.join(known)}.{nearest(exchange, known)}", code="DT-001"
        )
    return known[exchange]


def strategy_of_plugins(
    fsdp: FullyShardedDataParallelPlugin | Mapping[str, Any] | None,
    deepspeed: DeepSpeedPlugin | Mapping[str, Any] | None,
    parallelism: ParallelismConfig | None,
    megatron: MegatronLMPlugin | Mapping[str, Any] | None = None,
    grid_options: Mapping[str, Any] | None = None,
) -> Strategy | None:
    """The strategy that Accelerate's plugins ask for, if any was given.

    Args:
        fsdp: A plugin, or the keys of an `fsdp_config`.
        deepspeed: A plugin, or the keys of a `deepspeed_config`.
        parallelism: The sizes of a grid, over which `fsdp` may set how to shard.
        megatron: A plugin, or the keys of a `megatron_lm_config`.
        grid_options: Further arguments of `drivetrain.Parallel` for a grid.

    Raises:
        ConfigurationError: Two of them contradict each other.
    """
    if megatron is not None:
        if any(other is not None for other in (fsdp, deepspeed, parallelism)):
            raise ConfigurationError(
                "megatron_lm_plugin goes with no other plugin, nor with parallelism_config; give one.", code="DT-004"
            )
        if isinstance(megatron, Mapping):
            from drivetrain.strategies.megatron import Megatron

            return Megatron.from_config(megatron)
        return megatron.strategy()
    if deepspeed is not None and (fsdp is not None or parallelism is not None):
        raise ConfigurationError(
            "deepspeed_plugin goes with neither fsdp_plugin nor parallelism_config; give one.", code="DT-004"
        )
    if deepspeed is not None:
        if isinstance(deepspeed, Mapping):
            from drivetrain.strategies.deepspeed import DeepSpeed

            return DeepSpeed.from_config(deepspeed)
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
    """An enumeration's member by its name, as the keys of a YAML spell it."""
    return getattr(value, "name", value)


def _wrap_of(policy: Callable[..., Any]) -> Any:
    """What torch's policies for its older FSDP mean for `FSDP(wrap=...)`."""
    known = policy.keywords if isinstance(policy, functools.partial) else {}
    if "transformer_layer_cls" in known:
        return list(known["transformer_layer_cls"])
    if "min_num_params" in known:
        return int(known["min_num_params"])
    raise ConfigurationError(
        f"auto_wrap_policy={policy!r} is a function that only FSDP1 could ask. Give "
        "transformer_cls_names_to_wrap=[...] or min_num_params=..., or strategy=FSDP(wrap=function of a module).",
        code="DT-008",
    )


def _dtypes_of(policy: Any) -> dict[str, Any]:
    if policy is None:
        return {}
    if isinstance(policy, str):
        if policy not in _DTYPES:
            raise ConfigurationError(
                f"mixed_precision_policy={policy!r}: allowed are {', '.join(_DTYPES)}.", code="DT-001"
            )
        return {"gather_dtype": _DTYPES[policy], "reduce_dtype": _DTYPES[policy]}
    given = policy if isinstance(policy, Mapping) else vars(policy)
    return {"gather_dtype": given.get("param_dtype"), "reduce_dtype": given.get("reduce_dtype")}

"""Configurations of megatron-core: the user's values, completed with parallel sizes and precision."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import SGD, Adam, AdamW, Optimizer

from drivetrain.runtime.collectives import broadcast
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.seeds import isolated_random_state, own_generator, seed_all_generators
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import Topology
from drivetrain.strategies.parallel.mesh import MeshPlace, MeshSizes
from drivetrain.strategies.precision import Precision

# The options of `Megatron`, checked


RECOMPUTE = ("selective", "full")


@dataclass(frozen=True)
class MegatronOptions:
    """Validated options of the `Megatron` strategy."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline: int | None = None
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int | None = None
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    recompute: str | None = None
    gradient_clipping: float | None = None
    gradient_accumulation_steps: int | None = None
    transformer: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
            _check_size(name, getattr(self, name))
        for name in ("virtual_pipeline", "expert_tensor_parallel"):
            if getattr(self, name) is not None:
                _check_size(name, getattr(self, name))
        if (self.virtual_pipeline or 1) > 1 and self.pipeline_parallel == 1:
            raise ConfigurationError(
                f"virtual_pipeline={self.virtual_pipeline} interleaves pipeline stages, but pipeline_parallel=1. Set "
                "pipeline_parallel to 2 or more, or remove virtual_pipeline.",
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ConfigurationError(
                "sequence_parallel=True shards activations over tensor-parallel processes, but tensor_parallel=1. "
                "Set tensor_parallel to 2 or more, or remove sequence_parallel.",
            )
        if self.recompute is not None and self.recompute not in RECOMPUTE:
            raise ConfigurationError(
                f"recompute={self.recompute!r} is not supported. Allowed: None, 'selective' (attention only) and "
                f"'full' (whole layers).{nearest(str(self.recompute), RECOMPUTE)}",
            )

    @property
    def chunks(self) -> int:
        # Above 1 if `virtual_pipeline` interleaves the stages.
        return self.virtual_pipeline or 1

    def place(self, rank: int, world_size: int) -> MeshPlace:
        needed = self.tensor_parallel * self.pipeline_parallel * self.context_parallel
        if world_size % needed:
            raise ConfigurationError(
                f"{self.asked} needs a multiple of {needed} processes, but there are {world_size}. Start "
                f"{_near_multiples(world_size, needed)} processes, or choose sizes whose product is "
                f"{_listed(factors(world_size))}.",
            )
        data = world_size // needed
        expert_tensor = self.expert_tensor_parallel or self.tensor_parallel
        per_stage = world_size // self.pipeline_parallel
        if per_stage % (self.expert_parallel * expert_tensor):
            raise ConfigurationError(
                f"expert_parallel={self.expert_parallel} with {expert_tensor} tensor-parallel processes for each "
                f"expert does not fit the {per_stage} processes of a pipeline stage. Set expert_parallel to "
                f"{_listed(factors(per_stage // expert_tensor))}.",
            )
        sizes = MeshSizes(dp_shard=data, tp=self.tensor_parallel, cp=self.context_parallel, pp=self.pipeline_parallel)
        return MeshPlace(sizes, rank)

    @property
    def asked(self) -> str:
        # For error messages.
        names = ("tensor_parallel", "pipeline_parallel", "context_parallel")
        return " x ".join(f"{name}={getattr(self, name)}" for name in names if getattr(self, name) > 1) or "Megatron()"


def factors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [each for each in range(1, number + 1) if number % each == 0]


def check_fits(what: str, size: int, argument: str, parts: int) -> None:
    if size % parts:
        fits = [each for each in factors(size) if each <= max(2 * parts, 16)]
        raise ConfigurationError(
            f"{what}={size} is not a multiple of {argument}, which is {parts}. Set {argument} to {_listed(fits)}, "
            f"or {what} to {_near_multiples(size, parts)}.",
        )


def _near_multiples(number: int, of: int) -> str:
    below = number // of * of
    return f"{below} or {below + of}" if below else str(of)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _check_size(name: str, size: Any) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigurationError(f"{name} must be a whole number of at least 1, got {size!r}.")


# Fields of TransformerConfig that allow stages with different numbers of layers.
_UNEVEN = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
# Options of torch's optimizers, with their names in OptimizerConfig.
_ADAM = {"lr": "lr", "weight_decay": "weight_decay", "eps": "adam_eps"}
_SGD = {"lr": "lr", "weight_decay": "weight_decay", "momentum": "sgd_momentum"}
# Options that change a step's result and that megatron-core's optimizers lack, with their neutral values.
_REFUSED = {"amsgrad": False, "maximize": False, "nesterov": False, "dampening": 0}
# Text of megatron-core's assertion about a size that cannot be split evenly.
_DIVISIBILITY = re.compile(r"(\d+) is not divisible by (\d+)")


def low_dtype(precision: Precision) -> torch.dtype | None:
    # None means float32.
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision.name)


def complete(config: Any, options: MegatronOptions, precision: Precision) -> Any:
    if not is_dataclass(config) or isinstance(config, type) or not hasattr(config, "tensor_model_parallel_size"):
        raise ConfigurationError(
            f"transformer_config() returned {type(config).__name__}. Return a TransformerConfig of megatron-core, "
            "such as TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4).",
            see="megatron.md",
        )
    had: Any = config
    low = low_dtype(precision)
    interleaved = options.chunks > 1
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": options.tensor_parallel,
        "pipeline_model_parallel_size": options.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": options.chunks if interleaved else None,
        "context_parallel_size": options.context_parallel,
        "expert_model_parallel_size": options.expert_parallel,
        "expert_tensor_parallel_size": options.expert_tensor_parallel or options.tensor_parallel,
        "sequence_parallel": options.sequence_parallel,
        "bf16": low is torch.bfloat16,
        "fp16": low is torch.float16,
        "params_dtype": low or torch.float32,
        "pipeline_dtype": low or torch.float32,
    }
    # TransformerConfig has derived these from its earlier sizes and dtypes, so they must follow the new ones.
    if had.microbatch_group_size_per_vp_stage == had.pipeline_model_parallel_size:
        settings["microbatch_group_size_per_vp_stage"] = options.pipeline_parallel
    if had.autocast_dtype is had.params_dtype:
        settings["autocast_dtype"] = settings["params_dtype"]
    if interleaved:
        # Batched transfers between the same two ranks arrive in another order than the schedule waits for them.
        settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if options.recompute == "selective":
        settings["recompute_granularity"] = "selective"
    elif options.recompute == "full":
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    given = {name: options.transformer[name] for name in options.transformer}
    _check_names("transformer", given, config)
    _refuse_contradictions(config, {**settings, **given})
    _check_sizes(config, options)
    completed = replace(config, **settings, **given)
    _refuse_losses_beside(completed)
    return completed


def _refuse_contradictions(config: Any, settings: Mapping[str, Any]) -> None:
    for name, argument in (
        ("tensor_model_parallel_size", "tensor_parallel"),
        ("pipeline_model_parallel_size", "pipeline_parallel"),
        ("context_parallel_size", "context_parallel"),
        ("expert_model_parallel_size", "expert_parallel"),
    ):
        given = getattr(config, name)
        if given not in (1, None, settings[name]):
            raise ConfigurationError(
                f"TransformerConfig({name}={given}) contradicts the strategy's {argument}={settings[name]}. Remove it "
                "from the TransformerConfig, because the strategy sets it.",
            )


def _check_sizes(config: Any, options: MegatronOptions) -> None:
    if not any(getattr(config, name, None) for name in _UNEVEN):
        stages = options.pipeline_parallel * options.chunks
        by = "pipeline_parallel x virtual_pipeline" if options.chunks > 1 else "pipeline_parallel"
        check_fits("num_layers", config.num_layers, by, stages)
    check_fits("num_attention_heads", config.num_attention_heads, "tensor_parallel", options.tensor_parallel)
    for name in ("num_query_groups", "ffn_hidden_size"):
        size = getattr(config, name, None)
        if size:
            check_fits(name, size, "tensor_parallel", options.tensor_parallel)
    if getattr(config, "num_moe_experts", None):
        check_fits("num_moe_experts", config.num_moe_experts, "expert_parallel", options.expert_parallel)
    elif options.expert_parallel > 1:
        raise ConfigurationError(
            f"expert_parallel={options.expert_parallel} distributes experts over processes, but TransformerConfig has "
            "no num_moe_experts. Set it, or remove expert_parallel.",
        )


def _refuse_losses_beside(config: Any) -> None:
    beside = [name for name in ("num_moe_experts", "mtp_num_layers") if getattr(config, name, None)]
    if config.calculate_per_token_loss and beside:
        raise ConfigurationError(
            f"TransformerConfig({beside[0]}=..., calculate_per_token_loss=True) is not supported, because the "
            "auxiliary losses of these layers are not weighted per token. Set calculate_per_token_loss=False, which "
            "averages each micro-batch.",
        )


def _check_names(argument: str, given: Mapping[str, Any], known: Any) -> None:
    allowed = [each.name for each in fields(known)]
    for name in given:
        if name not in allowed:
            kind = known.__name__ if isinstance(known, type) else type(known).__name__
            raise ConfigurationError(
                f"Megatron({argument}=...) contains {name!r}, which is not a field of megatron-core's "
                f"{kind}.{nearest(name, allowed)}",
            )


def ddp_config(options: MegatronOptions, low: torch.dtype | None) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig

    _check_names("ddp", options.ddp, DistributedDataParallelConfig)
    chosen: dict[str, Any] = {
        "grad_reduce_in_fp32": low is not None,
        "use_distributed_optimizer": options.distributed_optimizer,
        **options.ddp,
    }
    return DistributedDataParallelConfig(**chosen)


def optimizer_config(optimizer: Optimizer, options: MegatronOptions, low: torch.dtype | None) -> Any:
    # `low` is the low-precision dtype of the model's weights, or None for float32.
    from megatron.core.optimizer import OptimizerConfig

    _check_names("optimizer", options.optimizer, OptimizerConfig)
    defaults = optimizer.defaults
    for name, neutral in _REFUSED.items():
        if defaults.get(name, neutral) != neutral:
            raise ConfigurationError(
                f"{type(optimizer).__name__}({name}={defaults[name]!r}) is not supported, because megatron-core's "
                f"optimizers have no {name}. Remove it, or use another strategy.",
            )
    if type(optimizer) in (Adam, AdamW):
        names = _ADAM
        chosen: dict[str, Any] = {
            "optimizer": "adam",
            "adam_beta1": defaults["betas"][0],
            "adam_beta2": defaults["betas"][1],
            "decoupled_weight_decay": type(optimizer) is AdamW,
        }
    elif type(optimizer) is SGD:
        names, chosen = _SGD, {"optimizer": "sgd"}
    else:
        raise ConfigurationError(
            "strategy='megatron' steps with megatron-core's own AdamW, Adam or SGD, not with "
            f"{type(optimizer).__name__}. Return torch.optim.AdamW, Adam or SGD over self.parameters(). Its options "
            "and learning-rate schedule are used.",
        )
    if options.distributed_optimizer:
        _check_distributed(optimizer)
    chosen |= {there: float(defaults[here]) for here, there in names.items()}
    return OptimizerConfig(
        **{
            **chosen,
            "bf16": low is torch.bfloat16,
            "fp16": low is torch.float16,
            "params_dtype": low or torch.float32,
            "use_distributed_optimizer": options.distributed_optimizer,
            # The strategy clips before the optimizer step.
            "clip_grad": 0.0,
            **options.optimizer,
        }
    )


def _check_distributed(optimizer: Optimizer) -> None:
    from megatron.core import optimizer as kernels

    adam = (AdamW,) if kernels.USING_PYTORCH_OPTIMIZER else (Adam, AdamW)
    if type(optimizer) not in adam:
        raise ConfigurationError(
            f"Megatron(distributed_optimizer=True) cannot shard the state of {type(optimizer).__name__}. "
            "Megatron-core supports AdamW, and with TransformerEngine or Apex also Adam. Use torch.optim.AdamW, or "
            "Megatron(distributed_optimizer=False).",
        )


@contextmanager
def explained() -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        if "sequence parallel not supported" in str(error):
            raise ConfigurationError(
                "sequence_parallel=True needs norm layers that sum their gradients over the parts of a sequence. "
                "Install TransformerEngine (get_gpt_layer_with_transformer_engine_spec) or Apex, which have such "
                "layers, or remove sequence_parallel.",
            ) from error
        found = _DIVISIBILITY.search(str(error))
        if found is None:
            raise
        size, parts = int(found[1]), int(found[2])
        raise ConfigurationError(
            f"model_provider created a layer of size {size}, such as vocab_size, which is not a multiple of "
            f"tensor_parallel={parts}. Pad it to {-(-size // parts) * parts}, or choose a tensor_parallel that "
            f"divides {size}.",
        ) from error


# The keys of a `megatron_lm_config` in a launcher's file, as arguments of `Megatron`


_log = get_logger(__name__)

PREFIX = "megatron_lm_"
# Keys for sizes and switches, with the arguments of Megatron that they set.
_ARGUMENTS = {
    "tp_degree": "tensor_parallel",
    "pp_degree": "pipeline_parallel",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "expert_tensor_parallel_size": "expert_tensor_parallel",
    "sequence_parallelism": "sequence_parallel",
    "use_distributed_optimizer": "distributed_optimizer",
    "gradient_clipping": "gradient_clipping",
    "num_micro_batches": "gradient_accumulation_steps",
}
_TRANSFORMER = {
    "recompute_granularity": "recompute_granularity",
    "recompute_method": "recompute_method",
    "recompute_num_layers": "recompute_num_layers",
    "attention_dropout": "attention_dropout",
    "hidden_dropout": "hidden_dropout",
    "attention_softmax_in_fp32": "attention_softmax_in_fp32",
    "calculate_per_token_loss": "calculate_per_token_loss",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "attention_backend": "attention_backend",
}
_OPTIMIZER = ("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer")
# Keys that have no effect, with what decides about them instead.
_ELSEWHERE = {
    "eod_mask_loss": "the task's loss_func",
    "eval_interval": "Trainer(val_check_interval)",
    "eval_iters": "Trainer(limit_val_batches)",
    "seq_length": "the batches",
    "train_iters": "Trainer(max_steps)",
    "use_rotary_position_embeddings": "the task's model_provider",
}
_RECOMPUTE = "recompute_activations"
KEYS = (*_ARGUMENTS, *_TRANSFORMER, *_OPTIMIZER, *_ELSEWHERE, _RECOMPUTE)


def arguments_from(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a launcher's `megatron_lm_config` section to arguments of `Megatron`.

    Settings of the task or the data are ignored with a warning.
    """
    arguments: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {"transformer": {}, "optimizer": {}}
    for spelled, value in given.items():
        key = spelled.removeprefix(PREFIX)
        if key not in KEYS:
            raise ConfigurationError(
                f"Unknown key {spelled!r} in megatron_lm_config. Allowed: {', '.join(PREFIX + each for each in KEYS)}."
                f"{nearest(key, KEYS)}",
            )
        if value is None:
            continue
        if key in _ARGUMENTS:
            arguments[_ARGUMENTS[key]] = value
        elif key in _TRANSFORMER:
            nested["transformer"][_TRANSFORMER[key]] = value
        elif key in _OPTIMIZER:
            nested["optimizer"][key] = value
        elif key == _RECOMPUTE:
            arguments["recompute"] = "selective" if value else None
        else:
            _log.warning_once(f"{spelled}={value!r} has no effect, because this is decided by {_ELSEWHERE[key]}.")
    if not arguments.get("gradient_clipping"):
        arguments.pop("gradient_clipping", None)  # 0 means no clipping
    return arguments | {name: options for name, options in nested.items() if options}


# The package megatron-core: whether it is there, and whether the device of a run is the one that it computes on


def require_megatron() -> None:
    """Raise `ConfigurationError` if megatron-core is not installed."""
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigurationError(
            "strategy='megatron' needs the package megatron-core, which is not installed. Install it: "
            "pip install 'drivetrain[megatron]' (torch first: another package may choose another build of it).",
        )


def require_device(device: torch.device) -> None:
    """Raise an error if megatron-core does not run on the device's type."""
    try:
        made = torch.empty(0, device="cuda").device.type
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            "strategy='megatron' needs CUDA GPUs, where megatron-core allocates its tensors, but none was found "
            f"({error}). Use strategy=Parallel(tp=..., pp=...) or 'fsdp', which also run on the CPU.",
        ) from None
    if made != device.type:
        raise ConfigurationError(
            f"strategy='megatron' runs on {made!r}, where megatron-core allocates its tensors, but this run is on "
            f"{device.type!r}. Use accelerator='cuda', or strategy=Parallel(tp=..., pp=...).",
        )


# Megatron-core's process groups, laid over the group that this process is in already, and its random state


_LARGEST = 2**31 - 1
_OWNER = "megatron_groups"


class MegatronGroups:
    """Megatron-core's global process groups and random state, for one run."""

    def __init__(self, options: MegatronOptions, place: MeshPlace, device: torch.device) -> None:
        from megatron.core import parallel_state

        self._made_group = False
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
            self._made_group = True
        self._state: Any = parallel_state
        # An earlier run in this process may have left its groups.
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            options.tensor_parallel,
            options.pipeline_parallel,
            options.virtual_pipeline,
            context_parallel_size=options.context_parallel,
            expert_model_parallel_size=options.expert_parallel,
            expert_tensor_parallel_size=options.expert_tensor_parallel,
        )
        self._place = place
        self._generator: torch.Generator | None = None
        # Marks the owner of the global groups, which a later strategy in this process creates anew.
        PartialState.registry()[_OWNER] = self

    @property
    def stage_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self._state.get_pipeline_model_parallel_group()
        return group

    def leave(self) -> None:
        if PartialState.registry().get(_OWNER) is self:
            del PartialState.registry()[_OWNER]
            self._state.destroy_model_parallel()
        if self._made_group and dist.is_initialized():
            dist.destroy_process_group()
            self._made_group = False

    # random numbers

    @contextmanager
    def initial_values(self, topology: Topology) -> Iterator[None]:
        # Replicas of a model get equal values, and shards different ones.
        generator = own_generator("megatron")
        # Without a seed, processes draw different numbers, so all take rank 0's. Later draws need no communication.
        seed = broadcast(torch.randint(_LARGEST, (1,), generator=generator).to(topology.device))
        self._generator = generator.manual_seed(int(seed))
        with isolated_random_state(devices=topology.kind.name != "cpu"):
            # The offset of megatron-core's own training script, by which stages draw different values.
            own = int(seed) + 100 * self._place.coordinates()["pp"]
            seed_all_generators(own)
            self._seed_tracker(own)
            yield

    def begin_window(self) -> None:
        # A new seed for dropout in each optimizer step, so that a resumed run repeats the steps.
        if self._generator is None:
            return
        drawn = int(torch.randint(_LARGEST, (1,), generator=self._generator))
        at = self._place.coordinates()
        # Megatron-core's tracker separates tensor-parallel ranks. Stages and data shards need seeds of their own.
        self._seed_tracker((drawn + 100_003 * at["pp"] + 1_000_003 * at["dp_shard"]) % _LARGEST)

    @property
    def generator(self) -> torch.Generator | None:
        # Draws the seeds of dropout. Checkpoints save its state. None before a model was built.
        return self._generator

    @staticmethod
    def _seed_tracker(seed: int) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(seed)

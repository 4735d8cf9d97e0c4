"""Megatron-core's configurations: the user's, completed by what the grid and the precision decide."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.strategies.megatron.options import MegatronOptions, check_fits
from drivetrain.strategies.precision import Precision

# Of TransformerConfig: what lets layers be spread unevenly over stages.
_UNEVEN = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
# What each of torch's optimizers calls its options, and what OptimizerConfig calls them.
_ADAM = {"lr": "lr", "weight_decay": "weight_decay", "eps": "adam_eps"}
_SGD = {"lr": "lr", "weight_decay": "weight_decay", "momentum": "sgd_momentum"}
# Options of these that change what a step computes, and that megatron-core's optimizers do not have.
_REFUSED = {"amsgrad": False, "maximize": False, "nesterov": False, "dampening": 0}
# What megatron-core asserts where a size cannot be shared.
_DIVISIBILITY = re.compile(r"(\d+) is not divisible by (\d+)")


def low_dtype(precision: Precision) -> torch.dtype | None:
    """The dtype of the model's weights beside 32-bit master weights; None in full precision."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision.name)


def complete(config: Any, options: MegatronOptions, precision: Precision) -> Any:
    """A model's `TransformerConfig` with the sizes of the grid and the precision in it.

    Args:
        config: What the task gave.
        options: The sizes of the grid.
        precision: The number formats.

    Raises:
        ConfigurationError: It is something else, or sizes of the model do not fit those of the grid.
    """
    if not is_dataclass(config) or isinstance(config, type) or not hasattr(config, "tensor_model_parallel_size"):
        raise ConfigurationError(
            f"transformer_config() returned {type(config).__name__}. Return a TransformerConfig of megatron-core, "
            "such as TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4).",
            code="DT-064",
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
    # What the configuration has derived from the sizes and formats that it had before.
    if had.microbatch_group_size_per_vp_stage == had.pipeline_model_parallel_size:
        settings["microbatch_group_size_per_vp_stage"] = options.pipeline_parallel
    if had.autocast_dtype is had.params_dtype:
        settings["autocast_dtype"] = settings["params_dtype"]
    if interleaved:
        # Batched sends and receives between the same two ranks arrive in another order than they are waited for.
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
    """Refuse a size that the configuration gives otherwise than the strategy."""
    for name, argument in (
        ("tensor_model_parallel_size", "tensor_parallel"),
        ("pipeline_model_parallel_size", "pipeline_parallel"),
        ("context_parallel_size", "context_parallel"),
        ("expert_model_parallel_size", "expert_parallel"),
    ):
        given = getattr(config, name)
        if given not in (1, None, settings[name]):
            raise ConfigurationError(
                f"TransformerConfig({name}={given}) contradicts the strategy's {argument}={settings[name]}. Leave it "
                "out of the TransformerConfig: the strategy fills it in.",
                code="DT-065",
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
            f"expert_parallel={options.expert_parallel} spreads experts over processes, but TransformerConfig has no "
            "num_moe_experts. Set it, or leave expert_parallel out.",
            code="DT-065",
        )


def _refuse_losses_beside(config: Any) -> None:
    """Refuse losses that are added within layers where losses are averaged per token by the engine."""
    beside = [name for name in ("num_moe_experts", "mtp_num_layers") if getattr(config, name, None)]
    if config.calculate_per_token_loss and beside:
        raise ConfigurationError(
            f"TransformerConfig({beside[0]}=..., calculate_per_token_loss=True): the losses that such layers add "
            "within the model are not weighed per token. Set calculate_per_token_loss=False, which averages each "
            "micro-batch.",
            code="DT-065",
        )


def _check_names(argument: str, given: Mapping[str, Any], known: Any) -> None:
    allowed = [each.name for each in fields(known)]
    for name in given:
        if name not in allowed:
            kind = known.__name__ if isinstance(known, type) else type(known).__name__
            raise ConfigurationError(
                f"Megatron({argument}=...) names {name!r}, which {kind} of megatron-core does not have."
                f"{nearest(name, allowed)}",
                code="DT-006",
            )


def ddp_config(options: MegatronOptions, low: torch.dtype | None) -> Any:
    """How gradients are accumulated and reduced.

    Args:
        options: Those of the strategy.
        low: The dtype of the weights, if it is a low one.
    """
    from megatron.core.distributed import DistributedDataParallelConfig

    _check_names("ddp", options.ddp, DistributedDataParallelConfig)
    chosen: dict[str, Any] = {
        "grad_reduce_in_fp32": low is not None,
        "use_distributed_optimizer": options.distributed_optimizer,
        **options.ddp,
    }
    return DistributedDataParallelConfig(**chosen)


def optimizer_config(optimizer: Optimizer, options: MegatronOptions, low: torch.dtype | None) -> Any:
    """What one of torch's optimizers asks for, as an `OptimizerConfig`; clipping is left to the engine.

    Args:
        optimizer: The user's.
        options: Those of the strategy.
        low: The dtype of the weights, if it is a low one.

    Raises:
        ConfigurationError: Megatron-core has no such optimizer.
    """
    from megatron.core.optimizer import OptimizerConfig

    _check_names("optimizer", options.optimizer, OptimizerConfig)
    defaults = optimizer.defaults
    for name, neutral in _REFUSED.items():
        if defaults.get(name, neutral) != neutral:
            raise ConfigurationError(
                f"{type(optimizer).__name__}({name}={defaults[name]!r}): megatron-core's optimizers have no {name}. "
                "Leave it out, or use another strategy.",
                code="DT-048",
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
            f"strategy='megatron' steps with megatron-core's own Adam, AdamW and SGD, not with "
            f"{type(optimizer).__name__}. Return torch.optim.AdamW, Adam or SGD over self.parameters(): its options "
            "and its learning-rate schedule are taken.",
            code="DT-048",
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
            "clip_grad": 0.0,
            **options.optimizer,
        }
    )


def _check_distributed(optimizer: Optimizer) -> None:
    """Refuse what megatron-core's distributed optimizer does not spread over processes."""
    from megatron.core import optimizer as kernels

    adam = (AdamW,) if kernels.USING_PYTORCH_OPTIMIZER else (Adam, AdamW)
    if type(optimizer) not in adam:
        raise ConfigurationError(
            f"Megatron(distributed_optimizer=True) cannot spread the state of {type(optimizer).__name__}: "
            "megatron-core does so for AdamW, and with TransformerEngine or Apex for Adam. Use torch.optim.AdamW, or "
            "Megatron(distributed_optimizer=False).",
            code="DT-048",
        )


@contextmanager
def explained() -> Iterator[None]:
    """Context of a model provider, in which megatron-core's assertions about sizes are raised in our words.

    Raises:
        ConfigurationError: A size of the model does not fit the tensor-parallel processes.
    """
    try:
        yield
    except AssertionError as error:
        if "sequence parallel not supported" in str(error):
            raise ConfigurationError(
                "sequence_parallel=True needs norms that sum their gradients over the parts of a sequence: those of "
                "TransformerEngine (get_gpt_layer_with_transformer_engine_spec) or of Apex. Install one of them, or "
                "leave sequence_parallel out.",
                code="DT-065",
            ) from error
        found = _DIVISIBILITY.search(str(error))
        if found is None:
            raise
        size, parts = int(found[1]), int(found[2])
        raise ConfigurationError(
            f"model_provider built a layer of size {size}, such as vocab_size, which is no multiple of "
            f"tensor_parallel={parts}. Pad it to {-(-size // parts) * parts}, or choose a tensor_parallel that "
            f"{size} is a multiple of.",
            code="DT-042",
        ) from error

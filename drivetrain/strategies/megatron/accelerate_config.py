"""Accelerate's `megatron_lm_config`: its keys, as `accelerate config` writes them, as arguments of `Megatron`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger

_log = get_logger(__name__)

PREFIX = "megatron_lm_"
# Its sizes and switches, and what Megatron calls them.
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
# What belongs to the task, the data or the loop here, and where.
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
    """The arguments of `Megatron` that keys of Accelerate's `megatron_lm_config` mean.

    Args:
        given: The keys, with or without `megatron_lm_` before them; None is what was not asked for.

    Raises:
        ConfigurationError: There is no such key.
    """
    arguments: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {"transformer": {}, "optimizer": {}}
    for spelled, value in given.items():
        key = spelled.removeprefix(PREFIX)
        if key not in KEYS:
            raise ConfigurationError(
                f"Unknown key {spelled!r} in megatron_lm_config. Allowed: {', '.join(PREFIX + each for each in KEYS)}."
                f"{nearest(key, KEYS)}",
                code="DT-006",
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
            _log.warning_once(f"{spelled}={value!r} changes nothing here: that is decided by {_ELSEWHERE[key]}.")
    if not arguments.get("gradient_clipping"):
        arguments.pop("gradient_clipping", None)  # Accelerate's 0 is no clipping
    return arguments | {name: options for name, options in nested.items() if options}

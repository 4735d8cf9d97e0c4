"""`MegatronLMPlugin`: options of the Megatron strategy under the names of a `megatron_lm_config`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, cast

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.base import Strategy
from drivetrain.strategies.registry import strategy_class

# Classes and functions that other scripts replace are methods of the task here.
_OF_THE_TASK = {
    "custom_model_provider_function": "MegatronTask.model_provider",
    "custom_prepare_model_function": "MegatronTask.model_provider",
    "custom_get_batch_function": "MegatronTask.forward_step",
    "custom_loss_function": "MegatronTask.loss_func",
    "custom_train_step_class": "MegatronTask.training_step",
}


@dataclass
class MegatronLMPlugin:
    """Options for training with Megatron-LM, such as the degrees of tensor and pipeline parallelism.

    `Accelerator(strategy=drivetrain.Megatron(...))` accepts the options directly. As with any strategy, the training
    loop owns learning-rate schedules and data.

    Attributes:
        other_megatron_args: Further keys of a `megatron_lm_config`.
    """

    tp_degree: int | None = None
    pp_degree: int | None = None
    num_micro_batches: int | None = None
    gradient_clipping: float | None = None
    sequence_parallelism: bool | None = None
    recompute_activations: bool | None = None
    use_distributed_optimizer: bool | None = None
    context_parallel_size: int | None = None
    expert_model_parallel_size: int | None = None
    expert_tensor_parallel_size: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    attention_softmax_in_fp32: bool | None = None
    calculate_per_token_loss: bool | None = None
    use_precision_aware_optimizer: bool | None = None
    optimizer_cpu_offload: bool | None = None
    overlap_cpu_optimizer_d2h_h2d: bool | None = None
    decoder_last_pipeline_num_layers: int | None = None
    seq_length: int | None = None
    train_iters: int | None = None
    eval_iters: int | None = None
    eval_interval: int | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    custom_train_step_class: Any = None
    other_megatron_args: dict[str, Any] | None = None

    def strategy(self) -> Strategy:
        """Return a `drivetrain.Megatron` strategy that is configured with this plugin's options.

        Raises:
            ConfigurationError: An option is not supported.
        """
        given = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}
        for name in given:
            if name in _OF_THE_TASK:
                raise ConfigurationError(
                    f"MegatronLMPlugin({name}=...) is not supported. Override the task's method instead: "
                    f"{_OF_THE_TASK[name]}.",
                )
        further = given.pop("other_megatron_args", {})
        return cast("Strategy", strategy_class("megatron").from_config({**given, **further}))

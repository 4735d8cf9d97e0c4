"""Megatron-LM's training loop, which is not run under these names."""

from __future__ import annotations

from drivetrain.compat.accelerate.absent import MEGATRON, absent_names

__getattr__ = absent_names(
    __name__,
    (
        MEGATRON,
        [
            "AbstractTrainStep",
            "BertTrainStep",
            "GPTTrainStep",
            "MegatronEngine",
            "MegatronLMDummyDataLoader",
            "MegatronLMDummyScheduler",
            "MegatronLMOptimizerWrapper",
            "MegatronLMSchedulerWrapper",
            "T5TrainStep",
            "add_model_config_to_megatron_parser",
            "avg_losses_across_data_parallel_group",
            "gather_across_data_parallel_groups",
            "initialize",
            "megatron_lm_initialize",
            "megatron_lm_prepare_data_loader",
            "megatron_lm_prepare_model_optimizer_scheduler",
            "megatron_lm_prepare_optimizer",
            "megatron_lm_prepare_scheduler",
            "prepare_data_loader",
            "prepare_model_optimizer_scheduler",
            "prepare_optimizer",
            "prepare_scheduler",
        ],
    ),
)

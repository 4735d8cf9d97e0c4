"""Weights on disk, which belong to big-model inference."""

from __future__ import annotations

from drivetrain.compat.accelerate.absent import BIG_MODELS, absent_names

__getattr__ = absent_names(
    __name__,
    (
        BIG_MODELS,
        [
            "OffloadedWeightsLoader",
            "PrefixedDataset",
            "extract_submodules_state_dict",
            "load_offloaded_weight",
            "offload_state_dict",
            "offload_weight",
            "save_offload_index",
        ],
    ),
)

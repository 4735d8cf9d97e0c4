"""Utilities of the Trainer."""

from __future__ import annotations

import torch

from drivetrain.compat.handed_on import absent_names
from drivetrain.compat.lightning.enums import GradClipAlgorithmType, LightningEnum
from drivetrain.compat.lightning.fabric.utilities import (
    disable_possible_user_warnings,
    is_shared_filesystem,
    measure_flops,
    move_data_to_device,
    suggested_max_num_workers,
)
from drivetrain.compat.lightning.fabric.utilities.rank_zero import (
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from drivetrain.compat.lightning.pytorch.utilities import rank_zero, warnings
from drivetrain.compat.lightning.pytorch.utilities.combined_loader import CombinedLoader
from drivetrain.compat.lightning.pytorch.utilities.grads import grad_norm
from drivetrain.compat.lightning.pytorch.utilities.parameter_tying import find_shared_parameters, set_shared_parameters
from drivetrain.compat.lightning.pytorch.utilities.parsing import AttributeDict, is_picklable

__all__ = [
    "AttributeDict",
    "CombinedLoader",
    "GradClipAlgorithmType",
    "LightningEnum",
    "disable_possible_user_warnings",
    "find_shared_parameters",
    "grad_norm",
    "is_picklable",
    "is_shared_filesystem",
    "measure_flops",
    "move_data_to_device",
    "rank_zero",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "set_shared_parameters",
    "suggested_max_num_workers",
    "warnings",
]

FLOAT16_EPSILON = torch.finfo(torch.float16).eps
FLOAT32_EPSILON = torch.finfo(torch.float32).eps
FLOAT64_EPSILON = torch.finfo(torch.float64).eps

__getattr__ = absent_names(__name__)

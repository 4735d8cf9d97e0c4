"""Weights on disk."""

from __future__ import annotations

from drivetrain.inference import OffloadedWeightsLoader as OffloadedWeightsLoader
from drivetrain.inference import PrefixedDataset as PrefixedDataset
from drivetrain.inference import extract_submodules_state_dict as extract_submodules_state_dict
from drivetrain.inference import load_offloaded_weight as load_offloaded_weight
from drivetrain.inference import offload_state_dict as offload_state_dict
from drivetrain.inference import offload_weight as offload_weight
from drivetrain.inference import save_offload_index as save_offload_index

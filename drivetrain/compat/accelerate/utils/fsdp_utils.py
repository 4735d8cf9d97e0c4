"""Save and load models and optimizers for scripts that manage sharded training themselves.

Full weights are one file, as with Accelerate. Shards and optimizer states are drivetrain checkpoints, which load with
any number of processes and any strategy.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drivetrain import checkpoint
from drivetrain.accelerator import PreparedOptimizer
from drivetrain.checkpoint.torch_files import TorchShards, bare_name
from drivetrain.compat.accelerate.absent import INTERNAL, absent_names
from drivetrain.compat.accelerate.utils.constants import (
    FSDP_MODEL_NAME,
    OPTIMIZER_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
)
from drivetrain.compat.accelerate.utils.modeling import is_peft_model
from drivetrain.compat.formats.accelerate import sharded_model

if TYPE_CHECKING:
    from drivetrain.compat.accelerate.accelerator import Accelerator

_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"

__getattr__ = absent_names(
    __name__,
    (
        INTERNAL,
        [
            "ensure_weights_retied",
            "fsdp2_apply_ac",
            "fsdp2_canonicalize_names",
            "fsdp2_load_full_state_dict",
            "fsdp2_prepare_auto_wrap_policy",
            "fsdp2_prepare_model",
            "fsdp2_switch_optimizer_parameters",
            "get_fsdp2_grad_scaler",
        ],
    ),
)


def enable_fsdp_ram_efficient_loading() -> None:
    """Make transformers read weights on rank 0 only."""
    os.environ["ACCELERATE_USE_FSDP"] = "True"
    os.environ[_EFFICIENT] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Make transformers read weights on every process."""
    os.environ[_EFFICIENT] = "False"


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save a sharded model's weights to a directory. Call it on all processes."""
    state, adapter_only = accelerator.strategy.state, adapter_only and is_peft_model(model)
    os.makedirs(output_dir, exist_ok=True)
    if _is_whole(fsdp_plugin):
        whole = state.model(model, full=True)
        if accelerator.is_main_process:
            torch.save(_part(whole, adapter_only), _whole_file(output_dir, model_index))
        accelerator.wait_for_everyone()
    else:
        shards = _part(state.model(model), adapter_only)
        _write(accelerator, _folder(output_dir, FSDP_MODEL_NAME, model_index), {"models": [shards]})


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Load weights that `save_fsdp_model` wrote. The arguments are the same."""
    state = accelerator.strategy.state
    if _is_whole(fsdp_plugin):
        loaded = torch.load(_whole_file(input_dir, model_index), map_location="cpu", weights_only=True)
    else:
        loaded = _read(_folder(input_dir, FSDP_MODEL_NAME, model_index))["models"][0]
    return state.load_model(model, loaded, strict=not (adapter_only and is_peft_model(model)))


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: Any,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Save the optimizer state of a sharded model. Call it on all processes."""
    os.makedirs(output_dir, exist_ok=True)
    named = accelerator.strategy.state.optimizer(model, _bare(optimizer))
    _write(accelerator, _folder(output_dir, OPTIMIZER_NAME, optimizer_index), {"optimizers": [named]})


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: Any,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load optimizer state that `save_fsdp_optimizer` wrote. The arguments are the same."""
    saved = _read(_folder(input_dir, OPTIMIZER_NAME, optimizer_index))
    accelerator.strategy.state.load_optimizer(model, _bare(optimizer), saved["optimizers"][0])


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merge a checkpoint's weights into one file. Only the main process writes."""
    from safetensors.torch import save_file

    from drivetrain.compat.accelerate.state import PartialState

    state = PartialState()
    if state.is_main_process:
        weights = _weights_in(checkpoint_dir)
        os.makedirs(output_path, exist_ok=True)
        if safe_serialization:
            own = {name: value.contiguous().clone() for name, value in weights.items()}
            save_file(own, Path(output_path, SAFE_WEIGHTS_NAME), metadata={"format": "pt"})
        else:
            torch.save(dict(weights), Path(output_path, WEIGHTS_NAME))
        if remove_checkpoint_dir:
            shutil.rmtree(checkpoint_dir)
    state.wait_for_everyone()


def get_parameters_from_modules(modules: Any, model: nn.Module, device: Any = None) -> set[nn.Parameter]:
    """Return the parameters of the named submodules, moved to the device."""
    if not modules:
        return set()
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    found: set[nn.Parameter] = set()
    for module in modules:
        found.update(module.parameters() if device is None else module.to(device).parameters())
    return found


def _is_whole(plugin: Any) -> bool:
    chosen = getattr(plugin, "state_dict_type", None)
    return "FULL" in str(getattr(chosen, "name", chosen) or "FULL")


def _part(state: Mapping[str, Any], adapter_only: bool) -> dict[str, Any]:
    """Return the state dict, or only the adapter weights if `adapter_only`."""
    if not adapter_only:
        return dict(state)
    return {name: value for name, value in state.items() if "lora_" in name or "modules_to_save" in name}


def _weights_in(directory: str | os.PathLike[str]) -> Mapping[str, torch.Tensor]:
    """Return the first model's weights from a checkpoint or a folder of distributed shards."""
    folder = None if checkpoint.is_checkpoint(directory) else sharded_model(directory)
    if folder is None:
        weights: Mapping[str, torch.Tensor] = _read(directory)["models"][0]
        return weights
    shards = TorchShards(folder)
    return {bare_name(name): shards.tensor(key) for key, name in shards.names_below("model").items()}


def _bare(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer


def _folder(directory: str | os.PathLike[str], name: str, index: int) -> Path:
    folder = Path(directory)
    return folder if folder.name.startswith(f"{name}_") else folder / f"{name}_{index}"


def _whole_file(directory: str | os.PathLike[str], index: int) -> Path:
    return Path(directory, f"{FSDP_MODEL_NAME}.bin" if index == 0 else f"{FSDP_MODEL_NAME}_{index}.bin")


def _write(accelerator: Accelerator, directory: Path, engine: dict[str, Any]) -> None:
    checkpoint.save_run_state(directory, {"engine": engine}, {}, accelerator.state)


def _read(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Read full tensors and the engine state of a checkpoint, on this process only."""
    shared, _ = checkpoint.load_run_state(directory)
    engine: dict[str, Any] = shared["engine"]
    return engine

"""Reader for DeepSpeed's checkpoint files (`mp_rank_00_model_states.pt`, `*_optim_states.pt`) that executes no code.

ZeRO stores each parameter group as one flat float32 tensor, split over the processes. Stages 1 and 2 split the whole
group, and stage 3 splits each parameter. Optimizer states are split in the same way.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.torch_files import bare_name, read_pickled
from drivetrain.runtime.errors import CheckpointError

LATEST = "latest"

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<model>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt")
_Shapes = Sequence[Mapping[str, Sequence[int]]]


class _Inert:
    # Replaces the classes in DeepSpeed's pickles, whose code must not run when a checkpoint is read.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


# Classes in DeepSpeed's pickles, each with the harmless class that is loaded in its place. Others are refused.
_ALLOWED: list[Any] = [
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


def deepspeed_folder(directory: str | os.PathLike[str], tag: str | None = None) -> Path | None:
    """Find the folder that contains the files of a DeepSpeed checkpoint, and return None if there is none.

    Without a tag, the file `latest` in the directory names the folder. If that file is missing, it is the directory
    itself.
    """
    root = Path(directory)
    latest = root / LATEST
    if tag is None and latest.is_file():
        tag = latest.read_text(encoding="utf-8").strip()
    folder = root if tag is None else root / tag
    return folder if folder.is_dir() and any(_MODEL.fullmatch(path.name) for path in folder.iterdir()) else None


class DeepSpeedShards:
    """Reader of a DeepSpeed checkpoint, for any ZeRO stage and number of processes.

    Attributes:
        folder: The checkpoint's folder.
        stage: The ZeRO stage.

    Raises:
        CheckpointError: Files of some processes are missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._models = [_read(path) for path in _by_rank(folder, _MODEL)]
        self._states = [_read(path)["optimizer_state_dict"] for path in _by_rank(folder, _OPTIMIZER)]
        self.stage = int(self._states[0].get("zero_stage", 0)) if self._states else 0
        if not self._states:
            return
        count = self._states[0]["partition_count"]
        # A list has one entry for each parameter group.
        count = max(count) if isinstance(count, list) else count
        if len(self._states) != count or (self.stage == 3 and len(self._models) != count):
            raise CheckpointError(
                f"{folder} is incomplete: it holds the files of {len(self._states)} of the {count} processes that "
                "wrote it. Copy the missing files into it."
            )

    def weights(self) -> dict[str, Tensor]:
        first = self._models[0]
        found = {name: value for name, value in (first["module"] or {}).items() if isinstance(value, Tensor)}
        # Stage 3 stores an empty tensor in place of each partitioned parameter.
        found = {name: value for name, value in found.items() if value.numel() or name in first["buffer_names"]}
        found |= self._frozen()
        if self._states:
            key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
            found |= dict(self._whole_tensors([[*state[key]] for state in self._states]))
        # Tied parameters are stored under one of their names only.
        for tied, name in (first.get("shared_params") or {}).items():
            found[tied] = found[name]
        return {bare_name(name): value.float() if value.is_floating_point() else value for name, value in found.items()}

    def optimizer(self) -> dict[str, Any]:
        """Merge the shards of a checkpoint's optimizer state, and return the full state by parameter name.

        A checkpoint of ZeRO stage 0 has no names, so that its state is by parameter index. Raise `CheckpointError` if
        DeepSpeed wrote the state in a format that is not supported.
        """
        if not self._states:
            return self._unspread()
        groups = [list(map(bare_name, shapes)) for shapes in self._shapes]
        inner = [state["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"] for state in self._states]
        if not all(isinstance(one, Mapping) for one in inner):
            raise CheckpointError(
                f"{self.folder} holds an optimizer in DeepSpeed's elastic format, which is not supported. Export the "
                "weights instead: drivetrain merge-weights."
            )
        flats = [[one["state"][number] for number in sorted(one["state"])] for one in inner]
        first = flats[0][0] if flats[0] else {}
        state: dict[str, dict[str, Any]] = {name: {} for names in groups for name in names} if first else {}
        for key, value in first.items():
            if isinstance(value, Tensor) and value.dim():
                for name, whole in self._whole_tensors([[flat[key] for flat in of_rank] for of_rank in flats]):
                    state[bare_name(name)][key] = whole
            else:
                for name in state:
                    state[name][key] = value.clone() if isinstance(value, Tensor) else value
        options = inner[0]["param_groups"]
        return {
            "state": state,
            "param_groups": [{**group, "params": names} for group, names in zip(options, groups, strict=True)],
        }

    @property
    def _shapes(self) -> _Shapes:
        found: _Shapes = self._models[0]["param_shapes"]
        return found

    def _whole_tensors(self, flats: list[list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
        if self.stage == 3:
            return _partitioned(self._shapes, [torch.cat(of_rank) for of_rank in flats])
        merged = [torch.cat(parts) for parts in zip(*flats, strict=True)]
        return _concatenated(self._shapes, merged, self._states[0].get("param_alignment_paddings"))

    def _frozen(self) -> dict[str, Tensor]:
        shapes = self._models[0].get("frozen_param_shapes") or {}
        parts = [model["frozen_param_fragments"] for model in self._models] if shapes else []
        return {
            name: torch.cat([part[name].flatten() for part in parts])[: math.prod(shape)].view(shape)
            for name, shape in shapes.items()
        }

    def _unspread(self) -> dict[str, Any]:
        found = self._models[0].get("optimizer")
        if not isinstance(found, Mapping) or "param_groups" not in found:
            raise CheckpointError(
                f"{self.folder} holds an optimizer of stage 0 in low precision, which is not supported. Export the "
                "weights instead: drivetrain merge-weights."
            )
        return dict(found)


def _concatenated(shapes: _Shapes, merged: Sequence[Tensor], paddings: Any) -> Iterator[tuple[str, Tensor]]:
    # The parameters of a group follow each other in its flat tensor.
    for number, (group, flat) in enumerate(zip(shapes, merged, strict=True)):
        start = 0
        for position, (name, shape) in enumerate(group.items()):
            size = math.prod(shape)
            yield name, flat[start : start + size].view(shape)
            # Parameters may be padded so that each begins at an aligned offset.
            start += size + (paddings[number][position] if paddings else 0)


def _partitioned(shapes: _Shapes, flats: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    # At ZeRO stage 3, the flat tensor of each rank holds an equal part of each parameter.
    start = 0
    for group in shapes:
        for name, shape in group.items():
            size = math.prod(shape)
            # Rounded up: the part of the last ranks may end with padding, which is cut off.
            part = -(-size // len(flats))
            yield name, torch.cat([flat[start : start + part] for flat in flats])[:size].view(shape)
            start += part


def _by_rank(folder: Path, kind: re.Pattern[str]) -> list[Path]:
    found = []
    for path in folder.iterdir():
        match = kind.fullmatch(path.name)
        if match is None:
            continue
        if int(match["model"]):
            raise CheckpointError(
                f"{folder} was written under DeepSpeed's own tensor parallelism, which is not supported. Convert it "
                "with DeepSpeed's ds_to_universal."
            )
        # Below stage 3, one file without a rank holds the model states of all processes.
        found.append((int(match["rank"] or 0), path))
    if any(folder.glob("*expert_*_states.pt")):
        raise CheckpointError(f"{folder} holds experts of a DeepSpeed MoE layer, which is not supported.")
    return [path for _, path in sorted(found)]


def _read(path: Path) -> Any:
    return read_pickled(path, _ALLOWED)


def read_deepspeed(folder: Path, read: Callable[[DeepSpeedShards], Any]) -> Any:
    try:
        return read(DeepSpeedShards(folder))
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{folder} is not a valid DeepSpeed checkpoint: {error!r}.") from error

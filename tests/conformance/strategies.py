"""Every strategy that a run can move to, by one name, and what its processes need.

A row runs in the lane that is named there, in whose environment its packages are. Rows of one family train the same
model, so a checkpoint of one can be opened by all others of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from drivetrain import DDP, FSDP, XLA, XLAFSDP, Colwise, DeepSpeed, Megatron, Parallel, Rowwise
from tests.conformance.test_parallel import layers_split
from tests.pool import device
from tests.strategies.xla.running import environment

OF_DEEPSPEED = "DeepSpeed knows no device of this kind"
LANGUAGE, LAYERS = "language model", "layers of megatron-core"


@dataclass(frozen=True)
class Row:
    """One strategy with its sizes.

    Attributes:
        make: Makes it, in one of its processes.
        processes: How many it takes.
        lane: The mark of the tests that run it.
        family: Which model it trains here.
        devices: XLA devices of its one process; 0 without.
        moves: Whether checkpoints are tried there too; not where that repeats what a neighbour shows.
        on_cpu: Why it runs on the CPU alone, if it does.
    """

    make: Callable[[], Any]
    processes: int = 1
    lane: str = "sharded"
    family: str = LANGUAGE
    devices: int = 0
    moves: bool = True
    on_cpu: str = ""

    @property
    def device(self) -> str:
        """The kind of device."""
        return "xla" if self.devices else device()

    @property
    def env(self) -> Mapping[str, str | None]:
        """Variables of its processes."""
        return environment(self.devices) if self.devices else {}


# On XLA devices the plan names linear layers and embeddings only.
XLA_PLAN = {f"layers.*.attention.{name}": Colwise() for name in ("wq", "wk", "wv")} | {
    "layers.*.attention.wo": Rowwise(),
    "layers.*.ffn.w1": Colwise(),
    "layers.*.ffn.w2": Rowwise(),
}


def on_xla(make: Callable[[], Any], devices: int = 4, moves: bool = True) -> Row:
    return Row(make, 1, "xla", LANGUAGE, devices, moves)


def on_grid(processes: int = 2, **sizes: Any) -> Row:
    return Row(lambda: Megatron(**sizes), processes, "megatron", LAYERS)


ROWS: dict[str, Row] = {
    "single": Row(lambda: "single"),
    "ddp": Row(DDP, 2),
    "fsdp": Row(FSDP, 2),
    "fsdp-hybrid": Row(lambda: FSDP(replicate_size=2), 4),
    "tp": Row(lambda: Parallel(tp=2, tp_plan=layers_split()), 2),
    "cp": Row(lambda: Parallel(cp=2), 2),
    "pp": Row(lambda: Parallel(pp=2), 2),
    "tp-fsdp": Row(lambda: Parallel(tp=2, dp_shard=2, tp_plan=layers_split()), 4),
    "pp-fsdp": Row(lambda: Parallel(pp=2, dp_shard=2), 4),
    "zero-1": Row(lambda: DeepSpeed(stage=1), 2, on_cpu=OF_DEEPSPEED),
    "zero-3": Row(lambda: DeepSpeed(stage=3), 2, on_cpu=OF_DEEPSPEED),
    "xla": on_xla(XLA, 1),
    "xla-data": on_xla(XLA, moves=False),
    "xla-fsdp": on_xla(XLAFSDP),
    "xla-tp": on_xla(lambda: XLA(tp=2, tp_plan=XLA_PLAN), moves=False),
    "xla-tp-fsdp": on_xla(lambda: XLAFSDP(tp=2, tp_plan=XLA_PLAN)),
    "megatron": on_grid(1),
    "megatron-data": on_grid(),
    "megatron-data-whole": on_grid(distributed_optimizer=False),
    "megatron-tp": on_grid(tensor_parallel=2),
    "megatron-pp": on_grid(pipeline_parallel=2),
    "megatron-interleaved": on_grid(pipeline_parallel=2, virtual_pipeline=2),
    # A plain task with a model of megatron-core's layers, in one part.
    "single-its-layers": Row(lambda: "single", 1, "megatron", LAYERS),
}


def cases(*names: str) -> list[Any]:
    """Rows as parameters of a test, with the mark of those that run on the CPU alone."""
    return [
        pytest.param(name, marks=[pytest.mark.cpu(ROWS[name].on_cpu)] if ROWS[name].on_cpu else []) for name in names
    ]

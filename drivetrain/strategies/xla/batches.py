"""How batches come onto XLA devices: sharded over them, and with the graph of the batch before launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from drivetrain.runtime import xla
from drivetrain.runtime.nested import recursively_apply
from drivetrain.strategies.capabilities import BatchPlacement
from drivetrain.strategies.xla.compilations import Compilations
from drivetrain.strategies.xla.mesh import DeviceMesh


class XLABatches(BatchPlacement):
    """Launches what was recorded for a batch before the next one comes, so that no loop has to.

    Args:
        compilations: Counts what is compiled.
        mesh: The devices that rows are spread over; None for one device.
        fills_evaluation: Whether short batches are filled up wherever nothing is trained.
    """

    def __init__(self, compilations: Compilations, mesh: DeviceMesh | None, fills_evaluation: bool) -> None:
        self.fills_evaluation = fills_evaluation
        self._compilations, self._mesh = compilations, mesh

    def around(self, place: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Launch the graph of the batch before, bring the batch over, and spread its rows."""
        mesh, compilations = self._mesh, self._compilations

        def shard(tensor: torch.Tensor) -> torch.Tensor:
            if mesh is not None and tensor.device.type == "xla":
                mesh.shard_rows(tensor)
            return tensor

        def place_and_shard(batch: Any) -> Any:
            self.finish()
            placed = place(batch)
            compilations.record_batch(placed)
            return placed if mesh is None else recursively_apply(shard, placed)

        return place_and_shard

    def finish(self) -> None:
        """Launch the graph of the last batch."""
        xla.sync()
        self._compilations.end_batch()

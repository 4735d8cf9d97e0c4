"""Loaders that are also instances of torchdata's `StatefulDataLoader`, for `isinstance` checks in scripts.

Importing this module imports torchdata. The loaders work like those of `drivetrain.compat.accelerate.data_loader`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from drivetrain.compat.accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader


class StatefulShard(DataLoaderShard, StatefulDataLoader):
    """`DataLoaderShard` made with `use_stateful_dataloader=True`."""


class StatefulDispatcher(DataLoaderDispatcher, StatefulDataLoader):
    """`DataLoaderDispatcher` made with `use_stateful_dataloader=True`."""


class StatefulSkip(SkipDataLoader, StatefulDataLoader):
    """`SkipDataLoader` made with `use_stateful_dataloader=True`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch."""
        return self.whole.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a position that `state_dict` returned."""
        self.whole.load_state_dict(state_dict)


KINDS: dict[type, type] = {
    DataLoaderShard: StatefulShard,
    DataLoaderDispatcher: StatefulDispatcher,
    SkipDataLoader: StatefulSkip,
}
"""Loader classes, and the subclass of each that is torchdata's too."""

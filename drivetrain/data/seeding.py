"""Random state of samples and epochs: seeding each sample, and drawing an epoch's order reproducibly."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils.collate import default_convert

from drivetrain.runtime.seeds import (
    GENERATORS,
    KeptGenerators,
    drawn_since,
    sample_seed,
    sample_seeds,
    seed_all_generators,
)

COLLATE = 0xC011A7E  # separates the random state of collating a batch from that of its first sample

_FIXED = (TensorDataset, list, tuple, range, torch.Tensor, np.ndarray)


def is_deterministic(dataset: Any) -> bool:
    """Return True if reading a sample never draws random numbers."""
    if "__getitems__" in getattr(dataset, "__dict__", ()):  # set on the instance; torch's DataLoader calls it
        return False
    # A table of the package `datasets` that only converts its values to tensors.
    is_table = type(dataset).__module__ == "datasets.arrow_dataset" and dataset.format["type"] == "torch"
    if type(dataset) in _FIXED or is_table:
        return True
    if type(dataset) is Subset:
        return is_deterministic(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(is_deterministic(each) for each in dataset.datasets)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return all(is_deterministic(each) for each in (parts.values() if isinstance(parts, dict) else parts))
    return False


def is_deterministic_collate(collate_fn: Any) -> bool:
    return collate_fn in (default_collate, default_convert)


def key_of(index: Any) -> int:
    try:
        return operator.index(index)
    except TypeError:
        # Not hash(), which differs between processes for strings.
        return int.from_bytes(hashlib.blake2b(repr(index).encode(), digest_size=8).digest(), "little")


def as_is(batch: Any) -> Any:
    return batch


class SeededBatches(Dataset[Any]):
    """Dataset that returns whole batches and seeds each sample, so that its values are equal on any process.

    It is indexed with `(epoch, indices)`, because persistent workers hold a copy that `set_epoch` cannot reach. In the
    main process the global generators are restored afterwards.

    Seeding a generator may take longer than reading a sample. A generator that no sample of the first batch uses is
    therefore not seeded for later samples. If a later batch uses it after all, the batch is read again with all its
    samples seeded. From then on this generator is always seeded. Collating is treated in this way too.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], seed: int, batched: bool) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.seed = seed
        self.batched = batched
        self.reads_many = bool(getattr(dataset, "__getitems__", None))
        self.seeds_samples = not is_deterministic(dataset)
        # Names of the generators that samples are known to use; None before the first batch.
        self._drawn: list[str] | None = None if self.seeds_samples else []
        self._collates_plainly = is_deterministic_collate(collate_fn)
        self._collating_draws: bool | None = None  # True if collating uses a generator; None before the first batch
        self._kept = KeptGenerators()

    def __getitem__(self, request: tuple[int, Any]) -> Any:
        self._kept.take()
        # If nothing is known to draw, read without seeding, and check the generators afterwards.
        if self._drawn == [] and (self._collates_plainly or self._collating_draws is False) and self.batched:
            try:
                batch = self.collate_fn(self._read_seeded(*request, ()))
            except Exception:
                if not self._kept.changed():
                    raise  # otherwise unseeded draws may be the cause: read again below with all samples seeded
            else:
                if not self._kept.changed():
                    return batch
            self._kept.put_back()
        try:
            return self._read(*request)
        finally:
            # In the main process these are the user's generators.
            if get_worker_info() is None:
                self._kept.put_back()

    def _read(self, epoch: int, indices: Any) -> Any:
        if not self.batched:
            seed_all_generators(sample_seed(self.seed, epoch, key_of(indices)))
            return self.collate_fn(self.dataset[indices])
        samples = self._samples(epoch, indices)
        if self._collates_plainly:
            return self.collate_fn(samples)
        seed = collate_seed(self.seed, epoch, key_of(indices[0]) if len(indices) else 0)
        seed_all_generators(seed)
        batch = self.collate_fn(samples)
        if not (self._drawn or self._collating_draws):
            self._collating_draws = bool(drawn_since(seed, GENERATORS))
        return batch

    def _samples(self, epoch: int, indices: Any) -> Any:
        if not self.seeds_samples or not len(indices):
            return self._read_seeded(epoch, indices, ())
        if self._drawn is None:
            return self._read_first(epoch, indices)
        others = [name for name in GENERATORS if name not in self._drawn]
        try:
            samples = self._read_seeded(epoch, indices, self._drawn)
        except Exception:
            late = self._kept.changed(others)
            if not late:
                raise
        else:
            late = self._kept.changed(others)
            if not late:
                return samples
        # From now on seed these generators too, and read the batch again.
        self._drawn = [*self._drawn, *late]
        return self._samples(epoch, indices)

    def _read_seeded(self, epoch: int, indices: Any, drawn: Sequence[str]) -> Any:
        if not drawn:
            return self.dataset.__getitems__(indices) if self.reads_many else [self.dataset[index] for index in indices]
        seeds = [GENERATORS[name].seed for name in drawn]
        seed_of = sample_seeds(self.seed, epoch)
        samples = []
        for index in indices:
            seed = seed_of(key_of(index))
            for seed_generator in seeds:
                seed_generator(seed)
            samples.append(self._read_one(index))
        return samples

    def _read_first(self, epoch: int, indices: Any) -> Any:
        drawn: list[str] = []
        samples = []
        for index in indices:
            seed = sample_seed(self.seed, epoch, key_of(index))
            seed_all_generators(seed)
            samples.append(self._read_one(index))
            drawn += drawn_since(seed, [name for name in GENERATORS if name not in drawn])
        self._drawn = drawn
        return samples

    def _read_one(self, index: Any) -> Any:
        return self.dataset.__getitems__([index])[0] if self.reads_many else self.dataset[index]


def collate_seed(seed: int, epoch: int, key: int) -> int:
    return sample_seed(sample_seed(seed, epoch, key), COLLATE, 0)


class ShowUsersDataset:
    # A `worker_init_fn`, so that `get_worker_info().dataset` is the user's dataset and not drivetrain's wrapper.

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None:
            # torch's WorkerInfo refuses ordinary assignment.
            object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)

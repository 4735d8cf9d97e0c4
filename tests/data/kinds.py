"""Loaders of every kind over the samples 0, 1, 2, …, for tests that compare them with what the plain loader gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from drivetrain.data import PermutationSampler

SAMPLES = 22


class Numbers(Dataset[int]):
    """Map-style: sample i is i."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return int(index)


class Stream(IterableDataset[int]):
    """Iterable: the samples in order, each worker its residue class."""

    def __init__(self, length: int = SAMPLES, known: bool = True) -> None:
        self.length = length
        if known:
            self.__class__ = SizedStream

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(first, self.length, step)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.length


class ShuffledStream(IterableDataset[int]):
    """Iterable: shuffled with torch's global generator."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SAMPLES).tolist()


class Reversed(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES - 1, -1, -1))

    def __len__(self) -> int:
        return SAMPLES


class EagerlyShuffled(Sampler[int]):
    """Draws all of its order where `iter` is called, from one of the global generators."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        indices = list(range(SAMPLES))
        if self.source == "python":
            random.shuffle(indices)
        elif self.source == "numpy":
            np.random.shuffle(indices)
        else:
            indices = torch.randperm(SAMPLES).tolist()
        return iter(indices)

    def __len__(self) -> int:
        return SAMPLES


class OwnGenerator(EagerlyShuffled):
    """Draws from a NumPy generator that it keeps, seeded differently in every process."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(torch.initial_seed() % 2**32)

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(SAMPLES).tolist())


class Episodes(Sampler[list[int]]):
    """Draws each batch from torch's global generator when it is asked for: few-shot learning does so."""

    def __init__(self, batches: int = 7, says: int | None = 7) -> None:
        self.batches, self.says = batches, says

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.batches):
            yield torch.randint(SAMPLES, (3,)).tolist()

    def __len__(self) -> int:
        if self.says is None:
            raise TypeError("no length")
        return self.says


class Buckets(Sampler[list[int]]):
    """Batches of different sizes, shuffled among each other with Python's global generator."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[0, 1, 2], [3], [4, 5, 6, 7], [8, 9], [10, 11, 12], [13, 14], [15]]
        random.shuffle(batches)
        yield from batches

    def __len__(self) -> int:
        return 7


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


Make = Callable[[], Any]

MAP_STYLE: dict[str, Make] = {
    "in order": lambda: DataLoader(Numbers(), batch_size=4),
    "drop_last": lambda: DataLoader(Numbers(), batch_size=4, drop_last=True, shuffle=True),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "shuffled, own generator": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, generator=generator()),
    "with replacement": lambda: DataLoader(
        Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), replacement=True, num_samples=70)
    ),
    "subset": lambda: DataLoader(Numbers(), batch_size=4, sampler=SubsetRandomSampler(range(3, 17))),
    "weighted": lambda: DataLoader(
        Numbers(), batch_size=4, sampler=WeightedRandomSampler([1 + n for n in range(SAMPLES)], 18)
    ),
    "permutation": lambda: DataLoader(Numbers(), batch_size=4, sampler=PermutationSampler(SAMPLES, seed=3)),
    "custom sampler": lambda: DataLoader(Numbers(), batch_size=4, sampler=Reversed()),
    "custom sampler drawing from torch": lambda: DataLoader(Numbers(), batch_size=4, sampler=EagerlyShuffled("torch")),
    "custom sampler drawing from python": lambda: DataLoader(
        Numbers(), batch_size=4, sampler=EagerlyShuffled("python")
    ),
    "custom sampler drawing from numpy": lambda: DataLoader(Numbers(), batch_size=4, sampler=EagerlyShuffled("numpy")),
    "custom sampler with a generator": lambda: DataLoader(Numbers(), batch_size=4, sampler=OwnGenerator()),
    "custom batch sampler": lambda: DataLoader(Numbers(), batch_sampler=Buckets()),
    "custom batch sampler drawing late": lambda: DataLoader(Numbers(), batch_sampler=Episodes()),
    "list of index batches": lambda: DataLoader(Numbers(), batch_sampler=[[0, 1], [2, 3], [4]]),
    "no batches": lambda: DataLoader(Numbers(7), batch_size=None),
    "no batches, shuffled": lambda: DataLoader(Numbers(7), batch_size=None, shuffle=True),
    "two workers": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2),
    "custom sampler, two workers": lambda: DataLoader(
        Numbers(), batch_size=4, sampler=EagerlyShuffled("torch"), num_workers=2
    ),
    "workers that stay": lambda: DataLoader(
        Numbers(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "no batches, two workers": lambda: DataLoader(Numbers(7), batch_size=None, shuffle=True, num_workers=2),
    "one batch": lambda: DataLoader(Numbers(3), batch_size=4),
    "no samples": lambda: DataLoader(Numbers(0), batch_size=4),
}

ITERABLE: dict[str, Make] = {
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "stream without length": lambda: DataLoader(Stream(known=False), batch_size=4),
    "stream, drop_last": lambda: DataLoader(Stream(), batch_size=4, drop_last=True),
    "stream, no batches": lambda: DataLoader(Stream(7), batch_size=None),
    "stream that draws": lambda: DataLoader(ShuffledStream(), batch_size=4),
    "stream of whole batches": lambda: DataLoader(Stream(24), batch_size=4),
    "empty stream": lambda: DataLoader(Stream(0), batch_size=4),
}

ITERABLE_WITH_WORKERS: dict[str, Make] = {
    "stream, two workers": lambda: DataLoader(Stream(), batch_size=4, num_workers=2),
    "stream, workers that stay": lambda: DataLoader(Stream(), batch_size=4, num_workers=1, persistent_workers=True),
}


class Watched(DataLoader[Any]):
    """A loader with an iteration of its own, as those that count or move batches."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()


class Around:
    """An object around a loader, with a length or without."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.wrapped = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wrapped)


class SizedAround(Around):
    def __len__(self) -> int:
        return len(self.wrapped)


class Remembering(SizedAround):
    """A loader that keeps its order and its place by itself, as streaming loaders do; a fresh one has another order."""

    def __init__(self) -> None:
        super().__init__(DataLoader(Numbers(), batch_size=4))
        self.order, self.place = torch.randperm(SAMPLES).tolist(), 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < SAMPLES:
            start, self.place = self.place, self.place + 4
            yield torch.tensor(self.order[start : start + 4])
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.place = state["order"], state["place"]


OWN_ITERATION: dict[str, Make] = {
    "subclass, shuffled": lambda: Watched(Numbers(), batch_size=4, shuffle=True),
    "subclass, shuffled, own generator": lambda: Watched(
        Numbers(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(torch.initial_seed())
    ),
    "subclass, two workers": lambda: Watched(Numbers(), batch_size=4, shuffle=True, num_workers=2),
    "object around a loader": lambda: SizedAround(DataLoader(Numbers(), batch_size=4, shuffle=True)),
    "object around a loader, no length": lambda: Around(DataLoader(Numbers(), batch_size=4, shuffle=True)),
    "object around a loader with a generator": lambda: SizedAround(
        DataLoader(Numbers(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(torch.initial_seed()))
    ),
}

READY: dict[str, Make] = {
    "list of batches": lambda: [torch.arange(start, min(start + 4, SAMPLES)) for start in range(0, SAMPLES, 4)],
    "batches of strings": lambda: [{"n": torch.arange(3), "s": ["a", "b", "c"]}, {"n": torch.tensor([3]), "s": ["d"]}],
}

KINDS = {**MAP_STYLE, **ITERABLE, **ITERABLE_WITH_WORKERS, **READY, **OWN_ITERATION}


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_state() -> tuple[Any, ...]:
    """All global generators' states, in a form that can be compared and sent."""
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def rows_of(batch: Any) -> list[int]:
    """The samples of a batch, as numbers."""
    if isinstance(batch, dict):
        batch = batch["n"]
    if isinstance(batch, Tensor):
        return batch.reshape(-1).tolist()
    return list(batch) if isinstance(batch, list) else [batch]

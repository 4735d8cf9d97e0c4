"""What a prepared loader offers beside its batches, and what cannot be prepared."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from itertools import zip_longest
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, IterDataPipe, RandomSampler

from drivetrain import ConfigurationError, DrivetrainDeprecationWarning
from drivetrain.data import DataLoaderConfiguration, DataShard, PreparedLoader, TailPolicy, prepare_loader
from tests.data.kinds import KINDS, MAP_STYLE, Buckets, Numbers, Stream, rows_of


def part(loader: Any, index: int = 0, count: int = 2, **options: Any) -> PreparedLoader:
    return prepare_loader(loader, shard=DataShard(index, count), **options)


def test_the_users_loader_shows_through() -> None:
    user = DataLoader(Numbers(), batch_size=4, drop_last=True)
    loader = part(user)
    names = ("dataset", "batch_size", "sampler", "batch_sampler", "num_workers", "collate_fn", "drop_last")
    assert all(getattr(loader, name) is getattr(user, name) for name in names)
    assert loader.loader is user
    with pytest.raises(AttributeError, match="no_such_thing"):
        loader.no_such_thing  # noqa: B018


def test_a_prepared_loader_is_not_prepared_again() -> None:
    loader = part(MAP_STYLE["in order"]())
    assert part(loader, 1) is loader


def test_accelerates_names_tell_the_end_and_the_sizes() -> None:
    loader = part(DataLoader(Numbers(22), batch_size=4))
    seen = [(loader.end_of_dataloader, loader.remainder, loader.remaining) for _ in loader]
    assert seen == [(False, -1, 3), (False, -1, 2), (True, 6, 1)]
    assert not loader.end_of_dataloader
    assert (loader.total_batch_size, loader.total_dataset_length) == (8, 22)
    split = part(DataLoader(Numbers(22), batch_size=4), config=DataLoaderConfiguration(split_batches=True))
    assert split.total_batch_size == 4
    assert part(DataLoader(Numbers(), batch_sampler=Buckets())).total_batch_size is None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "workers" not in kind])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("tail", TailPolicy)
def test_the_length_is_the_number_of_batches_of_this_process(kind: str, count: int, tail: TailPolicy) -> None:
    for index in range(count):
        loader = part(KINDS[kind](), index, count, tail=tail)
        try:
            length = len(loader)
        except TypeError:
            assert "stream" in kind or "no length" in kind
            continue
        assert length == len(list(loader))


@pytest.mark.parametrize("kind", ["in order", "stream", "stream, workers that stay", "list of batches"])
@pytest.mark.parametrize("dispatch", [False, True])
def test_the_tail_can_be_changed_between_iterations(kind: str, dispatch: bool) -> None:
    loader = part(KINDS[kind](), 1, 4, config=DataLoaderConfiguration(dispatch_batches=dispatch))
    assert [rows_of(batch) for batch in loader] == [[4, 5, 6, 7], [20, 21, 0, 1]]
    loader.tail = TailPolicy.WHOLE
    assert [rows_of(batch) for batch in loader] == [[4, 5, 6, 7], [20, 21]]
    assert loader.tail is TailPolicy.WHOLE


def test_uneven_batches_are_asked_for_by_the_configuration_too() -> None:
    loader = part(DataLoader(Numbers(9), batch_size=4), config=DataLoaderConfiguration(even_batches=False))
    assert loader.tail is TailPolicy.UNEVEN
    assert [rows_of(batch) for batch in loader] == [[0, 1, 2, 3], [8]]


class OwnIteration(DataLoader[int]):
    """A loader that does more than torch's."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch + 100


def test_a_loader_with_an_iteration_of_its_own_keeps_it() -> None:
    parts = [[rows_of(batch) for batch in part(OwnIteration(Numbers(9), batch_size=4), index)] for index in range(2)]
    assert parts == [[[100, 101, 102, 103], [108, 100, 101, 102]], [[104, 105, 106, 107], [103, 104, 105, 106]]]


def test_columns_that_are_no_tensors_are_completed_too() -> None:
    loader = part(KINDS["batches of strings"](), 1)
    batches = list(loader)
    assert batches[0]["s"] == ["d", "a", "b"]
    assert batches[0]["n"].tolist() == [3, 0, 1]
    assert loader.current is None


def test_a_very_large_random_sampler_is_told_of_a_better_one(caplog: pytest.LogCaptureFixture) -> None:
    dataset = Numbers(50_000_001)
    for _ in range(2):
        prepare_loader(DataLoader(dataset, batch_size=4, sampler=RandomSampler(dataset)), shard=DataShard())
    assert caplog.text.count("PermutationSampler") == 1


@pytest.mark.parametrize("loader", [5, None, torch.nn.Linear(1, 1)])
def test_what_cannot_be_iterated_is_refused(loader: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot be iterated"):
        prepare_loader(loader, shard=DataShard())


class Pipe(IterDataPipe[int]):
    def __iter__(self) -> Any:
        yield from range(6)


def test_data_pipes_work_alone_and_are_refused_where_they_would_shard_themselves() -> None:
    assert [rows_of(batch) for batch in prepare_loader(DataLoader(Pipe(), batch_size=4), shard=DataShard())] == [
        [0, 1, 2, 3],
        [4, 5],
    ]
    with pytest.raises(ConfigurationError, match="data pipe"):
        part(DataLoader(Pipe(), batch_size=4))


def test_batches_without_rows_cannot_be_split() -> None:
    loader = part([{"text": "a"}], config=DataLoaderConfiguration(split_batches=True))
    with pytest.raises(ValueError, match="no rows that can be counted"):
        list(loader)


def test_batches_without_rows_are_dealt_out_whole() -> None:
    ready = [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    parts = [part(ready, index) for index in range(2)]
    seen = [[(batch["text"], loader.current and loader.current.padding) for batch in loader] for loader in parts]
    assert seen == [[("a", 0), ("c", 0)], [("b", 0), ("a", 1)]]


def test_the_loader_says_what_it_is() -> None:
    assert repr(part(DataLoader(Stream()), 1, 2)) == "PreparedLoader(DataLoader, part 1 of 2, epoch 0)"


def sentences(samples: list[int]) -> torch.Tensor:
    """Texts of 1, 2, 3, ... tokens, padded to the longest of their batch."""
    return pad_sequence([torch.full((number + 1,), number) for number in samples], batch_first=True)


def images(samples: list[int]) -> tuple[Any, ...]:
    """Images of 3 channels in different sizes with their targets, as detection models take them."""
    pairs = [(torch.full((3, 4 + number, 5), number), {"boxes": torch.zeros(number + 1, 4)}) for number in samples]
    return tuple(zip(*pairs, strict=True))


def numbers_of(batch: Any) -> list[int]:
    if isinstance(batch, torch.Tensor):
        return batch[:, 0].tolist()
    assert [len(target["boxes"]) for target in batch[1]] == [int(image.max()) + 1 for image in batch[0]]
    return [int(image.max()) for image in batch[0]]


@pytest.mark.parametrize("collate", [sentences, images])
@pytest.mark.parametrize("dataset", [Numbers, Stream])
@pytest.mark.parametrize(("size", "count"), [(7, 2), (6, 2), (7, 3), (8, 3), (3, 3), (1, 2), (11, 2)])
@pytest.mark.parametrize("options", [{}, {"even_batches": False}, {"split_batches": True}])
def test_dispatched_batches_of_other_widths_and_lists_of_images_arrive(
    collate: Any, dataset: Any, size: int, count: int, options: dict[str, Any]
) -> None:
    config = DataLoaderConfiguration(dispatch_batches=True, **options)
    seen: list[list[Any]] = []
    for index in range(count):
        loader = part(DataLoader(dataset(size), 2 * count, collate_fn=collate), index, count, config=config)
        seen.append([])
        for batch in loader:
            info = loader.current
            assert info is not None
            assert info.rows == len(numbers_of(batch))
            seen[-1].append(numbers_of(batch)[: info.real_rows])
    in_turn = [row for step in zip_longest(*seen, fillvalue=()) for batch in step for row in batch]
    assert in_turn == list(range(size))
    if "even_batches" not in options:
        assert len({len(each) for each in seen}) == 1


def test_ready_batches_of_other_widths_are_completed_with_their_own_rows() -> None:
    ready = [torch.zeros(2, 3), torch.ones(2, 5), torch.full((1, 7), 2.0)]
    loader = part(ready)
    assert [(batch.shape, loader.current and loader.current.padding) for batch in loader] == [((2, 3), 0), ((2, 7), 1)]
    assert [batch.shape for batch in part(ready, 1)] == [(2, 5), (2, 3)]


@dataclasses.dataclass
class Checked:
    """A batch that refuses to be made twice, with a field that its constructor does not take."""

    x: torch.Tensor
    names: list[str]
    checked: bool = dataclasses.field(init=False, default=False)

    def __post_init__(self) -> None:
        assert not self.checked
        self.checked = True


@attrs.frozen
class Frozen:
    x: torch.Tensor
    names: list[str]


@pytest.mark.parametrize("kind", [Checked, Frozen, namedtuple("Named", ["x", "names"])])
def test_batches_of_classes_with_fields_have_rows_and_are_completed(kind: Any) -> None:
    ready = [kind(torch.arange(first, min(first + 2, 5)), ["n"] * min(2, 5 - first)) for first in (0, 2, 4)]
    first, second = part(ready), part(ready, 1)
    assert [(batch.x.tolist(), len(batch.names)) for batch in first] == [([0, 1], 2), ([4, 0], 2)]
    assert [second.current and second.current.padding for _ in second] == [0, 2]
    assert all(type(batch) is kind for batch in first)


@pytest.mark.parametrize("size", [5, 6, 7, 8, 9, 10, 12])
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("dispatch", [True, False])
def test_the_length_of_split_batches_is_the_number_that_this_process_gets(
    size: int, even: bool, dispatch: bool
) -> None:
    config = DataLoaderConfiguration(split_batches=True, even_batches=even, dispatch_batches=dispatch)
    batches = BatchSampler(range(size), 6, drop_last=False)
    for make in (
        lambda: DataLoader(Numbers(size), batch_size=6),
        lambda: DataLoader(Numbers(size), batch_size=6, drop_last=True),
        lambda: DataLoader(Numbers(size), batch_sampler=batches),
        lambda: DataLoader(Numbers(size), batch_sampler=list(batches)),
        lambda: DataLoader(Stream(size), batch_size=6),
        lambda: [torch.tensor(batch) for batch in batches],
    ):
        for index in range(3):
            loader = part(make(), index, 3, config=config)
            assert len(loader) == len(list(loader))


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("last", [1, 2, 3])
def test_arrays_and_lists_beside_tensors_of_other_widths_are_filled_up_too(rows: int, last: int) -> None:
    def batch(start: int, count: int) -> dict[str, Any]:
        numbers = range(start, start + count)
        return {
            "ids": torch.full((count, start + 1), float(start)) + torch.arange(count)[:, None],
            "images": [torch.full((1, 2 + number % 2, 2), float(number)) for number in numbers],
            "texts": [str(number) for number in numbers],
            "array": np.arange(start, start + count, dtype=np.float32),
            "missing": None,
        }

    batches = [batch(0, rows), batch(rows, rows), batch(2 * rows, min(rows, last))]
    for index in range(2):
        for given in prepare_loader(batches, shard=DataShard(index, 2)):
            numbers = given["array"].tolist()
            assert [len(given[name]) for name in ("ids", "images", "texts")] == [len(numbers)] * 3 == [rows] * 3
            assert given["ids"][:, 0].tolist() == numbers == [float(each) for each in given["texts"]]
            assert [float(each.flatten()[0]) for each in given["images"]] == numbers


def test_a_number_of_workers_belongs_to_the_loader() -> None:
    with pytest.warns(DrivetrainDeprecationWarning, match=r"\(num_workers='auto'\) has no effect") as caught:
        config = DataLoaderConfiguration(num_workers="auto")
    assert caught[0].filename == __file__
    loader = prepare_loader(DataLoader(Numbers(8), 2, num_workers=1), shard=DataShard(), config=config)
    assert loader.num_workers == 1
    with pytest.raises(ConfigurationError, match=r"num_workers=4 is not allowed.*DataLoader\(num_workers="):
        DataLoaderConfiguration(num_workers=4)  # type: ignore[arg-type]


def test_the_old_name_of_preserve_state_is_taken_and_deprecated() -> None:
    loader = prepare_loader(DataLoader(range(4), batch_size=2), shard=DataShard())
    with pytest.warns(DrivetrainDeprecationWarning, match=r"undone is deprecated.*Use preserve_state"), loader.undone():
        assert len(list(loader)) == 2
    assert loader.epoch == 0

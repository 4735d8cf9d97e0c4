"""Nested structures: every container keeps its type, every leaf its place."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from drivetrain import DataError
from drivetrain.runtime import pytrees


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    computed: Any = dataclasses.field(init=False, default="computed")


@dataclasses.dataclass
class Checked:
    x: Any

    def __post_init__(self) -> None:
        if not isinstance(self.x, Tensor):
            raise TypeError("x must be a tensor")


@dataclasses.dataclass
class Slotted:
    __slots__ = ("x", "y")
    x: Any
    y: Any


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """What tokenizers return: a mapping with its own attribute, whose `to` knows no `non_blocking`."""

    def __init__(self, data: dict[str, Any] | None = None, encodings: object = None) -> None:
        super().__init__(data or {})
        self.encodings = encodings
        self.moved_to: list[Any] = []

    def to(self, device: Any) -> Encoding:
        self.moved_to.append(device)
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


def one() -> Tensor:
    return torch.ones(2, 3)


def default_dict() -> Any:
    return collections.defaultdict(list, a=one())


CONTAINERS = {
    "tensor": one,
    "dict": lambda: {"a": one(), "b": "text"},
    "ordered dict": lambda: collections.OrderedDict(b=one(), a=one()),
    "default dict": default_dict,
    "user dict": lambda: Encoding({"a": one()}, encodings="kept"),
    "read-only mapping": lambda: types.MappingProxyType({"a": one()}),
    "list": lambda: [one(), None, 3],
    "tuple": lambda: (one(), "text"),
    "named tuple": lambda: Point(one(), "text"),
    "torch's named result": lambda: torch.max(torch.ones(2, 2), 0),
    "frozen dataclass with a computed field": lambda: Frozen(one()),
    "dataclass that checks itself": lambda: Checked(one()),
    "dataclass with slots": lambda: Slotted(one(), 1),
    "deep": lambda: {"a": [Point((one(),), {"b": Frozen([one()])})]},
    "empty": lambda: {"a": [], "b": (), "c": {}},
}


def tensors(data: Any) -> list[Tensor]:
    found: list[Tensor] = []
    pytrees.recursively_apply(found.append, data)
    return found


def types_of(data: Any) -> Any:
    """The nesting of types, to compare two structures by."""
    if isinstance(data, Tensor):
        return "tensor"
    if isinstance(data, collections.abc.Mapping):
        return type(data), {key: types_of(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data), [types_of(value) for value in data]
    if dataclasses.is_dataclass(data):
        return type(data), [types_of(getattr(data, field.name)) for field in dataclasses.fields(data)]
    return data


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_applying_changes_every_tensor_and_keeps_every_type(make: Any) -> None:
    data = make()
    before = [tensor.clone() for tensor in tensors(data)]

    doubled = pytrees.recursively_apply(lambda tensor: tensor * 2, data)

    assert types_of(doubled) == types_of(data)
    assert len(tensors(doubled)) == len(before)
    for result, original, untouched in zip(tensors(doubled), before, tensors(data), strict=True):
        torch.testing.assert_close(result, original * 2)
        torch.testing.assert_close(untouched, original)


def test_a_copy_of_a_mapping_keeps_what_is_not_an_item() -> None:
    doubled = pytrees.recursively_apply(lambda tensor: tensor * 2, default_dict())
    assert doubled["missing"] == []
    encoding = pytrees.recursively_apply(lambda tensor: tensor * 2, Encoding({"a": one()}, encodings="kept"))
    assert encoding.encodings == "kept"


def test_func_gets_the_further_arguments() -> None:
    result = pytrees.recursively_apply(lambda leaf, add, *, times: leaf * times + add, [1, 2], 1, times=10,
                                      test_type=lambda leaf: isinstance(leaf, int))  # fmt: skip
    assert result == [11, 21]


def test_a_leaf_that_is_no_tensor_can_be_refused_by_name() -> None:
    def scale(tensor: Tensor) -> Tensor:
        return tensor

    with pytest.raises(DataError, match=r"scale does not accept values of type 'str'.*gather_object"):
        pytrees.recursively_apply(scale, {"a": [one(), "text"]}, error_on_other_type=True)


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
@pytest.mark.parametrize("non_blocking", [False, True])
def test_sending_moves_every_tensor_and_keeps_every_type(make: Any, non_blocking: bool) -> None:
    data = make()
    moved = pytrees.send_to_device(data, torch.device("meta"), non_blocking=non_blocking)
    assert types_of(moved) == types_of(data)
    assert all(tensor.device.type == "meta" for tensor in tensors(moved))


def test_an_object_moves_itself_by_its_own_method() -> None:
    encoding = Encoding({"a": one()})
    moved = pytrees.send_to_device({"encoding": encoding}, "meta", non_blocking=True)
    assert moved["encoding"] is encoding
    assert encoding.moved_to == ["meta"]
    packed = pytrees.send_to_device(pack_sequence([torch.ones(3), torch.ones(2)]), "meta")
    assert isinstance(packed, PackedSequence)
    assert packed.data.device.type == "meta"


@pytest.mark.parametrize("skip_keys", ["stay", ["stay"], ("stay", "other")])
def test_keys_to_skip_are_skipped_at_every_depth(skip_keys: Any) -> None:
    data = {
        "stay": one(),
        "go": [{"stay": [one()], "go": one()}],
        "encoding": Encoding({"stay": one(), "go": one()}),
    }
    moved = pytrees.send_to_device(data, "meta", skip_keys=skip_keys)
    assert moved["stay"].device.type == "cpu"
    assert moved["go"][0]["stay"][0].device.type == "cpu"
    assert moved["go"][0]["go"].device.type == "meta"
    assert moved["encoding"]["stay"].device.type == "cpu"
    assert moved["encoding"]["go"].device.type == "meta"


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (torch.ones(4, 2), 4),
        ([torch.ones(3), torch.ones(5)], 3),
        ({"scale": torch.tensor(1.0), "x": torch.ones(7, 1)}, 7),
        ({"text": ["a", "b"], "ids": torch.ones(2)}, 2),
        (Point("label", torch.ones(6)), 6),
        ((np.ones((5, 2)), torch.ones(4)), 5),
        (Encoding({"ids": torch.ones(8, 3)}), 8),
        (Frozen([torch.ones(9)]), 9),
        (torch.ones(0, 2), 0),
    ],
)
def test_the_size_of_a_batch_is_that_of_its_first_tensor_with_rows(batch: Any, rows: int) -> None:
    assert pytrees.find_batch_size(batch) == rows
    assert pytrees.batch_size_or_none(batch) == rows


@pytest.mark.parametrize(
    ("batch", "described"),
    [
        (torch.tensor(1.0), r"a tensor of shape \(\)"),
        ({"text": ["a"], "n": 3}, r"a dict with the keys \['text', 'n'\]"),
        (["a", 1], r"a list of 2 \(str, int\)"),
        ([], "a list of 0"),
        (object(), "an object of type 'object'"),
        (None, "NoneType"),
    ],
)
def test_a_batch_without_a_size_is_described_with_the_way_out(batch: Any, described: str) -> None:
    with pytest.raises(DataError, match=rf"{described}.*batch_size=") as caught:
        pytrees.find_batch_size(batch)
    assert isinstance(caught.value, ValueError)
    assert pytrees.batch_size_or_none(batch) is None


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_concatenating_joins_leaf_by_leaf(dim: int) -> None:
    parts = [{"a": Point(torch.full((2, 2), float(i)), [torch.full((1, 1), i)])} for i in range(3)]
    joined = pytrees.concatenate(parts, dim=dim)
    assert types_of(joined) == types_of(parts[0])
    torch.testing.assert_close(joined["a"].x, torch.cat([part["a"].x for part in parts], dim))
    torch.testing.assert_close(joined["a"].y[0], torch.cat([part["a"].y[0] for part in parts], dim))


def test_concatenating_goes_by_the_keys_and_not_by_their_order() -> None:
    joined = pytrees.concatenate([{"a": torch.zeros(1), "b": torch.ones(1)}, {"b": torch.ones(1), "a": torch.zeros(1)}])
    assert joined["a"].tolist() == [0, 0]
    assert joined["b"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "empty list"),
        ([{"a": one()}, {"b": one()}], r"different forms: a dict with the keys \['a'\] and .*\['b'\]"),
        ([[one()], [one(), one()]], "different forms: a list of 1 .* and a list of 2"),
        ([[one()], one()], "different forms"),
        ([one(), "text"], "got a tensor and an object of type 'str'"),
        ([["text"], ["text"]], "values of type 'str'"),
    ],
)
def test_what_cannot_be_concatenated_is_said(parts: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        pytrees.concatenate(parts)


def test_slicing_takes_rows_and_leaves_what_has_none() -> None:
    sliced = pytrees.slice_tensors({"x": torch.arange(6), "scale": torch.tensor(2.0), "name": "n"}, slice(1, 3))
    assert sliced["x"].tolist() == [1, 2]
    assert sliced["scale"].item() == 2.0
    assert sliced["name"] == "n"


def test_listify_makes_python_numbers_of_every_dtype() -> None:
    data = {
        "half": torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
        "flag": torch.tensor([True]),
        "n": torch.tensor(3),
    }
    assert pytrees.listify(data) == {"half": [1.0, 1.0], "flag": [True], "n": 3}


def test_tensors_can_be_allocated_from_the_description_of_others() -> None:
    data = {"x": torch.ones(2, 3, dtype=torch.float16), "y": [torch.ones(4, dtype=torch.bool)], "name": "n"}
    structure = pytrees.get_data_structure(data)
    assert pytrees.is_tensor_information(structure["x"])
    assert not pytrees.is_tensor_information(data["x"])
    again = pytrees.initialize_tensors(structure)
    assert types_of(again) == types_of(data)
    for allocated, original in zip(tensors(again), tensors(data), strict=True):
        assert (allocated.shape, allocated.dtype) == (original.shape, original.dtype)
    assert pytrees.initialize_tensors(structure, device="meta")["x"].device.type == "meta"


def test_the_device_of_a_structure_is_that_of_its_first_tensor() -> None:
    assert pytrees.find_device(["text", torch.ones(1, device="meta"), one()]) == torch.device("meta")
    assert pytrees.find_device({"text": "a"}) is None


def test_honor_type_makes_sequences_of_every_kind() -> None:
    assert pytrees.honor_type([0], (i for i in range(2))) == [0, 1]
    assert pytrees.honor_type((0,), (i for i in range(2))) == (0, 1)
    assert pytrees.honor_type(Point(0, 0), (i for i in range(2))) == Point(0, 1)
    assert pytrees.is_namedtuple(Point(0, 0))
    assert not pytrees.is_namedtuple((0, 0))

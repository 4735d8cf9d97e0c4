"""What a checkpoint's state may consist of."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from drivetrain import CheckpointError
from drivetrain.checkpoint.tree import pack, tensor_keys, unpack
from tests.checkpoint.states import assert_same


def there_and_back(tree: Any) -> Any:
    packed, tensors = pack(tree)
    return unpack(json.loads(json.dumps(packed, allow_nan=False)), tensors.__getitem__)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**80,
        -0.0,
        0.1,
        math.inf,
        -math.inf,
        math.nan,
        "naïve / 100 % \udcff",
        b"\x00\xff",
        1 + 2j,
        (1, (2,), [3]),
        {1: "a", "1": "b", 2.5: "c", None: "d", (1, 2): "e"},
        {"__tensor__": "mine"},
        {"__dict__": 1},
        {},
        [],
        (),
        {1, 2},
        frozenset({1}),
        torch.bfloat16,
        torch.device("cpu"),
        Path("a/b"),
    ],
    ids=repr,
)
def test_a_plain_value_comes_back_as_it_was(value: Any) -> None:
    assert_same(there_and_back({"value": value}), {"value": value})
    assert str(there_and_back(value)) == str(value)


def test_counters_and_deques_come_back_as_such_since_schedulers_use_their_methods() -> None:
    found = there_and_back({"milestones": Counter([3, 3, 9]), "window": deque([1.0, 2.0]), "o": OrderedDict(a=1)})
    assert found == {"milestones": Counter({3: 2, 9: 1}), "window": deque([1.0, 2.0]), "o": {"a": 1}}
    assert list(found["milestones"].elements()) == [3, 3, 9]


def test_numpy_values_come_back() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3).T
    found = there_and_back({"array": array, "scalar": np.float64(0.1), "count": np.int32(7), "empty": np.zeros(())})
    assert found["array"].dtype == np.int16
    assert (found["array"] == array).all()
    assert (found["scalar"], found["count"], found["empty"].shape) == (0.1, 7, ())


def test_keys_of_tensors_are_paths_that_cannot_collide() -> None:
    tree = {"a/b": {"c": torch.tensor(1)}, "a": {"b/c": torch.tensor(2), "b": {"c": torch.tensor(3)}}}
    tree |= {"n": {1: torch.tensor(4), "1": torch.tensor(5)}, "l": [torch.tensor(6)]}
    packed, tensors = pack(tree)
    assert sorted(int(value) for value in tensors.values()) == [1, 2, 3, 4, 5, 6]
    assert_same(unpack(packed, tensors.__getitem__), tree)
    assert "a/b/c" in tensors


def test_tied_weights_are_kept_once_and_views_apart() -> None:
    model = nn.ModuleDict({"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)})
    model["second"].weight = model["first"].weight
    packed, tensors = pack(model.state_dict())
    assert sorted(tensors) == ["first.bias", "first.weight", "second.bias"]
    assert tensor_keys(packed) == ["first.weight", "first.bias", "second.bias"]
    base = torch.arange(6.0)
    assert len(pack({"whole": base, "half": base[:3], "other": base.view(2, 3)})[1]) == 3
    assert len(pack({"empty": torch.empty(0), "other": torch.empty(0)})[1]) == 2
    held_by_a_peer = torch.empty(3, device="meta")
    assert list(pack({"one": held_by_a_peer, "tied": held_by_a_peer})[1]) == ["one"]


class Point(NamedTuple):
    x: int


class Loud(dict[str, int]):
    pass


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"),
        (nn.Linear(1, 1), "Linear"),
        (Point(1), "Point"),
        (Loud(a=1), "Loud"),
        (lambda: 1, "function"),
        (np.array(["text"]), "NumPy array of dtype <U4"),
        (np.array([object()]), "NumPy array of dtype object"),
        (torch.eye(2).to_sparse(), "sparse_coo tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_anything_else_is_refused_by_path_and_type(value: Any, kind: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        pack({"callbacks": [{"mine": value}]})
    assert "callbacks/0/mine" in str(raised.value)
    assert kind in str(raised.value)

"""Exchange between processes: every rank gets the same, in rank order, with dtypes and containers kept."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain import CollectiveError, ConfigurationError, DataError, PartialState, recursively_apply
from drivetrain.runtime import collectives
from tests.pool import ProcessesFailed, run_in_processes


class Pair(NamedTuple):
    x: Any
    y: Any


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
]
FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point]


def plain(value: Any) -> Any:
    """Words and numbers that compare with == and cross to the test."""
    return recursively_apply(
        lambda tensor: (str(tensor.dtype).removeprefix("torch."), tensor.to(_comparable(tensor.dtype)).tolist()), value
    )  # fmt: skip


def _comparable(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize == 1 and dtype.is_floating_point else dtype


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returned, or the error that it raised."""
    try:
        return plain(call())
    except (CollectiveError, ConfigurationError, DataError) as error:
        return f"{type(error).__name__}: {error}"


# three processes, every case in one world


def gather_cases(state: PartialState) -> dict[str, Any]:
    rank = state.process_index
    x = torch.arange(6.0).view(3, 2) + 10 * rank
    grad = torch.full((1,), float(rank), requires_grad=True)
    cases: dict[str, Any] = {
        "rows": lambda: torch.tensor([[rank, rank]]),
        "no dimension": lambda: torch.tensor(rank),
        "not contiguous": lambda: x.t(),
        "strided": lambda: x[::2, 1],
        "expanded": lambda: torch.tensor([rank]).expand(2),
        "no rows": lambda: torch.empty(0, 2),
        "of a graph": lambda: grad * 2,
        "conjugate": lambda: torch.tensor([complex(0, rank)]).conj(),
        "nested": lambda: {"a": [Pair(torch.tensor([rank]), (torch.tensor(rank),))]},
        "ordered dict": lambda: collections.OrderedDict(b=torch.tensor([rank]), a=torch.tensor([-rank])),
        "empty": dict,
        "not a tensor": lambda: {"a": "text"},
        **{f"{dtype}": lambda dtype=dtype: torch.tensor([rank, 1]).to(dtype) for dtype in DTYPES},
    }
    results = {name: outcome(lambda make=make: collectives.gather(make())) for name, make in cases.items()}
    gathered = collectives.gather(grad * 2)
    results["needs no gradient"] = not gathered.requires_grad
    return results


def gather_rows_cases(state: PartialState) -> dict[str, Any]:
    rank = state.process_index
    x = torch.arange(8).view(4, 2) + 100 * rank
    cases: dict[str, tuple[Any, int]] = {
        "rank rows each": (x, rank),
        "none on the last": (x, 4 if rank < 2 else 0),
        "none at all": (x, 0),
        "as many each": (x, 2),
        "as many rows as are kept": (x[: rank + 1], rank + 1),
        "nested": ({"x": x, "y": (x[:, 0].to(torch.bfloat16),)}, rank),
        "not contiguous": (x.view(2, 4).t(), rank),
        "without rows of its own": ({"x": x[:, 0], "loss": torch.tensor(rank / 2)}, rank),
        "more than there are, on rank 1": (x, 5 if rank == 1 else 2),
        "below zero": (x, -1),
        "not a tensor": (["text"], 1),
    }
    results = {name: outcome(lambda case=case: collectives.gather_rows(*case)) for name, case in cases.items()}
    x_before = torch.arange(8).view(4, 2) + 100 * rank
    results["argument untouched"] = torch.equal(x, x_before)
    return results


def reduce_cases(state: PartialState) -> dict[str, Any]:
    rank = state.process_index
    x = torch.tensor([1.0, -2.0]) * (rank + 1)
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "default": (x, {}),
        "sum": (x, {"reduction": "sum"}),
        "mean": (x, {"reduction": "mean"}),
        "max": (x, {"reduction": "max"}),
        "min": (x, {"reduction": "min"}),
        "none": (x, {"reduction": "none"}),
        "scaled": (x, {"reduction": "sum", "scale": 0.5}),
        "scaled alone": (x, {"reduction": "none", "scale": 2.0}),
        "no dimension": (torch.tensor(float(rank)), {"reduction": "sum"}),
        "not contiguous": (torch.arange(4.0).view(2, 2).t(), {"reduction": "sum"}),
        "nested": ({"a": Pair(x, [x])}, {"reduction": "max"}),
        "integers": (torch.tensor([2**40 + rank]), {"reduction": "sum"}),
        "integers, max": (torch.tensor([rank], dtype=torch.int16), {"reduction": "max"}),
        "integers, mean": (torch.tensor([rank]), {"reduction": "mean"}),
        "integers, scaled": (torch.tensor([rank]), {"reduction": "sum", "scale": 0.5}),
        "any": (torch.tensor([rank == 1, False]), {"reduction": "max"}),
        "all": (torch.tensor([rank == 1, True]), {"reduction": "min"}),
        "booleans, sum": (torch.tensor([True]), {"reduction": "sum"}),
        "complex": (torch.tensor([complex(rank, 1)]), {"reduction": "sum"}),
        "complex, max": (torch.tensor([complex(rank, 1)]), {"reduction": "max"}),
        "half, whose sum is out of range": (torch.tensor([40000.0], dtype=torch.float16), {"reduction": "mean"}),
        "unknown": (x, {"reduction": "avg"}),
        "near a known one": (x, {"reduction": "summ"}),
        "not a tensor": ([1.0], {}),
        **{f"{dtype}": (torch.tensor([rank, 1]).to(dtype), {"reduction": "sum"}) for dtype in DTYPES[:-1]},
    }
    results = {name: outcome(lambda c=case: collectives.reduce(c[0], **c[1])) for name, case in cases.items()}
    results["argument untouched"] = plain(x)
    return results


def broadcast_cases(state: PartialState) -> dict[str, Any]:
    rank = state.process_index
    results: dict[str, Any] = {}
    for source in (0, 2):
        mine = torch.arange(4.0).view(2, 2) + 10 * rank
        data = {"x": mine, "y": [torch.tensor(rank)]}
        given = collectives.broadcast(data, from_process=source)
        results[f"from {source}"] = plain(given)
        results[f"in place from {source}"] = torch.equal(mine, given["x"])
        transposed = (torch.arange(4.0).view(2, 2) + 10 * rank).t()
        results[f"not contiguous from {source}"] = plain(collectives.broadcast(transposed, source))
        objects = [f"rank {rank}", {"rank": rank}]
        results[f"objects from {source}"] = collectives.broadcast_object_list(objects, from_process=source)
        results[f"objects in place from {source}"] = objects
    for dtype in DTYPES:
        results[f"{dtype}"] = plain(collectives.broadcast(torch.tensor([rank, 1]).to(dtype), from_process=1))
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    collectives.broadcast(parameter)
    results["a parameter"] = parameter.tolist()
    results["no such rank"] = outcome(lambda: collectives.broadcast(torch.ones(1), from_process=3))
    results["no such rank for objects"] = outcome(lambda: collectives.broadcast_object_list([1], from_process=-1))
    return results


def object_cases(state: PartialState) -> dict[str, Any]:
    rank = state.process_index
    return {
        "lists": collectives.gather_object([rank] * rank),
        "tuples": collectives.gather_object((rank, "x")),
        "text": collectives.gather_object("abc"[rank]),
        "dicts": collectives.gather_object({"rank": rank}),
        "none": collectives.gather_object(None),
        "made in a function": outcome(lambda: collectives.gather_object([collections.namedtuple("Here", "x")(rank)])),
    }


def pad_cases(state: PartialState) -> dict[str, Any]:
    rank = state.process_index
    x = torch.full((rank + 1, 2), rank + 1)
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "at the end": (x, {}),
        "at the start": (x, {"pad_first": True}),
        "with a value": (x, {"pad_index": -100}),
        "last dimension": (x.t(), {"dim": -1}),
        "dimension 1": (x.t(), {"dim": 1, "pad_first": True}),
        "a dimension that is not there": (x, {"dim": 2}),
        "equal already": (torch.ones(2), {}),
        "no rows": (torch.ones(rank), {}),
        "nested": ({"x": x[:, 0], "y": [torch.ones(3 - rank, dtype=torch.bool)], "z": torch.tensor(rank)}, {}),
        "half": (torch.ones(rank + 1, dtype=torch.bfloat16), {"pad_index": 0.5}),
        "not a tensor": ("text", {}),
    }
    return {
        name: outcome(lambda c=case: collectives.pad_across_processes(c[0], **c[1])) for name, case in cases.items()
    }


def everything() -> dict[str, dict[str, Any]]:
    state = PartialState()
    return {
        "gather": gather_cases(state),
        "rows": gather_rows_cases(state),
        "reduce": reduce_cases(state),
        "broadcast": broadcast_cases(state),
        "objects": object_cases(state),
        "pad": pad_cases(state),
    }


@pytest.fixture(scope="module", params=[None, "1"], ids=["plain", "debug"])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of three ranks got; the debug mode must not change it."""
    return run_in_processes(everything, world_size=3, timeout=60, env={"DRIVETRAIN_DEBUG": request.param})


def by_rank(results: list[dict[str, Any]], family: str, name: str) -> list[Any]:
    return [each[family][name] for each in results]


def check(results: list[dict[str, Any]], family: str, name: str, expected: Any) -> None:
    """All ranks must have got the same, or what the text says if `expected` is an error's beginning."""
    for got in by_rank(results, family, name):
        if isinstance(expected, str):
            assert isinstance(got, str), f"{family} of {name} gave {got}"
            assert got.startswith(expected.split("...")[0]), got
            assert all(part in got for part in expected.split("...")), got
        else:
            assert got == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rows", ("int64", [[0, 0], [1, 1], [2, 2]])),
        ("no dimension", ("int64", [0, 1, 2])),
        ("not contiguous", ("float32", [[0, 2, 4], [1, 3, 5], [10, 12, 14], [11, 13, 15], [20, 22, 24], [21, 23, 25]])),
        ("strided", ("float32", [1, 5, 11, 15, 21, 25])),
        ("expanded", ("int64", [0, 0, 1, 1, 2, 2])),
        ("no rows", ("float32", [])),
        ("of a graph", ("float32", [0, 2, 4])),
        ("conjugate", ("complex64", [0, -1j, -2j])),
        ("nested", {"a": [Pair(("int64", [0, 1, 2]), (("int64", [0, 1, 2]),))]}),
        ("ordered dict", collections.OrderedDict(b=("int64", [0, 1, 2]), a=("int64", [0, -1, -2]))),
        ("empty", {}),
        ("not a tensor", "DataError: ...values of type 'str'"),
        ("needs no gradient", True),
        *[
            (str(dtype), (str(dtype)[6:], [0, 1, 1, 1, bool(2) if dtype is torch.bool else 2, 1]))
            for dtype in DTYPES
        ],
    ],
)  # fmt: skip
def test_gather(name: str, expected: Any, results: list[dict[str, Any]]) -> None:
    check(results, "gather", name, expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rank rows each", ("int64", [[100, 101], [200, 201], [202, 203]])),
        ("none on the last", ("int64", [[b + i, b + i + 1] for b in (0, 100) for i in (0, 2, 4, 6)])),
        ("none at all", ("int64", [])),
        ("as many each", ("int64", [[b + i, b + i + 1] for b in (0, 100, 200) for i in (0, 2)])),
        ("as many rows as are kept", ("int64", [[0, 1], [100, 101], [102, 103], [200, 201], [202, 203], [204, 205]])),
        ("nested", {"x": ("int64", [[100, 101], [200, 201], [202, 203]]), "y": (("bfloat16", [100, 200, 202]),)}),
        ("not contiguous", ("int64", [[100, 104], [200, 204], [201, 205]])),
        ("without rows of its own", {"x": ("int64", [100, 200, 202]), "loss": ("float32", [0.0, 0.5, 1.0])}),
        ("more than there are, on rank 1", "CollectiveError: ...not true on rank(s) [1]"),
        ("below zero", "CollectiveError: ...not true on rank(s) [0, 1, 2]"),
        ("not a tensor", "DataError: "),
        ("argument untouched", True),
    ],
)  # fmt: skip
def test_gather_rows(name: str, expected: Any, results: list[dict[str, Any]]) -> None:
    check(results, "rows", name, expected)


REFUSED = "DataError: reduce keeps the dtype of tensors, ..."


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("default", ("float32", [2, -4])),
        ("sum", ("float32", [6, -12])),
        ("mean", ("float32", [2, -4])),
        ("max", ("float32", [3, -2])),
        ("min", ("float32", [1, -6])),
        ("scaled", ("float32", [3, -6])),
        ("no dimension", ("float32", 3)),
        ("not contiguous", ("float32", [[0, 6], [3, 9]])),
        ("nested", {"a": Pair(("float32", [3, -2]), [("float32", [3, -2])])}),
        ("integers", ("int64", [3 * 2**40 + 3])),
        ("integers, max", ("int16", [2])),
        ("integers, mean", REFUSED + "mean of torch.int64 may not...tensor.float()"),
        ("integers, scaled", REFUSED + "sum of torch.int64 times 0.5 may not"),
        ("any", ("bool", [True, False])),
        ("all", ("bool", [False, True])),
        ("booleans, sum", REFUSED + "sum of torch.bool may not"),
        ("complex", ("complex64", [3 + 3j])),
        ("complex, max", REFUSED + "max of torch.complex64 may not"),
        ("half, whose sum is out of range", ("float16", [40000])),
        ("unknown", "ConfigurationError: Unknown reduction 'avg'. Allowed: sum, mean, max, min, none."),
        ("near a known one", "ConfigurationError: ...Did you mean 'sum'?"),
        ("not a tensor", "DataError: "),
        *[(str(dtype), (str(dtype)[6:], [3, 3])) for dtype in DTYPES[:-1]],
    ],
)
def test_reduce(name: str, expected: Any, results: list[dict[str, Any]]) -> None:
    check(results, "reduce", name, expected)


def test_reducing_to_none_leaves_each_process_its_own(results: list[dict[str, Any]]) -> None:
    own = [("float32", [1, -2]), ("float32", [2, -4]), ("float32", [3, -6])]
    assert by_rank(results, "reduce", "none") == own
    assert by_rank(results, "reduce", "argument untouched") == own
    doubled = [("float32", [2, -4]), ("float32", [4, -8]), ("float32", [6, -12])]
    assert by_rank(results, "reduce", "scaled alone") == doubled


@pytest.mark.parametrize("source", [0, 2])
def test_broadcast(source: int, results: list[dict[str, Any]]) -> None:
    b = 10 * source
    expected = {"x": ("float32", [[b, b + 1], [b + 2, b + 3]]), "y": [("int64", source)]}
    check(results, "broadcast", f"from {source}", expected)
    check(results, "broadcast", f"in place from {source}", True)
    check(results, "broadcast", f"not contiguous from {source}", ("float32", [[b, b + 2], [b + 1, b + 3]]))
    for how in ("objects", "objects in place"):
        check(results, "broadcast", f"{how} from {source}", [f"rank {source}", {"rank": source}])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast_keeps_dtypes(dtype: torch.dtype, results: list[dict[str, Any]]) -> None:
    check(results, "broadcast", str(dtype), (str(dtype)[6:], [1, 1]))


def test_broadcast_overwrites_a_parameter(results: list[dict[str, Any]]) -> None:
    check(results, "broadcast", "a parameter", [0, 0])


def test_a_rank_that_is_not_there_is_refused(results: list[dict[str, Any]]) -> None:
    check(results, "broadcast", "no such rank", "ConfigurationError: from_process=3 ...ranks 0 to 2")
    check(results, "broadcast", "no such rank for objects", "ConfigurationError: from_process=-1 ")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lists", [1, 2, 2]),
        ("tuples", [0, "x", 1, "x", 2, "x"]),
        ("text", ["a", "b", "c"]),
        ("dicts", [{"rank": 0}, {"rank": 1}, {"rank": 2}]),
        ("none", [None, None, None]),
    ],
)
def test_gather_object(name: str, expected: Any, results: list[dict[str, Any]]) -> None:
    assert by_rank(results, "objects", name) == [expected] * 3


def test_objects_of_a_class_that_other_processes_do_not_have_are_refused(results: list[dict[str, Any]]) -> None:
    check(results, "objects", "made in a function", "DataError: gather_object on rank...top level of a module")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("at the end", [[[1, 1], [0, 0], [0, 0]], [[2, 2], [2, 2], [0, 0]], [[3, 3], [3, 3], [3, 3]]]),
        ("at the start", [[[0, 0], [0, 0], [1, 1]], [[0, 0], [2, 2], [2, 2]], [[3, 3], [3, 3], [3, 3]]]),
        ("with a value", [[[1, 1], [-100] * 2, [-100] * 2], [[2, 2], [2, 2], [-100] * 2], [[3, 3], [3, 3], [3, 3]]]),
        ("last dimension", [[[1, 0, 0], [1, 0, 0]], [[2, 2, 0], [2, 2, 0]], [[3, 3, 3], [3, 3, 3]]]),
        ("dimension 1", [[[0, 0, 1], [0, 0, 1]], [[0, 2, 2], [0, 2, 2]], [[3, 3, 3], [3, 3, 3]]]),
        ("a dimension that is not there", [[[1, 1]], [[2, 2], [2, 2]], [[3, 3], [3, 3], [3, 3]]]),
        ("equal already", [[1, 1]] * 3),
        ("no rows", [[0, 0], [1, 0], [1, 1]]),
    ],
)  # fmt: skip
def test_padding(name: str, expected: Any, results: list[dict[str, Any]]) -> None:
    assert [values for _, values in by_rank(results, "pad", name)] == expected


def test_padding_goes_leaf_by_leaf_and_keeps_dtypes(results: list[dict[str, Any]]) -> None:
    assert by_rank(results, "pad", "nested") == [
        {"x": ("int64", [1, 0, 0]), "y": [("bool", [True, True, True])], "z": ("int64", 0)},
        {"x": ("int64", [2, 2, 0]), "y": [("bool", [True, True, False])], "z": ("int64", 1)},
        {"x": ("int64", [3, 3, 3]), "y": [("bool", [True, False, False])], "z": ("int64", 2)},
    ]
    assert by_rank(results, "pad", "half")[0] == ("bfloat16", [1, 0.5, 0.5])
    check(results, "pad", "not a tensor", "DataError: ")


# debug mode: what would hang or be garbage is an error on every rank


def disagree(case: str) -> str:
    rank = PartialState().process_index
    more = int(rank == 1)
    integers = torch.ones(2, dtype=torch.int32 if more else torch.int64)
    calls: dict[str, Callable[[], Any]] = {
        "gather, rows": lambda: collectives.gather({"a": torch.ones(2 + more, 3)}),
        "gather, dtypes": lambda: collectives.gather(integers),
        "gather, keys": lambda: collectives.gather({f"k{more}": torch.ones(1)}),
        "gather, depth": lambda: collectives.gather([torch.ones(1)] * (1 + more)),
        "gather_rows, columns": lambda: collectives.gather_rows(torch.ones(4, 2 + more), keep=rank),
        "reduce": lambda: collectives.reduce(torch.ones(1 + more)),
        "broadcast": lambda: collectives.broadcast(torch.ones(1 + more)),
        "broadcast_object_list": lambda: collectives.broadcast_object_list([None] * (1 + more)),
        "pad_across_processes": lambda: collectives.pad_across_processes(torch.ones([1] * (1 + more))),
        "different ones": lambda: (collectives.reduce if more else collectives.gather)(torch.ones(1)),
    }
    with pytest.raises(CollectiveError) as caught:
        calls[case]()
    # Everyone is still in step.
    assert collectives.gather_object(rank) == list(range(PartialState().num_processes))
    return str(caught.value)


def disagree_in_turn(cases: list[str]) -> dict[str, str]:
    return {case: disagree(case) for case in cases}


DISAGREEMENTS = {
    "gather, rows": ["gather({'a': float32[2, 3]})", "gather({'a': float32[3, 3]})"],
    "gather, dtypes": ["int64[2]", "int32[2]"],
    "gather, keys": ["'k0'", "'k1'"],
    "gather, depth": ["gather([float32[1]])", "gather([float32[1], float32[1]])"],
    "gather_rows, columns": ["gather_rows(float32[*, 2])", "gather_rows(float32[*, 3])"],
    "reduce": ["reduce(float32[1])", "reduce(float32[2])"],
    "broadcast": ["broadcast(float32[1])", "broadcast(float32[2])"],
    "broadcast_object_list": ["[NoneType]", "[NoneType, NoneType]"],
    "pad_across_processes": ["float32[*]", "float32[*, *]"],
    "different ones": ["gather(float32[1])", "reduce(float32[1])"],
}


@pytest.fixture(scope="module")
def disagreements() -> list[dict[str, str]]:
    return run_in_processes(
        disagree_in_turn, world_size=3, args=(list(DISAGREEMENTS),), timeout=60, env={"DRIVETRAIN_DEBUG": "1"}
    )


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_the_rank_that_differs_is_named_on_every_rank(case: str, disagreements: list[dict[str, str]]) -> None:
    usual, other = DISAGREEMENTS[case]
    for each in disagreements:
        lines = each[case].splitlines()
        assert lines[0].startswith("Rank(s) [1] ")
        assert [usual in lines[1], other in lines[2], usual in lines[3]] == [True, True, True]
        assert [line.split(":")[0].strip() for line in lines[1:4]] == ["rank 0", "rank 1", "rank 2"]


# a peer that is gone


def lose_a_peer() -> str:
    state = PartialState()
    collectives.gather(torch.ones(1))
    if state.process_index == 1:
        os._exit(7)
    with pytest.raises(CollectiveError) as caught:
        collectives.gather(torch.ones(1))
    dist.destroy_process_group()
    raise RuntimeError(f"rank 0 was told: {caught.value}")


def test_a_peer_that_is_gone_is_named_as_the_likely_cause() -> None:
    with pytest.raises(ProcessesFailed) as caught:
        run_in_processes(lose_a_peer, timeout=60)
    assert "rank 0 was told: gather failed on rank 0 of 2: " in caught.value.tracebacks[0]
    assert "Most often another process raised or was stopped" in caught.value.tracebacks[0]


# a world of one


def test_alone_nothing_is_exchanged_or_copied() -> None:
    PartialState(cpu=True)
    x = torch.ones(3, 2)
    data = {"x": x, "n": torch.tensor(1.0)}
    assert collectives.gather(data) is data
    assert collectives.broadcast(data) is data
    assert collectives.pad_across_processes(data) is data
    assert collectives.gather_rows(data, keep=3)["x"] is x
    assert collectives.gather_rows(data, keep=2)["x"].shape == (2, 2)
    assert collectives.reduce(data)["x"] is x
    assert collectives.reduce(data, scale=2.0)["x"].tolist() == [[2, 2]] * 3
    objects = ["a"]
    assert collectives.broadcast_object_list(objects) is objects
    assert collectives.gather_object(["a", "b"]) == ["a", "b"]
    assert collectives.gather_object("ab") == ["ab"]
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: collectives.reduce(torch.ones(1), reduction="avg"), ConfigurationError),
        (lambda: collectives.reduce(torch.tensor([1]), reduction="mean"), DataError),
        (lambda: collectives.reduce(torch.tensor([True]), reduction="sum"), DataError),
        (lambda: collectives.broadcast(torch.ones(1), from_process=1), ConfigurationError),
        (lambda: collectives.broadcast_object_list([1], from_process=1), ConfigurationError),
        (lambda: collectives.gather_rows(torch.ones(2), keep=3), CollectiveError),
    ],
)
def test_what_is_refused_among_many_is_refused_alone(call: Callable[[], Tensor], error: type[Exception]) -> None:
    PartialState(cpu=True)
    with pytest.raises(error):
        call()

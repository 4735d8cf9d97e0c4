"""`PartialState`: this process among its peers."""

from __future__ import annotations

import collections
import os
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from drivetrain import ConfigurationError, DeviceNotAvailableError, DistributedType, LaunchError, PartialState
from tests.pool import run_in_processes
from tests.runtime.pretend import pretend_device

# one process


def test_a_process_alone_is_first_last_and_main() -> None:
    state = PartialState(cpu=True)
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert not state.use_distributed
    assert state.distributed_type is DistributedType.NO
    assert state.device == torch.device("cpu")
    assert state.backend is None
    assert not dist.is_initialized()
    state.wait_for_everyone()
    with state.main_process_first(), state.local_main_process_first():
        pass
    assert "Num processes: 1" in repr(state)


def test_all_instances_share_one_state() -> None:
    first, second = PartialState(cpu=True), PartialState()
    assert first.environment is second.environment
    assert second.initialized


@pytest.mark.parametrize("variable", ["1", "true", "YES"])
def test_the_launcher_s_request_for_the_cpu_is_honoured(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_device() as kind:
        monkeypatch.setattr("drivetrain.runtime.state.detect_device_kind", lambda: kind)
        monkeypatch.setenv("DRIVETRAIN_USE_CPU", variable)
        assert PartialState().kind.name == "cpu"


@pytest.mark.parametrize("variable", ["", "0", "false"])
def test_without_one_the_accelerator_is_used(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_device() as kind:
        monkeypatch.setattr("drivetrain.runtime.state.detect_device_kind", lambda: kind)
        monkeypatch.setenv("DRIVETRAIN_USE_CPU", variable)
        assert PartialState().kind is kind


def test_a_device_named_in_the_script_wins_over_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_device() as kind:
        monkeypatch.setenv("DRIVETRAIN_USE_CPU", "1")
        assert PartialState(device="pretend").kind is kind


def test_a_registered_device_is_picked_and_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_device() as kind:
        state = PartialState(device="makebelieve")
        assert state.kind is kind
        assert kind.module.calls == [("set_device", state.device)]


def test_a_state_cannot_move_to_another_device() -> None:
    with pretend_device():
        PartialState(cpu=True)
        with pytest.raises(ConfigurationError, match="already runs on 'cpu', so it cannot be moved to 'pretend'"):
            PartialState(device="pretend")


def test_an_absent_device_leaves_no_half_made_state() -> None:
    with pytest.raises(DeviceNotAvailableError, match=r"'xpu' was requested.*Available here: .*cpu"):
        PartialState(device="xpu")
    assert PartialState(cpu=True).device.type == "cpu"


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with (
        pretend_device(count=2),
        pytest.raises(ConfigurationError, match=r"3 processes, but has only 2 pretend.*--cpu"),
    ):
        PartialState(device="pretend")


def test_peers_that_never_come_are_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=r"Rank 1 of 2 could not connect .*at 127\.0\.0\.1:1 within"):
        PartialState(cpu=True, timeout=timedelta(seconds=1))


def test_decorated_functions_keep_their_name_arguments_and_result() -> None:
    state = PartialState(cpu=True)

    @state.on_main_process
    def add(left: int, right: int = 1) -> int:
        """Add."""
        return left + right

    assert add(1, right=2) == 3
    assert (add.__name__, add.__doc__) == ("add", "Add.")


def test_a_process_alone_keeps_all_inputs() -> None:
    inputs = [1, 2, 3]
    with PartialState(cpu=True).split_between_processes(inputs, apply_padding=True) as mine:
        assert mine is inputs


# several processes


def describe_myself() -> dict[str, Any]:
    state = PartialState()
    calls: list[str] = []
    state.on_main_process(calls.append)("main")
    state.on_local_main_process(calls.append)("local main")
    state.on_last_process(calls.append)("last")
    state.on_process(calls.append, process_index=1)("rank 1")
    state.on_process(process_index=2)(calls.append)("rank 2")
    state.on_local_process(calls.append, local_process_index=1)("local rank 1")
    state.print("printed by", state.process_index)
    return {
        "index": (state.process_index, state.local_process_index, state.num_processes),
        "flags": (state.is_main_process, state.is_local_main_process, state.is_last_process),
        "type": state.distributed_type,
        "device": (state.device.type, state.backend),
        "calls": calls,
    }


def test_each_of_three_processes_knows_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    zero, one, two = run_in_processes(describe_myself, world_size=3, timeout=60)
    assert [each["index"] for each in (zero, one, two)] == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]
    assert zero["flags"] == (True, True, False)
    assert one["flags"] == (False, False, False)
    assert two["flags"] == (False, False, True)
    assert {each["type"] for each in (zero, one, two)} == {DistributedType.MULTI_CPU}
    assert {each["device"] for each in (zero, one, two)} == {("cpu", "gloo")}
    assert zero["calls"] == ["main", "local main"]
    assert one["calls"] == ["rank 1", "local rank 1"]
    assert two["calls"] == ["last", "rank 2"]
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("printed")]
    assert printed == ["printed by 0"]


def take_turns(path: str) -> list[str]:
    """Each process adds its rank to one file in its turn; what the body saw shows who came before."""
    state = PartialState()
    seen: list[str] = []
    for first in (state.main_process_first, state.local_main_process_first) * 5:
        state.wait_for_everyone()
        with first():
            seen.append("there" if os.path.exists(path) else "missing")
            if state.is_main_process:
                with open(path, "w") as file:
                    file.write("made by the first")
        state.wait_for_everyone()
        if state.is_main_process:
            os.remove(path)
    return seen


def test_the_main_process_goes_first(tmp_path: Any) -> None:
    zero, one = run_in_processes(take_turns, args=(str(tmp_path / "made"),), timeout=60)
    assert zero == ["missing"] * 10
    assert one == ["there"] * 10


def raise_in_turn(raising_rank: int) -> list[str]:
    """A body that raises on one rank; afterwards everyone still agrees on the next barrier."""
    state = PartialState()
    events: list[str] = []
    for first in (state.main_process_first, state.local_main_process_first):
        try:
            with first():
                events.append("body")
                if state.process_index == raising_rank:
                    raise OSError("disk full")
        except OSError as error:
            events.append(str(error))
    state.wait_for_everyone()
    return events


@pytest.mark.parametrize("raising_rank", [0, 1])
def test_a_body_that_raises_releases_the_peers(raising_rank: int) -> None:
    events = run_in_processes(raise_in_turn, args=(raising_rank,), timeout=30)
    assert events[raising_rank] == ["body", "disk full"] * 2
    assert events[1 - raising_rank] == ["body"] * 2


class Columns:
    """Behaves as a Hugging Face dataset does: a slice is a dict, and `select` makes a smaller dataset."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self._columns = columns

    @property
    def column_names(self) -> list[str]:
        return list(self._columns)

    def __len__(self) -> int:
        return len(self._columns["x"])

    def __getitem__(self, index: Any) -> dict[str, Any]:
        return {name: column[index] for name, column in self._columns.items()}

    def select(self, indices: Any) -> Columns:
        return Columns({name: [column[i] for i in indices] for name, column in self._columns.items()})

    def __iter__(self) -> Any:
        return iter(self._columns["x"])


class Rows:
    """Has a length and slices, as a data frame has, and is no sequence."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: slice) -> Rows:
        return self


INPUTS: dict[str, Any] = {
    "list": list("abcde"),
    "tuple": tuple("abcde"),
    "text": "abcde",
    "range": range(5),
    "dataset": Columns({"x": list("abcde")}),
    "tensor": torch.arange(10).view(5, 2),
    "array": np.arange(10).reshape(5, 2),
    "dict": {"x": list("abcde"), "y": torch.arange(5)},
    "ordered dict": collections.OrderedDict(b=[1, 2], a=[3, 4]),
    "divides": list("abcdef"),
    "fewer than processes": ["a"],
    "tensor with fewer rows than processes": torch.tensor([[7]]),
    "nothing": [],
    "no rows": torch.empty(0, 2),
    "empty dict": {},
}


def plain(value: Any) -> Any:
    """In words that compare with ==, and cross to the test."""
    if isinstance(value, dict):
        return type(value).__name__, {key: plain(item) for key, item in value.items()}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return type(value).__name__, value.tolist()
    return type(value).__name__, list(value)


def split_everything() -> dict[str, Any]:
    state = PartialState()
    parts: dict[str, Any] = {}
    for name, inputs in INPUTS.items():
        for padding in (False, True):
            with state.split_between_processes(inputs, apply_padding=padding) as mine:
                parts[f"{name}, padded" if padding else name] = plain(mine)
    try:
        with state.split_between_processes({"x": [1], "y": [1, 2]}):
            pass
    except ConfigurationError as error:
        parts["uneven dict"] = str(error)
    try:
        with state.split_between_processes(Rows(), apply_padding=True):
            pass
    except ConfigurationError as error:
        parts["cannot be padded"] = str(error)
    return parts


@pytest.fixture(scope="module")
def split_parts() -> list[dict[str, Any]]:
    return run_in_processes(split_everything, world_size=3, timeout=60)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("list", [("list", ["a", "b"]), ("list", ["c", "d"]), ("list", ["e"])]),
        ("list, padded", [("list", ["a", "b"]), ("list", ["c", "d"]), ("list", ["e", "e"])]),
        ("tuple", [("tuple", ["a", "b"]), ("tuple", ["c", "d"]), ("tuple", ["e"])]),
        ("tuple, padded", [("tuple", ["a", "b"]), ("tuple", ["c", "d"]), ("tuple", ["e", "e"])]),
        ("text", [("str", ["a", "b"]), ("str", ["c", "d"]), ("str", ["e"])]),
        ("range", [("range", [0, 1]), ("range", [2, 3]), ("range", [4])]),
        ("range, padded", [("range", [0, 1]), ("range", [2, 3]), ("list", [4, 4])]),
        ("dataset", [("Columns", ["a", "b"]), ("Columns", ["c", "d"]), ("Columns", ["e"])]),
        ("dataset, padded", [("Columns", ["a", "b"]), ("Columns", ["c", "d"]), ("Columns", ["e", "e"])]),
        ("tensor", [("Tensor", [[0, 1], [2, 3]]), ("Tensor", [[4, 5], [6, 7]]), ("Tensor", [[8, 9]])]),
        (
            "tensor, padded",
            [("Tensor", [[0, 1], [2, 3]]), ("Tensor", [[4, 5], [6, 7]]), ("Tensor", [[8, 9], [8, 9]])],
        ),
        (
            "array, padded",
            [("ndarray", [[0, 1], [2, 3]]), ("ndarray", [[4, 5], [6, 7]]), ("ndarray", [[8, 9], [8, 9]])],
        ),
        (
            "dict",
            [
                ("dict", {"x": ("list", ["a", "b"]), "y": ("Tensor", [0, 1])}),
                ("dict", {"x": ("list", ["c", "d"]), "y": ("Tensor", [2, 3])}),
                ("dict", {"x": ("list", ["e"]), "y": ("Tensor", [4])}),
            ],
        ),
        (
            "ordered dict, padded",
            [
                ("OrderedDict", {"b": ("list", [1]), "a": ("list", [3])}),
                ("OrderedDict", {"b": ("list", [2]), "a": ("list", [4])}),
                ("OrderedDict", {"b": ("list", [2]), "a": ("list", [4])}),
            ],
        ),
        ("divides", [("list", ["a", "b"]), ("list", ["c", "d"]), ("list", ["e", "f"])]),
        ("divides, padded", [("list", ["a", "b"]), ("list", ["c", "d"]), ("list", ["e", "f"])]),
        ("fewer than processes", [("list", ["a"]), ("list", []), ("list", [])]),
        ("fewer than processes, padded", [("list", ["a"])] * 3),
        ("tensor with fewer rows than processes, padded", [("Tensor", [[7]])] * 3),
        ("nothing", [("list", [])] * 3),
        ("nothing, padded", [("list", [])] * 3),
        ("no rows, padded", [("Tensor", [])] * 3),
        ("empty dict, padded", [("dict", {})] * 3),
    ],
)
def test_inputs_are_split_in_order(name: str, expected: list[Any], split_parts: list[dict[str, Any]]) -> None:
    assert [parts[name] for parts in split_parts] == expected


def test_a_dict_of_uneven_values_is_refused_on_every_process(split_parts: list[dict[str, Any]]) -> None:
    assert all("equal lengths to be split, but have {'x': 1, 'y': 2}" in parts["uneven dict"] for parts in split_parts)


def test_what_cannot_be_padded_is_refused_on_every_process(split_parts: list[dict[str, Any]]) -> None:
    assert all("cannot repeat the last item of a Rows" in parts["cannot be padded"] for parts in split_parts)


def join_a_group_that_exists(names_ranks: bool) -> tuple[int, int, str | None]:
    """A script that has started torch.distributed by itself, with or without a launcher's variables."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    if not names_ranks:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name)
    state = PartialState()
    state.wait_for_everyone()
    return state.process_index, state.num_processes, state.backend


@pytest.mark.parametrize("names_ranks", [True, False])
def test_a_process_group_that_exists_is_joined(names_ranks: bool) -> None:
    places = run_in_processes(join_a_group_that_exists, args=(names_ranks,), timeout=60)
    assert places == [(0, 2, "gloo"), (1, 2, "gloo")]


def contradict_the_group_that_exists() -> str:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    os.environ["WORLD_SIZE"] = "4"
    with pytest.raises(ConfigurationError) as caught:
        PartialState()
    return str(caught.value)


def test_a_process_group_that_contradicts_the_launcher_is_refused() -> None:
    zero, _ = run_in_processes(contradict_the_group_that_exists, timeout=60)
    assert "rank 0 of 2" in zero
    assert "rank 0 of 4" in zero


def run_on_a_pretend_device() -> tuple[Any, ...]:
    with pretend_device(count=2) as kind:
        state = PartialState(device="pretend")
        total = torch.ones(1, device=state.device)
        dist.all_reduce(total)
        return state.distributed_type, state.backend, kind.module.calls, total.item()


def test_processes_meet_on_a_registered_device() -> None:
    for kind_of_run, backend, calls, total in run_in_processes(run_on_a_pretend_device, timeout=60):
        assert kind_of_run is DistributedType.MULTI_DEVICE
        assert backend == "gloo"
        assert calls == [("set_device", torch.device("cpu"))]
        assert total == 2

"""Who writes which tensor is agreed on once, and again whenever any process has other tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from drivetrain import CheckpointError
from drivetrain.checkpoint import load_run_state, save_queue, save_run_state
from drivetrain.checkpoint.shards import SnapshotPlanner
from drivetrain.runtime.state import PartialState
from tests.checkpoint.states import alone, assert_same
from tests.pool import run_in_processes


def token(state: PartialState) -> str:
    plan = save_queue(state)._plan
    assert plan is not None
    return plan.token


def tensors(add: float = 0.0) -> dict[str, Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3) + add, "b": torch.ones(3, dtype=torch.int64), "c": torch.zeros(())}


@pytest.mark.parametrize("block", [True, False])
def test_a_state_of_the_same_shapes_is_planned_once(
    block: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []
    plan = SnapshotPlanner.create_local_plan
    monkeypatch.setattr(SnapshotPlanner, "create_local_plan", lambda self: planned.append(1) or plan(self))
    before = save_queue(alone())._plan
    for number in range(3):
        shared = {"tensors": tensors(number), "number": number, "other": [number] * number}
        save_run_state(tmp_path / str(number), shared, {"x": torch.full((2,), number)}, alone(), block=block).wait(60)
    assert len(planned) == 1
    assert save_queue(alone())._plan is not before
    for number in range(3):
        shared, own = load_run_state(tmp_path / str(number), alone())
        assert_same(shared, {"tensors": tensors(number), "number": number, "other": [number] * number})
        assert_same(own, {"x": torch.full((2,), number)})


CHANGES: dict[str, Any] = {
    "a shape": {"a": torch.ones(3, 2)},
    "a dtype": {"b": torch.ones(3)},
    "a new tensor": {"d": torch.ones(1)},
    "one less": {"c": 7},
    "another order": {},
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_other_state_is_planned_again(change: str, tmp_path: Path) -> None:
    save_run_state(tmp_path / "one", tensors(), {}, alone())
    first = token(alone())
    state = {**tensors(), **CHANGES[change]}
    if change == "another order":
        state = dict(reversed(state.items()))
    save_run_state(tmp_path / "two", state, {}, alone(), block=False).wait(60)
    assert token(alone()) != first
    assert_same(load_run_state(tmp_path / "two", alone())[0], state)


def test_what_has_no_values_is_refused_also_later(tmp_path: Path) -> None:
    save_run_state(tmp_path / "one", tensors(), {}, alone())
    with pytest.raises(CheckpointError, match="a is on the meta device"):
        save_run_state(tmp_path / "two", {**tensors(), "a": torch.ones(2, 3, device="meta")}, {}, alone())
    save_run_state(tmp_path / "two", tensors(2), {}, alone())
    assert_same(load_run_state(tmp_path / "two", alone())[0], tensors(2))


def save_in_turn(root: str) -> list[tuple[str, int]]:
    state = PartialState()
    rank = state.process_index
    mesh = init_device_mesh("cpu", (2,))
    planned: list[int] = []
    plan = SnapshotPlanner.create_local_plan
    SnapshotPlanner.create_local_plan = lambda self: planned.append(1) or plan(self)  # type: ignore[method-assign]

    def sharded(value: float, placement: Any) -> Tensor:
        return distribute_tensor(torch.arange(10.0) + value, mesh, [placement])

    cases: list[tuple[Any, Any]] = [
        ({**tensors(), "d": sharded(0, Shard(0))}, {"x": torch.zeros(2)}),
        ({**tensors(1), "d": sharded(1, Shard(0))}, {"x": torch.ones(2)}),  # the same shapes
        ({**tensors(2), "d": sharded(2, Shard(0))}, {"x": torch.ones(2 + rank)}),  # other ones on rank 1 only
        ({**tensors(3), "d": sharded(3, Replicate())}, {"x": torch.ones(2 + rank)}),  # another placement
        ({**tensors(4), "d": sharded(4, Replicate())}, {"x": torch.zeros(2 + rank)}),
    ]
    seen = []
    for number, (shared, own) in enumerate(cases):
        save_run_state(f"{root}/{number}", shared, own, state, block=number % 2 == 0)
        seen.append((token(state), len(planned)))
    save_queue(state).finish()
    return seen


def test_processes_plan_again_where_any_of_them_has_other_tensors(tmp_path: Path) -> None:
    results = run_in_processes(save_in_turn, 2, args=(str(tmp_path),))
    assert results[0] == results[1]
    tokens, planned = zip(*results[0], strict=True)
    assert tokens[0] == tokens[1]
    assert tokens[3] == tokens[4]
    assert len(set(tokens)) == 3
    assert planned == (1, 1, 2, 3, 3)
    for number in range(5):
        shared, _ = load_run_state(tmp_path / str(number))
        assert_same(shared, {**tensors(number), "d": torch.arange(10.0) + number})

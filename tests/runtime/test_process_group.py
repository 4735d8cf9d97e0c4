"""Joining and leaving the process group."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain import PartialState, ProcessEnvironment
from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.process_group import barrier, destroy_process_group, init_process_group, leave_process_group
from tests.pool import run_in_processes
from tests.runtime.pretend import Pretend


def test_without_a_group_there_is_nothing_to_wait_for_or_leave() -> None:
    barrier()
    destroy_process_group()
    assert not dist.is_initialized()


def join_and_leave_twice() -> list[Any]:
    """The second time meets in a store of its own keys, as after a restart by the elastic agent."""
    environment = ProcessEnvironment.detect()
    told: list[Any] = []
    for attempt in ("0", "1"):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
        backend, _store = init_process_group(environment, get_device_kind("cpu"), timeout=timedelta(seconds=30))
        total = torch.ones(1)
        dist.all_reduce(total)
        told.append((backend, dist.get_rank(), total.item()))
        destroy_process_group()
        told.append(dist.is_initialized())
    return told


def test_a_group_can_be_left_and_joined_again() -> None:
    for rank, told in enumerate(run_in_processes(join_and_leave_twice, timeout=60)):
        assert told == [("gloo", rank, 2), False] * 2


def meet_beside_a_device() -> str:
    """A kind with another backend gets gloo beside it for the tensors of the host."""
    kind = Pretend()
    kind.backend = "cpu:gloo"
    init_process_group(ProcessEnvironment.detect(), kind)
    names: list[Any] = [None, None]
    dist.all_gather_object(names, os.environ["RANK"])
    destroy_process_group()
    return "".join(names)


def test_a_backend_spelled_by_device_is_taken_as_it_is() -> None:
    assert run_in_processes(meet_beside_a_device, timeout=60) == ["01", "01"]


def leave_although_a_peer_is_gone() -> tuple[bool, float]:
    environment = ProcessEnvironment.detect()
    _backend, store = init_process_group(environment, get_device_kind("cpu"))
    barrier()
    if environment.rank == 1:
        dist.destroy_process_group()
        return dist.is_initialized(), 0.0
    start = time.monotonic()
    leave_process_group(store, patience=timedelta(milliseconds=200))
    return dist.is_initialized(), time.monotonic() - start


def test_leaving_waits_for_a_peer_only_so_long() -> None:
    (zero, waited), (one, _) = run_in_processes(leave_although_a_peer_is_gone, timeout=30)
    assert (zero, one) == (False, False)
    assert waited > 0.1  # and less than the time-out of the test


def leave_through_the_state() -> list[Any]:
    state = PartialState()
    told: list[Any] = []
    state.before_leaving(lambda: told.append(("group is there", dist.is_initialized())))
    state.destroy_process_group()
    state.destroy_process_group()
    return [*told, dist.is_initialized()]


def test_what_depends_on_the_group_is_let_go_of_once_and_before_it() -> None:
    assert run_in_processes(leave_through_the_state, timeout=30) == [[("group is there", True), False]] * 2


@pytest.mark.parametrize("name", ["cpu", "pretend"])
def test_a_group_of_one_can_be_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = ProcessEnvironment(main_port=0)
    kind = get_device_kind("cpu") if name == "cpu" else Pretend()
    backend, _store = init_process_group(environment, kind)
    try:
        assert backend == "gloo"
        assert dist.get_world_size() == 1
        barrier()
    finally:
        destroy_process_group()

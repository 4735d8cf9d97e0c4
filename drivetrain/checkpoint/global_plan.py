"""Who writes which tensor, agreed on once and kept for as long as the state stays of the same shape."""

from __future__ import annotations

import uuid
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from drivetrain.checkpoint.peers import Failure, Peers
from drivetrain.checkpoint.shards import SnapshotPlanner
from drivetrain.runtime.errors import CheckpointError

_PLAN_AGAIN = "plan again"


@dataclass(frozen=True)
class GlobalPlan:
    """What all processes have agreed on.

    Attributes:
        token: Distinguishes it from others; the same on all processes.
        outline: What it was made for, see `outline_of`.
        local: What this process writes.
        metadata: On rank 0 where every part of every tensor belongs; None elsewhere.
    """

    token: str
    outline: Hashable
    local: SavePlan
    metadata: Metadata | None


def outline_of(tensors: Mapping[str, Tensor], elsewhere: Sequence[str]) -> Hashable:
    """All that a plan depends on; None where that cannot be found out.

    Args:
        tensors: What this process has.
        elsewhere: Keys of the tensors that only peers have.
    """
    outline: list[tuple[Any, ...]] = []
    for key, tensor in tensors.items():
        if type(tensor) is Tensor:
            outline.append((key, tensor.dtype, tensor.shape))
        elif type(tensor) is DTensor:
            outline.append((key, tensor.dtype, tensor.shape, tensor.placements, tensor.device_mesh))
        else:
            return None  # it may shard itself as it likes
    return (tuple(outline), tuple(elsewhere))


def plan_globally(
    peers: Peers, planner: SnapshotPlanner, outline: Hashable | Failure, elsewhere: list[str], known: GlobalPlan | None
) -> tuple[GlobalPlan | Failure, str]:
    """Let rank 0 decide who writes what: a tensor that all have is written once. Call it on all processes.

    Where no process has other tensors than at the time before, that is all they exchange: with thousands of tensors
    making plans and sending them takes longer than copying does.

    Args:
        peers: The processes.
        planner: Has this process's tensors.
        outline: Of them; a failure is reported to all.
        elsewhere: Keys of the tensors that only peers have.
        known: The plan of the time before.

    Returns:
        The plan, or the first failure of any process; and a token for this save.
    """
    proposal: Any = outline
    if not isinstance(outline, Failure):
        if known is not None and outline is not None and known.outline == outline:
            proposal = known.token
        else:
            proposal = peers.attempt(planner.create_local_plan)
    answer, token = _ask(peers, planner, proposal, elsewhere)
    if answer == _PLAN_AGAIN:
        if not isinstance(proposal, SavePlan):
            proposal = peers.attempt(planner.create_local_plan)
        answer, token = _ask(peers, planner, proposal, elsewhere)
    if isinstance(answer, Failure):
        return answer, token
    if answer is None:
        assert known is not None
        return known, token
    metadata = planner.metadata if peers.is_main else None
    return GlobalPlan(token, outline, planner.finish_plan(answer), metadata), token


def _ask(peers: Peers, planner: SnapshotPlanner, proposal: Any, elsewhere: list[str]) -> tuple[Any, str]:
    """Send rank 0 a local plan, a known plan's token or a failure.

    Returns:
        This process's share, None for that of the known plan, `_PLAN_AGAIN` or a failure; and a token for this save.
    """
    proposals = peers.gather(proposal)
    answers: list[Any] | None = None
    if proposals is not None:
        token = uuid.uuid4().hex[:12]
        answers = [(answer, token) for answer in _decide(peers, planner, proposals, elsewhere)]
    answer, token = peers.scatter(answers)
    return answer, token


def _decide(peers: Peers, planner: SnapshotPlanner, proposals: list[Any], elsewhere: list[str]) -> list[Any]:
    """What rank 0 answers to each process."""
    failed = next((one for one in proposals if isinstance(one, Failure)), None)
    if failed is not None:
        return [failed] * peers.size
    if all(isinstance(one, SavePlan) for one in proposals):
        made = peers.attempt(lambda: _shares(planner, proposals, elsewhere))
        return made if isinstance(made, list) else [made] * peers.size
    same = all(one == proposals[0] for one in proposals)
    return [None if same else _PLAN_AGAIN] * peers.size


def _shares(planner: SnapshotPlanner, plans: list[SavePlan], elsewhere: list[str]) -> list[SavePlan]:
    shares, metadata = planner.create_global_plan(plans)
    check_values([key for key in elsewhere if key not in metadata.state_dict_metadata])
    return shares


def check_values(keys: list[str]) -> None:
    """Raise where tensors have no values on any process."""
    if keys:
        raise CheckpointError(
            f"{', '.join(keys[:8])} is on the meta device and has no values yet. Materialise the model first."
        )

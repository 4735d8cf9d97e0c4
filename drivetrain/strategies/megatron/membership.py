"""Megatron-core's process groups, laid over the group that this process is in already, and its random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.runtime.collectives import broadcast
from drivetrain.runtime.seeds import isolated_random_state, own_generator, seed_all_generators
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.megatron.options import MegatronOptions
from drivetrain.strategies.parallel.mesh import MeshPlace
from drivetrain.strategies.topology import Topology

_LARGEST = 2**31 - 1
_OWNER = "megatron_groups"


class Membership:
    """This process in megatron-core's `parallel_state`.

    Args:
        options: The sizes of the grid.
        place: This process's place in it.
        device: Of the run.
    """

    def __init__(self, options: MegatronOptions, place: MeshPlace, device: torch.device) -> None:
        from megatron.core import parallel_state

        self._made_group = False
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
            self._made_group = True
        self._state: Any = parallel_state
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            options.tensor_parallel,
            options.pipeline_parallel,
            options.virtual_pipeline,
            context_parallel_size=options.context_parallel,
            expert_model_parallel_size=options.expert_parallel,
            expert_tensor_parallel_size=options.expert_tensor_parallel,
        )
        self._place = place
        self._generator: torch.Generator | None = None
        # Whose the groups are: a later strategy of this process makes them again.
        PartialState.registry()[_OWNER] = self

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The processes over which gradients are averaged."""
        group: dist.ProcessGroup = self._state.get_data_parallel_group(with_context_parallel=True)
        return group

    @property
    def stage_group(self) -> dist.ProcessGroup:
        """The stages of this process's pipeline."""
        group: dist.ProcessGroup = self._state.get_pipeline_model_parallel_group()
        return group

    def leave(self) -> None:
        """Forget the groups, which are about to be destroyed."""
        if PartialState.registry().get(_OWNER) is self:
            del PartialState.registry()[_OWNER]
            self._state.destroy_model_parallel()
        if self._made_group and dist.is_initialized():
            dist.destroy_process_group()
            self._made_group = False

    # random numbers

    @contextmanager
    def initial_values(self, topology: Topology) -> Iterator[None]:
        """Let what is drawn in the body be the same where processes hold copies, and differ where they hold parts.

        Args:
            topology: This process's place.
        """
        generator = own_generator("megatron")
        # In a run without a seed processes differ: all follow rank 0, from here on without talking.
        seed = broadcast(torch.randint(_LARGEST, (1,), generator=generator).to(topology.device))
        self._generator = generator.manual_seed(int(seed))
        with isolated_random_state(devices=topology.kind.name != "cpu"):
            own = int(seed) + 100 * self._place.coordinates()["pp"]
            seed_all_generators(own)
            self._seed_tracker(own)
            yield

    def begin_window(self) -> None:
        """Seed megatron-core's trackers for one step, so that dropout is resumed with the run's random state."""
        if self._generator is None:
            return
        drawn = int(torch.randint(_LARGEST, (1,), generator=self._generator))
        at = self._place.coordinates()
        # Parts of a layer draw alike or apart as the tracker decides; stages and data shards always apart.
        self._seed_tracker((drawn + 100_003 * at["pp"] + 1_000_003 * at["dp_shard"]) % _LARGEST)

    @property
    def generator(self) -> torch.Generator | None:
        """What the seeds of steps are drawn from."""
        return self._generator

    @staticmethod
    def _seed_tracker(seed: int) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(seed)

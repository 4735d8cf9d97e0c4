"""Float8 all-gather of weights under FSDP.

torchao replaces each parameter with a tensor subclass. Here parameters stay plain DTensors for checkpoints and
optimizers. A second layer holds torchao's subclass over the same shard, for FSDP's all-gather extension.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.runtime.logging import get_logger
from drivetrain.strategies.precision.fp8.base import CONVERTED

logger = get_logger(__name__)

_version = attrgetter("_version")  # torch's count of in-place changes


class GatheredWeight:
    # FSDP gathers the weight of this layer in float8.

    def __init__(self, layer: Any) -> None:
        from torchao.float8.float8_linear import Float8Linear
        from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

        weight = layer.weight
        self._shard: torch.Tensor = weight._local_tensor
        self._cast = WeightWithDynamicFloat8CastTensor(
            self._shard.detach(), layer.linear_mm_config, layer.config.cast_config_weight.target_dtype
        )
        self._weight = weight
        self._scaled: tuple[int, int] | None = None
        # The second layer only carries the weight: torchao computes scales for its own layer class.
        with torch.device("meta"):
            self.twin = Float8Linear(layer.in_features, layer.out_features, bias=False, config=layer.config)
        sharded = DTensor.from_local(
            self._cast,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
        self.twin.weight = nn.Parameter(sharded, requires_grad=False)
        self._cast = self.twin.weight._local_tensor
        # FSDP calls these methods of a shard before and after it gathers the shard.
        self._shard.fsdp_pre_all_gather = self._pre_all_gather
        self._shard.fsdp_post_all_gather = self._cast.fsdp_post_all_gather

    def is_of(self, layer: Any) -> bool:
        return layer.weight._local_tensor is self._shard

    def mark_scaled(self) -> None:
        self._scaled = self._versions()

    def _versions(self) -> tuple[int, int]:
        # Both counters change alike on all processes, so that either all or none drop the precomputed scale.
        return _version(self._weight), _version(self._shard)

    def _pre_all_gather(self, mesh: DeviceMesh) -> Any:
        if self._scaled != self._versions():
            # The weight was changed in another way, such as by loading, so the gather computes the scale.
            self._cast._precomputed_scale = None
        return self._cast.fsdp_pre_all_gather(mesh)


class Float8AllGather:
    # The weights that FSDP gathers in float8, which need new scales after a step of their optimizer.

    def __init__(self) -> None:
        self._weights: WeakKeyDictionary[nn.Module, GatheredWeight] = WeakKeyDictionary()
        self._groups: WeakKeyDictionary[Optimizer, list[list[nn.Module]]] = WeakKeyDictionary()

    def attach(self, models: Iterable[nn.Module], optimizer: Optimizer) -> None:
        # Makes FSDP gather the weights of float8 layers in float8.
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        by_mesh: dict[Any, list[nn.Module]] = defaultdict(list)
        for model in models:
            for layer, record in _sharded_layers(model):
                if layer not in self._weights:
                    self._weights[layer] = GatheredWeight(layer)
                    # FSDP looked for extensions when it sharded the parameter, before this one was set.
                    record._init_extensions()
                if id(layer.weight) in stepped:
                    by_mesh[layer.weight.device_mesh, layer.weight.placements].append(layer)
        if not by_mesh:
            logger.info_once("float8_all_gather has no effect, because no float8 layer has a sharded weight.")
        self._groups[optimizer] = list(by_mesh.values())

    def compute_scales(self, optimizer: Optimizer) -> None:
        # All processes must call this.
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        for layers in self._groups.get(optimizer, ()):
            known = [self._weights[layer] for layer in layers if self._weights[layer].is_of(layer)]
            precompute_float8_dynamic_scale_for_fsdp(nn.ModuleList(weight.twin for weight in known))
            for weight in known:
                weight.mark_scaled()


def _sharded_layers(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    # Float8 layers whose weights FSDP can gather in float8, each with FSDP's `FSDPParam` of the weight. Left out are
    # unevenly sharded weights, since torchao's cast cannot pad, weights resharded over fewer processes after forward,
    # since FSDP has no all-gather extension for them (torch 2.13), and weights offloaded to the CPU.
    for unit in model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            for record in group.fsdp_params:
                layer = record._module_info.module
                # Decided from values that are equal on all processes, which must agree on what to gather.
                even = record._orig_size[0] % record.mesh_info.shard_mesh_size == 0
                stays = not group._use_post_forward_mesh and not record.offload_to_cpu
                if even and stays and hasattr(layer, CONVERTED) and record._module_info.param_name == "weight":
                    yield layer, record

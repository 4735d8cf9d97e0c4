"""What is refused and found out without any XLA device."""

from __future__ import annotations

import pytest
import torch

from drivetrain import XLA, XLAFSDP, Accelerator, ConfigurationError, ProcessEnvironment
from drivetrain.runtime.devices import XLADevice
from drivetrain.strategies import resolve_strategy
from drivetrain.strategies.xla.compilations import describe_change, shapes_of
from drivetrain.strategies.xla.strategy import MeshShape, shard_spec

ALONE = ProcessEnvironment.detect({})


@pytest.mark.parametrize(("spec", "made"), [("auto", XLA), ("xla", XLA), ("xla_fsdp", XLAFSDP)])
def test_the_device_has_strategies_of_its_own(spec: str, made: type) -> None:
    assert type(resolve_strategy(spec, ALONE, XLADevice())) is made


def test_the_strategy_is_refused_on_another_device() -> None:
    with pytest.raises(ConfigurationError, match=r"needs an XLA device, but this process runs on 'cpu'.*PJRT_DEVICE"):
        Accelerator(cpu=True, strategy="xla")


def test_tensor_parallelism_needs_a_plan() -> None:
    with pytest.raises(ConfigurationError, match="tp=2 needs a plan of the layers to split"):
        XLA(tp=2)


@pytest.mark.parametrize(("shape", "devices"), [(MeshShape(tensor=3), 8), (MeshShape(data=2, shard=2), 8)])
def test_sizes_that_do_not_multiply_to_the_devices_are_refused_with_those_that_do(
    shape: MeshShape, devices: int
) -> None:
    with pytest.raises(ConfigurationError, match=r"do not multiply to the 8 XLA device.*Sizes that fit: 1, 2, 4, 8"):
        shape.fill(devices)


@pytest.mark.parametrize("sizes", [{"tensor": 0}, {"tensor": True}, {"data": 2.0}, {"data": -1, "shard": -1}])
def test_a_size_that_cannot_be_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        MeshShape(**sizes)


@pytest.mark.parametrize(
    ("shape", "taken", "spec"),
    [
        ((32, 8), None, ("fsdp", None)),
        ((30, 8), None, (None, "fsdp")),  # the larger one does not divide by 4
        ((30, 7), None, ("fsdp", None)),
        ((3, 2), None, (None, None)),
        ((), None, ()),
        ((32, 8), ("tensor", None), ("tensor", "fsdp")),
    ],
)
def test_a_parameter_is_sharded_along_its_largest_dimension_that_divides(shape, taken, spec) -> None:
    assert shard_spec(shape, 4, taken) == spec


def test_shapes_are_named_by_where_they_are() -> None:
    batch = {"x": torch.ones(2, 3), "pair": (torch.ones(4), "text")}
    assert shapes_of(batch) == (("batch['x']", (2, 3)), ("batch['pair'][0]", (4,)))


def test_only_what_changed_is_described() -> None:
    said = describe_change([(("a", (2, 3)), ("b", (2,))), (("a", (2, 5)), ("b", (2,)))])
    assert said.startswith("a had the shapes (2, 3), (2, 5). Pad")
    assert "did not change" in describe_change([(("a", (2,)),)] * 3)

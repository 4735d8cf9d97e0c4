"""Strategies by name, and a third party's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import (
    DDP,
    Accelerator,
    ConfigurationError,
    ProcessEnvironment,
    Single,
    Strategy,
    available_strategies,
    register_strategy,
)
from drivetrain.data import DataShard
from drivetrain.strategies import registry, resolve_ddp, resolve_strategy, started_by_verbs
from drivetrain.strategies.base import Gradients, ModelState
from tests.pool import run_in_processes

ALONE = ProcessEnvironment.detect({})
OF_TWO = ProcessEnvironment(0, 2, 0, 2, source="a test")


@pytest.mark.parametrize(
    ("spec", "environment", "kind"),
    [
        ("auto", ALONE, Single),
        ("auto", OF_TWO, DDP),
        ("single", ALONE, Single),
        ("ddp", ALONE, DDP),
        ("ddp", OF_TWO, DDP),
        ("ddp_find_unused_parameters_true", OF_TWO, DDP),
        ("ddp_find_unused_parameters_false", OF_TWO, DDP),
    ],
)
def test_a_name_gives_a_strategy(spec, environment, kind):
    assert type(resolve_strategy(spec, environment)) is kind


def test_a_strategy_is_taken_as_it_is():
    mine = DDP(static_graph=True)
    assert resolve_strategy(mine, OF_TWO) is mine
    assert repr(mine) == "DDP()"
    assert available_strategies()[:3] == ["auto", "single", "ddp"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dpp", r"Unknown strategy 'dpp'. Allowed: auto, single, ddp.*Did you mean 'ddp'.*register_strategy"),
        ("fsdp9000", "Unknown strategy 'fsdp9000'"),
        ("ddp_spawned", r"Unknown strategy 'ddp_spawned'.*Did you mean 'ddp_spawn'"),
        (None, "must be a name or a Strategy object, got NoneType"),
        (DDP, r"got the class DDP. Use DDP\(\)"),
    ],
)
def test_what_is_no_strategy_is_refused(spec, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve_strategy(spec, ALONE)


@pytest.mark.parametrize("name", ["ddp_spawn", "ddp_fork", "ddp_notebook"])
@pytest.mark.parametrize(
    ("options", "finds"),
    [("", False), ("_find_unused_parameters_true", True), ("_find_unused_parameters_false", False)],
)
def test_a_strategy_of_a_trainers_verbs_has_ddps_options(name, options, finds):
    spawned = started_by_verbs(name + options)
    assert spawned.name == name + options
    assert spawned.start_method == ("spawn" if name == "ddp_spawn" else "fork")
    assert spawned.within().wrapper_options["find_unused_parameters"] is finds


@pytest.mark.parametrize("spec", ["auto", "ddp", "ddp_spawned", DDP()])
def test_other_strategies_leave_the_processes_alone(spec):
    assert started_by_verbs(spec) is None


def test_an_accelerator_has_no_verbs_to_start_processes_for():
    with pytest.raises(
        ConfigurationError, match=r"'ddp_spawn' starts new processes for each Trainer method.*notebook_launcher"
    ):
        Accelerator(cpu=True, strategy="ddp_spawn")


def single_among_two() -> str:
    try:
        Accelerator(cpu=True, strategy="single")
    except ConfigurationError as error:
        return str(error)
    return ""


def test_single_is_refused_in_a_world_of_two():
    for rank, text in enumerate(run_in_processes(single_among_two, 2)):
        assert f"strategy='single' supports only one process, but this is rank {rank} of 2" in text
        assert "Use strategy='ddp' or 'auto'" in text


def test_ddp_alone_leaves_the_model_bare():
    accelerator = Accelerator(cpu=True, strategy="ddp")
    model = nn.Linear(1, 1)
    assert accelerator.prepare(model) is model


class NotedGradients(Gradients):
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        self.calls.append("clip")
        return super().clip_norm(parameters, max_norm, norm_type)


class Noted(Strategy):
    """A third party's: counts what it is asked, refuses fp16 and shares a batch between all processes."""

    name = "noted"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def setup(self, state: Any) -> None:
        super().setup(state)
        self.topology = replace(self.topology, data_shard=DataShard(0, 1))
        self.gradients = NotedGradients(self.calls)
        state.before_leaving(lambda: self.calls.append("left"))

    def check(self, options: Any) -> None:
        if options.precision.name == "fp16":
            raise ConfigurationError("strategy='noted' cannot run precision='fp16'. Use 'bf16' or '32'.")

    def prepare(self, model: nn.Module, optimizers: Any, precision: Any, move: bool = True) -> Any:
        self.calls.append(f"prepare {len(optimizers)}")
        return super().prepare(model, optimizers, precision)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self.calls.append("backward")
        super().backward(loss, **kwargs)

    def optimizer_step(self, optimizer: Any, precision: Any, closure: Any = None) -> bool:
        self.calls.append("step")
        return super().optimizer_step(optimizer, precision, closure)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(registry, "_STRATEGIES", dict(registry._STRATEGIES))
    register_strategy("noted", Noted)


def through_a_third_party_s() -> tuple[list[str], list[int]]:
    register_strategy("noted", Noted, replace=True)
    accelerator = Accelerator(cpu=True, strategy="noted")
    model = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.utils.data.DataLoader(torch.arange(2.0)[:, None], batch_size=1),
    )
    seen = []
    for batch in loader:
        accelerator.backward(model(batch).sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append(int(batch))
    accelerator.end_training()
    strategy = accelerator.strategy
    assert isinstance(strategy, Noted)
    return strategy.calls, seen


def test_a_third_party_s_strategy_is_asked_for_everything():
    step = ["backward", "clip", "step"]
    for calls, seen in run_in_processes(through_a_third_party_s, 2):
        assert calls == ["prepare 1", *step, *step, "left"]
        assert seen == [0, 1]  # its data shard says that both processes see every batch


@pytest.mark.usefixtures("registered")
def test_it_may_refuse_a_precision():
    assert "noted" in available_strategies()
    with pytest.raises(ConfigurationError, match="strategy='noted' cannot run precision='fp16'"):
        Accelerator(cpu=True, strategy="noted", mixed_precision="fp16")
    assert Accelerator(cpu=True, strategy="noted", mixed_precision="bf16").mixed_precision == "bf16"


@pytest.mark.usefixtures("registered")
def test_a_name_that_is_taken_needs_a_word():
    for name in ("noted", "ddp", "auto"):
        with pytest.raises(ConfigurationError, match=f"'{name}' is already registered. Pass replace=True"):
            register_strategy(name, Noted)
    register_strategy("noted", lambda: Noted(), replace=True)


@pytest.mark.parametrize("environment", [ALONE, OF_TWO])
def test_a_ddp_that_was_given_takes_batch_statistics_over_several_processes(environment: ProcessEnvironment) -> None:
    given = DDP()
    assert resolve_ddp(given, environment, "sync_batchnorm=True", sync_batchnorm=True) is given
    assert given.sync_batchnorm is (environment.world_size == 2)


@pytest.mark.parametrize(
    ("parent", "old", "new"),
    [
        (Gradients, "sync", r"no_sync\(model\)"),
        (Gradients, "scale_held", "scale"),
        (Gradients, "clip_value", r"scale\(parameters, bound=...\)"),
        (Gradients, "leaves", "backward"),
        (ModelState, "full", r"model\(model, full=True\)"),
        (ModelState, "holds_whole", "held_as"),
        (Strategy, "capability", "split_sequences"),
        (Strategy, "place", "prepare"),
        (Strategy, "teardown", "before_leaving"),
        (Strategy, "split_sequences", "SplitsSequences"),
        (Strategy, "join", "JoinsUnevenInputs"),
        (Strategy, "batch_placement", "PlacesBatches"),
    ],
)
def test_a_class_that_overrides_a_method_of_an_earlier_version_is_refused(parent: type, old: str, new: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Mine overrides {old}, .* Override .*{new}"):
        type("Mine", (parent,), {old: lambda self: None})

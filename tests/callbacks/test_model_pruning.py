from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from drivetrain import ConfigurationError
from drivetrain.callbacks import ModelCheckpoint, ModelPruning
from tests.callbacks.guarded import Regression, rows, train
from tests.pool import run_in_processes


class Wide(Regression):
    def __init__(self) -> None:
        super().__init__({})
        torch.manual_seed(3)
        self.layer = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))  # type: ignore[assignment]


def by_torch(epochs: int, apply: Any, lottery: bool, batches: Any) -> Wide:
    """The same in a plain loop, pruned by torch's own functions after each epoch."""
    task = Wide()
    first = copy.deepcopy(task.state_dict())
    configured = task.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    targets = [(task.layer[n], name) for n in (0, 2) for name in ("weight", "bias")]  # type: ignore[index]
    for _ in range(epochs):
        for inputs, outputs in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(task.layer(inputs), outputs).backward()
            optimizer.step()
            scheduler.step()
        apply(targets)
        if lottery:
            for number, name in ((0, "weight"), (0, "bias"), (2, "weight"), (2, "bias")):
                original = getattr(task.layer[number], f"{name}_orig")  # type: ignore[index]
                original.data.copy_(first[f"layer.{number}.{name}"])
    for module, name in targets:
        prune.remove(module, name)
    return task


def each(function: Any, **options: Any) -> Any:
    return lambda targets: [function(module, name, **options) for module, name in targets]


def all_together(targets: Any) -> None:
    prune.global_unstructured(targets, pruning_method=prune.L1Unstructured, amount=0.3)


def gap(task: nn.Module, other: nn.Module) -> float:
    here, there = task.state_dict(), other.state_dict()
    assert here.keys() == there.keys()
    return max(float((here[name].cpu() - there[name].cpu()).abs().max()) for name in here)


@pytest.mark.parametrize("lottery", [False, True])
@pytest.mark.parametrize(
    ("options", "apply"),
    [
        ({"pruning_fn": "l1_unstructured", "amount": 0.3}, all_together),
        ({"pruning_fn": prune.L1Unstructured, "amount": lambda epoch: 0.3}, all_together),
        (
            {"pruning_fn": "l1_unstructured", "amount": 0.3, "use_global_unstructured": False},
            each(prune.l1_unstructured, amount=0.3),
        ),
    ],
)
def test_the_model_is_pruned_as_by_torch(options: dict[str, Any], apply: Any, lottery: bool, tmp_path: Path) -> None:
    task = Wide()
    callback = ModelPruning(use_lottery_ticket_hypothesis=lottery, verbose=2, **options)
    train(task, tmp_path, [callback], batches=4, epochs=3, enable_checkpointing=False)
    expected = by_torch(3, apply, lottery, list(rows(4)))
    assert gap(task, expected) < 1e-6
    zeros = sum(int((value == 0).sum()) for value in task.state_dict().values())
    assert zeros >= 20  # of 41: 0.3 thrice of what is left


def test_how_sparse_the_model_becomes_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pruning = ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False, verbose=1)
    with caplog.at_level("INFO"):
        train(Wide(), tmp_path, [pruning], batches=4, epochs=2, enable_checkpointing=False)
    [first, second] = [each for each in caplog.messages if each.startswith("Applied `L1Unstructured`. Pruned: ")]
    assert first.partition("Pruned: ")[2].startswith("0/41 (0.00%) -> 20/41 (48.78%)")
    assert "20/41 (48.78%) -> " in second


def test_two_that_prune_differently_run_side_by_side(tmp_path: Path) -> None:
    task = Wide()
    callbacks = [ModelPruning(name, amount=0.25) for name in ("l1_unstructured", "random_unstructured")]
    train(task, tmp_path, callbacks, batches=4, epochs=1, enable_checkpointing=False)
    weights = torch.cat([parameter.flatten() for parameter in task.parameters()])
    assert float((weights == 0).float().mean()) > 0.25


def test_slices_are_pruned_by_their_norm(tmp_path: Path) -> None:
    task = Wide()
    callback = ModelPruning(
        "ln_structured",
        [(task.layer[0], "weight")],  # type: ignore[index]
        use_global_unstructured=False,
        amount=0.5,
        pruning_dim=0,
        pruning_norm=2,
        apply_pruning=lambda epoch: epoch == 1,
    )
    train(task, tmp_path, [callback], batches=2, epochs=3, enable_checkpointing=False)
    rows_left = task.layer[0].weight.abs().sum(1) != 0  # type: ignore[index]
    assert int(rows_left.sum()) == 4


def test_masks_stay_where_they_are_not_made_permanent(tmp_path: Path) -> None:
    task = Wide()
    callback = ModelPruning("random_unstructured", make_pruning_permanent=False, resample_parameters=True)
    train(task, tmp_path, [callback], batches=2, epochs=1, enable_checkpointing=False)
    assert "layer.0.weight_mask" in task.state_dict()
    callback.make_pruning_permanent(task)
    assert task.state_dict().keys() == Wide().state_dict().keys()


@pytest.mark.parametrize("step", [6, 8])
def test_a_resumed_run_keeps_its_masks(step: int, tmp_path: Path) -> None:
    def fit(resume: Any = None) -> Wide:
        task = Wide()
        saving = ModelCheckpoint(tmp_path, every_n_train_steps=step, save_top_k=-1, filename="{step}")
        pruning = ModelPruning("l1_unstructured", amount=0.3)
        train(task, tmp_path, [pruning, saving], batches=4, epochs=3, ckpt_path=resume, enable_checkpointing=True)
        return task

    assert gap(fit(), fit(tmp_path / f"step={step}.ckpt")) < 1e-7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pruning_fn": "l2_unstructured"}, "Did you mean 'l1_unstructured'"),
        ({"pruning_fn": "ln_structured"}, "only an unstructured"),
        ({"pruning_fn": "random_structured", "use_global_unstructured": False}, "pruning_dim should be"),
        ({"pruning_fn": "ln_structured", "use_global_unstructured": False, "pruning_dim": 0}, "the `pruning_norm`"),
        ({"pruning_fn": "l1_unstructured", "amount": 1.5}, "from 0.0 to 1.0"),
        ({"pruning_fn": "l1_unstructured", "verbose": 3}, r"any of \(0, 1, 2\)"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ModelPruning(**arguments)


def test_parameters_of_other_models_are_refused(tmp_path: Path) -> None:
    callback = ModelPruning("l1_unstructured", [(nn.Linear(2, 2), "weight")])
    with pytest.raises(ConfigurationError, match="is not a parameter of Wide"):
        train(Wide(), tmp_path, [callback], enable_checkpointing=False)


def prune_over_processes() -> list[Any]:
    torch.set_num_threads(1)
    task = Wide()
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    callback = ModelPruning("random_unstructured", amount=0.3)
    train(task, ".", [callback], batches=2, epochs=2, strategy="ddp", enable_checkpointing=False, seed=None)
    with pytest.raises(ConfigurationError, match="FSDP shards them"):
        train(Wide(), ".", [ModelPruning("l1_unstructured")], strategy="fsdp", enable_checkpointing=False)
    return [value.tolist() for value in task.state_dict().values()]


@pytest.mark.sharded
def test_processes_prune_the_same_and_shards_are_refused() -> None:
    first, second = run_in_processes(prune_over_processes, 2)
    assert first == second


class EveryOther(torch.nn.utils.prune.BasePruningMethod):
    """A method whose constructor takes no amount."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: Any, default_mask: Any) -> Any:
        mask = default_mask.clone()
        mask.view(-1)[::2] = 0
        return mask


def test_a_method_without_an_amount_chooses_among_all_parameters() -> None:
    model = torch.nn.Linear(4, 2)
    pruning = ModelPruning(EveryOther, parameters_to_prune=None, parameter_names=["weight"])
    pruning.setup(None, model, "fit")  # type: ignore[arg-type]
    pruning.apply_pruning(0.5)
    assert model.weight_mask.view(-1).tolist() == [0.0, 1.0] * 4  # type: ignore[union-attr]

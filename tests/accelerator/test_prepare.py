"""What prepare gives back, for what, in which order."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, ConfigurationError
from drivetrain.accelerator import PreparedOptimizer, PreparedScheduler
from drivetrain.data import PreparedLoader
from tests.pool import run_in_processes


def parts() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5),
        "loader": DataLoader(TensorDataset(torch.randn(16, 3), torch.arange(16) % 2), batch_size=4),
    }


def train(model: nn.Module, optimizer: Any, scheduler: Any, loader: Any, accelerator: Accelerator) -> list[float]:
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        scheduler.step()
    return [*torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), *scheduler.get_last_lr()]


def in_any_order() -> list[list[float]]:
    results = []
    for order in permutations(["model", "optimizer", "scheduler", "loader"]):
        accelerator = Accelerator(cpu=True)
        made = parts()
        prepared = dict(zip(order, accelerator.prepare(*(made[name] for name in order)), strict=True))
        results.append(train(**prepared, accelerator=accelerator))
    accelerator = Accelerator(cpu=True)
    one_by_one = {name: accelerator.prepare(item) for name, item in parts().items()}
    results.append(train(**one_by_one, accelerator=accelerator))
    return results


@pytest.mark.parametrize("processes", [1, 2])
def test_the_order_does_not_matter(processes):
    for results in run_in_processes(in_any_order, processes):
        assert all(result == results[0] for result in results)
        # 4 steps in one process; 2 steps of which each counts twice for the scheduler in two
        assert results[0][-1] == pytest.approx(0.1 * 0.5**4)


def test_one_object_is_not_wrapped_and_several_keep_their_order():
    accelerator = Accelerator(cpu=True)
    made = parts()
    assert isinstance(accelerator.prepare(made["loader"]), PreparedLoader)
    scheduler, unknown, optimizer, nothing, model = accelerator.prepare(
        made["scheduler"], "a string", made["optimizer"], None, made["model"]
    )
    assert isinstance(scheduler, PreparedScheduler)
    assert isinstance(optimizer, PreparedOptimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(model, nn.Linear)
    assert (unknown, nothing) == ("a string", None)


def twice() -> list[bool]:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    made = list(parts().values())
    once = accelerator.prepare(*made)
    again = accelerator.prepare(*once)
    raw = accelerator.prepare(*made[:3])
    held = accelerator.prepared
    return [
        all(a is b for a, b in zip(once, again, strict=True)),
        all(a is b for a, b in zip(once, raw, strict=False)),
        all(len(kind) == 1 for kind in (held.models, held.optimizers, held.schedulers)),
        sum(type(module).__name__ == "DistributedDataParallel" for module in once[0].modules())
        == (accelerator.num_processes > 1),
    ]


@pytest.mark.parametrize("processes", [1, 2])
def test_preparing_twice_changes_nothing(processes):
    assert run_in_processes(twice, processes) == [[True] * 4] * processes


def test_the_wrapped_are_what_the_user_knows():
    accelerator = Accelerator(cpu=True)
    made = parts()
    model, optimizer, scheduler, loader = accelerator.prepare(*made.values())
    assert optimizer.param_groups is made["optimizer"].param_groups
    assert optimizer.defaults["lr"] == 0.1
    assert optimizer.optimizer is made["optimizer"]
    assert scheduler.scheduler is made["scheduler"]
    assert scheduler.gamma == 0.5
    assert loader.batch_size == 4
    assert len(loader) == 4
    train(model, optimizer, scheduler, loader, accelerator)
    assert optimizer.state_dict()["state"][0]["step"] == 4
    assert optimizer.state is made["optimizer"].state
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert len(made["optimizer"].param_groups) == 2


def test_a_scheduler_may_be_made_for_the_prepared_optimizer():
    accelerator = Accelerator(cpu=True)
    made = parts()
    model, optimizer, loader = accelerator.prepare(made["model"], made["optimizer"], made["loader"])
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1))
    train(model, optimizer, scheduler, loader, accelerator)
    assert made["optimizer"].param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**4)


def test_device_placement_has_one_entry_for_each_object():
    accelerator = Accelerator(cpu=True)
    made = parts()
    prepared = accelerator.prepare(*made.values(), device_placement=[True, False, None, False])
    assert len(prepared) == 4
    with pytest.raises(ConfigurationError, match="2 entries for 1 objects"):
        accelerator.prepare(made["model"], device_placement=[True, False])


def test_a_model_that_is_not_moved_is_still_converted():
    accelerator = Accelerator(cpu=True, device_placement=False, mixed_precision="bf16-true")
    model = accelerator.prepare(parts()["model"])
    assert model.weight.dtype == torch.bfloat16
    assert model(torch.zeros(1, 3)).dtype == torch.bfloat16
    assert model.to(torch.float32).weight.dtype == torch.float32  # its own `to` again


def for_evaluation() -> list[str]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True)
    return [type(model).__name__, type(accelerator.prepare_model(nn.Linear(2, 2))).__name__]


def test_a_model_for_evaluation_is_not_wrapped():
    assert run_in_processes(for_evaluation, 2) == [["Linear", "DistributedDataParallel"]] * 2


def test_the_user_s_own_module_comes_back():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    bare = nn.Linear(2, 2)
    model = accelerator.prepare(bare)
    assert accelerator.unwrap_model(model) is bare
    assert "forward" in bare.__dict__
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is bare
    assert "forward" not in bare.__dict__


def test_a_schedule_free_optimizer_is_told_of_training_and_evaluation():
    class Free(torch.optim.SGD):
        mode = None

        def train(self) -> None:
            self.mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(Free([nn.Parameter(torch.zeros(1))], lr=0.1))
    optimizer.train()
    assert optimizer.mode == "train"
    optimizer.eval()
    assert optimizer.mode == "eval"


def test_an_optimizer_with_a_closure_steps_through_it():
    accelerator = Accelerator(cpu=True)
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer = accelerator.prepare(torch.optim.LBFGS([weight], lr=1.0))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight - 1).square().sum()
        accelerator.backward(loss)
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert weight.item() == pytest.approx(1.0, abs=1e-4)

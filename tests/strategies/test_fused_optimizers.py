"""Fused implementations are chosen where a script left the choice open, and a checkpoint belongs to neither."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from drivetrain import BaseFinetuning, Task, Trainer
from drivetrain.strategies.fused_optimizers import use_fused
from drivetrain.strategies.optimizer_names import named_optimizer_state


class Regression(Task):
    def __init__(self, make: type[Optimizer] = AdamW, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.make, self.options, self.losses = make, options, list[float]()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Optimizer:
        return self.make(self.net.parameters(), lr=1e-2, **self.options)


def batches() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 16, 8, generator=generator)
    return [[each, each.sum(1, keepdim=True)] for each in x]


def fit(task: Regression, tmp_path: object, ckpt_path: object = None, **options: object) -> Trainer:
    options = {"max_epochs": 1, "logger": False, "enable_progress_bar": False, **options}
    trainer = Trainer(default_root_dir=tmp_path, **options)
    trainer.fit(task, batches(), ckpt_path=ckpt_path)
    return trainer


def is_fused(trainer: Trainer) -> list[object]:
    return [group["fused"] for group in trainer.optimizers[0].param_groups]


@pytest.mark.parametrize("make", [Adam, AdamW, SGD, Adagrad])
def test_an_optimizer_that_was_made_without_a_choice_steps_fused_and_by_the_plain_losses(make, tmp_path):
    fused, plain = Regression(make), Regression(make)
    assert is_fused(fit(fused, tmp_path, enable_checkpointing=False)) == [True]
    assert is_fused(fit(plain, tmp_path, enable_checkpointing=False, fused_optimizer=False)) == [None]
    assert fused.losses == pytest.approx(plain.losses, abs=5e-6)


@pytest.mark.parametrize("option", [{"fused": False}, {"foreach": True}, {"foreach": False}, {"differentiable": True}])
def test_what_the_script_chose_stays(option):
    optimizer = Adam([nn.Parameter(torch.ones(3))], **option)
    before = dict(optimizer.param_groups[0])
    assert not use_fused(optimizer, [])
    assert optimizer.param_groups[0] == before


def test_a_checkpoint_holds_what_the_script_gave():
    model = nn.Linear(2, 1)
    for given in ({}, {"fused": True}):
        optimizer = Adam(model.parameters(), **given)
        use_fused(optimizer, [model])
        saved = named_optimizer_state(model, optimizer)["param_groups"][0]
        assert (saved["fused"], optimizer.param_groups[0]["fused"]) == (given.get("fused"), True)


class OwnAdam(Adam):
    """One that may do something else in its step."""


@pytest.mark.parametrize(
    "make",
    [
        lambda p: OwnAdam([p]),
        lambda p: RMSprop([p]),
        lambda p: Adam([p], lr=torch.tensor(1e-3)),
        lambda p: Adam([nn.Parameter(p.detach().bfloat16())]),
        lambda p: Adam([p, nn.Parameter(torch.ones(2, device="meta"))]),
    ],
    ids=["a class of one's own", "without a fused kernel", "a rate on a device", "bfloat16", "a device without"],
)
def test_what_has_no_fused_step_with_the_same_numbers_stays(make):
    assert not use_fused(make(nn.Parameter(torch.ones(3))), [])


def test_sparse_gradients_keep_the_step_that_takes_them():
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = SGD(embedding.parameters(), lr=0.1)
    assert not use_fused(optimizer, [embedding])
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True)])
def test_a_run_resumes_by_its_own_implementation_whichever_wrote_the_checkpoint(first, then, tmp_path):
    whole, half = Regression(), Regression()
    fit(whole, tmp_path / "whole", enable_checkpointing=False, fused_optimizer=False)
    trainer = fit(half, tmp_path, fused_optimizer=first, max_steps=20, enable_checkpointing=False)
    trainer.save_checkpoint(tmp_path / "half")
    rest = Regression()
    trainer = fit(rest, tmp_path, tmp_path / "half", fused_optimizer=then, enable_checkpointing=False)
    assert is_fused(trainer) == [True if then else None]
    assert half.losses + rest.losses == pytest.approx(whole.losses, abs=5e-6)


class Unfreezes(BaseFinetuning):
    """Trains the last layer from the second epoch on."""

    def freeze_before_training(self, task: Task) -> None:
        self.freeze(task.net[2])

    def finetune_function(self, task: Task, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(task.net[2], optimizer, lr=1e-3)


class Partly(Regression):
    """Gives its optimizer what is trained from the start."""

    def configure_optimizers(self) -> Optimizer:
        return self.make([each for each in self.net.parameters() if each.requires_grad], lr=1e-2, **self.options)


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_a_group_that_is_added_during_a_run_steps_fused_by_the_plain_losses(make, tmp_path):
    options = {"enable_checkpointing": False, "max_epochs": 3}
    fused, plain = Partly(make), Partly(make)
    trainer = fit(fused, tmp_path, callbacks=Unfreezes(), **options)
    assert is_fused(trainer) == [True, True]
    assert is_fused(fit(plain, tmp_path, callbacks=Unfreezes(), fused_optimizer=False, **options)) == [None, None]
    assert fused.losses == pytest.approx(plain.losses, abs=5e-6)
    saved = named_optimizer_state(fused, trainer.optimizers[0])["param_groups"]
    assert [group["fused"] for group in saved] == [None, None]


@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True), (True, True)])
def test_so_it_does_in_a_run_that_resumes_after_it_was_added(first, then, tmp_path):
    whole, half, rest = Partly(), Partly(), Partly()
    plain = {"enable_checkpointing": False, "callbacks": Unfreezes(), "max_epochs": 3}
    fit(whole, tmp_path / "whole", **plain, fused_optimizer=False)
    fit(half, tmp_path, **plain, fused_optimizer=first, max_steps=50).save_checkpoint(tmp_path / "half")
    plain["callbacks"] = Unfreezes()
    trainer = fit(rest, tmp_path, **plain, fused_optimizer=then, ckpt_path=tmp_path / "half")
    assert is_fused(trainer) == [True if then else None] * 2
    assert half.losses + rest.losses == pytest.approx(whole.losses, abs=5e-6)


@pytest.mark.parametrize(
    ("group", "fused"),
    [
        ({"params": [nn.Parameter(torch.ones(2))]}, True),
        ({"params": nn.Parameter(torch.ones(2)), "fused": False}, False),
        ({"params": [nn.Parameter(torch.ones(2))], "foreach": True}, None),
        ({"params": [nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]}, None),
    ],
    ids=["without a choice", "unfused", "foreach", "bfloat16"],
)
def test_what_an_added_group_chose_stays(group, fused):
    model = nn.ParameterList([nn.Parameter(torch.ones(3)), *torch.optim.SGD([dict(group)]).param_groups[0]["params"]])
    optimizer = AdamW([model[0]], lr=0.5)
    use_fused(optimizer, [])
    optimizer.add_param_group(dict(group))
    assert [each["fused"] for each in optimizer.param_groups] == [True, fused]
    saved = named_optimizer_state(model, optimizer)["param_groups"]
    assert [each["fused"] for each in saved] == [None, group.get("fused")]
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(parameter.max() < 1 for parameter in model)


def test_an_optimizer_that_steps_fused_is_freed_with_its_last_reference():
    optimizer = AdamW([nn.Parameter(torch.ones(3))])
    assert use_fused(optimizer, [])
    copied, seen = copy.deepcopy(optimizer), weakref.ref(optimizer)
    copied.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 1
    gc.disable()
    try:
        del optimizer
        assert seen() is None
    finally:
        gc.enable()

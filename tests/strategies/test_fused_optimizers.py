"""Fused implementations are chosen where a script left the choice open, and a checkpoint belongs to neither."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from drivetrain import Task, Trainer
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


def fit(task: Regression, tmp_path: object, **options: object) -> Trainer:
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, logger=False, enable_progress_bar=False, **options)
    trainer.fit(task, batches())
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
    trainer = Trainer(
        max_epochs=1,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        fused_optimizer=then,
    )
    trainer.fit(rest, batches(), ckpt_path=tmp_path / "half")
    assert is_fused(trainer) == [True if then else None]
    assert half.losses + rest.losses == pytest.approx(whole.losses, abs=5e-6)

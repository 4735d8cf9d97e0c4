"""Training, checkpoints and refusals of models whose layers are spread over processes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, Callback, ConfigurationError, Parallel, Task, Trainer
from tests.pool import ProcessesFailed, run_in_processes
from tests.strategies.quiet import quiet_trainer

pytestmark = pytest.mark.sharded

WIDTH, CLASSES, ROWS = 6, 3, 8


class Net(nn.Module):
    """Blocks between an embedding and a head, with running statistics, and a buffer that all stages use."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.GELU()) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens).mean(1) * self.scale
        for block in self.blocks:
            x = block(x) * self.scale
        return self.head(x)


class NetTask(Task):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = Net()
        if frozen:
            self.net.tokens.requires_grad_(False)
            self.net.blocks[0].requires_grad_(False)
            self.net.blocks[3].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", F.cross_entropy(self.net(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        early = [p for name, p in self.net.named_parameters() if not name.startswith("head") and p.requires_grad]
        groups = [{"params": early, "lr": 1e-2}, {"params": list(self.net.head.parameters()), "lr": 3e-2}]
        # With the usual eps of 1e-8 a gradient of that size, which is rounding, moves its parameter by all of lr.
        return torch.optim.AdamW(groups, eps=1e-4)


def loader(rows: int = ROWS, batches: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 11, (batches * ROWS, 5), generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(0, CLASSES, (len(x),), generator=generator)), batch_size=rows)


def clipping_trainer(strategy: Any, **options: Any) -> Trainer:
    return quiet_trainer(strategy, **{"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, **options})


def plain(epochs: int = 1, frozen: bool = False) -> dict[str, Tensor]:
    """The same in one process of plain torch."""
    task = NetTask(frozen)
    optimizer = task.configure_optimizers()
    for _ in range(epochs):
        for index, (x, y) in enumerate(loader()):
            (F.cross_entropy(task.net(x), y) / 2).backward()
            if index % 2:
                nn.utils.clip_grad_norm_(task.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in task.state_dict().items()}


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys(), set(one) ^ set(other)
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


# what each process does in one call of the pool, and what is expected of it


def trains() -> dict[str, Any]:
    """Fit, validate, test and predict, the last three also with another trainer and strategy."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    task = NetTask()
    trainer = clipping_trainer(Parallel(pp=2))
    trainer.fit(task, loader(), loader(5))
    whole = trainer.strategy.state.model(trainer.model, full=True)
    found["gap"] = gap(whole, plain()) if trainer.global_rank == 0 else len(whole)
    found["logged"] = sorted(trainer.callback_metrics)
    found["loss"] = float(trainer.callback_metrics["loss"])
    found["held"] = sorted(name for name, p in task.named_parameters() if not p.is_meta)
    found["groups"] = [len(group["params"]) for group in trainer.optimizers[0].param_groups]
    state = trainer.strategy.state.optimizer(trainer.model, trainer.optimizers[0])
    found["names in state"] = list(state["state"]) == [name for name, _ in task.named_parameters()]
    found["names in groups"] = [len(group["params"]) for group in state["param_groups"]]
    found["validation"] = float(trainer.callback_metrics["validation"])
    again = clipping_trainer(Parallel(pp=2))
    found["again"] = again.validate(task, loader(5), verbose=False)[0]["validation"]
    found["test"] = again.test(task, loader(5), verbose=False)[0]["validation"]
    found["predictions"] = torch.cat(again.predict(task, loader(5)))
    found["copy"] = len(copy.deepcopy(task).state_dict())
    return found


def test_losses_metrics_and_predictions_reach_every_process():
    first, last = run_in_processes(trains, 2, timeout=60)
    assert first["gap"] < 5e-6
    assert last["gap"] == 0
    task = NetTask()
    task.load_state_dict(plain())
    task.eval()
    x, y = loader().dataset.tensors
    with torch.no_grad():
        logits = task.net(x)
    for found in (first, last):
        assert {"loss", "loss_epoch", "loss_step", "validation"} <= set(found["logged"])
        assert found["loss"] == first["loss"]
        for name in ("validation", "again", "test"):
            assert found[name] == pytest.approx(float(F.cross_entropy(logits, y)), abs=5e-6), name
        torch.testing.assert_close(found["predictions"], logits, atol=5e-6, rtol=5e-6)
        assert found["names in state"]
        assert found["names in groups"] == [13, 2]
        assert found["copy"] == len(task.state_dict())
    assert set(first["held"]) | set(last["held"]) == {name for name, _ in task.named_parameters()}
    assert not set(first["held"]) & set(last["held"])
    assert (first["groups"], last["groups"]) == ([7, 0], [6, 2])


class Weighs(NetTask):
    """Draws a number before the model is called, which all stages must agree on, and leaves a batch out."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        shift = int(torch.randint(0, 5, ()))
        tokens = (batch[0] + shift) % 11
        logits = self.net(tokens)
        return None if batch_idx == 1 else F.cross_entropy(logits, batch[1])


def varies() -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for schedule in ("1f1b", "interleaved_zero_bubble"):
        trainer = clipping_trainer(Parallel(pp=2, pp_schedule=schedule))
        trainer.fit(NetTask(frozen=True), loader())
        whole = trainer.strategy.state.model(trainer.model, full=True)
        found[f"frozen, {schedule}"] = gap(whole, plain(frozen=True)) if whole else 0.0
        trainer = clipping_trainer(Parallel(pp=2, pp_schedule=schedule))
        trainer.fit(Weighs(), loader())
        whole = trainer.strategy.state.model(trainer.model, full=True)
        found[f"left out, {schedule}"] = not all(torch.isfinite(value).all() for value in whole.values())
    trainer = clipping_trainer(Parallel(pp=2, activation_checkpointing=True, wrap=[nn.Sequential]))
    trainer.fit(NetTask(), loader())
    whole = trainer.strategy.state.model(trainer.model, full=True)
    # Batch statistics move on in the recomputed forward too, as they do in one process.
    found["recomputed"] = (
        gap(
            {n: v for n, v in whole.items() if "running" not in n and "tracked" not in n},
            {n: v for n, v in plain().items() if "running" not in n and "tracked" not in n},
        )
        if whole
        else 0.0
    )
    return found


def test_frozen_stages_batches_left_out_and_recomputed_blocks():
    for found in run_in_processes(varies, 2, timeout=60):
        assert max(found.values()) < 5e-6, found


# what a later stage uses of an earlier one, besides the arguments of its first module


class Remembers(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.tokens(tokens)
        x = memory.mean(1) * self.scale
        for block in self.blocks:
            x = block(x) + memory.amax(1)
        return self.head(x + memory.mean(1))


class Remembering(NetTask):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = Remembers()
        self.net.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))


def remembers(options: dict[str, Any]) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    trainer = clipping_trainer(Parallel(**options) if options else "single")
    trainer.fit(Remembering(), loader())
    return trainer.strategy.state.model(trainer.model, full=True)


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        ({"pp": 2}, 2),
        ({"pp": 4, "pp_schedule": "gpipe"}, 4),
        ({"pp": 2, "pp_schedule": "interleaved_1f1b"}, 2),
        ({"pp": 2, "pp_schedule": "zbv_zero_bubble"}, 2),
    ],
)
def test_gradients_flow_back_to_what_a_module_of_an_earlier_stage_returned(options: dict[str, Any], processes: int):
    whole = run_in_processes(remembers, processes, args=[options], timeout=60)[0]
    (expected,) = run_in_processes(remembers, 1, args=[{}], timeout=60)
    assert gap(whole, expected) < 5e-6


# parameters that cannot be sharded


class Gain(nn.Module):
    """One number, which no dimension of shards has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Gained(NetTask):
    def __init__(self) -> None:
        super().__init__()
        for block in self.net.blocks:
            block[1] = nn.LayerNorm(WIDTH)
            block.append(Gain())


class GainedLater(Gained):
    """Trains its scalars and a layer from the second step on, all in the optimizer from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.later(False)

    def later(self, trained: bool) -> None:
        for block in self.net.blocks:
            block[-1].requires_grad_(trained)
        self.net.blocks[2].requires_grad_(trained)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.later(batch_idx >= 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class Adding(NetTask):
    """Adds a parameter that no stage has, after the first step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def fit_gained(options: dict[str, Any], task: type[NetTask] = Gained) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    trainer = clipping_trainer(Parallel(**options) if options else "single")
    trainer.fit(task(), loader(ROWS // trainer.strategy.topology.data_shard.count))
    return trainer.strategy.state.model(trainer.model, full=True)


@pytest.mark.parametrize("task", [Gained, GainedLater])
def test_a_scalar_is_averaged_over_the_processes_with_other_data(task: type[NetTask]):
    [expected] = run_in_processes(fit_gained, 1, args=({}, task))
    found = run_in_processes(fit_gained, 4, args=({"pp": 2, "dp_shard": 2}, task), timeout=90)[0]
    assert gap(found, expected) < 5e-6


def test_a_parameter_that_is_added_later_is_refused() -> None:
    with pytest.raises(ProcessesFailed, match="A pipeline cannot train additional parameters after the model is split"):
        run_in_processes(fit_gained, 2, args=({"pp": 2}, Adding), timeout=60)


# random numbers


class Shuffled(NetTask):
    """Keeps the first token of each batch, and what its dropout leaves of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []
        self.masks: list[list[float]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.order.append(int(batch[0][0, 0]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        mask = F.dropout(torch.ones(8))
        output = self.net(batch[0])
        self.masks.append(mask.tolist())  # on the process that gets past the call
        return F.cross_entropy(output, batch[1]) * mask.mean()


def shuffled(strategy: Any, path: str, resume: bool) -> dict[str, Any]:
    """The order of two epochs, and masks; with `resume` of the second, from a checkpoint in its middle."""
    torch.set_num_threads(1)
    torch.manual_seed(9)
    data = loader(1).dataset
    options = {"max_epochs": 2, "accumulate_grad_batches": 2}
    task = Shuffled()
    torch.manual_seed(9)
    trainer = quiet_trainer(strategy, **options, callbacks=[SaveAt(6, path)])
    trainer.fit(task, DataLoader(data, batch_size=4, shuffle=True))
    found = {"order": task.order, "masks": task.masks}
    if resume:
        torch.manual_seed(1)
        again = Shuffled()
        quiet_trainer(strategy, **options).fit(again, DataLoader(data, batch_size=4, shuffle=True), resume=path)
        found["resumed"] = again.masks
        found["rest"] = again.order
    return found


class SaveAt(Callback):
    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and batch_idx % 2:
            trainer.save_checkpoint(self.path)


def plain_order() -> list[int]:
    """Of plain torch: two epochs of a shuffling loader."""
    torch.manual_seed(9)
    batches = DataLoader(loader(1).dataset, batch_size=4, shuffle=True)
    return [int(x[0, 0]) for _ in range(2) for x, _ in batches]


def test_the_order_of_every_epoch_is_that_of_one_process(tmp_path):
    expected = plain_order()
    first, last = run_in_processes(shuffled, 2, args=(Parallel(pp=2), str(tmp_path / "c"), True), timeout=60)
    assert first["order"] == last["order"] == expected
    # Dropout draws other numbers in each micro-batch, and the same after a resume.
    masks = [tuple(mask) for mask in last["masks"]]
    assert len(set(masks)) > len(masks) // 2
    assert last["rest"] == expected[-len(last["rest"]) :]
    assert last["resumed"] == last["masks"][-len(last["resumed"]) :]


# checkpoints


LAYOUTS: dict[str, tuple[Any, int]] = {
    "single": ({}, 1),
    "1f1b": ({"pp": 2}, 2),
    "zbv": ({"pp": 2, "pp_schedule": "zbv_zero_bubble"}, 2),
}
SLOW_LAYOUTS = {"fsdp": ({"dp_shard": 2}, 2), "pp x fsdp": ({"pp": 2, "dp_shard": 2}, 4)}


class Plain(NetTask):
    """Without statistics of batches, which differ with the number of rows of each process."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.net.blocks:
            block[1] = nn.LayerNorm(WIDTH)


def fit(options: dict[str, Any], epochs: int, resume: str | None = None) -> Trainer:
    torch.set_num_threads(1)
    trainer = clipping_trainer(Parallel(**options) if options else "single", max_epochs=epochs)
    trainer.fit(Plain(), loader(ROWS // trainer.strategy.topology.data_shard.count), resume=resume)
    return trainer


def write(options: dict[str, Any], path: str) -> None:
    fit(options, 1).save_checkpoint(path)


def go_on(options: dict[str, Any], paths: list[str]) -> list[dict[str, Tensor]]:
    found = []
    for path in [None, *paths]:
        trainer = fit(options, 2, path)
        found.append(trainer.strategy.state.model(trainer.model, full=True))
    return found


def check_checkpoints(root: Path, layouts: dict[str, tuple[Any, int]]) -> None:
    paths = [str(root / name) for name in layouts]
    for (options, processes), path in zip(layouts.values(), paths, strict=True):
        run_in_processes(write, processes, args=(options, path), timeout=60)
    straight: dict[str, Tensor] = {}
    for name, (options, processes) in layouts.items():
        for path, state in zip(
            ["straight", *paths], run_in_processes(go_on, processes, args=(options, paths), timeout=90)[0], strict=True
        ):
            straight = straight or state
            assert gap(state, straight) < 5e-6, (name, path)


def test_checkpoints_go_from_any_layout_to_any_other(tmp_path):
    check_checkpoints(tmp_path, LAYOUTS)


@pytest.mark.slow
def test_checkpoints_go_to_and_from_sharded_layouts(tmp_path):
    check_checkpoints(tmp_path, {**LAYOUTS, **SLOW_LAYOUTS})


# errors


class Raises(NetTask):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        logits = self.net(batch[0])
        if batch_idx == 2:
            raise ValueError("no loss today")
        return F.cross_entropy(logits, batch[1])


def fit_one(task: Task, **options: Any) -> None:
    torch.set_num_threads(1)
    # One micro-batch in a step, and no clipping, which tasks that optimize by hand do themselves.
    strategy = Parallel(pp=2, **options)
    quiet_trainer(strategy).fit(task, loader())


def raises(schedule: str) -> None:
    fit_one(Raises(), pp_schedule=schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_an_error_in_one_stage_ends_all_and_is_the_first_to_be_told(schedule):
    with pytest.raises(ProcessesFailed) as failed:
        run_in_processes(raises, 2, args=(schedule,), timeout=60)
    assert not failed.value.hung
    assert failed.value.ranks[0] == 1
    assert "ValueError: no loss today" in failed.value.tracebacks[1]
    assert "failed to run forward" not in failed.value.tracebacks[1]


class CallsTwice(NetTask):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]) + self.net(batch[0]), batch[1])


class NeverCalls(NetTask):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net.head.weight.sum()


class ByHand(NetTask):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Looks(Callback):
    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        task.net(loader().dataset.tensors[0])


def refusals() -> dict[str, str]:
    torch.set_num_threads(1)
    found: dict[str, str] = {}

    def attempt(name: str, run: Any) -> None:
        try:
            run()
        except ConfigurationError as error:
            found[name] = str(error)

    def outside() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        accelerator = Accelerator(cpu=True, strategy=Parallel(pp=2))
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    attempt("accelerator", outside)
    attempt("by hand", lambda: fit_one(ByHand()))
    attempt("never", lambda: fit_one(NeverCalls()))
    attempt("closure", lambda: clipping_trainer(Parallel(pp=2), callbacks=[Looks()]).fit(NetTask(), loader()))
    attempt("names", lambda: fit_one(NetTask(), pp_split=["blocks.1", "blocks.2"]))
    attempt("option", lambda: fit_one(NetTask(), pp_splits=["blocks.1"]))
    return found


def test_what_a_pipeline_cannot_do_is_refused_by_name():
    for found in run_in_processes(refusals, 2, timeout=60):
        assert "A loop with loss.backward() cannot do this. Use a Trainer" in found["accelerator"]
        assert "manual optimization" in found["by hand"]
        assert "training_step never called Net" in found["never"]
        assert "can only be called within training_step" in found["closure"]
        assert "pp_split names 2 modules, which makes 3 stages, but pp=2 x 1" in found["names"]
        assert "no option pp_splits. Allowed: pp_module, pp_split," in found["option"]


def calls_twice() -> None:
    fit_one(CallsTwice())


def sharded_with_zero_bubble() -> None:
    Accelerator(cpu=True, strategy=Parallel(pp=2, dp_shard=2, pp_schedule="zbv_zero_bubble"))


def test_sharded_stages_refuse_schedules_that_would_lose_their_gradients():
    with pytest.raises(ProcessesFailed, match=r"zbv_zero_bubble.*do not support. Use 'interleaved_1f1b' or '1f1b'"):
        run_in_processes(sharded_with_zero_bubble, 4, timeout=60)


def test_a_second_call_in_a_step_is_refused():
    with pytest.raises(ProcessesFailed) as failed:
        run_in_processes(calls_twice, 2, timeout=60)
    assert "once in each" in failed.value.tracebacks[1]


class SeesGradients(Callback):
    """Whether parameters have gradients when the hooks around a backward are called, on each process."""

    def __init__(self) -> None:
        self.after: list[bool] = []

    def on_after_backward(self, trainer, task):
        held = [parameter for parameter in task.parameters() if not parameter.is_meta]
        self.after.append(bool(held) and all(parameter.grad is not None for parameter in held))


def gradients_seen_after_backward() -> list[bool]:
    torch.set_num_threads(1)
    watch = SeesGradients()
    data = TensorDataset(torch.randint(11, (ROWS, 4)), torch.randint(CLASSES, (ROWS,)))
    quiet_trainer(Parallel(pp=2), accumulate_grad_batches=2, callbacks=[watch]).fit(
        NetTask(), DataLoader(data, batch_size=ROWS // 2)
    )
    return watch.after


def test_hooks_after_a_backward_see_its_gradients_on_every_stage():
    assert run_in_processes(gradients_seen_after_backward, 2, timeout=60) == [[True, True], [True, True]]

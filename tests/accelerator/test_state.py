"""save_state and load_state: a run that is continued is the run that was never left."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import (
    Accelerator,
    CheckpointError,
    CombinedLoader,
    ConfigurationError,
    DataLoaderConfiguration,
    PartialState,
    ProjectConfiguration,
    set_seed,
)
from drivetrain.accelerator import run_state
from tests.data.kinds import KINDS, Remembering, rows_of, seed_everything
from tests.pool import run_in_processes


class Counter:
    """What a user registers."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


class Run:
    """Two models, two optimizers, a schedule, dropout, a shuffled loader and something registered."""

    def __init__(self, precision: str = "no", **options: Any) -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        self.accelerator = Accelerator(cpu=True, mixed_precision=precision, **options)
        first = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.BatchNorm1d(4), nn.Linear(4, 1))
        second = nn.Linear(4, 1)
        optimizers = [torch.optim.AdamW(first.parameters(), lr=0.05), torch.optim.SGD(second.parameters(), lr=0.05)]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 3, gamma=0.5)
        data = TensorDataset(torch.randn(40, 4), torch.arange(40))
        loader = DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))
        prepare = self.accelerator.prepare
        self.first, self.second, *self.optimizers, self.scheduler, self.loader = prepare(
            first, second, *optimizers, scheduler, loader
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.log: list[Any] = []

    def step(self, x: torch.Tensor, index: torch.Tensor) -> None:
        x = x + 0.1 * torch.randn_like(x) + 0.1 * random.random() + 0.1 * np.random.rand()
        for model, optimizer in zip((self.first, self.second), self.optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            self.accelerator.backward(loss)
            optimizer.step()
        self.scheduler.step()
        self.counter.seen += index.tolist()
        self.log.append((loss.item(), self.scheduler.get_last_lr()[0]))

    def epoch(
        self,
        loader: Any = None,
        save_after: int | None = None,
        folder: Any = None,
        stop: bool = False,
        pass_over: int = 0,
    ) -> None:
        for number, (x, index) in enumerate(self.loader if loader is None else loader):
            if number < pass_over:
                continue
            self.step(x, index)
            if number + 1 == save_after:
                self.accelerator.save_state(folder)
                if stop:
                    return

    def outcome(self) -> dict[str, Any]:
        parameters = [p.detach().flatten() for m in (self.first, self.second) for p in [*m.parameters(), *m.buffers()]]
        return {
            "parameters": torch.cat([p.float() for p in parameters]).tolist(),
            "seen": self.counter.seen,
            "last": self.log[-1],
        }


def uninterrupted(folder: str, save_after: int, precision: str) -> dict[str, Any]:
    run = Run(precision)
    run.epoch()
    run.epoch(save_after=save_after, folder=folder)
    run.epoch()
    return run.outcome()


def continued(folder: str, save_after: int, precision: str, way: str) -> dict[str, Any]:
    """A new process that loads, and leaves out what the epoch has seen already: one of Accelerate's three ways."""
    stateful = DataLoaderConfiguration(use_stateful_dataloader=way == "stateful")
    run = Run(precision, dataloader_config=stateful)
    run.accelerator.load_state(folder)
    if save_after < len(run.loader):
        batches = run.loader
        if way == "skip":
            batches = run.accelerator.skip_first_batches(run.loader, save_after)
        run.epoch(batches, pass_over=save_after if way == "count" else 0)
    run.epoch()
    return run.outcome()


@pytest.mark.parametrize(
    ("processes", "save_after", "precision", "way"),
    [
        *((1, 7, "no", way) for way in ("stateful", "skip", "count")),
        *((2, 4, "no", way) for way in ("stateful", "skip", "count")),
        (1, 20, "no", "skip"),
        (2, 10, "bf16", "skip"),
        (2, 10, "bf16", "stateful"),
        (1, 7, "fp16", "count"),
    ],
)
def test_continued_is_as_uninterrupted(tmp_path, processes, save_after, precision, way):
    folder = str(tmp_path / "state")
    expected = run_in_processes(uninterrupted, processes, args=(folder, save_after, precision))
    found = run_in_processes(continued, processes, args=(folder, save_after, precision, way))
    assert found[0] == expected[0]
    for each, other in zip(found[1:], expected[1:], strict=True):
        # What is registered is rank 0's, as in Accelerate, and so is what DDP sends to all before each forward.
        own = len(other["seen"]) - save_after * 2 - 20 * 2 // processes
        assert each["seen"][-own:] == other["seen"][-own:]
        assert each["last"] == other["last"]
    seen = sorted(index for each in expected for index in each["seen"])
    assert seen == sorted([*range(40)] * 3)


# Whose orders come from generators, samplers, streams, and states of their own.
RESUMED = {"a state of its own": Remembering} | {
    name: KINDS[name]
    for name in (
        *("in order", "drop_last", "shuffled", "shuffled, own generator", "permutation", "custom batch sampler"),
        *("custom batch sampler drawing late", "no batches", "two workers", "stream", "stream without length"),
        *("subclass, shuffled", "object around a loader, no length", "list of batches"),
    )
}
EPOCHS = 4


def with_loaders(seed: int, stateful: bool = True) -> tuple[Accelerator, dict[str, Any]]:
    seed_everything(seed)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful))
    return accelerator, {kind: accelerator.prepare_data_loader(make()) for kind, make in RESUMED.items()}


def read_by_epoch(folder: str) -> dict[tuple[str, int], list[list[int]]]:
    """Read all epochs of all loaders; save when the last batches of epoch 1 are handed out, and after that epoch."""
    accelerator, loaders = with_loaders(seed=3)
    read: dict[tuple[str, int], list[list[int]]] = {}
    for epoch in range(EPOCHS):
        iterators = {kind: iter(loader) for kind, loader in loaders.items()}
        for kind, loader in loaders.items():
            batches = read[kind, epoch] = []
            while not loader.end_of_dataloader:
                batches.append(rows_of(next(iterators[kind])))
        if epoch == 1:
            accelerator.save_state(f"{folder}/with last batch")
        assert not any(list(iterator) for iterator in iterators.values())
        if epoch == 1:
            accelerator.save_state(f"{folder}/after epoch")
    return read


def resumed_by_epoch(
    folder: str, way: str, moment: str, done: dict[str, int]
) -> dict[tuple[str, int], list[list[int]]]:
    """Read on from a save, with epochs counted in one of the ways of scripts.

    Args:
        folder: The folder of the checkpoints.
        way: How the script finds the epoch: "loader" asks `loader.epoch`, "set" counts epochs and calls `set_epoch`,
            "skip" counts epochs and skips what the epoch has seen, "steps" counts batches.
        moment: When the checkpoint was saved.
        done: Batches of an epoch of this process.
    """
    accelerator, loaders = with_loaders(seed=17, stateful=way != "skip")
    accelerator.load_state(f"{folder}/{moment}")
    assert {loader.epoch for loader in loaders.values()} == {2}
    counted = 1 if moment == "with last batch" and way in ("set", "skip") else 2
    read: dict[tuple[str, int], list[list[int]]] = {}
    for epoch in range(counted, EPOCHS):
        iterators = {}
        for kind, loader in loaders.items():
            if way == "set":
                loader.set_epoch(epoch)
            skipped = done[kind] if epoch == 1 else 0
            skips = way != "set" and epoch == counted
            iterators[kind] = iter(accelerator.skip_first_batches(loader, skipped) if skips else loader)
        for kind, iterator in iterators.items():
            read[kind, epoch] = [rows_of(batch) for batch in iterator]
    return read


def epochs_around_a_save(folder: str) -> list[str]:
    """Compare what is read after a save at an epoch's end with the undisturbed run. Returns what differs."""
    expected, differ = read_by_epoch(folder), []
    done = {kind: len(expected[kind, 1]) for kind in RESUMED}
    for way, moment in itertools.product(("loader", "set", "skip", "steps"), ("with last batch", "after epoch")):
        found = resumed_by_epoch(folder, way, moment, done)
        for kind in RESUMED:
            if way == "skip" and kind == "a state of its own":  # which cannot go back to where its epoch began
                continue
            again = [found.get((kind, epoch), []) for epoch in range(1, EPOCHS)]
            if again != [[], expected[kind, 2], expected[kind, 3]]:
                differ.append(f"{kind}, {way}, {moment}: {again}")
    return differ


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_saved_at_the_end_of_an_epoch_reads_each_batch_once(tmp_path, processes):
    assert run_in_processes(epochs_around_a_save, processes, args=(str(tmp_path),)) == [[]] * processes


def combined(way: str, mode: str, seed: int) -> tuple[Accelerator, Any]:
    """Two loaders in step: prepared as one, or one by one and registered."""
    seed_everything(seed)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    generators = [torch.Generator().manual_seed(seed), None]
    parts = [
        DataLoader(torch.arange(rows), batch_size=2, shuffle=True, generator=generator)
        for rows, generator in zip((8, 14), generators, strict=True)
    ]
    loader = CombinedLoader(parts, mode)
    if way == "as one":
        return accelerator, accelerator.prepare_data_loader(loader)
    loader = loader.map(accelerator.prepare_data_loader)
    accelerator.register_for_checkpointing(loader)
    return accelerator, loader


def combined_around_a_save(folder: str) -> list[str]:
    """Save a combination at each batch of epoch 1, and compare the rest. Returns what differs."""
    differ = []
    for way, mode in itertools.product(
        ("as one", "registered"), ("min_size", "max_size_cycle", "max_size", "sequential")
    ):
        accelerator, loader = combined(way, mode, seed=3)
        read: list[list[Any]] = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            read.append([])
            for batch in loader:
                read[-1].append(str(batch))
                if epoch == 1:
                    accelerator.save_state(f"{folder}/{way} {mode} {len(read[-1])}")
        for number in range(1, len(read[1]) + 1):
            accelerator, loader = combined(way, mode, seed=17)
            accelerator.load_state(f"{folder}/{way} {mode} {number}")
            again = []
            for epoch in (1, 2):
                loader.set_epoch(epoch)
                again.append([str(batch) for batch in loader])
            if again != [read[1][number:], read[2]]:
                differ.append(f"{way}, {mode}, after {number}: {again} for {read}")
    return differ


@pytest.mark.parametrize("processes", [1, 2])
def test_combined_loaders_continue_at_the_next_batch(tmp_path, processes):
    assert run_in_processes(combined_around_a_save, processes, args=(str(tmp_path),)) == [[]] * processes


def saved_in_a_skipped_epoch(folder: str) -> dict[str, Any]:
    """Resume by skipping, save again within that epoch, and resume from there."""
    run = Run()
    run.epoch(save_after=3, folder=folder, stop=True)
    run = Run()
    run.accelerator.load_state(folder)
    run.epoch(run.accelerator.skip_first_batches(run.loader, 3), save_after=4, folder=folder, stop=True)
    run = Run()
    run.accelerator.load_state(folder)
    run.epoch(run.accelerator.skip_first_batches(run.loader, 3 + 4))
    run.epoch()
    return run.outcome()


def straight(epochs: int) -> dict[str, Any]:
    run = Run()
    for _ in range(epochs):
        run.epoch()
    return run.outcome()


def test_a_checkpoint_written_in_an_epoch_that_was_resumed_has_the_right_place(tmp_path):
    found = run_in_processes(saved_in_a_skipped_epoch, 1, args=(str(tmp_path / "state"),))
    assert found == run_in_processes(straight, 1, args=(2,))


def saved_by_two(folder: str) -> dict[str, Any]:
    run = Run()
    run.epoch(save_after=5, folder=folder, stop=True)
    return run.outcome()


def loaded_by_one(folder: str) -> dict[str, Any]:
    run = Run(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    run.accelerator.load_state(folder)
    before = run.outcome() if run.log else None
    assert before is None
    run.log.append(None)
    outcome = run.outcome()
    run.epoch()
    return {**outcome, "seen": run.counter.seen}


def test_another_number_of_processes_takes_up_weights_and_position(tmp_path):
    folder = str(tmp_path / "state")
    two = run_in_processes(saved_by_two, 2, args=(folder,))
    [one] = run_in_processes(loaded_by_one, 1, args=(folder,))
    assert one["parameters"] == two[0]["parameters"]  # running means too, which rank 1 has others of
    assert one["parameters"] != two[1]["parameters"]
    # 2 processes saw 5 batches of 2 samples each; the registered counter is rank 0's, which saw half of them
    rest = one["seen"][10:]
    assert len(rest) == 20
    assert not set(rest) & {index for each in two for index in each["seen"]}


def random_states(folder: str, save: bool) -> list[float]:
    """Save after drawing from states that differ by rank, or load; return what is drawn next by all generators."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    set_seed(30 + accelerator.process_index if save else 90 + accelerator.process_index)
    if save:
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_another_number_of_processes_takes_up_the_random_states(tmp_path, before, after):
    folder = str(tmp_path / "state")
    saved = run_in_processes(random_states, before, args=(folder, True))
    loaded = run_in_processes(random_states, after, args=(folder, False))
    assert loaded == [saved[rank % before] for rank in range(after)]


def project(tmp_path: Path, **options: Any) -> Accelerator:
    return Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, **options),
    )


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


def test_checkpoints_are_numbered_and_the_oldest_go(tmp_path):
    accelerator = project(tmp_path, total_limit=2)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    for number in range(11):
        counter.seen.append(number)
        assert accelerator.save_state() == str(tmp_path / "checkpoints" / f"checkpoint_{number}")
    assert names(tmp_path) == ["checkpoint_10", "checkpoint_9"]
    elsewhere = accelerator.save_state(tmp_path / "elsewhere")
    assert elsewhere == str(tmp_path / "elsewhere")
    assert accelerator.project_configuration.iteration == 11


def test_what_only_has_the_name_of_a_checkpoint_stays_and_does_not_count(tmp_path):
    for number in (0, 2):
        notes = tmp_path / "checkpoints" / f"checkpoint_{number}" / "notes.txt"
        notes.parent.mkdir(parents=True)
        notes.write_text("mine")
    accelerator = project(tmp_path, total_limit=1, iteration=3)
    for _ in range(2):
        accelerator.save_state()
    assert names(tmp_path) == ["checkpoint_0", "checkpoint_2", "checkpoint_4"]
    assert notes.read_text() == "mine"


def test_the_latest_is_loaded_and_counted_on_from(tmp_path):
    accelerator = project(tmp_path)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    for number in range(11):
        counter.seen.append(number)
        accelerator.save_state()
    again = project(tmp_path)
    loaded = Counter()
    again.register_for_checkpointing(loaded)
    again.load_state()
    assert loaded.seen == list(range(11))
    again.save_state()
    assert "checkpoint_11" in names(tmp_path)


def numbered_by_two(folder: str) -> list[str]:
    accelerator = project(Path(folder), total_limit=1)
    written = [accelerator.save_state() for _ in range(2)]
    accelerator.load_state()
    refused = ""
    try:
        project(Path(folder), iteration=1).save_state()
    except ConfigurationError as error:
        refused = str(error)
    return [*(Path(each).name for each in written), refused]


def test_two_processes_number_together_and_replace_no_earlier_run(tmp_path):
    for first, second, refused in run_in_processes(numbered_by_two, 2, args=(str(tmp_path),)):
        assert (first, second) == ("checkpoint_0", "checkpoint_1")
        assert "checkpoint_1 already exists" in refused
    assert names(tmp_path) == ["checkpoint_1"]


def test_without_a_name_there_must_be_numbers(tmp_path):
    accelerator = Accelerator(cpu=True)
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(ConfigurationError, match="automatic_checkpoint_naming=True"):
            call()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        project(tmp_path).load_state()
    with pytest.raises(ConfigurationError, match="at least 1"):
        ProjectConfiguration(total_limit=0)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda a: a.prepare(nn.Linear(1, 1), nn.Linear(1, 1)), "1 models, but this run has 2"),
        (lambda a: _prepare_all(a, registered=2), "1 objects registered for checkpointing, but this run has 2"),
    ],
)
def test_a_checkpoint_of_other_objects_is_refused(tmp_path, prepare, message):
    accelerator = Accelerator(cpu=True)
    _prepare_all(accelerator)
    accelerator.save_state(tmp_path / "state")
    other = Accelerator(cpu=True)
    prepare(other)
    with pytest.raises(CheckpointError, match=message):
        other.load_state(tmp_path / "state")


def test_fewer_objects_than_were_saved_are_loaded_and_the_rest_is_named(tmp_path, caplog):
    accelerator = Accelerator(cpu=True)
    models = [nn.Linear(1, 1), nn.Conv1d(1, 1, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    accelerator.prepare(*models, *optimizers)
    accelerator.register_for_checkpointing(Counter())
    accelerator.save_state(tmp_path / "state")
    other = Accelerator(cpu=True)
    model = other.prepare(nn.Linear(1, 1))
    other.load_state(tmp_path / "state")
    assert torch.equal(model.weight, models[0].weight)
    for left in (
        "2 models",
        "2 optimizers",
        "1 objects registered",
        "Not loaded: Conv1d.",
        "Not loaded: SGD, SGD.",
        "Counter",
    ):
        assert left in caplog.text


def _prepare_all(accelerator: Accelerator, registered: int = 1) -> None:
    model = nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.register_for_checkpointing(*(Counter() for _ in range(registered)))


def test_what_is_registered_must_have_a_state():
    with pytest.raises(ConfigurationError, match=r"int cannot be registered.*state_dict"):
        Accelerator(cpu=True).register_for_checkpointing(3)


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="checkpoint"):
        Accelerator(cpu=True).load_state(tmp_path)


def an_optimizer_over_two_models(folder: str) -> list[Any]:
    def make() -> Any:
        torch.manual_seed(0)
        models = [nn.Linear(2, 1), nn.Linear(2, 1)]
        accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.Adam([p for model in models for p in model.parameters()], lr=0.1)
        return accelerator, *accelerator.prepare(*models, optimizer)

    accelerator, first, second, optimizer = make()
    accelerator.backward((first(torch.ones(1, 2)) + second(torch.ones(1, 2))).sum())
    optimizer.step()
    accelerator.save_state(folder)
    accelerator, first, second, again = make()
    accelerator.load_state(folder)
    before, after = optimizer.state_dict()["state"], again.state_dict()["state"]
    return [torch.equal(before[i]["exp_avg"], after[i]["exp_avg"]) for i in range(4)]


@pytest.mark.parametrize("processes", [1, 2])
def test_an_optimizer_over_two_models(tmp_path, processes):
    found = run_in_processes(an_optimizer_over_two_models, processes, args=(str(tmp_path / "state"),))
    assert found == [[True] * 4] * processes


def whole_state() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Sequential(nn.Linear(2, 3)))
    state = accelerator.get_state_dict(model)
    return {"rank": PartialState().process_index, "names": list(state)}


def test_the_whole_state_is_on_every_process_under_the_model_s_own_names():
    for found in run_in_processes(whole_state, 2):
        assert found["names"] == ["0.weight", "0.bias"]


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_the_whole_state_leaves_out_extra_state_that_is_no_tensor():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(WithExtraState(2, 3))
    assert list(accelerator.get_state_dict(model)) == ["weight", "bias"]


# saves within a step


def train_and_save(kind: str, folder: str, strategy: str = "single") -> tuple[str, int]:
    """Train and save at one moment of each batch; returns the error, and how many saves were made."""
    accelerator = Accelerator(
        cpu=True,
        strategy=strategy,
        gradient_accumulation_steps=2 if "accumulate" in kind else 1,
    )
    torch.manual_seed(0)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    sides: Any = nn.ModuleDict({"first": first, "second": second})
    loader = DataLoader(TensorDataset(torch.randn(16, 2, generator=torch.Generator().manual_seed(1))), 2)
    if "L-BFGS" in kind:
        optimizers: list[Any] = [torch.optim.LBFGS(sides.parameters(), lr=0.1, max_iter=2)]
    elif "two" in kind:
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    else:
        optimizers = [torch.optim.SGD(sides.parameters(), lr=0.1, momentum=0.9)]
    model, loader, *optimizers = accelerator.prepare(Both(sides), loader, *optimizers)
    saved = 0

    def save(when: str) -> None:
        nonlocal saved
        if when in kind:
            accelerator.save_state(f"{folder}/{kind}-{saved}".replace(" ", "_"))
            saved += 1

    def closure() -> torch.Tensor:
        optimizers[0].zero_grad()
        loss: torch.Tensor = model(x)
        accelerator.backward(loss)
        save("in the closure")
        return loss

    try:
        for number, (x,) in enumerate(loader):
            if "L-BFGS" in kind:
                optimizers[0].step(closure)
            elif "two" in kind:
                for side, optimizer in enumerate(optimizers):
                    optimizer.zero_grad(set_to_none=False)
                    accelerator.backward(model(x))  # leaves gradients for the other side too
                    optimizer.step()
                    if side == 0:
                        save("between")
            elif "by hand" in kind:
                accelerator.backward(model(x) / 2)
                if number % 2:
                    save("before the step")
                    optimizers[0].step()
                    optimizers[0].zero_grad(set_to_none=number % 4 == 1)
                    save("after the step")
                else:
                    save("within")
            else:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x))
                    optimizers[0].step()
                    optimizers[0].zero_grad()
                save("within")
                if accelerator.sync_gradients:
                    save("after the step")
                if "break" in kind and number == 2:
                    break
            save("at the end")
        for _ in loader:  # a validation
            pass
        save("in the end")
    except CheckpointError as error:
        return str(error), saved
    return "", saved


class Both(nn.Module):
    def __init__(self, sides: nn.ModuleDict) -> None:
        super().__init__()
        self.sides = sides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.sides["second"](self.sides["first"](x)) - 1).square().mean()
        return loss


WITHIN = {
    "accumulate, within": 8,
    "by hand, within": 4,
    "by hand, before the step": 4,
    "two optimizers, between": 8,
}
AFTER = {
    "L-BFGS, at the end": 8,
    "accumulate, after the step": 4,
    "accumulate with a break, in the end": 1,
    "by hand, after the step": 4,
    "two optimizers, at the end": 8,
    "two optimizers, in the end": 1,
}


def test_a_save_in_a_closure_is_refused(tmp_path: Path) -> None:
    error, saved = train_and_save("L-BFGS, in the closure", str(tmp_path))
    assert "in the closure of L-BFGS" in error
    assert saved == 0
    assert not list(tmp_path.iterdir())


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether a save has warned of gradients that it does not hold."""
    monkeypatch.setattr(run_state.logger, "_seen", set())
    return lambda: "not part of the checkpoint" in caplog.text


@pytest.mark.parametrize("kind", WITHIN)
def test_a_save_within_a_step_warns_of_the_gradients(kind: str, tmp_path: Path, warned: Callable[[], bool]) -> None:
    assert train_and_save(kind, str(tmp_path)) == ("", WITHIN[kind])
    assert warned()


@pytest.mark.parametrize("kind", AFTER)
def test_a_save_after_the_last_step_of_a_batch_loses_nothing(
    kind: str, tmp_path: Path, warned: Callable[[], bool]
) -> None:
    assert train_and_save(kind, str(tmp_path)) == ("", AFTER[kind])
    assert not warned()


def saves_and_warns(*given: str) -> tuple[tuple[str, int], bool]:
    found: list[str] = []
    run_state.logger._seen.clear()
    run_state.logger.logger.addFilter(lambda record: found.append(record.getMessage()) or True)
    return train_and_save(*given), any("not part of the checkpoint" in each for each in found)


@pytest.mark.parametrize(
    "strategy",
    ["ddp", *(pytest.param(name, marks=pytest.mark.sharded) for name in ("fsdp", "deepspeed_stage_1"))],
)
def test_gradients_that_a_strategy_keeps_elsewhere_are_held_too(strategy: str, tmp_path: Path) -> None:
    for kind, saves, warns in (("accumulate, within", 4, True), ("by hand, after the step", 2, False)):
        [result, *_] = run_in_processes(saves_and_warns, 2, (kind, str(tmp_path), strategy))
        assert result == (("", saves), warns)

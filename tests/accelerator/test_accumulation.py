"""Windows of micro-batches: where they end, what they divide by, and that a loop leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import Accelerator, ConfigurationError, GradientAccumulationPlugin
from tests.pool import run_in_processes


class Parameter(torch.nn.Module):
    """One weight whose gradient is the mean of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x.float().mean()


class Stream(IterableDataset):
    """As many ones as said; its length is said only if asked for."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self):
        return iter(torch.ones(self.samples))


class StreamThatSays(Stream):
    def __init__(self, samples: int, said: int) -> None:
        super().__init__(samples)
        self.said = said

    def __len__(self) -> int:
        return self.said


def ones(batches: int) -> DataLoader:
    return DataLoader(torch.ones(batches), batch_size=1)


class Loop:
    """A training loop that notes each step's gradient. `clear` says where gradients are cleared."""

    def __init__(self, steps: int = 4, clear: str = "first", **options: Any) -> None:
        if "gradient_accumulation_plugin" not in options:
            options["gradient_accumulation_steps"] = steps
        self.accelerator = Accelerator(cpu=True, **options)
        self.clear = clear
        self.model = Parameter()
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.gradients: list[float] = []
        self.inner.register_step_pre_hook(lambda *_: self.gradients.append(self.bare.weight.grad.item()))
        self.bare = self.model
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.inner)

    def step(self, batch: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            if self.clear == "first":
                self.optimizer.zero_grad()
            self.accelerator.backward(self.model(batch))
            self.optimizer.step()
            if self.clear == "last":
                self.optimizer.zero_grad()

    def run(self, loader: Any, stop_after: int | None = None) -> list[float]:
        """The gradient of each step of one pass."""
        self.gradients.clear()
        for index, batch in enumerate(loader):
            self.step(batch)
            if stop_after == index + 1:
                break
        return list(self.gradients)


@pytest.mark.parametrize("clear", ["first", "last"])
@pytest.mark.parametrize(
    ("steps", "batches", "expected"),
    [
        (1, 3, [1, 1, 1]),
        (2, 4, [1, 1]),
        (4, 5, [1, 1]),  # the last window holds one micro-batch and is divided by one
        (4, 7, [1, 1]),
        (4, 3, [1]),
        (3, 1, [1]),
    ],
)
def test_every_window_is_divided_by_what_it_holds(steps, batches, expected, clear):
    loop = Loop(steps, clear)
    loader = loop.accelerator.prepare(ones(batches))
    for _ in range(2):
        assert loop.run(loader) == pytest.approx(expected)


@pytest.mark.parametrize("clear", ["first", "last"])
@pytest.mark.parametrize(
    "data",
    [
        lambda samples: Stream(samples),
        lambda samples: StreamThatSays(samples, samples + 2),
        lambda samples: StreamThatSays(samples, samples - 1),
    ],
    ids=["without a length", "that says too much", "that says too little"],
)
@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_also_of_a_stream(data, clear):
    loop = Loop(4, clear)
    for samples, steps in ((4, 1), (6, 2), (7, 2), (1, 1)):
        loader = loop.accelerator.prepare(DataLoader(data(samples), batch_size=1))
        assert loop.run(loader) == pytest.approx([1] * steps)


@pytest.mark.parametrize("clear", ["first", "last"])
@pytest.mark.parametrize("stop_after", [1, 2, 3, 5])
def test_a_loop_left_by_break_leaves_nothing(stop_after, clear):
    loop = Loop(4, clear)
    loader = loop.accelerator.prepare(ones(8))
    assert loop.run(loader, stop_after) == [1] * (stop_after // 4)
    assert loop.accelerator.sync_gradients
    assert loop.run(loader) == pytest.approx([1, 1])
    assert loop.run(ones(8)) == pytest.approx([1, 1])


def test_a_loop_left_by_an_exception_leaves_nothing():
    loop = Loop(4, "last")
    loader = loop.accelerator.prepare(ones(8))

    def fail() -> None:
        for batch in loader:
            loop.step(batch)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert loop.run(loader) == pytest.approx([1, 1])


def test_what_is_held_after_a_break_can_be_stepped_with():
    loop = Loop(4, "last")
    loader = loop.accelerator.prepare(ones(8))
    loop.run(loader, 2)
    loop.optimizer.step()
    assert loop.gradients == [0.5]
    loop.optimizer.zero_grad()
    assert loop.bare.weight.grad is None
    assert loop.run(loader) == pytest.approx([1, 1])


def test_gradients_computed_between_loops_are_kept():
    loop = Loop(2, "last")
    loader = loop.accelerator.prepare(ones(4))
    loop.run(loader)
    loop.bare.weight.grad = torch.tensor(10.0)
    assert loop.run(loader) == pytest.approx([11, 1])


@pytest.mark.parametrize("stop_after", [None, 1, 2])
def test_an_evaluation_loop_inside_does_not_disturb(stop_after):
    loop = Loop(4)
    loader, evaluation = loop.accelerator.prepare(ones(6), ones(3))
    synced = []
    for batch in loader:
        loop.step(batch)
        synced.append(loop.accelerator.sync_gradients)
        for index, _ in enumerate(evaluation):
            if index + 1 == stop_after:
                break
    assert synced == [False, False, False, True, False, True]
    assert loop.gradients == pytest.approx([1, 1])


def test_the_evaluation_may_stand_between_backward_and_step():
    loop = Loop(2)
    loader, evaluation = loop.accelerator.prepare(ones(4), ones(3))
    for batch in loader:
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(loop.model(batch))
            for _ in evaluation:
                pass
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert loop.gradients == pytest.approx([1, 1])


def test_a_plain_list_is_counted_by_itself():
    loop = Loop(4)
    assert loop.run([torch.ones(1)] * 6) == pytest.approx([1])
    assert loop.run([torch.ones(1)] * 6) == pytest.approx([1, 1])  # the two that were left are part of a window


def test_letting_go_of_everything_ends_the_window():
    loop = Loop(4)
    loop.run([torch.ones(1)] * 3)
    loop.accelerator.free_memory()
    assert loop.accelerator.sync_gradients
    with loop.accelerator.accumulate():
        assert not loop.accelerator.sync_gradients


def test_a_prepared_list_has_an_end():
    loop = Loop(4)
    loader = loop.accelerator.prepare_data_loader([torch.ones(1)] * 6)
    assert loop.run(loader) == pytest.approx([1, 1])


def test_windows_go_on_over_the_end_of_a_loader_if_asked_to():
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    loop = Loop(gradient_accumulation_plugin=plugin)
    loader = loop.accelerator.prepare(ones(6))
    assert loop.run(loader) == pytest.approx([1])
    assert loop.run(loader) == pytest.approx([1, 1])


def test_without_accumulate_backward_divides_by_the_steps_as_accelerate_does():
    loop = Loop(4)
    loop.accelerator.backward(loop.model(torch.ones(1)))
    assert loop.bare.weight.grad.item() == 0.25


def test_the_steps_can_be_changed():
    loop = Loop(1)
    loader = loop.accelerator.prepare(ones(6))
    assert loop.run(loader) == pytest.approx([1] * 6)
    loop.accelerator.gradient_accumulation_steps = 3
    assert loop.accelerator.gradient_accumulation_steps == 3
    assert loop.run(loader) == pytest.approx([1, 1])
    loop.accelerator.gradient_accumulation_steps = 2
    loop.optimizer.zero_grad()
    loop.accelerator.backward(loop.model(torch.ones(1)))
    assert loop.bare.weight.grad.item() == 0.5


def test_several_models_and_optimizers_share_a_window():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = Parameter(), Parameter()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (first, second)]
    first, second, *optimizers, loader = accelerator.prepare(first, second, *optimizers, ones(4))
    for batch in loader:
        with accelerator.accumulate(first, second):
            for optimizer in optimizers:
                optimizer.zero_grad()
            accelerator.backward(first(batch))
            optimizers[0].step()
            accelerator.backward(2 * second(batch))
            optimizers[1].step()
    assert (first.weight.item(), second.weight.item()) == (-2, -4)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "two"])
def test_a_number_of_steps_that_cannot_be_is_refused(steps):
    with pytest.raises(ConfigurationError, match="integer of at least 1"):
        Accelerator(cpu=True, gradient_accumulation_steps=steps)


def test_steps_that_contradict_the_plugin_are_refused():
    with pytest.raises(ConfigurationError, match="contradicts"):
        Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3),
        )


def averaged_over_processes(sync_each_batch: bool) -> dict[str, Any]:
    plugin = GradientAccumulationPlugin(num_steps=4, sync_each_batch=sync_each_batch)
    loop = Loop(gradient_accumulation_plugin=plugin)
    rank = loop.accelerator.process_index
    # Rank 0 sees the samples 0, 2, 4, …, rank 1 the samples 1, 3, 5, …
    loader = loop.accelerator.prepare(DataLoader(torch.arange(20.0), batch_size=1))
    gradients = loop.run(loader)
    within = Loop(gradient_accumulation_plugin=plugin)
    with within.accelerator.accumulate(within.model):
        within.accelerator.backward(within.model(torch.tensor([float(rank)])))
    return {"gradients": gradients, "within": within.bare.weight.grad.item()}


def test_gradients_are_reduced_where_a_window_ends_or_each_time_if_asked():
    for each, rank in zip(run_in_processes(averaged_over_processes, 2, args=(False,)), (0, 1), strict=True):
        assert each["gradients"] == pytest.approx([3.5, 11.5, 17.5])
        assert each["within"] == pytest.approx(rank / 4)
    for each in run_in_processes(averaged_over_processes, 2, args=(True,)):
        assert each["gradients"] == pytest.approx([3.5, 11.5, 17.5])
        assert each["within"] == pytest.approx(0.5 / 4)


@pytest.mark.parametrize("loader", [ones(6), DataLoader(Stream(6), batch_size=1)], ids=["length", "stream"])
def test_a_short_window_is_divided_by_the_full_number_where_asked(loader):
    plugin = GradientAccumulationPlugin(num_steps=4, average_short_window=False)
    loop = Loop(gradient_accumulation_plugin=plugin)
    assert loop.run(loop.accelerator.prepare(loader)) == [1.0, 0.5]
    usual = Loop(steps=4)
    assert usual.run(usual.accelerator.prepare(loader)) == [1.0, 1.0]

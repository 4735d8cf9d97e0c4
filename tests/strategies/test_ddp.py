"""DDP's options, each with what it is for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import DDP, Accelerator, ConfigurationError, Task
from tests.pool import ProcessesFailed, run_in_processes
from tests.strategies.quiet import quiet_trainer


class Branches(nn.Module):
    """Uses one of two branches; the frozen one never learns."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(2, 2)
        self.right = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        return self.frozen(getattr(self, branch)(x))


def train_branches(options: dict[str, Any], branches: list[str], steps: int = 1) -> dict[str, Any]:
    """Gradients after a few steps in which rank 0's input is ones and rank 1's threes."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, strategy=DDP(**options), gradient_accumulation_steps=steps)
    module = Branches()
    before = module.frozen.weight.clone()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.0))
    x = torch.full((1, 2), 1.0 + 2 * accelerator.process_index)
    for _ in range(3):
        for branch in branches:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(model(x, branch).sum())
                optimizer.step()
    gradients = {name: None if p.grad is None else p.grad.tolist() for name, p in module.named_parameters()}
    optimizer.zero_grad()
    mean = Branches()
    mean.load_state_dict(module.state_dict())
    mean(torch.full((1, 2), 2.0), branches[-1]).sum().backward()
    expected = getattr(mean, branches[-1]).weight.grad
    return {
        "gradients": gradients,
        "expected": expected.tolist(),
        "options": {name: getattr(model, name) for name in ("gradient_as_bucket_view", "static_graph")},
        "frozen": torch.equal(module.frozen.weight, before) and gradients["frozen.weight"] is None,
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": False},
        {"static_graph": True},
        {"bucket_cap_mb": 0.00001},
        {"broadcast_buffers": False},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_are_those_of_the_mean_over_processes(options, steps):
    options = {"find_unused_parameters": not options.get("static_graph"), **options}
    for each in run_in_processes(train_branches, 2, args=(options, ["left"], steps)):
        torch.testing.assert_close(torch.tensor(each["gradients"]["left.weight"]), torch.tensor(each["expected"]))
        assert each["frozen"]
        defaults = {"gradient_as_bucket_view": True, "static_graph": False}
        assert each["options"] == {name: options.get(name, value) for name, value in defaults.items()}


def test_parameters_that_take_no_part_need_to_be_looked_for():
    for each in run_in_processes(train_branches, 2, args=({"find_unused_parameters": True}, ["left", "right"])):
        torch.testing.assert_close(torch.tensor(each["gradients"]["right.weight"]), torch.tensor(each["expected"]))
    with pytest.raises(ProcessesFailed, match="find_unused_parameters=True"):
        run_in_processes(train_branches, 2, args=({}, ["left", "right"]))


ADVICE = 'use strategy="ddp_find_unused_parameters_true"'


class BranchTask(Task):
    """Both branches on all ranks but one, which takes the left alone."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.net = Branches()
        self.odd = odd

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0], "left").sum()
        return loss if self.trainer.global_rank == self.odd else loss + self.net(batch[0], "right").sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def fit_branches(strategy: str, odd: int) -> list[float]:
    trainer = quiet_trainer(strategy, log_every_n_steps=1)
    task = BranchTask(odd)
    trainer.fit(task, DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=1))
    return [float(parameter.sum()) for parameter in task.parameters()]


def step_by_hand(odd: int, steps: int) -> None:
    accelerator = Accelerator(cpu=True)
    module = Branches()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for _ in range(steps):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(1, 2), "right" if accelerator.process_index == odd else "left").sum())
        optimizer.step()
    accelerator.wait_for_everyone()


def two_losses() -> bool:
    """Two backwards after one forward, each through its own part, are one reduction."""
    accelerator = Accelerator(cpu=True)
    module = Both()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        left, right = model(torch.full((1, 2), 1.0 + accelerator.process_index))
        accelerator.backward(left.sum())
        accelerator.backward(right.sum())
        optimizer.step()
    return bool(torch.equal(*accelerator.gather(module.left.weight[None])))


class Both(Branches):
    def forward(self, x: torch.Tensor) -> Any:
        return self.left(x), self.right(x)


def test_a_parameter_that_one_rank_leaves_out_ends_in_an_error_that_names_both():
    words = r"On rank 1 no gradient was computed for net\.right\.weight, net\.right\.bias, because the loss"
    with pytest.raises(ProcessesFailed, match=words) as failed:
        run_in_processes(fit_branches, 2, args=("ddp", 1), timeout=30)
    assert ADVICE in str(failed.value)
    assert not failed.value.hung


def test_a_parameter_that_one_rank_leaves_out_works_where_it_is_looked_for():
    first, second = run_in_processes(fit_branches, 2, args=("ddp_find_unused_parameters_true", 1), timeout=30)
    assert first == second


@pytest.mark.parametrize("steps", [1, 3])
def test_a_raw_loop_that_leaves_parameters_out_on_all_ranks_or_one_is_told_which(steps):
    with pytest.raises(ProcessesFailed) as failed:
        run_in_processes(step_by_hand, 2, args=(1, steps), timeout=30)
    message = str(failed.value)
    assert "no gradient was computed for " in message
    assert ADVICE in message
    assert not failed.value.hung
    with pytest.raises(
        ProcessesFailed, match=r"no gradient was computed for right\.weight, right\.bias, because the loss"
    ):
        run_in_processes(step_by_hand, 2, args=(-1, steps), timeout=30)


def step_weighted(clips: bool) -> None:
    """A window of two micro-batches with weights; rank 1's losses leave the right branch out."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    module = Both()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for _ in range(2):
        with accelerator.accumulate(model):
            left, right = model(torch.ones(1, 2))
            loss = left.sum() + right.sum() if accelerator.is_main_process else left.sum()
            accelerator.backward(loss, weight=2)
            if clips:
                accelerator.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("clips", [False, True])
def test_a_raw_loop_with_weights_names_what_one_rank_leaves_out(clips):
    with pytest.raises(ProcessesFailed) as failed:
        run_in_processes(step_weighted, 2, args=(clips,), timeout=30)
    message = failed.value.tracebacks[1]
    assert "On rank 1 no gradient was computed for right.weight, right.bias, because the loss" in message
    assert ADVICE in message
    assert not failed.value.hung


def forwards_without_steps(freezes: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(module := Branches())
    module.left.weight.requires_grad_(not freezes)
    for _ in range(2):
        model(torch.ones(1, 2), "left").sum().backward()


@pytest.mark.parametrize("freezes", [False, True])
def test_torchs_own_error_about_parameters_left_out_is_ours(freezes):
    with pytest.raises(
        ProcessesFailed, match=r"no gradient was computed for right\.weight, right\.bias, because"
    ) as failed:
        run_in_processes(forwards_without_steps, 2, args=(freezes,), timeout=30)
    assert ADVICE in str(failed.value)


def test_two_backwards_after_one_forward_are_one_reduction():
    assert run_in_processes(two_losses, 2) == [True, True]


def compressed(name: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Bytes that go through all-reduce in the last step, and how far gradients are from the exact mean."""
    torch.manual_seed(0)
    hook = HOOKS.get(name, name)
    if "state" in options:
        options = {"state": []}
    accelerator = Accelerator(cpu=True, strategy=DDP(comm_hook=hook, comm_hook_options=options))
    model = nn.Linear(64, 64, bias=False)
    bare = model
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    sent: list[int] = []
    original = dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counting
    for _ in range(4):
        sent.clear()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(accelerator.process_index)
        x, y = (torch.randn(1, 64, generator=generator) for _ in range(2))
        accelerator.backward((model(x) * y).sum())
    dist.all_reduce = original
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    pairs = [[torch.randn(1, 64, generator=g) for _ in range(2)] for g in generators]
    exact = torch.stack([y.T @ x for x, y in pairs]).mean(0)
    error = (bare.weight.grad - exact).norm() / exact.norm()
    same = accelerator.gather(bare.weight.grad[None]).unbind()
    return {"bytes": sum(sent), "error": error.item(), "same": torch.equal(*same), "state": options.get("state")}


def halved(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A user's own: in a module whose annotations are strings. Notes its buckets in its state."""
    state.append(bucket.index())
    return default_hooks.fp16_compress_hook(None, bucket)


HOOKS = {"a function": halved, "torch's own bf16": default_hooks.bf16_compress_hook}
FULL = 64 * 64 * 4


@pytest.mark.parametrize(
    ("name", "options", "most_bytes", "most_error"),
    [
        ("fp16", {}, FULL / 2, 1e-3),
        ("bf16", {}, FULL / 2, 1e-2),
        ("a function", {"state": True}, FULL / 2, 1e-3),
        ("torch's own bf16", {}, FULL / 2, 1e-2),
        ("powersgd", {"matrix_approximation_rank": 2, "min_compression_rate": 1}, FULL / 8, 1e-2),
        ("batched_powersgd", {"matrix_approximation_rank": 2, "min_compression_rate": 1}, FULL / 8, 1e-2),
    ],
)
def test_hooks_send_less(name, options, most_bytes, most_error):
    for each in run_in_processes(compressed, 2, args=(name, options)):
        assert 0 < each["bytes"] <= most_bytes
        assert each["error"] < most_error
        assert each["same"]
        if "state" in options:
            assert each["state"] == [0] * 4


class Scaled(Task):
    """A parameter without dimensions beside a matrix, as a learned temperature is."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = nn.Linear(8, 8, bias=False), nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.net(batch[0]) * self.scale).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_compressed(hook: str) -> list[float]:
    torch.manual_seed(0)
    task = Scaled()
    with torch.no_grad():
        task.net.weight[:, 4:] = 0.0
    options = {"start_powerSGD_iter": 2, "min_compression_rate": 0}
    rows = torch.randn(12, 8) * (torch.arange(8) < 4)  # half of the columns have gradients of zero
    quiet_trainer(DDP(comm_hook=hook, comm_hook_options=options)).fit(task, DataLoader(TensorDataset(rows)))
    return [float(parameter.detach().sum()) for parameter in task.parameters()]


@pytest.mark.parametrize("hook", ["powersgd", "batched_powersgd"])
def test_power_sgd_trains_on_once_it_compresses(hook):
    first, second = run_in_processes(fit_compressed, 2, args=(hook,))
    assert first == second
    assert all(math.isfinite(each) for each in first)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"comm_hook": "powersdg"},
        r"Unknown comm_hook 'powersdg'. Allowed: fp16, bf16, powersgd.*Did you mean 'powersgd'",
    ),
    ({"comm_hook": "fp16", "comm_hook_options": {"rank": 1}}, r"comm_hook='fp16' takes no options, got \['rank'\]"),
    ({"comm_hook_options": {"rank": 1}}, "takes no options"),
    ({"bucket_cap_mb": 0}, "bucket_cap_mb must be positive"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        DDP(**options)


def test_batch_statistics_over_processes_need_gpus():
    with pytest.raises(ConfigurationError, match="sync_batchnorm=True needs GPUs"):
        Accelerator(cpu=True, strategy=DDP(sync_batchnorm=True))


def refused_power_sgd() -> str:
    accelerator = Accelerator(cpu=True, strategy=DDP(comm_hook="powersgd", comm_hook_options={"rnak": 1}))
    try:
        accelerator.prepare(nn.Linear(1, 1))
    except ConfigurationError as error:
        return str(error)
    return ""


def nothing_to_train() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    frozen = nn.Linear(1, 1).requires_grad_(False)
    return [accelerator.prepare(frozen) is frozen, frozen(torch.ones(1, 1)).shape[0], refused_power_sgd()]


def test_a_model_without_trainable_parameters_stays_bare():
    for bare, rows, message in run_in_processes(nothing_to_train, 2):
        assert bare
        assert rows == 1
        assert "matrix_approximation_rank" in message


def buffers() -> list[Any]:
    """Rank 0's running means are what counts, in the next forward and in the state."""
    accelerator = Accelerator(cpu=True)
    module = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    model = accelerator.prepare(module)
    x = torch.randn(4, 1, generator=torch.Generator().manual_seed(accelerator.process_index))
    accelerator.backward(model(x).sum())
    own = module[1].running_mean.item()
    state = accelerator.strategy.state.model(model)
    return [own, state["1.running_mean"].item(), module[1].running_mean.item(), list(state)]


def test_the_state_holds_rank_0_s_buffers_and_changes_none():
    first, second = run_in_processes(buffers, 2)
    assert first[0] != second[0]
    assert first[1] == second[1] == first[0]
    assert (first[2], second[2]) == (first[0], second[0])
    assert first[3] == list(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)).state_dict())


def evaluated() -> list[bool]:
    accelerator = Accelerator(cpu=True)
    module = nn.Linear(1, 1)
    model = accelerator.prepare(module)
    strategy = accelerator.strategy
    # In evaluation nothing is exchanged, so one process may evaluate alone.
    called = strategy.view(model, "evaluate")
    if accelerator.is_main_process:
        called(torch.ones(1, 1))
    return [strategy.unwrap(model) is module, called is module, not strategy.needs_even_batches]


def test_evaluation_needs_no_peers():
    assert run_in_processes(evaluated, 2) == [[True] * 3] * 2


class Phases(Task):
    """A complex parameter, or the two real ones that it consists of; rank 1 leaves its second batch out."""

    def __init__(self, is_complex: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = torch.randn(3, 2)
        self.is_complex = is_complex
        self.phase = nn.Parameter(torch.view_as_complex(parts) if is_complex else parts)
        self.scale = nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        if batch_idx == 1 and self.trainer.global_rank == 1:
            return None
        parts = torch.view_as_real(self.phase) if self.is_complex else self.phase
        return ((batch[0] * self.scale)[..., None] * parts).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def phases() -> float:
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    tasks = [Phases(is_complex) for is_complex in (True, False)]
    for task in tasks:
        quiet_trainer("ddp").fit(task, DataLoader(TensorDataset(rows)))
    return float((torch.view_as_real(tasks[0].phase) - tasks[1].phase).abs().max())


def test_a_batch_may_be_left_out_beside_complex_parameters():
    assert max(run_in_processes(phases, 2, timeout=60)) <= 5e-6

"""Sequences split over processes: attention over all tokens, which part is whose, and what is refused."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Accelerator, ConfigurationError, Parallel, Task, Trainer, sequence_positions
from tests.pool import run_in_processes
from tests.strategies.parallel_models import WIDTH, Attention, made

pytestmark = pytest.mark.sharded

# heads, key heads, length, causal, chunks from both ends, scale
ATTENTION = [
    (4, 4, 16, True, True, None),
    (4, 4, 16, True, False, None),
    (4, 2, 24, True, True, 0.3),
    (4, 1, 8, False, True, None),
    (2, 2, 12, False, False, 0.5),
]


def strategy_of(**options: Any) -> Parallel:
    """A strategy that is set up, in a world of as many as there are."""
    count = int(torch.distributed.get_world_size()) if torch.distributed.is_initialized() else 2
    accelerator = Accelerator(cpu=True, strategy=Parallel(cp=options.pop("cp", count), **options))
    assert isinstance(accelerator.strategy, Parallel)
    return accelerator.strategy


def attention_gaps(cases: list[Any], count: int) -> list[float]:
    """How far outputs and gradients are from those of whole sequences, for each case."""
    gaps = []
    for heads, key_heads, length, causal, balanced, scale in cases:
        strategy = strategy_of(cp=count, cp_load_balance=balanced)
        shard = strategy.sequences.shard
        assert shard is not None
        generator = torch.Generator().manual_seed(2)
        size = 8 if balanced else 6  # of values: as large as keys, and not
        shapes = [(2, heads, length, 8), (2, key_heads, length, 8), (2, key_heads, length, size)]
        whole = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
        weights = torch.randn(2, heads, length, size, generator=generator)
        options = {"is_causal": causal, "scale": scale, "enable_gqa": heads != key_heads}
        expected = F.scaled_dot_product_attention(*whole, **options)
        (expected * weights).sum().backward()
        own = [shard.split(tensor.detach(), 2).requires_grad_() for tensor in whole]
        with strategy.sequences.attention():
            found = F.scaled_dot_product_attention(*own, **options)
        (found * shard.split(weights, 2)).sum().backward()
        pairs = [(shard.join(found.detach(), 2), expected)]
        pairs += [(shard.join(mine.grad, 2), tensor.grad) for mine, tensor in zip(own, whole, strict=True)]
        gaps.append(max((one - other).abs().max().item() for one, other in pairs))
    return gaps


def test_attention_is_that_of_whole_sequences():
    for gaps in run_in_processes(attention_gaps, 2, args=(ATTENTION, 2)):
        assert max(gaps) < 2e-6, gaps


def test_attention_over_four_processes():
    cases = [case for case in ATTENTION if case[2] % 8 == 0]
    for gaps in run_in_processes(attention_gaps, 4, args=(cases, 4)):
        assert max(gaps) < 2e-6, gaps


def parts() -> dict[str, Any]:
    """Which tokens are this process's."""
    found: dict[str, Any] = {"alone": sequence_positions(3).tolist()}
    for name, balanced in (("balanced", True), ("in order", False)):
        strategy = strategy_of(cp_load_balance=balanced)
        tokens = torch.arange(8).expand(3, 8)
        batch = strategy.sequences.shard_batch(
            {"tokens": tokens, "weights": [tokens * 2.0], "count": torch.tensor(3), "name": "a"}
        )
        with strategy.sequences.attention(), strategy.sequences.attention():
            positions = sequence_positions(4)
        shard = strategy.sequences.shard
        assert shard is not None
        found[name] = {
            "tokens": batch["tokens"].tolist(),
            "follows": torch.equal(batch["weights"][0], batch["tokens"] * 2.0),
            "rest": (batch["count"].item(), batch["name"]),
            "positions": positions.tolist(),
            "joined": torch.equal(shard.join(batch["tokens"], 1), tokens),
        }
    return found


def test_positions_and_all_tensors_of_a_batch_follow_the_tokens():
    owners = {"balanced": [[0, 1, 6, 7], [2, 3, 4, 5]], "in order": [[0, 1, 2, 3], [4, 5, 6, 7]]}
    for rank, found in enumerate(run_in_processes(parts, 2)):
        assert found["alone"] == [0, 1, 2]
        for name, expected in owners.items():
            each = found[name]
            assert each["tokens"] == [expected[rank]] * 3
            assert each["positions"] == expected[rank]
            assert each["follows"]
            assert each["joined"]
            assert each["rest"] == (3, "a")


class Local(nn.Module):
    """Attends without the function that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(1, 2)).softmax(-1) @ self.mix(x)


def refusals() -> dict[str, str]:
    """What is refused, and with which words."""
    accelerator = Accelerator(cpu=True, strategy=Parallel(cp=2))
    strategy = accelerator.strategy
    assert isinstance(strategy, Parallel)
    q = torch.randn(1, 2, 4, 8)
    x = torch.randn(2, 8, WIDTH)
    model = accelerator.prepare(made(Local))

    def within(function: Any) -> Any:
        with accelerator.maybe_context_parallel([x], [1], {x}):
            return function()

    attempts: dict[str, Any] = {
        "mask": lambda: within(lambda: F.scaled_dot_product_attention(q, q, q, torch.ones(4, 4))),
        "dropout": lambda: within(lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)),
        "lengths": lambda: within(lambda: F.scaled_dot_product_attention(q, q[:, :, :2], q[:, :, :2], is_causal=True)),
        "module": lambda: within(lambda: nn.MultiheadAttention(8, 2, batch_first=True)(q[0], q[0], q[0])),
        "odd": lambda: strategy.sequences.shard_batch(torch.zeros(2, 6)),
        "shapes": lambda: strategy.sequences.shard_batch((torch.zeros(2, 8), torch.zeros(2, 4))),
        "numbers": lambda: accelerator.maybe_context_parallel([x, x], [1]).__enter__(),
        "strangers": lambda: accelerator.maybe_context_parallel([x], [1], {q}).__enter__(),
        "no attention": lambda: within(lambda: model(x)),
    }
    found = {}
    for name, attempt in attempts.items():
        x = torch.randn(2, 8, WIDTH)
        try:
            attempt()
            found[name] = ""
        except ConfigurationError as error:
            found[name] = str(error)
    return found


REFUSED = {
    "mask": r"got a mask of shape \(4, 4\).*Pass is_causal=True",
    "dropout": r"dropout_p=0.1",
    "lengths": r"as many queries as keys, got 4 and 2",
    "module": r"does not support nn.MultiheadAttention and nn.Transformer",
    "odd": r"Sequences of 6 tokens cannot be split over cp=2 processes, which needs a multiple of 4. Pad them to 8",
    "shapes": r"tensors of the shapes \(2, 4\), \(2, 8\)..*cp_shard_batch",
    "numbers": r"there are 2 buffers and 1 dimensions",
    "strangers": r"1 tensors of no_restore_buffers are not in buffers",
    "no attention": r"nothing called torch.nn.functional.scaled_dot_product_attention",
}


def test_what_would_be_wrong_silently_is_refused():
    for found in run_in_processes(refusals, 2):
        assert found.keys() == REFUSED.keys()
        for name, message in found.items():
            assert re.search(REFUSED[name], message), f"{name}: {message}"


def raw_loop(strategy: Any) -> dict[str, Any]:
    """Three steps of a raw loop with buffers split in place."""
    accelerator = Accelerator(cpu=True, strategy=Parallel(cp=2, wrap=None) if strategy else "auto")
    model = made(Attention)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses, restored = [], []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(2, 8, WIDTH, generator=generator), torch.randn(2, 8, WIDTH, generator=generator)
        before = x.clone()
        with accelerator.maybe_context_parallel([x, y], [1, 1], {y}):
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        restored.append((torch.equal(x, before), y.shape[1]))
    return {"losses": losses, "restored": restored, "state": accelerator.get_state_dict(model)}


def test_the_raw_engine_splits_buffers_for_the_time_of_a_step():
    (alone,) = run_in_processes(raw_loop, 1, args=(False,))
    split = run_in_processes(raw_loop, 2, args=(True,))
    for each in split:
        torch.testing.assert_close(each["losses"], alone["losses"], atol=5e-6, rtol=5e-6)
        assert each["restored"] == [(True, 4)] * 3
    assert alone["restored"] == [(True, 8)] * 3
    torch.testing.assert_close(split[0]["state"], alone["state"], atol=5e-6, rtol=5e-6)


class PositionalTask(Task):
    """Makes its positions itself; its batches hold something besides sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = made(Attention)
        self.positions = nn.Embedding(8, WIDTH)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, bias = batch["x"], batch["bias"]
        y = self.attention(x + self.positions(sequence_positions(x.shape[1])) + bias[:, None])
        self.seen.append((tuple(x.shape), tuple(bias.shape)))
        return (y - x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def only_x(batch: Any, shard: Any) -> Any:
    return {**batch, "x": shard.split(batch["x"], 1)}


def trained(strategy: bool) -> tuple[dict[str, Tensor], list[Any]]:
    generator = torch.Generator().manual_seed(0)
    data = [
        {"x": torch.randn(2, 8, WIDTH, generator=generator), "bias": torch.randn(2, WIDTH, generator=generator)}
        for _ in range(3)
    ]
    task = copy.deepcopy(made(PositionalTask))
    trainer = Trainer(
        accelerator="cpu",
        strategy=Parallel(cp=2, wrap=None, cp_shard_batch=only_x) if strategy else "auto",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, data)
    return trainer.strategy.state.model(trainer.model, full=True), task.seen


def test_a_function_may_split_batches_and_a_model_may_number_its_tokens():
    ((alone, seen),) = run_in_processes(trained, 1, args=(False,))
    assert seen == [((2, 8, WIDTH), (2, WIDTH))] * 3
    (split, seen), _ = run_in_processes(trained, 2, args=(True,))
    assert seen == [((2, 4, WIDTH), (2, WIDTH))] * 3
    torch.testing.assert_close(split, alone, atol=5e-6, rtol=5e-6)


def ring_is_refused() -> str:
    with pytest.raises(ConfigurationError) as raised:
        strategy_of(cp_attention="ring")
    return str(raised.value)


def test_torchs_own_ring_is_refused_on_the_cpu_by_name():
    assert all("no kernels for the CPU" in message for message in run_in_processes(ring_is_refused, 2, timeout=30))
    with pytest.raises(ConfigurationError, match="'gather' or 'ring'"):
        Parallel(cp=2, cp_attention="rings")


def ring_gap() -> float:
    """How far outputs and gradients of torch's ring are from those of whole sequences, in bfloat16."""
    accelerator = Accelerator(strategy=Parallel(cp=2, cp_attention="ring"))
    strategy: Any = accelerator.strategy
    shard = strategy.sequences.shard
    generator = torch.Generator(accelerator.device).manual_seed(2)
    make = {"generator": generator, "device": accelerator.device, "dtype": torch.bfloat16}
    whole = [torch.randn((2, 4, 256, 64), **make).requires_grad_() for _ in range(3)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    expected.float().square().sum().backward()
    own = [shard.split(tensor.detach(), 2).requires_grad_() for tensor in whole]
    with strategy.sequences.attention():
        found = F.scaled_dot_product_attention(*own, is_causal=True)
        found.float().square().sum().backward()
    pairs = [(shard.join(found.detach(), 2), expected)]
    pairs += [(shard.join(mine.grad, 2), tensor.grad) for mine, tensor in zip(own, whole, strict=True)]
    return max((one.float() - other.float()).abs().max().item() for one, other in pairs)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are missing: each process of a ring needs one")
def test_torchs_own_ring_attends_to_all_tokens():
    assert max(run_in_processes(ring_gap, 2, env={"DRIVETRAIN_USE_CPU": None}, timeout=120)) < 5e-2

"""Pooling on the host: the same bits as torch's own kernel, wherever it is called from."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Task, Trainer
from drivetrain.runtime import host_kernels
from drivetrain.runtime.host_kernels import use_faster_kernels

SHAPES = [(3, 8, 40, 40), (2, 16, 33, 31), (5, 64, 12, 12), (16, 40, 7, 9), (1, 8, 400, 400), (300, 16, 16, 16)]
WINDOWS: list[dict[str, Any]] = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 1, "padding": 1},
    {"kernel_size": (2, 3), "stride": (3, 2), "padding": (1, 0), "ceil_mode": True},
    {"kernel_size": 2, "stride": 2, "dilation": 2},
]


@pytest.fixture(autouse=True)
def faster() -> None:
    assert use_faster_kernels()


def by_torch(call: Callable[[], Any]) -> Any:
    """What a call gives with torch's own kernel."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(host_kernels, "_is_worth_it", lambda x: False)
        return call()


@pytest.fixture
def pooled_here(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what is pooled here."""
    found: list[tuple[int, ...]] = []
    pool = host_kernels._pool_by_channels

    def recorded(x: Tensor, by: Any) -> tuple[Tensor, Tensor]:
        found.append(tuple(x.shape))
        return pool(x, by)

    monkeypatch.setattr(host_kernels, "_pool_by_channels", recorded)
    return found


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Equal to the bit and laid out alike."""
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        if not one.is_floating_point():
            assert torch.equal(one, other)
            continue
        missing = torch.isnan(other)
        assert torch.equal(torch.isnan(one), missing)
        assert torch.equal(one[~missing], other[~missing])
        assert torch.equal(torch.signbit(one)[~missing], torch.signbit(other)[~missing])


def image(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """An image with ties, zeros of both signs, and values that are not finite."""
    x = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(0))
    x = (x * 4).round() / 4
    flat = x.view(-1)
    flat[::97], flat[5::101], flat[7::211], flat[11::223] = float("nan"), -0.0, float("inf"), float("-inf")
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "window"), list(itertools.product(SHAPES, WINDOWS)), ids=str)
def test_maxima_places_and_gradients_are_torchs(
    shape: tuple[int, ...], window: dict[str, Any], dtype: torch.dtype, pooled_here: list[tuple[int, ...]]
) -> None:
    x = image(shape, dtype).requires_grad_()

    def call() -> tuple[Tensor, Tensor, Tensor]:
        maxima, places = F.max_pool2d(x, **window, return_indices=True)
        weight = torch.randn(maxima.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        (gradient,) = torch.autograd.grad(maxima, x, weight)
        return maxima.detach(), places, gradient

    assert_same(call(), by_torch(call))
    assert pooled_here == [shape]


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(64, 3, 32, 32),
        torch.randn(2, 8, 8, 8),
        torch.randn(8, 40, 40),
        torch.randn(2, 16, 32, 32, dtype=torch.float64),
        torch.arange(2 * 16 * 32 * 32).reshape(2, 16, 32, 32).to(torch.uint8),
        torch.arange(2 * 16 * 32 * 32).reshape(2, 16, 32, 32).to(torch.int8),
        torch.randn(2, 16, 32, 32).contiguous(memory_format=torch.channels_last),
        torch.randn(2, 32, 32, 16).transpose(1, 3),
    ],
    ids=["few channels", "small", "one image", "double", "bytes", "signed bytes", "channels last", "not contiguous"],
)
def test_the_rest_is_left_to_torch(x: Tensor, pooled_here: list[tuple[int, ...]]) -> None:
    expected = by_torch(lambda: F.max_pool2d(x, 2, return_indices=True))
    assert_same(F.max_pool2d(x, 2, return_indices=True), expected)
    assert not pooled_here


def test_a_copy_is_of_a_few_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []
    original = Tensor.contiguous

    def recorded(self: Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        parts.append(self.nbytes)
        return original(self, memory_format=memory_format)

    x = torch.randn(40, 16, 64, 64)  # 10.5 MB
    expected = by_torch(lambda: F.max_pool2d(x, 3, 1))
    monkeypatch.setattr(Tensor, "contiguous", recorded)
    assert torch.equal(F.max_pool2d(x, 3, 1), expected)
    assert len(parts) == 3
    assert sum(parts) == x.nbytes
    assert max(parts) <= 4 << 20


def test_second_and_forward_derivatives_and_batches_of_calls(pooled_here: list[tuple[int, ...]]) -> None:
    x = torch.randn(2, 8, 32, 32).requires_grad_()
    tangent = torch.randn(2, 8, 32, 32)

    def second() -> list[Tensor]:
        (first,) = torch.autograd.grad(F.max_pool2d(x, 2).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), x))

    def forward_mode() -> list[Tensor]:
        return list(torch.func.jvp(lambda each: F.max_pool2d(each, 2), (x.detach(),), (tangent,)))

    def mapped() -> list[Tensor]:
        return [torch.func.vmap(lambda each: F.max_pool2d(each, 2))(x.detach())]

    def gradients() -> list[Tensor]:
        return [torch.func.grad(lambda each: F.max_pool2d(each, 2).square().sum())(x.detach())]

    for call in (second, forward_mode, mapped, gradients):
        before = len(pooled_here)
        found = call()
        assert len(pooled_here) > before
        assert_same(found, by_torch(call))


def test_scripted_traced_and_exported_modules_pool_alike(pooled_here: list[tuple[int, ...]]) -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2)).eval()
    x = torch.randn(4, 3, 34, 34)
    with torch.inference_mode():
        expected = by_torch(lambda: module(x))
        forms: list[Callable[[Tensor], Tensor]] = [
            module,
            copy.deepcopy(module),
            torch.jit.trace(module, x),  # type: ignore[no-untyped-call]
            torch.jit.script(module),
            torch.export.export(module, (x,)).module(),
        ]
        for form in forms:
            before = len(pooled_here)
            assert torch.equal(form(x), expected)
            assert len(pooled_here) > before


class PooledTask(Task):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 2))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.layers(x), y)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def test_a_run_has_the_same_losses(tmp_path: Path, pooled_here: list[tuple[int, ...]]) -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 1, 16, 16, generator=generator), torch.arange(64) % 2)

    def losses() -> list[float]:
        torch.manual_seed(0)
        task = PooledTask()
        options: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        trainer = Trainer(max_epochs=4, accelerator="cpu", default_root_dir=tmp_path, **options)
        trainer.fit(task, DataLoader(data, batch_size=16))
        return task.losses

    found = losses()
    assert len(pooled_here) == len(found) == 16
    assert found == by_torch(losses)


def test_a_kernel_that_something_else_has_put_there_stays() -> None:
    program = """
        import warnings
        import torch
        from drivetrain import Accelerator
        from drivetrain.runtime.host_kernels import use_faster_kernels

        kernel = torch.library.get_kernel("aten::max_pool2d_with_indices", "CPU")
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        calls = []

        def own(x, size, stride=(), padding=0, dilation=1, ceil_mode=False):
            calls.append(x.shape)
            return kernel.call_boxed(keys, x, size, stride, padding, dilation, ceil_mode)

        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl("max_pool2d_with_indices", own, "CPU")
        Accelerator(cpu=True)
        assert not use_faster_kernels()
        torch.nn.functional.max_pool2d(torch.randn(4, 8, 32, 32), 2)
        assert len(calls) == 1
    """
    run_quietly(program)


def test_nothing_is_said_of_it() -> None:
    run_quietly(
        """
        import torch
        from drivetrain import Accelerator
        from drivetrain.runtime.host_kernels import use_faster_kernels

        Accelerator(cpu=True)
        assert use_faster_kernels()
        assert torch.nn.functional.max_pool2d(torch.randn(4, 8, 32, 32), 2).shape == (4, 8, 16, 16)
        """
    )


def run_quietly(program: str) -> None:
    """Run a program in a process of its own, in which a warning is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr

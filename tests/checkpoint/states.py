"""States to save, storages that fail, and comparisons."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain import PartialState
from drivetrain.checkpoint import load_run_state, save_run_state
from drivetrain.checkpoint.storage import MANIFEST, LocalStorage
from tests.pool import device

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def odd_tensors() -> dict[str, Tensor]:
    """Every dtype, and every way to lie in memory."""
    base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    tensors = {str(dtype): base.to(dtype) for dtype in DTYPES}
    tied = torch.randn(3)
    return {
        **tensors,
        "scalar": torch.tensor(math.pi),
        "empty": torch.empty(0, 3),
        "nan": torch.tensor([math.nan, -math.inf, -0.0]),
        "transposed": base.permute(2, 0, 1),
        "strided": base[:, ::2, 1:],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "parameter": nn.Parameter(torch.ones(2)),
        "channels_last": torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
        "unaligned": torch.arange(9, dtype=torch.uint8)[1:],
        "tied": tied,
        "tied_again": tied,
    }


def alone() -> PartialState:
    return PartialState(device=device())


def run_state(seed: int = 0) -> dict[str, Any]:
    """What a small training run shares."""
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(8, 4, generator=generator), torch.randn(8, generator=generator)
    return {
        "global_step": seed,
        "state_dict": {"layer.weight": weight, "layer.bias": bias},
        "optimizer_states": [{"state": {"layer.weight": {"step": torch.tensor(float(seed)), "exp_avg": weight * 2}}}],
    }


def own_state(rank: int = 0) -> dict[str, Any]:
    return {"random": {"torch": torch.full((16,), rank, dtype=torch.uint8), "position": rank}}


def write(directory: str | Path, seed: int = 0, **options: Any) -> None:
    save_run_state(directory, run_state(seed), own_state(), alone(), **options)


def seed_of(directory: str | Path) -> int:
    """Which state a checkpoint holds, after comparing all of it."""
    shared, own = load_run_state(directory, alone())
    seed = shared["global_step"]
    assert_same(shared, run_state(seed))
    assert_same(own, own_state())
    return int(seed)


def assert_same(found: Any, expected: Any, path: str = "state") -> None:
    """Compare nested values exactly: types, dtypes and bits."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), path
        assert found.dtype == expected.dtype, path
        assert found.shape == expected.shape, path
        assert bits(found) == bits(expected), path
    elif isinstance(expected, Mapping):
        assert isinstance(found, Mapping), path
        assert list(found) == list(expected), path
        for key in expected:
            assert type(next(one for one in found if one == key)) is type(key), path
            assert_same(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected), path
        assert len(found) == len(expected), path
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{path}/{index}")
    else:
        assert type(found) is type(expected), path
        assert found == expected or (found != found and expected != expected), path


def bits(tensor: Tensor) -> bytes:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def leftovers(root: str | Path) -> list[str]:
    """Names beside the checkpoints that a save should have removed."""
    return sorted(name for name in os.listdir(root) if name.startswith("."))


def reseal(directory: str | Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint, and make the manifest agree, as an attacker would who can count too."""
    path = Path(directory, name)
    path.write_bytes(content)
    reseal_manifest(directory, lambda manifest: manifest["files"].update({name: digest(content)}))


def reseal_manifest(directory: str | Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what a checkpoint's manifest says, and make its checksum right."""
    path = Path(directory, MANIFEST)
    content = json.loads(path.read_bytes())
    content.pop("checksum")
    change(content)
    checksum = hashlib.sha256(spelled(content)).hexdigest()
    path.write_bytes(spelled({**content, "checksum": checksum}))


def spelled(content: Any) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True).encode() + b"\n"


def digest(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


class CountingStorage(LocalStorage):
    """Counts the system calls that can fail, and lets one of them fail, or kill the process.

    Args:
        fail_at: number of the call that fails, from 1; 0 for none.
        error: the error number that it fails with; None kills the process as the kernel would.
        before: is called before each of them, with its kind.
    """

    def __init__(
        self, fail_at: int = 0, error: int | None = None, before: Callable[[str], Any] = lambda kind: None
    ) -> None:
        self.calls: list[str] = []
        self._os = _CountedCalls(self.calls, fail_at, error, before)


class _CountedCalls:
    def __init__(self, calls: list[str], fail_at: int, error: int | None, before: Callable[[str], Any]) -> None:
        self._calls, self._fail_at, self._error, self._before = calls, fail_at, error, before
        self._paths: dict[int, str] = {}

    def _meet(self, kind: str, path: str) -> None:
        self._before(kind)
        self._calls.append(kind)
        if len(self._calls) == self._fail_at:
            if self._error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                raise OSError(self._error, os.strerror(self._error), path)

    def makedirs(self, path: str, exist_ok: bool) -> None:
        self._meet("mkdir", path)
        os.makedirs(path, exist_ok=exist_ok)

    def open(self, path: str, *options: int) -> int:
        self._meet("open", path)
        descriptor = os.open(path, *options)
        self._paths[descriptor] = path
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        self._meet("write", self._paths[descriptor])
        # Short writes are what a disk that fills up does first.
        return os.write(descriptor, data[: max(1, len(data) // 2)])

    def fsync(self, descriptor: int) -> None:
        self._meet("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        os.fsync(descriptor)

    def rename(self, source: str, target: str) -> None:
        self._meet("rename", source)
        os.rename(source, target)

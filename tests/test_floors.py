"""What import-linter cannot see: which rooms may name a backend, and which may ask what is in use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool import ROOT

PACKAGE = ROOT / "drivetrain"

# The rooms that talk to devices and process groups.
MAY_NAME_BACKENDS = {"runtime", "strategies", "data", "checkpoint"}
BACKENDS = {"distributed", "cuda", "mps", "xpu", "npu", "mlu", "hpu"}
# `launch` stands on torch's elastic agent and the store that it serves: it starts groups and is in none.
ALLOWED = {
    "launch": (
        "torch.distributed.elastic",
        "torch.distributed.run",
        "torch.distributed.launcher",
        "torch.distributed.Store",
        "torch.distributed.TCPStore",
        "torch.distributed.PrefixStore",
        "torch.distributed.DistStoreError",
        "torch.distributed.DistNetworkError",
    )
}

KINDS_OF_STRATEGY = ("DDP", "DistributedDataParallel", "FSDP", "DeepSpeed", "Megatron", "XLA", "Single")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def dotted(node: ast.expr) -> str:
    """Spell `a.b.c` of an attribute chain; empty for anything else."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


def running_code(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree, leaving out what only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and dotted(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from running_code(child)


def torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every dotted name under torch that the code imports or reaches for."""
    for node in running_code(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, dotted(node)


def named_backends(source: str, room: str) -> list[str]:
    found = []
    for line, name in torch_names(ast.parse(source)):
        parts = name.split(".")
        if parts[0] != "torch" or len(parts) < 2 or parts[1] not in BACKENDS:
            continue
        # An attribute chain is met at each of its links: `torch.distributed` is part of what is allowed.
        if any(one.startswith(name) or name.startswith(one) for one in ALLOWED.get(room, ())):
            continue
        found.append(f"line {line}: {name}")
    return found


def strategy_ladders(source: str) -> list[str]:
    """Questions about which strategy is in use: isinstance over kinds, comparisons of its name."""
    found = []
    for node in running_code(ast.parse(source)):
        if isinstance(node, ast.Call) and dotted(node.func) == "isinstance" and len(node.args) == 2:
            kinds = node.args[1].elts if isinstance(node.args[1], ast.Tuple) else [node.args[1]]
            names = [dotted(kind).rsplit(".", 1)[-1] for kind in kinds]
            if any(name.startswith(KINDS_OF_STRATEGY) for name in names):
                found.append(f"line {node.lineno}: isinstance(..., {', '.join(names)})")
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                name = dotted(side)
                if name.endswith(("strategy.name", "distributed_type")):
                    found.append(f"line {node.lineno}: compares {name}")
    return found


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_only_the_lower_rooms_name_a_backend(path: Path) -> None:
    if room_of(path) not in MAY_NAME_BACKENDS:
        assert named_backends(path.read_text(), room_of(path)) == []


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_nothing_outside_strategies_asks_which_one_is_in_use(path: Path) -> None:
    if room_of(path) != "strategies":
        assert strategy_ladders(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.distributed as dist", ["line 1: torch.distributed"]),
        ("from torch import distributed", ["line 1: torch.distributed"]),
        ("from torch.distributed import all_reduce", ["line 1: torch.distributed.all_reduce"]),
        ("import torch\ntorch.cuda", ["line 2: torch.cuda"]),
        ("if TYPE_CHECKING:\n    from torch.distributed import Store", []),
        ("import torch\ntorch.accelerator.current_device_index()", []),
    ],
)
def test_the_look_for_backends_finds_them(source: str, found: list[str]) -> None:
    assert named_backends(source, "trainer") == found


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("isinstance(strategy, DDPStrategy)", 1),
        ("isinstance(model, (Tensor, torch.nn.parallel.DistributedDataParallel))", 1),
        ("self.strategy.name == 'ddp'", 1),
        ("isinstance(strategy, Strategy)", 0),
        ("log(strategy.name)", 0),
    ],
)
def test_the_look_for_ladders_finds_them(source: str, count: int) -> None:
    assert len(strategy_ladders(source)) == count

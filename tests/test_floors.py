"""What import-linter cannot see: which rooms may name a backend, and which may ask what is in use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.strategies import available_strategies
from tests.house import PACKAGE, House, dotted, running_code

# The rooms that talk to devices and process groups.
MAY_NAME_BACKENDS = {"runtime", "strategies", "data", "checkpoint"}
BACKENDS = {"distributed", "cuda", "mps", "xpu", "npu", "mlu", "musa", "sdaa", "hpu"}
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
    ),
    # `planning` runs strategies in a process group without peers.
    "planning": ("torch.distributed.tensor.DTensor",),
}


def strategy_classes() -> set[str]:
    """The names of `Strategy`'s subclasses in the package, at any depth."""
    bases = {
        node.name: {dotted(base).rpartition(".")[2] for base in node.bases}
        for module in House().modules
        for node in module.definitions
        if isinstance(node, ast.ClassDef)
    }
    found = {"Strategy"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found - {"Strategy", "Configured"}  # the second is an interface: what has configurations of its own


# The classes of strategies, and those of other packages that give one away.
KINDS_OF_STRATEGY = (*sorted(strategy_classes()), "DistributedDataParallel", "FullyShardedDataParallel")
# "auto" is what stands for no choice.
NAMES_OF_STRATEGIES = set(available_strategies()) - {"auto"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


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
    """Questions about which strategy is in use: of which class it is, what its name is or begins with."""
    found = []
    for node in running_code(ast.parse(source)):
        if isinstance(node, ast.Call) and dotted(node.func) in ("isinstance", "issubclass") and len(node.args) == 2:
            names = [dotted(kind).rpartition(".")[2] for kind in alternatives(node.args[1])]
            if any(name.startswith(KINDS_OF_STRATEGY) for name in names):
                found.append(f"line {node.lineno}: {dotted(node.func)}(..., {', '.join(names)})")
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                name = dotted(side)
                if name.endswith(("strategy.name", "distributed_type")):
                    found.append(f"line {node.lineno}: compares {name}")
                found += [f"line {node.lineno}: compares with {name!r}" for name in named_strategies(side)]
        if isinstance(node, ast.MatchValue):
            found += [f"line {node.lineno}: matches {name!r}" for name in named_strategies(node.value)]
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "endswith"):
            names = [name for argument in node.args for name in named_strategies(argument)]
            found += [f"line {node.lineno}: begins or ends with {name!r}" for name in names]
    return found


def alternatives(node: ast.expr) -> list[ast.expr]:
    """The members of `(A, B)`, `[A, B]`, `{A, B}` or `A | B`; else the expression itself."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return node.elts
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*alternatives(node.left), *alternatives(node.right)]
    return [node]


def named_strategies(node: ast.expr) -> list[str]:
    """The names of strategies, and names of their classes, that an expression spells or takes from the class."""
    found = []
    for each in alternatives(node):
        owner, _, attribute = dotted(each).rpartition(".")
        if isinstance(each, ast.Constant) and each.value in (NAMES_OF_STRATEGIES | set(KINDS_OF_STRATEGY)):
            found.append(str(each.value))
        if dotted(each) in KINDS_OF_STRATEGY or (attribute == "name" and owner in KINDS_OF_STRATEGY):
            found.append(dotted(each))
    return found


def test_only_the_lower_rooms_name_a_backend() -> None:
    higher = [path for path in modules() if room_of(path) not in MAY_NAME_BACKENDS]
    found = [f"{name_of(path)}, {each}" for path in higher for each in named_backends(path.read_text(), room_of(path))]
    assert not found, "\n".join(found)


def test_nothing_outside_strategies_asks_which_one_is_in_use() -> None:
    others = [path for path in modules() if room_of(path) != "strategies"]
    found = [f"{name_of(path)}, {each}" for path in others for each in strategy_ladders(path.read_text())]
    assert not found, "\n".join(found)


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
def test_named_backends_are_found(source: str, found: list[str]) -> None:
    assert named_backends(source, "trainer") == found


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("isinstance(strategy, DDPStrategy)", 1),
        ("isinstance(model, (Tensor, torch.nn.parallel.DistributedDataParallel))", 1),
        ("self.strategy.name == other", 1),
        ("isinstance(strategy, Parallel)", 1),
        ("isinstance(strategy, FSDP | Single)", 1),
        ("issubclass(kind, DeepSpeed)", 1),
        ("type(strategy) is Parallel", 1),
        ("type(strategy).__name__ == 'Parallel'", 1),
        ("strategy not in ('auto', 'ddp')", 1),
        ("spec == 'deepspeed_stage_2'", 1),
        ("spec == DDP.name", 1),
        ("name.startswith('deepspeed')", 1),
        ("match spec:\n    case 'fsdp': pass", 1),
        ("isinstance(strategy, Strategy)", 0),
        ("strategy != 'auto'", 0),
        ("log(strategy.name)", 0),
        ("FSDP(cpu_offload=True)", 0),
    ],
)
def test_ladders_over_strategies_are_found(source: str, count: int) -> None:
    assert len(strategy_ladders(source)) == count

"""The pages under docs/explanations: their formulas, figures and pictures are those of the program as it is."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.pool import ROOT, run_in_processes
from tests.test_snippets import run_script, scripts_of

EXPLANATIONS = ROOT / "docs" / "explanations"
PICTURES = ROOT / "docs" / "images" / "explanations"
PAGES = sorted(EXPLANATIONS.glob("*.md"))


# the formulas against what is measured


class Block(nn.Module):
    """A block as the page describes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (y.view(rows, length, -1, 32).transpose(1, 2) for y in self.qkv(self.first(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(y)
        added: Tensor = self.down(F.gelu(self.up(self.second(x))))
        return x + added


def bytes_kept(precision: str, width: int, layers: int, rows: int, length: int) -> int:
    """Bytes of the activations that the forward of some blocks keeps for the backward."""
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    blocks = nn.Sequential(*(Block(width) for _ in range(layers))).to(dtype)
    smallest = rows * length * width * 2  # bytes; weights, also copies of them in 16 bits, have fewer
    assert smallest > 4 * width * width * 4
    kept: dict[int, int] = {}
    alive = []  # so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() >= smallest:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    x = torch.randn(rows, length, width, dtype=dtype)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        blocks(x)
    return sum(kept.values())


@pytest.mark.parametrize(("precision", "each"), [("32", 64), ("bf16", 36), ("bf16-true", 32)])
def test_a_block_keeps_the_activations_that_the_page_counts(precision: str, each: int) -> None:
    sizes = {"width": 64, "layers": 3, "rows": 8, "length": 128}
    assert bytes_kept(precision, **sizes) == pytest.approx(each * 64 * 3 * 8 * 128, rel=0.02)


# Bytes of state for each parameter with AdamW in 32 bits, on N processes, as the page counts them.
STATE = {
    "DDP": lambda n: 16,
    "FSDP": lambda n: 16 / n,
    "DeepSpeed ZeRO-1": lambda n: 4 + 16 / n + (n > 1) * 4 / 32,  # with the bucket that is reduced
    "DeepSpeed ZeRO-2": lambda n: 4 + 16 / n + (n > 1) * 4 / 32,
    "DeepSpeed ZeRO-3": lambda n: 20 / n,
}


def test_the_formulas_give_the_state_that_the_memory_benchmark_measured() -> None:
    row = r"^\| (DDP|FSDP|DeepSpeed ZeRO-\d) \| (\d) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|"
    rows = re.findall(row, (ROOT / "benchmarks" / "README.md").read_text(), flags=re.MULTILINE)
    assert len(rows) == 15
    for name, processes, *figures in rows:
        state = STATE[name](int(processes)) * 67.37 / 4  # MB of the benchmark's parameters in 32 bits
        assert state == pytest.approx(sum(map(float, figures)), rel=0.02), (name, processes)


# what each strategy holds


def hook(name: str) -> Any:
    """A script of docs/hooks as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "hooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def held_now(strategy: str) -> Any:
    return json.loads(json.dumps(hook("placement").measure(strategy)))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp", "cp"])
def test_a_strategy_holds_what_its_picture_shows(strategy: str) -> None:
    recorded = json.loads((ROOT / "docs" / "hooks" / "placement.json").read_text())[strategy]
    assert run_in_processes(partial(held_now, strategy), 2, timeout=120) == [recorded, recorded]


def test_the_pictures_are_those_of_the_record() -> None:
    placement = hook("placement")
    recorded = json.loads(placement.RECORD.read_text())
    assert recorded.keys() == placement.STRATEGIES.keys()
    for name, processes in recorded.items():
        picture = PICTURES / f"placement_{name.replace('-', '_')}.svg"
        assert picture.read_text() == placement.picture(name, processes), name


def test_strategies_train_as_one_process_within_the_bound_of_the_picture() -> None:
    placement = hook("placement")
    values = json.loads(placement.LOSSES.read_text())
    assert values.keys() == placement.STRATEGIES.keys()
    assert all(placement.difference(each, values["single"]) <= placement.BOUND for each in values.values())
    assert values["single"][-1] < values["single"][0] - 0.5
    assert (PICTURES / "exactness.svg").read_text() == placement.exactness_picture(values)
    [now, _] = run_in_processes(losses_now, 2, timeout=120)
    assert placement.difference(now, values["single"]) <= placement.BOUND


def losses_now() -> Any:
    return hook("placement").losses("ddp")


# how data reaches processes, and what a step does


def test_loaders_give_what_the_picture_shows() -> None:
    pictures = hook("explanation_pictures")
    recorded = json.loads(pictures.RECORD.read_text())
    alone = pictures.data_order(workers=0)
    assert [[each["samples"] for each in batches] for batches in alone] == [
        [each["samples"] for each in batches] for batches in recorded
    ]
    assert [[each["workers"] for each in batches] for batches in recorded] == [[[0], [1], [0], [1]]] * 2
    assert sum(each["real"] for batches in recorded for each in batches) == pictures.SAMPLES
    assert (PICTURES / "data.svg").read_text() == pictures.data_picture(recorded)
    assert (PICTURES / "step.svg").read_text() == pictures.step_picture()


# the checkpoint format


def test_the_listing_is_that_of_a_real_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = EXPLANATIONS / "checkpoint-format.md"
    listing = re.search(r"<!-- listing: .*?-->\s+```text\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert listing is not None
    monkeypatch.chdir(tmp_path)
    run_in_processes(run_script, 1, args=(first_script(page, tmp_path),), timeout=120)
    folder = tmp_path / "run" / "step_3"
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    assert files == listing[1].split()


def first_script(page: Path, folder: Path) -> str:
    path = folder / "script.py"
    path.write_text(scripts_of(page, page.read_text())[0].text)
    return str(path)


# the pages


def test_the_tests_that_pages_name_exist() -> None:
    named = {pair for page in PAGES for pair in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page.read_text())}
    assert len(named) >= 12
    for path, name in named:
        defined = [node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)]
        assert name in defined, (path, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_explanation_has_a_picture_that_is_described(page: Path) -> None:
    text = page.read_text()
    pictures = re.findall(r"!\[([^\]]{20,})\]\((\.\./images/explanations/\w+\.\w+)\)", text)
    assert pictures or ("```mermaid" in text and "accDescr:" in text)
    for _, picture in pictures:
        file = (page.parent / picture).resolve()
        assert file.stat().st_size <= 60_000
        assert file.suffix == ".png" or "<title>" in file.read_text()
    assert "\nNext: " in text


def test_every_picture_is_on_a_page() -> None:
    shown = "".join(page.read_text() for page in PAGES)
    assert {path.name for path in PICTURES.iterdir()} == set(re.findall(r"images/explanations/(\w+\.\w+)", shown))

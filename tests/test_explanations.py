"""The pages under docs/explanations: their formulas, figures and pictures are those of the program as it is."""

from __future__ import annotations

import ast
import html
import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.inference.model_size import ModelSize, estimate_training
from tests.browser import CHROMIUM, needs_chromium
from tests.pool import ROOT, run_in_processes
from tests.test_snippets import run_script, scripts_of

EXPLANATIONS = ROOT / "docs" / "explanations"
PICTURES = ROOT / "docs" / "images" / "explanations"
PAGES = sorted(EXPLANATIONS.glob("*.md"))
CALCULATOR = EXPLANATIONS / "calculator.js"
WHAT_TO_USE = (EXPLANATIONS / "what-to-use.md").read_text()

MODELS = {
    "GPT-2": {"parameters": 124e6, "layers": 12, "width": 768, "vocabulary": 50257, "rows": 8, "length": 1024},
    "1.1 B": {"parameters": 1.1e9, "layers": 22, "width": 2048, "vocabulary": 32000, "rows": 4, "length": 2048},
    "7 B": {"parameters": 6.7e9, "layers": 32, "width": 4096, "vocabulary": 32000, "rows": 1, "length": 4096},
    "13 B": {"parameters": 13e9, "layers": 40, "width": 5120, "vocabulary": 32000, "rows": 1, "length": 4096},
    "70 B": {"parameters": 69e9, "layers": 80, "width": 8192, "vocabulary": 32000, "rows": 1, "length": 4096},
}
COMPARED = ("single", "ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "tp")
CASES = [
    (strategy, name, precision, optimizer, processes)
    for name in ("GPT-2", "7 B")
    for strategy in COMPARED
    for precision in ("32", "bf16", "bf16-true")
    for optimizer, processes in (("adamw", 8), ("sgd", 3), ("sgd_momentum", 1))
]


def in_browser(folder: Path, script: str, body: str = "") -> Any:
    """What an expression of JavaScript gives in a page with the calculator, once the page is loaded."""
    page = folder / "page.html"
    page.write_text(
        f"<!DOCTYPE html><meta charset='utf-8'><body>{body}<pre id='result'></pre>"
        f"<script src='{CALCULATOR.as_uri()}'></script>"
        "<script>addEventListener('load', () => {"
        f"document.getElementById('result').textContent = JSON.stringify({script});"
        "});</script></body>"
    )
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000"]
    command += [f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    found = re.search(r'<pre id="result">(.*?)</pre>', dom, flags=re.DOTALL)
    assert found is not None, dom[-2000:]
    assert found[1], "the script on the page has failed"
    return json.loads(html.unescape(found[1]))


# the calculator


@needs_chromium
def test_the_calculator_computes_what_drivetrain_estimates(tmp_path: Path) -> None:
    cases = json.dumps([[s, MODELS[name], p, o, n] for s, name, p, o, n in CASES])
    results = in_browser(tmp_path, f"{cases}.map(c => ({{...estimate(...c), size: sizeOf(c[1])}}))")
    for (strategy, _, precision, optimizer, processes), use in zip(CASES, results, strict=True):
        counts = [round(use["size"][key]) for key in ("parameters", "matrices", "largestUnit")]
        size = ModelSize(counts[0], counts[0], counts[1], counts[2])
        expected = estimate_training(size, strategy, precision, processes, optimizer, use["activations"])
        case = (strategy, precision, optimizer, processes)
        for part in ("weights", "gradients", "optimizer", "gathered", "total"):
            assert use[part] == pytest.approx(getattr(expected, part), rel=1e-6), (case, part)


SENT = {  # values that a process sends for each parameter, times N / (N - 1): of weights and of gradients
    "single": (0, 0),
    "ddp": (0, 2),
    "deepspeed_stage_1": (1, 1),
    "deepspeed_stage_2": (1, 1),
    "deepspeed_stage_3": (2, 1),
    "fsdp": (2, 1),
}


@needs_chromium
def test_the_calculator_counts_what_collectives_send(tmp_path: Path) -> None:
    cases = json.dumps([[strategy, MODELS["7 B"], "32", "adamw", 8] for strategy in SENT])
    sent = in_browser(tmp_path, f"{cases}.map(c => estimate(...c).sent)")
    for (weights, gradients), found in zip(SENT.values(), sent, strict=True):
        assert found == pytest.approx(4 * (weights + gradients) * 6.7e9 * 7 / 8)


def raw_html() -> str:
    """The calculator as the page has it, without its script."""
    found = re.search(
        r'<style>.*?</style>\s*<div id="calculator">.*?\n</div>\n(?=\n<script)', WHAT_TO_USE, flags=re.DOTALL
    )
    assert found is not None
    return found[0]


@needs_chromium
def test_the_form_on_the_page_shows_the_advice_and_fits_a_phone(tmp_path: Path) -> None:
    shown = """(() => {
        const form = document.querySelector("#calculator form");
        const read = () => ({
            line: document.querySelector("#calculator p code").textContent,
            best: document.querySelector("#calculator .best")?.dataset.strategy,
            ddp: document.querySelector("#calculator [data-strategy=ddp]")?.children[2].textContent,
            rows: document.querySelectorAll("#calculator tbody tr").length,
        });
        const found = [read()];
        form.elements.devices.value = 1;
        form.dispatchEvent(new Event("input"));
        found.push(read());
        form.elements.preset.value = "GPT-2, 124 M";
        form.elements.preset.dispatchEvent(new Event("change"));
        found.push(read());
        form.elements.devices.value = 4;
        form.dispatchEvent(new Event("input"));
        found.push(read());
        const phone = document.getElementById("phone");
        return {found, wide: [phone.scrollWidth, phone.clientWidth]};
    })()"""
    result = in_browser(tmp_path, shown, f'<div id="phone" style="width: 360px">{raw_html()}</div>')
    seven, alone, small, four = result["found"]
    assert seven == {
        "line": 'Trainer(devices=8, strategy="fsdp", precision="bf16")',
        "best": "fsdp",
        "ddp": "too large",
        "rows": 9,
    }
    assert (alone["best"], alone["rows"]) == ("fsdp_offload", 7)
    assert small["line"] == 'Trainer(devices=1, strategy="single", precision="bf16")'
    assert (four["best"], four["ddp"]) == ("ddp", "fits")
    assert result["wide"][0] <= result["wide"][1]


def worked_examples() -> Iterator[tuple[str, int, str, list[float]]]:
    """The lines of the page's table: model, devices, precision, and GB under DDP, ZeRO-2, FSDP and recomputed FSDP."""
    row = r"^\| ([^:|]+?)(?:, 124 M)?: .*?(\d+) devices? of \d+ GB, `([\w-]+)` \|((?: [\d.]+ \|){4})"
    for name, devices, precision, figures in re.findall(row, WHAT_TO_USE, flags=re.MULTILINE):
        yield name, int(devices), precision, [float(each) for each in figures.split("|") if each.strip()]


@needs_chromium
def test_the_worked_examples_are_what_the_calculator_gives(tmp_path: Path) -> None:
    examples = list(worked_examples())
    assert len(examples) == 6
    strategies = ("ddp", "deepspeed_stage_2", "fsdp", "fsdp_recompute")
    cases = json.dumps([[s, MODELS[name], p, "adamw", n] for name, n, p, _ in examples for s in strategies])
    totals = in_browser(tmp_path, f"{cases}.map(c => estimate(...c).total / 1e9)")
    written = [figure for *_, figures in examples for figure in figures]
    assert written == pytest.approx(totals, abs=0.051)


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


@needs_chromium
def test_the_calculator_counts_these_activations(tmp_path: Path) -> None:
    sizes = json.dumps({"width": 64, "layers": 3, "rows": 8, "length": 128, "vocabulary": 0})
    found = in_browser(tmp_path, f'["32", "bf16", "bf16-true"].map(p => activations({sizes}, p))')
    assert found == [each * 64 * 3 * 8 * 128 for each in (64, 36, 32)]


NAMES_IN_BENCHMARK = {
    "DDP": "ddp",
    "FSDP": "fsdp",
    **{f"DeepSpeed ZeRO-{stage}": f"deepspeed_stage_{stage}" for stage in (1, 2, 3)},
}


def test_the_formulas_give_the_state_that_the_memory_benchmark_measured() -> None:
    row = r"^\| (DDP|FSDP|DeepSpeed ZeRO-\d) \| (\d) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|"
    rows = re.findall(row, (ROOT / "benchmarks" / "README.md").read_text(), flags=re.MULTILINE)
    assert len(rows) == 15
    parameters = round(67.37e6 / 4)
    size = ModelSize(parameters, parameters, 0, 0)
    for name, processes, *figures in rows:
        use = estimate_training(size, NAMES_IN_BENCHMARK[name], "32", int(processes), "adamw")
        state = use.weights + use.gradients + use.optimizer
        assert state / 1e6 == pytest.approx(sum(map(float, figures)), rel=0.02), (name, processes)


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

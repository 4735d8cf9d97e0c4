"""Figures of `drivetrain plan`: beside published results, on up to 1,024 devices, and for the examples of the manual.

    python benchmarks/plan.py published
    python benchmarks/plan.py scale
    python benchmarks/plan.py examples

Each takes minutes and needs transformers and peft, which have the models. With --write, the table replaces the one in
docs/.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from tables import as_table

from drivetrain.planning.candidates import Candidate
from drivetrain.planning.hardware import DEVICES, Cluster, read_hardware
from drivetrain.planning.planner import Result, Workers, plan
from drivetrain.planning.run import estimate
from drivetrain.planning.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30

# Models


def llama(width: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int, seq: int) -> dict[str, Any]:
    """Return a configuration of LlamaForCausalLM."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "max_position_embeddings": seq,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def gpt(width: int, layers: int, heads: int, seq: int, vocabulary: int = 50368) -> dict[str, Any]:
    """Return a configuration of GPT2LMHeadModel without dropout. MPT has the same operations and parameters."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": seq,
        "vocab_size": vocabulary,
        "activation_function": "gelu",
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    }


LLAMA_3_8B = llama(4096, 14336, 32, 32, 8, 128256, 8192)
LLAMA_3_70B = llama(8192, 28672, 80, 64, 8, 128256, 8192)
MODELS = {
    "Llama 3 8B": LLAMA_3_8B,
    "Llama 3 8B, 32,768 tokens": LLAMA_3_8B | {"max_position_embeddings": 32768},
    "Llama 3 70B": LLAMA_3_70B,
    "Llama 2 7B": llama(4096, 11008, 32, 32, 32, 32000, 4096),
    "Llama 2 7B, 2,048 tokens": llama(4096, 11008, 32, 32, 32, 32000, 2048),
    "Llama 2 13B": llama(5120, 13824, 40, 40, 40, 32000, 4096),
    "Llama 2 70B": llama(8192, 28672, 80, 64, 8, 32000, 4096),
    "GPT-2 124M": gpt(768, 12, 12, 1024, 50257),
    "MPT 1B": gpt(2048, 24, 16, 2048),
    "MPT 7B": gpt(4096, 32, 32, 2048),
    "MPT 13B": gpt(5120, 40, 40, 2048),
    "MPT 30B": gpt(7168, 48, 56, 2048),
}
LENGTHS = {name: given.get("max_position_embeddings") or given["n_positions"] for name, given in MODELS.items()}

_HBM2E = replace(DEVICES["H100-80GB"], name="H100-96GB", memory=94.5 * GIB, memory_speed=2.4e12)
"""The H100 of torchtitan's report. Its power limit of 500 W lowers its speed by an unknown amount."""

# Published results


@dataclass(frozen=True)
class Report:
    """A published result.

    Attributes:
        source: Key of `SOURCES`.
        model: Key of `MODELS`.
        cluster: The devices.
        batch: Rows of a micro-batch.
        recomputed: `"none"`, `"all"`, or `"some"` if some operations of a block are recomputed.
        speed: Tokens per second on each device, or None if they were measured in another precision.
        memory: GiB at the peak, or None. torchtitan's tables have what is reserved, its pull request what is active.
        strategy: Kind of strategy.
        precision: Name of the precision.
        tokens: Tokens of a row, or None for the model's longest sequence. With LoRA, litgpt's rows have that many.
    """

    source: str
    model: str
    cluster: Cluster
    batch: int
    recomputed: str
    speed: float | None
    memory: float | None = None
    strategy: str = "fsdp"
    precision: str = "bf16"
    tokens: int | None = None


SOURCES = {
    "titan": ("torchtitan, H100", "pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"),
    "titan A100": ("torchtitan, A100", "pytorch/torchtitan/blob/157a12c56/docs/performance.md"),
    "titan 7B": ("torchtitan, FSDP2", "pytorch/torchtitan/pull/165"),
    "litgpt": ("litgpt, LoRA", "Lightning-AI/litgpt/blob/main/tutorials/resource-tables.md"),
    "foundry": ("llm-foundry", "mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md"),
}
"""Name and place on GitHub of each source."""

_LORA: dict[str, Any] = {"strategy": "single", "precision": "bf16-true", "tokens": 1304}
REPORTS = (
    Report("titan", "Llama 3 8B", Cluster(_HBM2E, 8), 2, "some", 5762, 82.4),
    Report("titan", "Llama 3 8B", Cluster(_HBM2E, 8, 16), 2, "some", 5605, 67.0),
    Report("titan", "Llama 3 8B, 32,768 tokens", Cluster(_HBM2E, 8), 1, "all", None, 83.9),
    Report("titan 7B", "Llama 2 7B, 2,048 tokens", Cluster(_HBM2E, 8), 8, "all", 6200, 0.2392 * 95.04),
    *(
        Report("litgpt", model, read_hardware("A100-40GB"), rows, "none", None, gb * 1e9 / GIB, **_LORA)
        for model, rows, gb in (("Llama 2 7B", 1, 21.30), ("Llama 2 7B", 2, 29.07), ("Llama 2 13B", 1, 38.12))
    ),
    Report("titan A100", "Llama 2 13B", read_hardware("8xA100-80GBx8"), 2, "none", 2162),
    Report("titan A100", "Llama 2 70B", read_hardware("8xA100-80GBx8"), 2, "all", 353),
    Report("titan A100", "Llama 3 8B", read_hardware("8xA100-80GBx8"), 1, "some", 2973),
    Report("titan A100", "Llama 3 70B", read_hardware("8xA100-80GBx8"), 1, "all", 331),
    Report("foundry", "MPT 1B", read_hardware("8xH100-80GB"), 14, "none", 45455),
    Report("foundry", "MPT 7B", read_hardware("8xH100-80GB"), 6, "none", 10643),
    Report("foundry", "MPT 13B", read_hardware("8xH100-80GB"), 2, "none", 4792),
    Report("foundry", "MPT 7B", read_hardware("8xH100-80GBx16"), 6, "none", 10475),
    Report("foundry", "MPT 30B", read_hardware("8xH100-80GBx16"), 8, "all", 2199),
    Report("foundry", "MPT 7B", read_hardware("8xA100-80GB"), 6, "none", 4641),
    Report("foundry", "MPT 13B", read_hardware("8xA100-80GB"), 2, "none", 2262),
    Report("foundry", "MPT 30B", read_hardware("8xA100-80GB"), 3, "all", 916),
    Report("foundry", "MPT 1B", read_hardware("8xA100-40GBx8"), 10, "none", 19001),
    Report("foundry", "MPT 7B", read_hardware("8xA100-40GBx8"), 18, "all", 3665),
)


_NO_KEYWORDS = ("architectures", "model_type", "torch_dtype")


@contextmanager
def config_of(model: str) -> Iterator[str]:
    """Return a context with the path of a model's config.json."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(MODELS[model]), encoding="utf-8")
        yield str(path)


def predicted(report: Report, recomputed: bool, workers: Workers) -> Result:
    """Return the prediction for a published result."""
    candidate = Candidate(
        report.strategy, report.cluster.world_size, report.precision, report.batch, checkpointing=recomputed
    )
    with config_of(report.model) as path:
        workload = Workload(path, seq=LENGTHS[report.model])
        if report.source == "litgpt":
            given = {key: value for key, value in MODELS[report.model].items() if key not in _NO_KEYWORDS}
            workload = Workload("lora:Llama", kwargs=given, inputs=(f"1x{report.tokens}:int64",))
        found = workers.estimates(workload, [(candidate, report.cluster, None)], 0.0, False)[0]
    if found.estimate is None:
        raise click.ClickException(f"{report.model}: {found.error}")
    return found


def published(only: str) -> Iterator[tuple[str, ...]]:
    """Yield rows of predictions beside published results."""
    with Workers(1) as workers:
        for report in REPORTS:
            if only and only not in f"{report.source} {report.model}":
                continue
            options = {"none": (False,), "all": (True,), "some": (False, True)}[report.recomputed]
            for recomputed in options:
                result = predicted(report, recomputed, workers)
                assert result.estimate is not None
                speed = result.rate / report.cluster.world_size
                memory = result.estimate.peak / GIB
                again = "all" if recomputed else "none"
                yield (
                    f"[{SOURCES[report.source][0]}]",
                    report.model,
                    str(report.cluster),
                    str(report.batch),
                    again if again == report.recomputed else f"{report.recomputed}, here {again}",
                    _beside(memory, report.memory, 1),
                    _beside(speed, report.speed, 0),
                )
                click.echo(f"{report.model} on {report.cluster}: {speed:,.0f} tokens/s, {memory:.1f} GiB", err=True)


def _beside(value: float, real: float | None, digits: int) -> str:
    found = f"{value:,.{digits}f}"
    return found if real is None else f"{found} / {real:,.{digits}f} = **{value / real:.2f}**"


_PUBLISHED = ("source", "model", "devices", "rows:", "recomputed", "GiB:", "tokens/s per device:")
_LINKS = "\n".join(f"[{name}]: https://github.com/{place}" for name, place in SOURCES.values())

# Cost of an estimate

_SCALE = (
    *(("Llama 3 8B", size, False) for size in (8, 64, 512, 1024)),
    ("Llama 3 70B", 1024, False),
    ("Llama 3 70B", 1024, True),
)


def measured(model: str, size: int, full: bool) -> tuple[float, float, dict[str, float]]:
    """Return seconds and GiB of an estimate in a process of its own, and what it found."""
    command = [sys.executable, __file__, "one", "--model", model, "--size", str(size), *(["--full"] if full else [])]
    start = time.perf_counter()
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    took = time.perf_counter() - start
    found = json.loads(run.stdout.splitlines()[-1])
    return took, found.pop("resident") / GIB, found


def scale(only: str) -> Iterator[tuple[str, ...]]:
    """Yield rows of what an estimate costs."""
    before: dict[str, float] = {}
    for model, size, full in _SCALE:
        if only and only not in f"{model} {size} {'all' if full else 'few'}":
            continue
        took, resident, found = measured(model, size, full)
        differs = ""
        if full and before:
            compared = found.keys() - {"user"}
            differs = f"{max(abs(before[name] / found[name] - 1) for name in compared):.2%}"
        before = found
        yield (
            model,
            f"{size:,}",
            "all" if full else "3 and 5",
            f"{found['user']:.0f}",
            f"{took:.0f}",
            f"{resident:.2f}",
            f"{found['peak'] / GIB:.2f}",
            f"{1000 * found['seconds']:,.0f}",
            differs,
        )


_COST = (
    *("model", "devices:", "blocks that run", "CPU seconds:", "seconds:", "GiB resident:"),
    *("predicted GiB:", "predicted ms:", "differs"),
)

# Examples


@dataclass(frozen=True)
class Example:
    """Model and devices, with the options of `plan`."""

    title: str
    model: str
    hardware: str
    strategies: str
    batch: tuple[int, ...]


_FIRST = Example("Llama 3 8B on eight GPUs of 80 GB", "Llama 3 8B", "8xH100-80GB", "ddp,fsdp", (1, 2))
"""The one that the page about plan begins with."""
_EXAMPLES = (
    Example("GPT-2 with 124 M parameters on a small GPU", "GPT-2 124M", "L4-24GB", "single", (8, 16)),
    Example("A GPT of 1.3 B parameters on eight small GPUs", "MPT 1B", "8xL4-24GB", "ddp,fsdp", (1, 2)),
    _FIRST,
    Example("Llama 3 70B on eight machines", "Llama 3 70B", "8xH100-80GBx8", "ddp,fsdp,hsdp", (1,)),
)


def examples(only: str) -> dict[str, str]:
    """Return what `plan` prints for the examples, by the name of its place in the manual."""
    from drivetrain.planning.command import as_text

    parts = []
    found = {}
    for example in _EXAMPLES:
        if only and only not in example.model:
            continue
        seq = LENGTHS[example.model]
        with config_of(example.model) as path:
            made = plan(
                path,
                example.hardware,
                seq=seq,
                batch=example.batch,
                strategies=example.strategies.split(","),
                jobs=1,
            )
        given = ",".join(map(str, example.batch))
        said = "\n".join(line.rstrip() for line in as_text(made, {}, {}).splitlines())
        if example is _FIRST:
            found["example"] = f"```text\n{said}\n```"
        table, _, _ = said.partition("\n\nfrom drivetrain")
        parts.append(
            f"**{example.title}**\n\n```bash\ndrivetrain plan config.json --seq {seq} --batch {given} --hardware "
            f"{example.hardware} --strategies {example.strategies}\n```\n\n```text\n{table}\n```"
        )
        click.echo(made.advice, err=True)
    return {"examples": "\n\n".join(parts), **found}


# Command line

_PAGES = {"published": "plan.md", "scale": "plan.md", "examples": "explanations/what-to-use.md", "example": "plan.md"}


def write(name: str, text: str) -> None:
    """Replace the text between the marks of a name in its page."""
    page = ROOT / "docs" / _PAGES[name]
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    content, count = re.subn(
        f"{begin}.*?{end}", lambda _: f"{begin}\n\n{text}\n\n{end}", page.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    if count != 1:
        raise click.ClickException(f"{page} needs the lines {begin} and {end} once.")
    page.write_text(content, encoding="utf-8")


def table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return as_table(columns, list(rows))


@click.command()
@click.argument("what", type=click.Choice(["published", "scale", "examples", "one"]))
@click.option("--only", default="", help="Only cases whose name contains this.")
@click.option("--write", "writes", is_flag=True, help="Replace the table in docs/.")
@click.option("--model", default="", help="Model of the estimate that `one` makes.")
@click.option("--size", default=8, help="Number of devices of the estimate that `one` makes.")
@click.option("--full", is_flag=True, help="Run all blocks in the estimate that `one` makes.")
def main(what: str, only: str, writes: bool, model: str, size: int, full: bool) -> None:
    if only and writes:
        raise click.UsageError("--write needs all cases: leave out --only.")
    if what == "one":
        cluster = read_hardware("8xH100-80GB").with_world_size(size)
        with config_of(model) as path:
            made = estimate(Workload(path, seq=8192), Candidate("fsdp", size, checkpointing=True), cluster, full=full)
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(
            json.dumps(
                {
                    "peak": made.peak,
                    "seconds": made.seconds,
                    "flops": made.flops,
                    "checkpoint": made.checkpoint_bytes,
                    "sent": sum(size for _, size in made.traffic.values()),
                    "user": used.ru_utime + used.ru_stime,
                    "resident": 1024 * used.ru_maxrss,
                }
            )
        )
        return
    if what == "examples":
        texts = examples(only)
    elif what == "published":
        texts = {what: f"{table(_PUBLISHED, published(only))}\n\n{_LINKS}"}
    else:
        texts = {what: table(_COST, scale(only))}
    for name, text in texts.items():
        print(text)
        if writes:
            write(name, text)


if __name__ == "__main__":
    main()

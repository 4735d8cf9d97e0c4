"""The pages of the gallery: runs its examples in full, and writes docs/gallery, its pictures and its reports.

    python -m tests.examples.gallery                        # writes the pages from the recorded results
    python -m tests.examples.gallery --run                  # first runs all examples, about five minutes on one core
    python -m tests.examples.gallery --run gan kfold        # or some of them
    python -m tests.examples.gallery --draw gan --folder F  # draws and records what was run in a folder before

Results are recorded in gallery.json beside this file; gallery_pages.py has what the pages state beyond them.
"""

from __future__ import annotations

import csv
import html
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from tests.examples.gallery_pages import EXAMPLES, OTHERS, Example
from tests.pool import ROOT

SCRIPTS = ROOT / "examples" / "gallery"
PAGES = ROOT / "docs" / "gallery"
PICTURES = ROOT / "docs" / "images" / "gallery"
RECORD = Path(__file__).with_suffix(".json")
LARGEST_PICTURE, LARGEST_REPORT = 40_000, 150_000


class Finished:
    """What a run of an example has left in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: dict[str, Any] = json.loads((folder / "results.json").read_text())
        self.taken = folder / "taken.json"

    def curve(self, name: str, run: str = "run") -> tuple[list[int], list[float]]:
        """The steps and the values of a metric that a run has logged."""
        with (self.directory(run) / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row.get(name)]
        return [int(row["step"]) for row in rows], [float(row[name]) for row in rows]

    def directory(self, run: str = "run") -> Path:
        """The folder of a run: the one with this name, or its only version."""
        named = self.folder / run
        return named if (named / "metrics.csv").exists() else next(iter(sorted(named.glob("version_*"))))

    def scalars(self) -> dict[str, float]:
        return {name: value for name, value in self.results.items() if isinstance(value, int | float)}


def run(example: Example, folder: Path) -> None:
    """Run an example in full, as a user would on two cores."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    shutil.rmtree(folder / example.name, ignore_errors=True)
    command = [sys.executable, str(SCRIPTS / f"{example.name}.py"), "--output", example.name]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with (folder / f"{example.name}.log").open("w") as log:
        subprocess.run(command, check=True, cwd=folder, env=environment, stdout=log, stderr=log, timeout=300)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    taken = {"seconds": round(wall, 1), "processor_seconds": round(processor, 1)}
    (folder / example.name / "taken.json").write_text(json.dumps(taken))


def is_outdated(example: Example, folder: Path) -> bool:
    """Whether what is in the folder was not run by the script as it is now."""
    taken = folder / example.name / "taken.json"
    return not taken.exists() or taken.stat().st_mtime < (SCRIPTS / f"{example.name}.py").stat().st_mtime


def draw(example: Example, finished: Finished) -> None:
    """Draw the picture of a page, and the one of its card in the index."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    PICTURES.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"font.size": 9, "axes.titlesize": 10, "axes.grid": True, "grid.alpha": 0.25})
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
    widths = [panel.width for panel in example.panels]
    figure, axes = plt.subplots(
        *((1, len(widths)) if not example.stacked else (len(widths), 1)),
        figsize=example.size,
        layout="constrained",
        squeeze=False,
        **({"width_ratios": widths} if not example.stacked else {"height_ratios": widths}),
    )
    for panel, place in zip(example.panels, axes.flatten(), strict=True):
        panel.draw(place, finished)
    save(figure, PICTURES / f"{example.name}.png", LARGEST_PICTURE)
    figure, place = plt.subplots(figsize=(3.2, 2.0), layout="constrained")
    example.panels[example.card].draw(place, finished)
    place.set_title("")
    save(figure, PICTURES / f"{example.name}-card.png", LARGEST_PICTURE // 2)


def save(figure: Any, path: Path, largest: int) -> None:
    """Save a figure with as few colours as keep its file small."""
    import matplotlib.pyplot as plt
    from PIL import Image

    figure.savefig(path, dpi=100)
    plt.close(figure)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(128).save(path, optimize=True)
    assert path.stat().st_size <= largest, f"{path.name} has {path.stat().st_size:,} bytes, more than {largest:,}"


def keep_report(example: Example, finished: Finished) -> None:
    """Keep the report of a run, with paths as a user's run has them."""
    source = finished.directory(example.report) / "report.html"
    if not source.exists():  # a loop of one's own leaves a table, of which a report is made
        command = [sys.executable, "-m", "drivetrain", "report", str(source.parent), "-o", str(source)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    text = source.read_text()
    text = text.replace(f"{finished.folder.parent}/", "").replace(str(finished.folder.parent), ".")
    text = text.replace(f"{ROOT}/", "").replace(html.escape(platform.node()), "localhost")
    text = re.sub(r"<dt>(host|commit|folder)</dt><dd[^>]*>[^<]*</dd>", "", text)
    assert len(text) <= LARGEST_REPORT, f"the report of {example.name} has {len(text):,} characters"
    (PAGES / "reports").mkdir(parents=True, exist_ok=True)
    (PAGES / "reports" / f"{example.name}.html").write_text(text)


def page(example: Example, record: dict[str, Any]) -> str:
    """The page of an example, from what was recorded."""
    results, seconds = record["results"], record["seconds"]
    rows = "\n".join(f"| {label} | {results[name]:{form}} |" for label, name, form in example.numbers)
    used = "\n".join(f"- {each}" for each in example.uses)
    following = "\n".join(f"- {each}" for each in example.following)
    return f"""# {example.title}

{example.text.strip()}

![{example.described}](../images/gallery/{example.name}.png)

| result of this run | |
|---|---:|
{rows}
| time on two CPU cores | {seconds:.0f} s |

```bash
python examples/gallery/{example.name}.py
python examples/gallery/{example.name}.py --small   # {example.small}
```

[The report of this run](reports/{example.name}.html): curves to zoom, where the time went, and the configuration.

## What it uses

{used}

## The script

``` {{.python title="examples/gallery/{example.name}.py"}}
--8<-- "examples/gallery/{example.name}.py"
```

## Next

{following}
"""


def index(recorded: dict[str, Any]) -> str:
    """The page of all examples: a card for each."""
    environment = recorded["environment"]
    cards = "\n\n".join(
        f"-   [![{example.described}](../images/gallery/{example.name}-card.png)]({example.name}.md)\n\n"
        f"    **[{example.title}]({example.name}.md)**\n\n"
        f"    {example.summary} *{recorded['examples'][example.name]['seconds']:.0f} s*"
        for example in EXAMPLES
    )
    others = "\n\n".join(
        f"-   [![{described}]({picture})]({target})\n\n    **[{title}]({target})**\n\n    {summary}"
        for title, target, picture, described, summary in OTHERS
    )
    versions = ", ".join(f"{name} {value}" for name, value in environment.items())
    return f"""# Gallery

Copy a complete example. Each is one script of at most 150 lines, shown with its curves, results and time on two CPU
cores. Nothing is downloaded.

<div class="grid cards" markdown>

{cards}

{others}

</div>

```bash
pip install "drivetrain[examples]"
python examples/gallery/classification.py --output classification
```

Each example writes metrics, checkpoints, pictures and a [run report](../run-report.md) to `--output`. With `--small`,
it takes only a few steps. The results shown are from {versions}.

## Next

- [Trainer and Task](../trainer.md), or [the Accelerator](../accelerator.md) for your own loop
- [More examples](../examples.md), with one feature per file
"""


def contents() -> dict[Path, str]:
    """All pages, as they are to be."""
    recorded = json.loads(RECORD.read_text())
    pages = {PAGES / f"{example.name}.md": page(example, recorded["examples"][example.name]) for example in EXAMPLES}
    return {PAGES / "index.md": index(recorded), **pages}


def write_pages() -> None:
    PAGES.mkdir(parents=True, exist_ok=True)
    for path, text in contents().items():
        path.write_text(text)


def record(examples: Sequence[Example], folder: Path, again: bool) -> None:
    """Run examples, or take what was run in the folder, and keep their results, pictures and reports."""
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {"examples": {}}
    packages = {name: version(name) for name in ("torch", "scikit-learn", "torchmetrics")}
    recorded["environment"] = {"Python": platform.python_version(), **packages}
    for example in examples:
        if again or is_outdated(example, folder):
            run(example, folder)
        finished = Finished(folder / example.name)
        draw(example, finished)
        keep_report(example, finished)
        recorded["examples"][example.name] = {**json.loads(finished.taken.read_text()), "results": finished.scalars()}
        print(example.name, recorded["examples"][example.name])
        recorded["examples"] = dict(sorted(recorded["examples"].items()))
        RECORD.write_text(json.dumps(recorded, indent=2) + "\n")


@click.command()
@click.argument("names", nargs=-1, type=click.Choice([example.name for example in EXAMPLES]))
@click.option("--run", "again", is_flag=True, help="Run the examples, record their results, and draw.")
@click.option("--draw", "redraw", is_flag=True, help="The same, but keep runs of the folder that are up to date.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Where the examples run.")
def main(names: tuple[str, ...], again: bool, redraw: bool, folder: Path | None) -> None:
    if again or redraw:
        with tempfile.TemporaryDirectory() as temporary:
            place = (folder or Path(temporary)).resolve()
            place.mkdir(parents=True, exist_ok=True)
            record([each for each in EXAMPLES if not names or each.name in names], place, again)
    write_pages()


if __name__ == "__main__":
    main()

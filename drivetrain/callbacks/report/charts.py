"""Charts of a report: samples of each process, grouping of curves into charts, and HTML helpers."""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

from drivetrain.callbacks.report.record import Curve, RunValues
from drivetrain.runtime.terminal import visible

# Samples of each rank, in `ranks/rank_<n>.csv` of the run's folder


FOLDER = "ranks"


@dataclass
class Sample:
    """Measurements of one process over a few seconds of training, which a run's report shows.

    Attributes:
        time: The end of the stretch, in seconds since 1970.
        seconds: The length of the stretch.
        step: The number of optimizer steps at its end.
        steps_per_sec: Optimizer steps per second of training.
        samples_per_sec: Samples of this process per second of training, or NaN if they are not counted.
        data: The fraction of time spent waiting for the loader. `Timing` documents this and the following fractions.
        forward: The fraction of time in the forward pass.
        backward: The fraction of time in the backward pass.
        optimizer: The fraction of time in optimizer steps.
        sync: The fraction of time spent waiting for other processes.
        logging: The fraction of time spent logging.
        callbacks: The fraction of time in callbacks.
        checkpoint: The fraction of time spent writing checkpoints.
        evaluation: The fraction of time in validations.
        idle: The remaining fraction of time.
        memory: The memory in use in bytes: of the device, or of the process if the device is the CPU.
        lr: The learning rate of the first optimizer's first parameter group.
        epoch: The number of epochs at the end of the stretch, with the fraction of the current one.
        cpu: The fraction of the machine's CPU time that was in use, by any process.
        gpu: The fraction of time in which the GPU was in use, or NaN without a GPU.
    """

    time: float
    seconds: float
    step: float
    steps_per_sec: float
    samples_per_sec: float
    data: float
    forward: float
    backward: float
    optimizer: float
    sync: float
    logging: float
    callbacks: float
    checkpoint: float
    evaluation: float
    idle: float
    memory: float
    lr: float
    epoch: float = math.nan
    cpu: float = math.nan
    gpu: float = math.nan

    @property
    def busy(self) -> float:
        return 1.0 - self.data - self.checkpoint - self.evaluation


COLUMNS = tuple(each.name for each in fields(Sample))


class Lane:
    """File in a run's folder to which one process writes its performance samples as CSV."""

    def __init__(self, folder: str | os.PathLike[str], rank: int, about: Mapping[str, str]) -> None:
        self._path = Path(folder, FOLDER, f"rank_{rank}.csv")
        self._about = " ".join(f"{name}={value}" for name, value in about.items())
        self._file: TextIO | None = None

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def write(self, sample: Sample) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Line buffering: a killed run loses at most the last sample.
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
            # A resumed run writes them again, since an older version may have written other columns.
            self._file.write(f"# {self._about}\n{','.join(COLUMNS)}\n")
        self._file.write(",".join(f"{getattr(sample, name):.15g}" for name in COLUMNS) + "\n")

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


def read_lanes(folder: str | os.PathLike[str]) -> dict[int, tuple[str, list[Sample]]]:
    """Read the performance samples of all processes from the CSV files in a run's folder.

    Return a dict from rank to a description of its machine and its samples in order of time.
    """
    found: dict[int, tuple[str, list[Sample]]] = {}
    for path in Path(folder, FOLDER).glob("rank_*.csv"):
        match = re.fullmatch(r"rank_(\d+)\.csv", path.name)
        if match:
            found[int(match[1])] = _read(path)
    return dict(sorted(found.items()))


def _read(path: Path) -> tuple[str, list[Sample]]:
    about, samples, columns = "", [], list(COLUMNS)
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for row in csv.reader(file):
            if row and row[0].startswith("#"):
                about = ",".join(row)[1:].strip()
            elif row and row[0] == COLUMNS[0]:
                columns = row
            elif len(row) == len(columns):
                try:
                    samples.append(Sample(**{name: float(cell) for name, cell in zip(columns, row, strict=True)}))
                except (ValueError, TypeError):
                    continue  # a killed process may leave an incomplete line
    return about, samples


_STAGES = {"train": "train", "training": "train", "fit": "train", "test": "test", "testing": "test"}
_STAGES |= dict.fromkeys(("val", "valid", "validate", "validation", "eval", "dev"), "val")
_EDGES = {"step", "epoch", "dataloader", "idx"}
# Kinds of charts with the names of their curves. Compiled on first use, to keep the start of a run fast.
_PATTERNS = (
    ("Loss", r"(^|[_/ ])(loss|nll|cross_?entropy|elbo|perplexity|ppl)"),
    ("Learning rate", r"^(lr\b|lr[-_/]|learning_rate)|[-_/]lr$"),
    ("Gradient norm", r"grad.*norm|norm.*grad"),
    ("Data wait", r"data_wait|data_time"),
    ("Memory", r"memory|alloc|_vm_|swap|reserved|\brss\b|active_bytes|inactive|oversize|segment"),
    ("Throughput", r"per_?sec|throughput|/s$|it/s|mfu|^speed|flops|^train/(time|batches|samples|lengths)$"),
    ("Device", r"^DeviceStats|cpu_percent|gpu"),
)
_KINDS = ("Loss", "Metrics", "Learning rate", "Gradient norm", "Throughput", "Data wait", "Memory", "Device")
_PARTS = {"Loss": "Loss and metrics", "Metrics": "Loss and metrics", "Ranks": "Ranks"}
_PARTS |= {"Learning rate": "Optimizer", "Gradient norm": "Optimizer", "Differences": "Differences"}
_HIGHER_IS_BETTER = (
    r"acc|auc|auroc|f1|f_?beta|precision|recall|iou|dice|map\b|bleu|rouge|psnr|ssim|r2|reward|return|score|jaccard"
    r"|specificity|kappa|corr|spearman|pearson|ndcg|mrr|hit|per_?sec|throughput|mfu"
)


@dataclass
class Series:
    """Curve of a chart in a run report, with its legend text and color.

    Attributes:
        name: The text in the legend.
        curve: The points.
        run: The index of the color: that of the run in a comparison, or that of the part in a stacked chart.
        is_dashed: True if the line is dashed.
    """

    name: str
    curve: Curve
    run: int = 0
    is_dashed: bool = False


@dataclass
class Chart:
    """Line chart of a run report, with one or more curves.

    Attributes:
        title: The title.
        kind: The group of the chart, such as `"Loss"` or `"Memory"`.
        series: The curves.
        x: The quantity on the x axis: `"step"` or `"seconds"`.
        unit: The format of the values: `""`, `"%"` for a fraction, or `"B"` for bytes.
        is_stacked: True if the curves are fractions of a whole, drawn on top of each other.
    """

    title: str
    kind: str
    series: list[Series] = field(default_factory=list)
    x: str = "step"
    unit: str = ""
    is_stacked: bool = False

    @property
    def section(self) -> str:
        return _PARTS.get(self.kind, "Speed and memory")

    def as_data(self) -> dict[str, Any]:
        curves = [each.curve.thinned() for each in self.series]
        xs = sorted({x for curve in curves for x in curve.steps})
        columns = []
        for curve in curves:
            values = dict(zip(curve.steps, curve.values, strict=True))
            # None stands for a point that this curve does not have.
            columns.append([shortened(values.get(x)) for x in xs])
        return {
            "title": self.title,
            "x": self.x,
            "unit": self.unit,
            "stacked": self.is_stacked,
            "names": [each.name for each in self.series],
            "runs": [each.run for each in self.series],
            "dashed": [each.is_dashed for each in self.series],
            "data": [[shortened(x) for x in xs], *columns],
        }


def stage_of(name: str) -> str:
    """Return the stage that a metric's name mentions, such as `"val"`, or an empty string."""
    return next((_STAGES[word] for word in _words(name) if word in _STAGES), "")


def is_higher_better(name: str) -> bool:
    """Return True if a metric's name suggests that higher values are better, as for an accuracy."""
    return bool(re.search(_HIGHER_IS_BETTER, name.lower())) and "loss" not in name.lower()


def kind_of(name: str) -> str:
    """Return the group of charts to which a metric belongs, such as `"Loss"`."""
    lowered = name.lower()
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, lowered)), "Metrics")


def in_order(charts: Sequence[Chart]) -> list[Chart]:
    return sorted(charts, key=lambda chart: _KINDS.index(chart.kind))


def subject_of(name: str) -> str:
    # `val/loss` becomes `loss`.
    words = _words(name)
    kept = [word for word in words if word not in _STAGES and word not in _EDGES and not word.isdigit()]
    return "_".join(kept) or name


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[/_.\s-]+", name.lower()) if word]


def charts_of(runs: Sequence[RunValues], names: Sequence[str] = ()) -> list[Chart]:
    """Create the charts of a run report, one for each metric, with a curve for each run and stage.

    Metrics such as `train_loss` and `val_loss` share a chart.
    """
    charts: dict[tuple[str, str], Chart] = {}
    for number, run in enumerate(runs):
        for name, curve in run.curves.items():
            if stage_of(name) == "test" and len(curve) == 1:
                continue  # a single test result is shown in a table
            kind = kind_of(name)
            title = name if kind in ("Throughput", "Data wait", "Device") else subject_of(name)
            chart = charts.setdefault((kind, title), Chart(title, kind))
            shown = f"{names[number]} · {name}" if names else name
            chart.series.append(Series(shown, curve, number, bool(names) and stage_of(name) == "train"))
    return in_order(list(charts.values()))


def figure_of(run: RunValues) -> Any:
    """Return a matplotlib figure with the charts of a run, one below the other."""
    # In a notebook, importing pyplot registers how figures are displayed.
    import matplotlib.pyplot  # noqa: F401
    from matplotlib.figure import Figure

    charts = charts_of([run])
    figure = Figure(figsize=(8, 2.6 * len(charts)), layout="constrained")
    for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
        for series in chart.series:
            marker = "o" if len(series.curve) == 1 else ""
            axes.plot(series.curve.steps, series.curve.values, marker=marker, label=series.name)
        axes.set_title(chart.title)
        axes.set_xlabel(chart.x)
        axes.legend()
    return figure


def sampled_charts(
    lanes: Mapping[int, tuple[str, Sequence[Sample]]], has_rate: bool = False, run: int = 0, name: str = ""
) -> list[Chart]:
    charts = [
        Chart("steps per second", "Throughput", x="seconds"),
        Chart("samples per second", "Throughput", x="seconds"),
        Chart("waiting for data", "Data wait", x="seconds", unit="%"),
        Chart("memory in use", "Memory", x="seconds", unit="B"),
        Chart("GPU in use", "Device", x="seconds", unit="%"),
        Chart("CPU in use", "Device", x="seconds", unit="%"),
    ]
    fields = ["steps_per_sec", "samples_per_sec", "data", "memory", "gpu", "cpu"]
    if not has_rate:
        charts.append(Chart("learning rate", "Learning rate"))
        fields.append("lr")
    hosts: list[str] = []
    for rank, (about, samples) in lanes.items():
        times = times_of(samples)
        host = next((word for word in about.split() if word.startswith("host=")), "").removeprefix("host=")
        hosts.append(host)
        for chart, column in zip(charts, fields, strict=True):
            # All ranks have the same learning rate, and all ranks of a machine the same CPUs.
            if (column == "lr" and rank) or (column == "cpu" and host in hosts[:-1]):
                continue
            xs = [sample.step for sample in samples] if chart.x == "step" else times
            pairs = [(x, getattr(sample, column)) for x, sample in zip(xs, samples, strict=True)]
            curve = Curve(*map(list, zip(*(pair for pair in pairs if math.isfinite(pair[1])), strict=True)))
            if len(curve):
                label = f"rank {rank}" if len(lanes) > 1 and column not in ("lr", "cpu") else chart.title
                label = f"{label} of {host}" if column == "cpu" and len(lanes) > 1 else label
                chart.series.append(Series(f"{name} · {label}" if name else label, curve, run))
    return [chart for chart in charts if chart.series]


_MOST_PLACES = 400


def places_of(samples: Sequence[Sample], values: RunValues) -> dict[str, list[float]]:
    rows: list[tuple[float, ...]] = [
        (each.step, time, each.epoch) for each, time in zip(samples, times_of(samples), strict=True)
    ]
    units = ["step", "seconds", "epoch"]
    if not rows or not all(math.isfinite(value) for row in rows for value in row):
        # Without samples, an epoch ends at its last logged step.
        ends = {epoch: step for step, epoch in sorted(values.epochs.items())}
        rows, units = [(step, epoch + 1) for epoch, step in ends.items()], ["step", "epoch"]
    kept: list[tuple[float, ...]] = [(0.0,) * len(units)]
    for row in rows:
        # A resumed run repeats the steps after its checkpoint.
        while len(kept) > 1 and row[0] <= kept[-1][0]:
            kept.pop()
        if row[0] > kept[-1][0]:
            kept.append(row)
    kept = kept[: -1 : 1 + len(kept) // _MOST_PLACES] + kept[-1:]
    # The page converts its x axis with these columns. Units that the run did not record are left out.
    columns = {unit: list(column) for unit, column in zip(units, zip(*kept, strict=True), strict=True)}
    return {unit: column for unit, column in columns.items() if column[-1] > 0}


def lane_charts(lanes: Mapping[int, tuple[str, Sequence[Sample]]]) -> list[Chart]:
    charts = []
    for rank, (about, samples) in lanes.items() if len(lanes) > 1 else ():
        times = times_of(samples)
        chart = Chart(f"rank {rank} {about}".strip(), "Ranks", x="seconds", unit="%", is_stacked=True)
        for column, label, color in SPENT:
            values = [getattr(each, column) for each in samples]
            if any(values):
                chart.series.append(Series(label, Curve(list(times), values), color))
        charts.append(chart)
    return charts


SPENT = (
    ("data", "waiting for data", 1),
    ("forward", "forward", 0),
    ("backward", "backward", 6),
    ("optimizer", "optimizer", 4),
    ("sync", "waiting for other processes", 7),
    ("logging", "logging", 5),
    ("callbacks", "callbacks", 8),
    ("checkpoint", "saving", 3),
    ("evaluation", "validating", 2),
    ("idle", "everything else", 9),
)
"""Fields of `Sample` with their labels and the indices of their colors."""


def times_of(samples: Sequence[Sample]) -> list[float]:
    seconds, found = 0.0, []
    for sample in samples:
        seconds += sample.seconds
        found.append(seconds)
    return found


def shortened(value: float | None) -> float | int | None:
    """Round a number to six digits for JSON. NaN and infinity become None."""
    if value is None or not math.isfinite(value):
        return None
    if value == (whole := int(value)):
        return whole
    return float(f"{value:.6g}") if abs(value) < 1e6 else round(value)


# HTML


_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&#34;", "'": "&#39;"})
_WITHIN_SCRIPTS = str.maketrans({"&": "\\u0026", "<": "\\u003c", ">": "\\u003e", "'": "\\u0027"})


class Markup(str):
    """String of HTML that is inserted into a page without escaping."""

    __slots__ = ()


def escaped(text: object) -> Markup:
    """Escape the HTML characters in a value's text, unless it is `Markup`."""
    return text if isinstance(text, Markup) else Markup(visible(str(text)).translate(_ESCAPES))


def joined(parts: Iterable[object], between: str = "") -> Markup:
    return Markup(between.join(map(escaped, parts)))


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """Format an HTML element as markup, and escape its text and attribute values."""
    given = "".join(
        # `class_` becomes `class`, and `aria_label` becomes `aria-label`.
        f' {name.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for name, value in attributes.items()
        if value
    )
    # Elements without content have no end.
    end = "" if tag in ("img", "input") else f"{joined(children)}</{tag}>"
    return Markup(f"<{tag}{given}>{end}")


def json_within_script(text: str) -> Markup:
    return Markup(text.translate(_WITHIN_SCRIPTS))

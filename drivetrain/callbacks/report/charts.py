"""Which curves belong into one chart, and in which order charts come."""

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

# What each process of a run measured of itself, one small table a rank: `ranks/rank_<n>.csv` in the run's folder


FOLDER = "ranks"


@dataclass
class Sample:
    """What a process did in a stretch of time.

    Attributes:
        time: When it ended, in seconds since 1970.
        seconds: How long it was.
        step: Optimizer steps taken when it ended.
        steps_per_sec: Optimizer steps in a second of training.
        samples_per_sec: Samples of this process in a second of training; nan where they are not counted.
        data: The share of the time in which it waited for its loader; see `Timing` for this and the following.
        forward: The share of forwards.
        backward: The share of backwards.
        optimizer: The share of optimizers.
        sync: The share in which it waited for other processes.
        logging: The share of logging.
        callbacks: The share of callbacks.
        checkpoint: The share in which it wrote checkpoints.
        evaluation: The share in which it validated.
        idle: The share of everything else.
        memory: Bytes in use: of the device, or of the process where the device is the CPU.
        lr: The learning rate of the first optimizer's first group.
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

    @property
    def busy(self) -> float:
        """The share of the time in which it trained, without waiting for its loader."""
        return 1.0 - self.data - self.checkpoint - self.evaluation


COLUMNS = tuple(each.name for each in fields(Sample))


class Lane:
    """Writes the samples of one process."""

    def __init__(self, folder: str | os.PathLike[str], rank: int, about: Mapping[str, str]) -> None:
        self._path = Path(folder, FOLDER, f"rank_{rank}.csv")
        self._about = " ".join(f"{name}={value}" for name, value in about.items())
        self._file: TextIO | None = None

    @property
    def is_open(self) -> bool:
        """Whether a sample was written."""
        return self._file is not None

    def write(self, sample: Sample) -> None:
        """Append a sample; it is in the file when this returns."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self._path.exists()
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
            if is_new:
                self._file.write(f"# {self._about}\n{','.join(COLUMNS)}\n")
        self._file.write(",".join(f"{getattr(sample, name):.15g}" for name in COLUMNS) + "\n")

    def close(self) -> None:
        """Close the file; what waits in it is lost if it cannot be written."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


def read_lanes(folder: str | os.PathLike[str]) -> dict[int, tuple[str, list[Sample]]]:
    """What each rank runs on, and its samples in the order of time."""
    found: dict[int, tuple[str, list[Sample]]] = {}
    for path in Path(folder, FOLDER).glob("rank_*.csv"):
        match = re.fullmatch(r"rank_(\d+)\.csv", path.name)
        if match:
            found[int(match[1])] = _read(path)
    return dict(sorted(found.items()))


def _read(path: Path) -> tuple[str, list[Sample]]:
    about, samples = "", []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for row in csv.reader(file):
            if row and row[0].startswith("#"):
                about = ",".join(row)[1:].strip()
            elif len(row) == len(COLUMNS) and row[0] != COLUMNS[0]:
                try:
                    samples.append(Sample(*map(float, row)))
                except ValueError:
                    continue  # a line that a killed process has cut short
    return about, samples


_STAGES = {"train": "train", "training": "train", "fit": "train", "test": "test", "testing": "test"}
_STAGES |= dict.fromkeys(("val", "valid", "validate", "validation", "eval", "dev"), "val")
_EDGES = {"step", "epoch", "dataloader", "idx"}
# Kinds of charts, and what names of curves in them look like; compiled for the first chart, not as a run starts.
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
_PARTS |= {"Learning rate": "Optimizer", "Gradient norm": "Optimizer"}
_HIGHER_IS_BETTER = (
    r"acc|auc|auroc|f1|f_?beta|precision|recall|iou|dice|map\b|bleu|rouge|psnr|ssim|r2|reward|return|score|jaccard"
    r"|specificity|kappa|corr|spearman|pearson|ndcg|mrr|hit|per_?sec|throughput|mfu"
)


@dataclass
class Series:
    """One curve of a chart.

    Attributes:
        name: What the legend shows.
        curve: The points.
        run: The number of its colour: that of its run where several are compared, that of its share in a whole.
        is_dashed: Whether it is drawn dashed.
    """

    name: str
    curve: Curve
    run: int = 0
    is_dashed: bool = False


@dataclass
class Chart:
    """One chart.

    Attributes:
        title: Its title.
        kind: What it shows, such as `"Loss"` or `"Memory"`.
        series: Its curves.
        x: What is on the x axis: `"step"` or `"seconds"`.
        unit: How values are shown: `""`, `"%"` of a share, or `"B"` for bytes.
        is_stacked: Whether the curves are shares of a whole, drawn one on the other.
    """

    title: str
    kind: str
    series: list[Series] = field(default_factory=list)
    x: str = "step"
    unit: str = ""
    is_stacked: bool = False

    @property
    def section(self) -> str:
        """The heading on the page that it is under."""
        return _PARTS.get(self.kind, "Speed and memory")

    def as_data(self) -> dict[str, Any]:
        """The chart as the page's script takes it: all curves over one list of x, None where a curve has no point."""
        curves = [each.curve.thinned() for each in self.series]
        xs = sorted({x for curve in curves for x in curve.steps})
        columns = []
        for curve in curves:
            values = dict(zip(curve.steps, curve.values, strict=True))
            columns.append([_short(values.get(x)) for x in xs])
        return {
            "title": self.title,
            "x": self.x,
            "unit": self.unit,
            "stacked": self.is_stacked,
            "names": [each.name for each in self.series],
            "runs": [each.run for each in self.series],
            "dashed": [each.is_dashed for each in self.series],
            "data": [[_short(x) for x in xs], *columns],
        }


def stage_of(name: str) -> str:
    """The stage that a name was logged in: `"train"`, `"val"`, `"test"` or an empty text."""
    return next((_STAGES[word] for word in _words(name) if word in _STAGES), "")


def is_higher_better(name: str) -> bool:
    """Whether higher values of a metric are better, by its name."""
    return bool(re.search(_HIGHER_IS_BETTER, name.lower())) and "loss" not in name.lower()


def kind_of(name: str) -> str:
    """The kind of chart that a curve belongs to."""
    lowered = name.lower()
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, lowered)), "Metrics")


def in_order(charts: Sequence[Chart]) -> list[Chart]:
    """Charts in the order of the page."""
    return sorted(charts, key=lambda chart: _KINDS.index(chart.kind))


def subject_of(name: str) -> str:
    """What a name is about, without its stage: `loss` of `train_loss_epoch` and of `val/loss`."""
    words = _words(name)
    kept = [word for word in words if word not in _STAGES and word not in _EDGES and not word.isdigit()]
    return "_".join(kept) or name


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[/_.\s-]+", name.lower()) if word]


def charts_of(runs: Sequence[RunValues], names: Sequence[str] = ()) -> list[Chart]:
    """Charts of everything that runs have logged, curves of one subject together."""
    charts: dict[tuple[str, str], Chart] = {}
    for number, run in enumerate(runs):
        for name, curve in run.curves.items():
            if stage_of(name) == "test" and len(curve) == 1:
                continue  # the result of one evaluation, which a table shows
            kind = kind_of(name)
            title = name if kind in ("Throughput", "Data wait", "Device") else subject_of(name)
            chart = charts.setdefault((kind, title), Chart(title, kind))
            shown = f"{names[number]} · {name}" if names else name
            chart.series.append(Series(shown, curve, number, bool(names) and stage_of(name) == "train"))
    return in_order(list(charts.values()))


def sampled_charts(
    lanes: Mapping[int, tuple[str, Sequence[Sample]]], has_rate: bool = False, run: int = 0, name: str = ""
) -> list[Chart]:
    """Charts of what processes measured of themselves: a curve a rank."""
    charts = [
        Chart("steps per second", "Throughput", x="seconds"),
        Chart("samples per second", "Throughput", x="seconds"),
        Chart("waiting for data", "Data wait", x="seconds", unit="%"),
        Chart("memory in use", "Memory", x="seconds", unit="B"),
    ]
    fields = ["steps_per_sec", "samples_per_sec", "data", "memory"]
    if not has_rate:
        charts.append(Chart("learning rate", "Learning rate"))
        fields.append("lr")
    for rank, (_, samples) in lanes.items():
        times = times_of(samples)
        for chart, column in zip(charts, fields, strict=True):
            if column == "lr" and rank:
                continue  # that of every rank
            xs = [sample.step for sample in samples] if chart.x == "step" else times
            pairs = [(x, getattr(sample, column)) for x, sample in zip(xs, samples, strict=True)]
            curve = Curve(*map(list, zip(*(pair for pair in pairs if math.isfinite(pair[1])), strict=True)))
            if len(curve):
                label = f"rank {rank}" if len(lanes) > 1 and column != "lr" else chart.title
                chart.series.append(Series(f"{name} · {label}" if name else label, curve, run))
    return [chart for chart in charts if chart.series]


def lane_charts(lanes: Mapping[int, tuple[str, Sequence[Sample]]]) -> list[Chart]:
    """For each rank where there are several, what it spent its time with."""
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
"""The shares of a sample, what the page calls them, and their colours."""


def times_of(samples: Sequence[Sample]) -> list[float]:
    """The seconds that a process had run at the end of each of its samples."""
    seconds, found = 0.0, []
    for sample in samples:
        seconds += sample.seconds
        found.append(seconds)
    return found


def _short(value: float | None) -> float | int | None:
    """A number with six digits, as many as a chart shows; None where it is not finite: JSON has no such number."""
    if value is None or not math.isfinite(value):
        return None
    if value == (whole := int(value)):
        return whole
    return float(f"{value:.6g}") if abs(value) < 1e6 else round(value)


# HTML from Python: elements in which every text is escaped


_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&#34;", "'": "&#39;"})
_WITHIN_SCRIPTS = str.maketrans({"&": "\\u0026", "<": "\\u003c", ">": "\\u003e", "'": "\\u0027"})


class Markup(str):
    """A text that is HTML already: an element takes it as it is."""

    __slots__ = ()


def escaped(text: object) -> Markup:
    """A value as HTML: text escaped, its control characters spelled out, `Markup` as it is."""
    return text if isinstance(text, Markup) else Markup(visible(str(text)).translate(_ESCAPES))


def joined(parts: Iterable[object], between: str = "") -> Markup:
    """Values one after the other as HTML."""
    return Markup(between.join(map(escaped, parts)))


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """An element with its end tag."""
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escaped(value)}"' for name, value in attributes.items() if value
    )
    return Markup(f"<{tag}{given}>{joined(children)}</{tag}>")


def json_within_script(text: str) -> Markup:
    """JSON as the content of a `<script>` element, which nothing in it ends."""
    return Markup(text.translate(_WITHIN_SCRIPTS))

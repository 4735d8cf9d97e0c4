"""The parts of the gallery's pictures: each draws one thing of a finished run into given axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import matplotlib.image

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#9467bd", "#56b4e9")


@dataclass(frozen=True)
class Panel:
    """A part of a picture, with its share of the picture's width."""

    title: str
    width: float = field(default=1.0, kw_only=True)

    def draw(self, axes: Any, finished: Any) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Curves(Panel):
    """Metrics over the steps; a key is a metric, or `run:metric` where an example has several runs."""

    lines: Mapping[str, str]
    xlabel: str = "step"
    ylabel: str = ""
    log: bool = False
    percent: bool = False
    marks: Mapping[str, str] = field(default_factory=dict)  # results drawn as level lines

    def draw(self, axes: Any, finished: Any) -> None:
        for (key, label), colour in zip(self.lines.items(), COLOURS, strict=False):
            run, _, name = key.rpartition(":")
            axes.plot(*finished.curve(name, run or "run"), color=colour, linewidth=1.6, label=label)
        for (name, label), colour in zip(self.marks.items(), reversed(COLOURS), strict=False):
            axes.axhline(finished.results[name], color=colour, linestyle="--", linewidth=1.2, label=label)
        axes.set(title=self.title, xlabel=self.xlabel, ylabel=self.ylabel)
        if self.log:
            axes.set_yscale("log")
        if self.percent:
            from matplotlib.ticker import PercentFormatter

            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            axes.set_ylim(bottom=min(0.5, axes.get_ylim()[0]))
        axes.legend(fontsize=8)


@dataclass(frozen=True)
class Picture(Panel):
    """A picture that the example has written."""

    file: str

    def draw(self, axes: Any, finished: Any) -> None:
        axes.imshow(matplotlib.image.imread(finished.folder / self.file), interpolation="nearest", aspect="equal")
        axes.set_title(self.title)
        axes.axis("off")


@dataclass(frozen=True)
class Confusion(Panel):
    """A confusion matrix of the ten digits."""

    result: str = "confusion"

    def draw(self, axes: Any, finished: Any) -> None:
        matrix = finished.results[self.result]
        axes.imshow(matrix, cmap="Blues")
        for row, counts in enumerate(matrix):
            for column, count in enumerate(counts):
                if count:
                    axes.text(
                        column, row, count, ha="center", va="center", color="w" if count > 12 else "k", fontsize=7
                    )
        axes.grid(visible=False)
        axes.set(title=self.title, xlabel="guess", ylabel="digit", xticks=range(10), yticks=range(10))


@dataclass(frozen=True)
class Bars(Panel):
    """Results side by side: some by name, or all of a result that is a mapping or a list."""

    results: Mapping[str, str] | str
    xlabel: str = ""
    percent: bool = False
    start: float = 0.0

    def draw(self, axes: Any, finished: Any) -> None:
        if isinstance(self.results, str):
            given = finished.results[self.results]
            bars = given if isinstance(given, dict) else {f"{i + 1}": value for i, value in enumerate(given)}
        else:
            bars = {label: finished.results[name] for name, label in self.results.items()}
        shape = "{:.1%}" if self.percent else "{:.3g}"
        drawn = axes.barh(
            list(bars), [value - self.start for value in bars.values()], left=self.start, color=COLOURS[0]
        )
        axes.bar_label(drawn, [shape.format(value) for value in bars.values()], padding=3, fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.18)
        axes.set(title=self.title, xlabel=self.xlabel)
        axes.set_xlim(left=self.start)
        if self.percent:
            from matplotlib.ticker import PercentFormatter

            axes.xaxis.set_major_formatter(PercentFormatter(1.0))


@dataclass(frozen=True)
class Plane(Panel):
    """Points of the plane in the colours of their classes."""

    points: str
    classes: str

    def draw(self, axes: Any, finished: Any) -> None:
        x, y = zip(*finished.results[self.points], strict=True)
        drawn = axes.scatter(x, y, c=finished.results[self.classes], cmap="tab10", s=9)
        axes.legend(*drawn.legend_elements(), fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5), handletextpad=0)
        axes.grid(visible=False)
        axes.set(title=self.title, xticks=[], yticks=[])


@dataclass(frozen=True)
class Forecast(Panel):
    """One window of a series: what was seen, what came, and the quantiles that were forecast."""

    index: int
    milliseconds: float = 0.5

    def draw(self, axes: Any, finished: Any) -> None:
        window = finished.results["windows"][self.index]
        past, ahead, quantiles = (window[name] for name in ("past", "ahead", "quantiles"))
        low, median, high = zip(*quantiles, strict=True)
        seen = [(i - len(past)) * self.milliseconds for i in range(len(past))][-64:]
        times = [i * self.milliseconds for i in range(len(ahead))]
        axes.plot(seen, past[-64:], color="#777777", linewidth=1.2, label="seen")
        axes.plot(times, ahead, color="black", linewidth=1.2, label="came")
        axes.plot(times, median, color=COLOURS[3], linewidth=1.4, label="median")
        axes.fill_between(times, low, high, color=COLOURS[1], alpha=0.35, linewidth=0, label="10 % to 90 %")
        axes.set(title=self.title, xlabel="milliseconds", ylabel="deviations")
        axes.legend(fontsize=7)

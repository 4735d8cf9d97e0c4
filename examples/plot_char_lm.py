"""Draw the losses of all strategies that examples/char_lm.py was run under, and how far they are from one process.

python examples/plot_char_lm.py char_lm docs/images/char_lm_curves.png
"""

from __future__ import annotations

import csv
from pathlib import Path

import click

# In the order in which they are drawn: the reference first, as a broad band that the others lie on.
LABELS = {
    "single": "one process",
    "ddp": "DDP, 2 processes",
    "fsdp": "FSDP, 2 processes",
    "tp_fsdp": "TP x FSDP, 2 x 2 processes",
    "pp": "pipeline, 2 stages",
    "deepspeed": "DeepSpeed ZeRO-2, 2 processes",
}
COLOURS = dict(zip(LABELS, ("#c9c9c9", "#0072b2", "#e69f00", "#009e73", "#d55e00", "#9467bd"), strict=True))
OFFSETS = {"ddp": 0, "fsdp": 2, "tp_fsdp": 4, "pp": 6, "deepspeed": 8}
WINDOW = 20
ROUNDING = 2.0**-22  # between two neighbouring 32-bit numbers from 2 to 4


def read_losses(folder: Path, name: str) -> tuple[dict[int, float], dict[int, float]]:
    """Training and validation loss by step, of the newest run under a strategy."""
    newest = max((folder / name).glob("version_*"), key=lambda version: int(version.name.removeprefix("version_")))
    losses: tuple[dict[int, float], dict[int, float]] = ({}, {})
    with (newest / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for values, column in zip(losses, ("loss", "val_loss"), strict=True):
                if row.get(column):
                    values[int(row["step"])] = float(row[column])
    return losses


def largest_lately(gaps: dict[int, float]) -> dict[int, float]:
    """The largest of the last so many steps, which can be read where single steps jump up and down."""
    return {step: max(gaps.get(each, 0.0) for each in range(step - WINDOW + 1, step + 1)) for step in gaps}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.argument("picture", type=click.Path(path_type=Path))
def main(folder: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = {name: read_losses(folder, name) for name in LABELS if (folder / name).exists()}
    reference, validation = runs["single"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    for name, (losses, validated) in runs.items():
        colour, values = COLOURS[name], list(losses.values())
        if name == "single":
            left.plot(list(losses), values, color=colour, linewidth=5, label=LABELS[name])
            continue
        # Colours take turns along one curve, so that all of them can be seen where they are one.
        left.plot(list(losses), values, color=colour, linewidth=1.8, linestyle=(OFFSETS[name], (2, 8)))
        gaps = {step: abs(value - reference[step]) for step, value in losses.items()}
        shown = largest_lately(gaps)
        right.plot(list(shown), [max(gap, 1e-9) for gap in shown.values()], color=colour, linewidth=1.8)
        left.plot([], [], color=colour, linewidth=2, label=LABELS[name])  # for the legend, without gaps
        worst = max([*gaps.values(), *(abs(value - validation[step]) for step, value in validated.items())])
        print(f"{LABELS[name]}: last loss {values[-1]:.6f}, largest difference {worst:.1e}")
    dots = {"color": "black", "linestyle": "none", "marker": "o", "markersize": 6, "markeredgecolor": "white"}
    left.plot(list(validation), list(validation.values()), **dots, label="validation", zorder=3)
    left.set(title="Loss", xlabel="step", ylabel="cross-entropy of a character, nats")
    right.set(title="Difference from one process", xlabel="step", yscale="log", ylim=(5e-8, 1e-4))
    right.set_ylabel(f"largest of the last {WINDOW} steps, log scale")
    right.axhline(ROUNDING, color="#777777", linestyle=":", linewidth=1.2)
    right.text(20, ROUNDING * 0.85, "last bit of a 32-bit loss", color="#777777", va="top", fontsize=9)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=100)


if __name__ == "__main__":
    main()

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
DASHES = {"ddp": (0, 10), "fsdp": (2, 10), "tp_fsdp": (4, 10), "pp": (6, 10), "deepspeed": (8, 10)}


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
        single = name == "single"
        # Colours take turns along one curve, so that all of them can be seen where they are one.
        style = {"linewidth": 5} if single else {"linewidth": 1.8, "linestyle": (DASHES[name][0], (2, 8))}
        left.plot(list(losses), list(losses.values()), color=COLOURS[name], **style)
        left.plot(
            list(validated),
            list(validated.values()),
            color=COLOURS[name],
            linestyle="none",
            marker="o",
            markersize=9 if single else 8 - list(runs).index(name),
        )
        gaps = {step: abs(value - reference[step]) for step, value in losses.items()}
        worst = max([*gaps.values(), *(abs(value - validation[step]) for step, value in validated.items())])
        print(f"{LABELS[name]}: last loss {list(losses.values())[-1]:.6f}, largest difference {worst:.1e}")
        if single:
            left.plot([], [], color=COLOURS[name], linewidth=5, label=LABELS[name])
        else:
            left.plot([], [], color=COLOURS[name], linewidth=2, label=LABELS[name])
            shown = {step: max(gap, 1e-9) for step, gap in gaps.items()}
            right.plot(list(shown), list(shown.values()), color=COLOURS[name], linewidth=1.1)
    left.plot([], [], color="#666666", linestyle="none", marker="o", label="validation")
    left.set(title="Loss", xlabel="step", ylabel="cross-entropy of a character, nats")
    right.set(title="Difference from one process", xlabel="step", ylabel="absolute, log scale", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()

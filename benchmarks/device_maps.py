"""Device maps of random models: how many fit, here and by Accelerate, and how long one of 80 blocks takes.

    python benchmarks/device_maps.py
    python benchmarks/device_maps.py --cases 2000 --json maps.json

Run it where accelerate is installed; without it only drivetrain's are counted. The cases are those of
tests/inference/random_models.py: ties, views, nested modules, buffers, zero budgets and dtypes of less than a byte.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from tables import as_table
from torch import nn

from drivetrain import ConfigurationError, infer_auto_device_map

sys.path.append(str(Path(__file__).parents[1]))
from tests.inference.random_models import Case, Counted, random_case, units_of

OUTCOMES = {
    "holds": "holds: covers everything, keeps ties together, fits",
    "refused": "refused, and no map fits",
    "missed": "refused, or does not fit, though a map fits",
    "over": "does not fit, and no map does",
    "tie": "splits tied weights",
    "gap": "a tensor without a device",
    "raised": "raises another error",
}
MOST_GROUPS = 8
"""Up to so many parts all maps are tried, to find whether one fits."""


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    while name not in device_map and name:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def some_map_fits(case: Case) -> bool:
    """Whether any map fits, with buffers of what is offloaded where they are asked for, or offloaded too."""
    units = units_of(case)
    counted = [Counted(case, units, buffers) for buffers in {case.offload_buffers, True}]
    return len(counted[0].tied_units()) <= MOST_GROUPS and any(each.any_map_fits() for each in counted)


def outcome(case: Case, find: Callable[..., Mapping[str, Any]], main_of: Callable[[Mapping[str, Any]], Any]) -> str:
    case.no_split_module_classes = case.no_split_module_classes or []  # Accelerate finds no blocks by itself
    units = units_of(replace(case, no_split_module_classes=[]))  # Accelerate streams these, whatever stays together
    try:
        found = find(case.model, **case.arguments, clean_result=False)
    except ConfigurationError:
        return "missed" if some_map_fits(case) else "refused"
    except Exception:
        return "raised"
    parameters = [name for name, _ in case.model.named_parameters(remove_duplicate=False)]
    buffers = [name for name, _ in case.model.named_buffers(remove_duplicate=False)]
    if any(device_of(name, found) is None for name in parameters + buffers):
        return "gap"
    devices = {unit: device_of(unit, found) for unit in units}
    counted = [Counted(case, units, buffers_too) for buffers_too in {case.offload_buffers, True}]
    if any(len({devices[unit] for unit in group}) > 1 for group in counted[0].tied_units()):
        return "tie"
    if any(each.fits(devices, main_of(found)) for each in counted):
        return "holds"
    return "missed" if some_map_fits(case) else "over"


def first_device(device_map: Mapping[str, Any]) -> Any:
    """What computes the modules of Accelerate's maps that are on the CPU or the disk."""
    return next((device for device in device_map.values() if device not in ("cpu", "disk")), "cpu")


def count(cases: int, find: Callable[..., Mapping[str, Any]], main_of: Callable[[Mapping[str, Any]], Any]) -> Counter:
    found: Counter = Counter()
    for seed in range(cases):
        found[outcome(random_case(random.Random(seed)), find, main_of)] += 1
    return found


def seconds_for_80_blocks(find: Callable[..., Mapping[str, Any]], rounds: int = 9) -> float:
    block = lambda: nn.TransformerEncoderLayer(1024, 8, device="meta")  # noqa: E731
    model = nn.Sequential(*(block() for _ in range(80)))
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        find(
            model,
            max_memory={0: "1GB", 1: "1GB", "cpu": "10GB"},
            no_split_module_classes=["TransformerEncoderLayer"],
        )
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


@click.command()
@click.option("--cases", default=2000, show_default=True, help="How many random models.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures here.")
def main(cases: int, file: Path | None) -> None:
    """Count how the maps of random models end."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    contenders: dict[str, tuple[Callable[..., Mapping[str, Any]], Callable[..., Any]]] = {
        "drivetrain": (infer_auto_device_map, lambda found: found.main_device)
    }
    if importlib.util.find_spec("accelerate") is not None:
        import accelerate

        contenders["accelerate"] = (accelerate.infer_auto_device_map, first_device)
    else:
        click.echo("accelerate is not installed, and left out.", err=True)
    results = {name: count(cases, *each) for name, each in contenders.items()}
    seconds = {name: seconds_for_80_blocks(find) for name, (find, _) in contenders.items()}
    rows = [[text, *(str(found[key]) for found in results.values())] for key, text in OUTCOMES.items()]
    rows.append(["80 blocks, ms", *(f"{1000 * taken:.0f}" for taken in seconds.values())])
    click.echo(as_table([f"of {cases} models", *(f"{name}:" for name in contenders)], rows))
    if file is not None:
        file.write_text(json.dumps({"cases": cases, "outcomes": results, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()

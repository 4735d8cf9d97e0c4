"""What each process holds under a strategy: parameters, gradients and optimizer state, on 1, 2 and 4 processes.

    python benchmarks/memory.py
    python benchmarks/memory.py --only FSDP --processes 1 --processes 2 --json memory.json

Counted are the storages of the tensors that are alive in a process when its second optimizer step is about to begin,
which is when gradients and optimizer state are there together. See benchmarks/README.md.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from processes import measure_in_processes
from tables import as_table
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformer import LAYERS, LanguageModel, make_batch, make_model, tensor_parallel_plan

from drivetrain import Callback, Trainer, gather_object

ROLES = ("parameters", "gradients", "optimizer", "other")
DIVIDED = ("FSDP", "DeepSpeed ZeRO-3")
"""Those that promise each process a share of everything."""
TOLERANCE = 0.05
LARGEST_BUFFER = 2**24 * 4  # bytes: a bucket of ZeRO-3, which is not a share of anything
SMALL = 4096  # bytes; smaller storages are steps, losses and the like


def make_strategy(name: str, processes: int) -> Any:
    if name == "DDP":
        return "ddp" if processes > 1 else "single"
    if name == "FSDP":
        return "fsdp"
    if name == "TP x FSDP":
        from drivetrain import Parallel

        return Parallel(tp=2, tp_plan=tensor_parallel_plan())
    from drivetrain import DeepSpeed

    return DeepSpeed(stage=int(name[-1]))


# name -> processes that it can run on
STRATEGIES = {
    "DDP": (1, 2, 4),
    "FSDP": (1, 2, 4),
    "TP x FSDP": (2, 4),
    "DeepSpeed ZeRO-1": (1, 2, 4),
    "DeepSpeed ZeRO-2": (1, 2, 4),
    "DeepSpeed ZeRO-3": (1, 2, 4),
}


# counting


def parts_of(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors of this process that a tensor stands for."""
    if not isinstance(tensor, Tensor):
        return
    local = getattr(tensor, "_local_tensor", tensor)
    if isinstance(getattr(tensor, "ds_tensor", None), Tensor):  # this process's part of a parameter under ZeRO-3
        yield tensor.ds_tensor
    yield local


def storages_of(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes of each storage, by address: views of one storage count once."""
    found = {}
    for tensor in tensors:
        for part in parts_of(tensor):
            if part.device.type != "meta":
                storage = part.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def count_bytes(trainer: Trainer) -> dict[str, int]:
    """Bytes that this process holds, by what they are for; each storage counts under the first that it belongs to."""
    [optimizer] = trainer.optimizers
    inner = getattr(optimizer, "optimizer", optimizer)  # the one that does the sums
    stepped = [parameter for group in inner.param_groups for parameter in group["params"]]
    parameters = list(trainer.task.parameters())
    engine = getattr(trainer.model, "optimizer", None)  # DeepSpeed's, which keeps gradients and masters by itself
    masters = getattr(engine, "fp32_partitioned_groups_flat", [])
    gradients = [parameter.grad for parameter in (*parameters, *stepped)]
    gradients += tensors_in(getattr(engine, "averaged_gradients", None))
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alive = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    groups = (parameters, gradients, [stepped, masters, *inner.state.values()], alive)
    counted: dict[int, int] = {}
    result = {}
    for role, tensors in zip(ROLES, groups, strict=True):
        found = storages_of(tensors_in(list(tensors)))
        result[role] = sum(
            size for address, size in found.items() if address not in counted and (role != "other" or size >= SMALL)
        )
        counted |= found
    return result


class CountBytes(Callback):
    """Counts before the second step."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        if trainer.global_step == 1:
            self.counts = count_bytes(trainer)


def measure(name: str, processes: int, layers: int) -> list[dict[str, int]]:
    """Train for two steps in this process; what each process held."""
    torch.set_num_threads(1)
    counting = CountBytes()
    trainer = Trainer(
        accelerator="cpu",
        strategy=make_strategy(name, processes),
        devices=processes,
        callbacks=[counting],
        max_steps=2,
        barebones=True,
    )
    trainer.fit(LanguageModel(layers), DataLoader(TensorDataset(*make_batch(2 * processes)), 1))
    return gather_object(counting.counts)


# comparing


def share_of(results: list[dict[str, Any]], result: dict[str, Any]) -> float | None:
    """What one process holds of the model's state, with the strategy on one process as 1; None if not measured."""
    alone = "FSDP" if result["name"] == "TP x FSDP" else result["name"]
    for other in results:
        if other["name"] == alone and other["processes"] == 1:
            return float(state_of(result) / state_of(other))
    return None


def state_of(result: dict[str, Any]) -> int:
    """Bytes of parameters, gradients and optimizer state."""
    return int(result["total"] - result["other"])


def rows_of(results: list[dict[str, Any]]) -> Iterator[list[str]]:
    """The cells of each result."""
    for each in results:
        share = share_of(results, each)
        sizes = [f"{each[role] / 1e6:.1f}" for role in (*ROLES, "total")]
        yield [each["name"], str(each["processes"]), *sizes, "" if share is None else f"{share:.3f}"]


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(STRATEGIES)), help="Can be given several times.")
@click.option("--processes", multiple=True, type=int, default=(1, 2, 4), show_default=True)
@click.option("--layers", default=LAYERS, show_default=True, help="Blocks of the transformer.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there too.")
@click.option("--measure", "measured", hidden=True, help="Measure this one here, as the launcher's processes do.")
def main(
    only: tuple[str, ...], processes: tuple[int, ...], layers: int, json_file: Path | None, measured: str | None
) -> None:
    if measured is not None:
        from drivetrain import PartialState

        counts = measure(measured, PartialState().num_processes, layers)
        if PartialState().is_main_process:
            assert json_file is not None
            json_file.write_text(json.dumps(counts))
        return
    results: list[dict[str, Any]] = []
    for name in only or STRATEGIES:
        for count in processes:
            if count in STRATEGIES[name]:
                each = measure_in_processes(__file__, name, count, layers=layers)
                counts = max(each, key=lambda counts: sum(counts.values()))  # of the process that holds most
                results.append({"name": name, "processes": count, **counts, "total": sum(counts.values())})
                print(f"{name} on {count}: {results[-1]['total'] / 1e6:.1f} MB", file=sys.stderr, flush=True)
    millions = sum(parameter.numel() for parameter in make_model(layers).parameters()) / 1e6
    print(
        f"{millions:.1f} M parameters in 32 bits, AdamW; MB on the process that holds most. "
        f"torch {torch.__version__}.\n"
    )
    columns = ["", "processes:", *(f"{role}:" for role in ROLES), "sum, MB:", "state, of one process:"]
    print(as_table(columns, rows_of(results)))
    if json_file is not None:
        json_file.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=2))
    missed = []
    for each in results:
        share = share_of(results, each)
        if each["name"] in DIVIDED and share is not None and share * each["processes"] > 1 + TOLERANCE:
            missed.append(f"{each['name']} on {each['processes']}: {share:.3f} of the state that one process holds")
        if each["other"] > LARGEST_BUFFER + 0.01 * state_of(each):
            missed.append(f"{each['name']} on {each['processes']}: buffers of {each['other'] / 1e6:.1f} MB")
    if missed:
        raise click.ClickException(f"more than {TOLERANCE:.0%} above an equal share: " + "; ".join(missed))


if __name__ == "__main__":
    main()

"""What quantised weights take, how far off they are and how fast they compute on this machine, beside float32.

    python benchmarks/quantization.py
    python benchmarks/quantization.py --width 4096 --batch 64 --device cuda

One linear layer, in turn with the same layer in float32. See benchmarks/README.md.
"""

from __future__ import annotations

import logging
import warnings
from time import perf_counter

import click
import torch
from tables import as_table
from timing import compare
from torch import Tensor, nn

from drivetrain import ConfigurationError, quantize_model

NAMES = ("nf4", "fp4", "int8", "int8wo", "int8dq", "int4wo", "float8wo", "float8dq")


def held(model: nn.Module) -> int:
    """Bytes of what a model's layer holds, also of what is not in its parameters but beside them."""
    layer = model.get_submodule("0")
    state = model.quantization.quantizer.saved(layer)[0] if hasattr(model, "quantization") else layer.state_dict()  # type: ignore[union-attr, operator]
    return sum(_bytes(value) for value in state.values() if isinstance(value, Tensor))


def _bytes(tensor: Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


def make_layer(width: int, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width, bias=False)).to(device).eval()


def seconds_of(model: nn.Module, x: Tensor, calls: int) -> float:
    with torch.inference_mode():
        start = perf_counter()
        for _ in range(calls):
            model(x)
        if x.is_cuda:
            torch.cuda.synchronize()
    return (perf_counter() - start) / calls


@click.command()
@click.option("--width", default=2048, show_default=True, help="Inputs and outputs of the layer.")
@click.option("--batch", default=16, show_default=True, help="Rows of a batch.")
@click.option("--rounds", default=9, show_default=True, help="How often each is measured.")
@click.option("--calls", default=20, show_default=True, help="Forwards of each measurement.")
@click.option("--device", default="cpu", show_default=True)
def main(width: int, batch: int, rounds: int, calls: int, device: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    plain = make_layer(width, device)
    x = torch.randn(batch, width, generator=torch.Generator().manual_seed(1)).to(device)
    right = plain(x).detach()
    models: dict[str, nn.Module] = {"bfloat16": make_layer(width, device).bfloat16()}
    for name in NAMES:
        try:
            models[name] = quantize_model(make_layer(width, device), name, skip_modules=[])
        except ConfigurationError as error:
            print(f"{name}: left out. {error}")
    rows = []
    inputs = {name: x.bfloat16() if name == "bfloat16" else x for name in models}
    measures = {
        name: (lambda model=model, x=inputs[name]: seconds_of(model, x, calls)) for name, model in models.items()
    }
    for result in compare(lambda: seconds_of(plain, x, calls), measures, rounds):
        model = models[result.name]
        off = float((model(inputs[result.name]).float() - right).norm() / right.norm())
        share = held(model) / held(plain)
        rows.append([result.name, f"{share:.2f}", f"{off:.3f}", f"{result.ratio:.2f}"])
    conditions = f"batches of {batch}, {device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"Linear({width}, {width}), {conditions}\n")
    print(as_table(["", "memory:", "relative error:", "time:"], rows))


if __name__ == "__main__":
    main()

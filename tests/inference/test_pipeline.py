"""Models whose layers are spread over processes, for inference."""

from __future__ import annotations

import re
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from drivetrain import (
    CheckpointError,
    ConfigurationError,
    PartialState,
    PipelineInference,
    init_empty_weights,
    prepare_pippy,
)
from tests.pool import ProcessesFailed, run_in_processes
from tests.shared_runs import SharedRuns

runs = SharedRuns(__name__)

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.norm(torch.tanh(self.linear(x)))
        return x if scale is None else x * scale


class Net(nn.Module):
    """Blocks between an embedding and a head that has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(11, WIDTH)
        self.register_buffer("table", torch.linspace(0, 1, WIDTH), persistent=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, scale: Tensor | None = None, loss: bool = False) -> Any:
        x = self.tokens(tokens).mean(1) + self.table
        for block in self.blocks:
            x = block(x, scale)
        logits = self.head(x)
        return {"logits": logits, "hidden": (x, None), **({"loss": logits.mean()} if loss else {})}


def tokens(rows: int, seed: int = 1) -> Tensor:
    return torch.randint(11, (rows, 5), generator=torch.Generator().manual_seed(seed))


def plain(rows: int, chunks: int = 2, **kwargs: Any) -> Tensor:
    """What one process returns for the same parts of a batch."""
    with torch.no_grad():
        parts = tokens(rows).tensor_split(min(chunks, rows) or 1)
        return torch.cat([Net().eval()(part, **kwargs)["logits"] for part in parts])


def trained() -> nn.Module:
    """A model whose running statistics are not those that it is built with."""
    model = Net().eval()
    for block in model.blocks:
        block.norm.running_mean += 1
    return model


def called(options: dict[str, Any], batches: list[int]) -> list[Any]:
    model = prepare_pippy(Net().eval(), **options)
    # Only what the first process is called with counts.
    given = [tokens(rows) if PartialState().is_main_process else None for rows in batches]
    outputs = [model(each) for each in given]
    held = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    return [None if output is None else output["logits"] for output in outputs], sorted(held), model.hf_split_points


BATCHES = [8, 1, 3, 2, 5]


@runs
def on_the_last() -> Any:
    return called({"example_args": (tokens(2),)}, BATCHES)


def test_a_batch_of_any_size_gives_what_one_process_gives():
    first, last = runs.of(on_the_last)
    assert first[0] == [None] * len(BATCHES)
    assert all(torch.equal(got, plain(rows)) for got, rows in zip(last[0], BATCHES, strict=True))
    assert first[1][:2] == ["blocks.0.linear.bias", "blocks.0.linear.weight"]
    assert "tokens.weight" in first[1]
    assert not set(first[1]) & set(last[1])
    assert first[2] == last[2] == ["blocks.2"]


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        ({"gather_output": True, "split_points": ["blocks.1", "blocks.3"], "num_chunks": 2}, 3),
        ({"gather_output": True, "no_split_module_classes": ["Block"], "num_chunks": 1}, 2),
        ({"gather_output": True}, 1),
    ],
)
def test_all_processes_get_the_output_if_asked_for(options: dict[str, Any], processes: int):
    chunks = options.get("num_chunks", 1)
    for outputs, _, points in run_in_processes(called, processes, args=(options, [7, 2])):
        assert torch.equal(outputs[0], plain(7, chunks))
        assert torch.equal(outputs[1], plain(2, chunks))
        assert len(points) == processes - 1


@runs
def streamed() -> list[Any]:
    pipeline = PipelineInference(Net().eval(), in_flight=2)
    requests = None
    if PartialState().is_main_process:
        scale = torch.full((WIDTH,), 0.5)
        requests = iter([tokens(3), (tokens(1), scale), {"tokens": tokens(4), "scale": scale}, *[tokens(2)] * 9])
    results = [output["logits"] for output in pipeline.stream(requests)]
    assert torch.is_grad_enabled()
    return results


def test_requests_of_any_shape_are_streamed_in_order():
    first, last = runs.of(streamed)
    scale = torch.full((WIDTH,), 0.5)
    expected = [plain(3, 1), plain(1, 1, scale=scale), plain(4, 1, scale=scale), *[plain(2, 1)] * 9]
    assert first == []
    assert all(torch.equal(got, each) for got, each in zip(last, expected, strict=True))


@runs
def overlapped() -> int:
    pipeline, state = PipelineInference(Net().eval(), in_flight=2), PartialState()
    calls: list[int] = []

    def first_stage(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            state.store.set("the first stage has computed the second request", "")

    def last_stage(*_: Any) -> None:
        state.store.wait(["the first stage has computed the second request"], timedelta(seconds=20))

    blocks = pipeline.model.blocks
    blocks[0].register_forward_hook(first_stage) if state.is_main_process else blocks[2].register_forward_hook(
        last_stage
    )
    return len(list(pipeline.stream([tokens(1)] * 3)))


def test_a_stage_computes_while_the_next_one_does():
    # The last stage is not done with the first request before the first stage is with the second.
    assert runs.of(overlapped) == [0, 3]


def from_meta(weights: str) -> tuple[Any, Any]:
    with init_empty_weights():
        model = Net().eval()
    read: list[str] = []

    class Noted(dict):
        def __getitem__(self, name: str) -> Tensor:
            read.append(name)
            return super().__getitem__(name)

    by_hand = Noted({name: value.clone() for name, value in trained().state_dict().items()})
    model = prepare_pippy(model, weights=weights or by_hand, gather_output=True)
    return model(tokens(6))["logits"], sorted(read), model.table.is_meta


@pytest.mark.parametrize("source", ["file", "mapping"])
def test_each_stage_of_a_model_without_memory_loads_its_own_part(tmp_path: Path, source: str):
    state = {name: value for name, value in trained().state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    (got, first, table), (other, last, _) = run_in_processes(
        from_meta, args=("" if source == "mapping" else str(tmp_path),)
    )
    with torch.no_grad():
        expected = torch.cat([trained()(part)["logits"] for part in tokens(6).tensor_split(2)])
    assert torch.equal(got, expected)
    assert torch.equal(other, expected)
    assert not table
    if source == "mapping":
        assert first == sorted(name for name in state if name.startswith(("tokens", "blocks.0", "blocks.1")))
        assert last == sorted([*(name for name in state if name.startswith(("blocks.2", "blocks.3"))), "head.weight"])


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "split_points names 'blocks.9', which is not a module of Net": ({"split_points": ["blocks.9"]}, {}),
    "makes 3 stages, but there are 2 processes": ({"split_points": ["blocks.1", "blocks.2"]}, {}),
    "must be 'auto' or a list of module names": ({"split_points": "blocks.1"}, {}),
    "has no 'Blok'.*'Block'": ({"no_split_module_classes": ["Blok"]}, {}),
    "num_chunks is 0, but must be at least 1": ({"num_chunks": 0}, {}),
    "9 tensors of this stage .* such as 'blocks.2.linear.weight'. Pass a file or folder": ({"meta": True}, {}),
    "The weights have no 'blocks.2.linear.weight'": ({"meta": True, "weights": {}}, {}),
    r"returns a tensor of shape \(\) .*num_chunks=1": ({}, {"loss": True}),
}


@runs
def refusals() -> list[str]:
    found = []
    for options, arguments in REFUSED.values():
        try:
            with init_empty_weights() if options.get("meta") else nullcontext():
                model = Net().eval()
            given = {name: value for name, value in options.items() if name != "meta"}
            prepare_pippy(model, **given)(tokens(4), **arguments)
            found.append("")
        except (ConfigurationError, CheckpointError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_run_is_refused(message: str):
    *_, last = runs.of(refusals)
    assert re.search(message, last[list(REFUSED).index(message)])


def failing() -> None:
    model = prepare_pippy(Net().eval())
    bad = tokens(2)
    bad[0, 0] = 99
    model(bad)


def test_a_stage_that_fails_lets_the_next_ones_fail_too():
    with pytest.raises(ProcessesFailed) as failed:
        run_in_processes(failing, timeout=30)
    assert failed.value.hung == []
    assert "index out of range" in failed.value.tracebacks[0]

"""Weights that come and go: from mapped files on the CPU, in the order that the forward before has shown."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain import (
    CheckpointError,
    ConfigurationError,
    StreamedModelError,
    StreamOptions,
    WeightStream,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from tests.inference.block_models import IDS, Blocks, empty, saved, seeded
from tests.pool import ROOT, run_in_processes


def mapped(path: Path, **options) -> Blocks:
    """A model over a file, whose weights come and go."""
    model = seeded()
    return load_checkpoint_and_dispatch(
        empty(), saved(model, path / "model.safetensors"), "disk", stream=StreamOptions(**options)
    )


def stream_of(model: nn.Module) -> WeightStream:
    return model._hf_hook.placement.stream


def names(model: nn.Module) -> list[str]:
    return [group.name for group in stream_of(model).groups]


@pytest.mark.parametrize(
    "options",
    [{}, {"groups": "leaf"}, {"num_blocks_per_group": 3}, {"prefetch": 0}, {"prefetch": 9}, {"budget": 0}],
    ids=str,
)
def test_outputs_are_those_of_the_model_in_memory(tmp_path, options):
    expected = seeded()(IDS)
    model = mapped(tmp_path, **options)
    for _ in range(3):
        assert torch.equal(model(IDS), expected)


def test_weights_are_the_file_s_own_bytes(tmp_path):
    model = mapped(tmp_path)
    maps = Path("/proc/self/maps").read_text().splitlines()
    [line] = [line for line in maps if line.endswith(str(tmp_path / "model.safetensors"))]
    start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
    assert all(start <= parameter.data_ptr() < end for parameter in model.parameters())


def test_blocks_are_groups_and_so_is_each_other_module_with_weights(tmp_path):
    layers = [f"layers.{number}" for number in range(4)]
    assert names(mapped(tmp_path)) == ["words", *layers, "norm", "head"]
    assert names(mapped(tmp_path, num_blocks_per_group=3)) == ["words", "layers.0", "layers.3", "norm", "head"]
    parts = [f"{layer}.{part}" for layer in layers for part in ("up", "down")]
    assert names(mapped(tmp_path, groups="leaf")) == ["words", *parts, "norm", "head"]


def test_a_class_that_is_preloaded_is_one_group(tmp_path):
    model = load_checkpoint_and_dispatch(
        empty(),
        saved(seeded(), tmp_path / "model.safetensors"),
        "disk",
        preload_module_classes=["Block"],
        stream=StreamOptions(groups="leaf"),
    )
    assert names(model) == ["words", *(f"layers.{number}" for number in range(4)), "norm", "head"]


class Reversing(Blocks):
    """Its blocks run in an order that a batch chooses."""

    def forward(self, ids: torch.Tensor, backwards: bool = False) -> torch.Tensor:
        x = self.words(ids) + self.table
        for layer in reversed(self.layers) if backwards else self.layers[:3]:
            x = layer(x)
        return self.head(self.norm(x))


def test_a_forward_that_departs_from_the_order_before_is_right(tmp_path):
    torch.manual_seed(0)
    model = Reversing()
    expected = [model(IDS, backwards) for backwards in (False, True, False)]
    load_checkpoint_in_model(model, saved(model, tmp_path / "model.safetensors"), {"": "disk"})
    stream = WeightStream(model, options=StreamOptions(prefetch=2, budget=0))
    for backwards, output in zip((False, True, False), expected, strict=True):
        assert torch.equal(model(IDS, backwards), output)
    stream.remove()


def test_used_pages_leave_memory_and_no_anonymous_memory_is_taken(tmp_path):
    # A process of its own: what others of this one hold would be counted.
    script = f"""
import torch
from torch import nn
from drivetrain import StreamOptions, init_empty_weights, load_checkpoint_and_dispatch
from safetensors.torch import save_file
from tests.inference.block_models import Block

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) >> 10

depth, width = 8, 1024
one = Block(width).state_dict()
save_file({{f"{{n}}.{{k}}": v.clone() for n in range(depth) for k, v in one.items()}}, r"{tmp_path}/m.safetensors")
with init_empty_weights():
    model = nn.Sequential(*(Block(width) for _ in range(depth)))
load_checkpoint_and_dispatch(model, r"{tmp_path}/m.safetensors", "disk", stream=StreamOptions(budget=0))
x = torch.ones(1, width)
with torch.no_grad():
    model(x)
    anonymous, file = status("RssAnon"), status("RssFile")
    seen = []
    for block in model:
        block.register_forward_hook(lambda *a: seen.append(status("RssFile") - file))
    model(x)
print(status("RssAnon") - anonymous, max(seen))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    anonymous, file = map(int, found.stdout.split()) if not found.returncode else pytest.fail(found.stderr)
    assert anonymous <= 4  # of 64 MiB of weights
    assert file <= 24  # two blocks and what lies between them


def test_a_weight_that_was_changed_in_place_keeps_its_values(tmp_path):
    before = (tmp_path / "model.safetensors", saved(seeded(), tmp_path / "model.safetensors").read_bytes())
    model, plain = mapped(tmp_path, budget=0), seeded()
    with torch.no_grad():
        for each in (model, plain):
            each.layers[1].up.weight.mul_(2)
    expected = plain(IDS)
    assert torch.equal(model(IDS), expected)
    assert torch.equal(model(IDS), expected)
    assert before[0].read_bytes() == before[1]


def _shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _rewrite(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))


def _replace(path: Path) -> None:
    other = path.with_suffix(".other")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


@pytest.mark.parametrize("change", [_shorten, _rewrite, _replace, Path.unlink])
def test_a_file_that_changes_is_refused_by_name(tmp_path, change):
    model = mapped(tmp_path)
    model(IDS)
    change(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors (has changed|cannot be read any more)"):
        model(IDS)


def shortened_within_a_forward(path: Path) -> str:
    model = mapped(path, budget=0, prefetch=2)
    model(IDS)
    model.layers[0].register_forward_hook(lambda *_: os.truncate(path / "model.safetensors", 4096))
    try:
        model(IDS)
    except CheckpointError as error:
        return str(error)
    return "computed"


def test_a_file_that_is_shortened_within_a_forward_is_refused_before_a_page_beyond_its_end_is_used(tmp_path):
    (message,) = run_in_processes(shortened_within_a_forward, 1, args=[tmp_path])  # a bus error would be its end
    assert "model.safetensors has changed" in message


@pytest.mark.parametrize("move", [nn.Module.half, lambda m: m.to("meta"), lambda m: m.to(torch.bfloat16)])
def test_moving_or_casting_is_refused_with_what_to_do(tmp_path, move):
    model = mapped(tmp_path)
    expected = model(IDS)
    for part in (model, model.layers[1], model.layers[1].up):
        with pytest.raises(StreamedModelError, match="remove_hook_from_submodules"):
            move(part)
    assert torch.equal(model(IDS), expected)


def test_moving_to_where_it_is_does_nothing(tmp_path):
    model = mapped(tmp_path)
    kept = [parameter.data_ptr() for parameter in model.parameters()]
    assert model.to("cpu").float() is model
    assert [parameter.data_ptr() for parameter in model.parameters()] == kept


def test_a_copy_and_a_pickle_compute_the_same(tmp_path):
    model = mapped(tmp_path)
    expected = model(IDS)
    assert torch.equal(copy.deepcopy(model)(IDS), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(IDS), expected)


@pytest.mark.slow  # importing the compiler takes seconds
def test_compiled_blocks_compute_the_same(tmp_path):
    model = mapped(tmp_path, budget=0)
    for layer in model.layers:
        layer.compile(backend="eager")
    for _ in range(2):
        assert torch.equal(model(IDS), seeded()(IDS))


def test_state_is_readable_between_calls(tmp_path):
    model, plain = mapped(tmp_path), seeded()
    model(IDS)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_gradients_through_a_weight_that_comes_and_goes_are_refused_by_name(tmp_path):
    model = mapped(tmp_path)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.layers[2].down.bias.requires_grad_(True)
    with pytest.raises(StreamedModelError, match=r"bias in layers\.2"):
        model(IDS)
    with torch.no_grad():
        model(IDS)


def test_weights_beside_them_are_trained(tmp_path):
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.low = base, nn.Linear(base.in_features, 2, bias=False)
            self.high = nn.Linear(2, base.out_features, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.high(self.low(x))

    def adapted(model: Blocks) -> Blocks:
        model.requires_grad_(False)
        torch.manual_seed(1)
        for layer in model.layers:
            layer.up = Adapted(layer.up)
        return model

    streamed, plain = adapted(mapped(tmp_path, budget=0)), adapted(seeded())
    for model in (streamed, plain):
        model(IDS).square().sum().backward()
    for name, parameter in plain.named_parameters():
        found = streamed.get_parameter(name).grad
        assert (found is None and parameter.grad is None) or torch.equal(found, parameter.grad)
    assert streamed.layers[0].up.low.weight.grad.abs().sum() > 0


def test_a_model_is_as_any_other_once_its_hooks_are_removed(tmp_path):
    plain = seeded()
    load_checkpoint_in_model(plain, saved(plain, tmp_path / "model.safetensors"), {"": "disk"})
    expected = plain(IDS)
    stream = WeightStream(plain)
    stream.remove()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in plain.modules())
    assert all(parameter.requires_grad for parameter in plain.parameters())
    assert torch.equal(plain(IDS), expected)
    assert plain.double().words.weight.dtype == torch.float64


def test_a_module_that_raises_leaves_the_model_usable(tmp_path):
    model = mapped(tmp_path, budget=0)
    expected = model(IDS)
    with pytest.raises(IndexError):
        model(torch.tensor([[99]]))
    assert torch.equal(model(IDS), expected)


@pytest.mark.parametrize(
    "options", [{"groups": "blocks"}, {"num_blocks_per_group": 0}, {"prefetch": -1}, {"budget": -1}], ids=str
)
def test_options_that_cannot_be_are_refused(tmp_path, options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        mapped(tmp_path, **options)

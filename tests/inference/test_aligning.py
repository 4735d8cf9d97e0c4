"""Weights that are kept elsewhere and come for the forward."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import (
    AlignDevicesHook,
    CheckpointError,
    ConfigurationError,
    ModelHook,
    SequentialHook,
    StreamedModelError,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    get_state_dict_offloaded_model,
    has_offloaded_params,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    """A model with tied weights, a buffer that is not saved, and a layer that is used without being called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("offset", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor, *, fail: bool = False) -> torch.Tensor:
        x = self.norm(self.first(x)) + self.offset
        if fail:
            raise RuntimeError("no forward today")
        return nn.functional.linear(x, self.last.weight, self.last.bias)


class Reading(Mapping[str, torch.Tensor]):
    """Weights that are read again each time."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self._state = {name: value.clone() for name, value in state.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._state[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


@pytest.fixture
def model() -> nn.Module:
    return Tied().eval()


@pytest.fixture
def expected(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(X)


def where(model: nn.Module) -> set[str]:
    return {parameter.device.type for parameter in model.parameters()}


PRELOADED: dict[str, Any] = {"preload_module_classes": ["Tied"]}


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("source", ["memory", "state dict", "read each time"])
def test_offloaded_weights_come_for_the_forward_and_back_when_the_hooks_go(
    model: nn.Module, expected: torch.Tensor, offload_buffers: bool, source: str
):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    weights = {"memory": None, "state dict": model.state_dict(), "read each time": Reading(state)}[source]
    attach_align_device_hook(
        model, "cpu", offload=True, weights_map=weights, offload_buffers=offload_buffers, **PRELOADED
    )
    assert where(model) == {"meta"}
    assert model.norm.running_mean.is_meta == offload_buffers
    assert not model.offset.is_meta  # nothing could bring it back
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model(X), expected)
        assert where(model) == {"meta"}
    assert all(torch.equal(value, state[name]) for name, value in get_state_dict_offloaded_model(model).items())
    remove_hook_from_submodules(model)
    assert where(model) == {"cpu"}
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_state_dict_is_loaded_into_offloaded_weights(model: nn.Module, recwarn: pytest.WarningsRecorder):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    attach_align_device_hook(model, "cpu", offload=True, offload_buffers=True)
    zeros = {name: torch.zeros_like(value) for name, value in state.items()}
    for loaded in (zeros, state):
        result = model.load_state_dict(loaded)
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
    assert where(model) == {"meta"}
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.weight"):
        model.load_state_dict({**state, "first.weight": torch.zeros(1)})
    remove_hook_from_submodules(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    attach_align_device_hook(model, "cpu", offload=True, weights_map=state)
    with pytest.raises(ConfigurationError, match=r"'first\.weight' is offloaded to a user-provided weights_map"):
        model.load_state_dict(zeros)
    assert not recwarn.list


def test_each_module_brings_its_own_weights_only(expected: torch.Tensor):
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    attach_align_device_hook(inner, "cpu", offload=True)
    seen = []
    inner[0].register_forward_hook(lambda *_: seen.append(where(inner)))
    inner[1][0].forward = lambda x: seen.append(inner[1][0].weight.device.type) or x
    inner(X)
    assert seen == [{"meta"}, "cpu"]


def test_weights_go_away_after_an_error_too(model: nn.Module, expected: torch.Tensor):
    attach_align_device_hook(model, "cpu", offload=True, **PRELOADED)
    with pytest.raises(RuntimeError, match="no forward today"):
        model(X, fail=True)
    assert where(model) == {"meta"}
    with torch.no_grad():
        assert torch.equal(model(X), expected)


def test_tied_weights_are_kept_and_brought_once(model: nn.Module):
    attach_align_device_hook(model, "meta", offload=True, **PRELOADED)
    hook = model._hf_hook
    kept = hook.weights_map
    assert kept["first.weight"].data_ptr() == kept["last.weight"].data_ptr()
    hook.pre_forward(model)
    assert model.first.weight is model.last.weight
    hook.post_forward(model, None)
    assert all(set(places) <= {torch.device("cpu")} for places in hook.tied_params_map.values())


def test_weights_that_are_read_each_time_are_never_taken_for_each_other(model: nn.Module, expected: torch.Tensor):
    # A tensor that is read may be where a tied one was before.
    weights = Reading(model.state_dict())
    attach_align_device_hook(model, "cpu", offload=True, weights_map=weights, **PRELOADED)
    assert model._hf_hook._shared == set()
    with torch.no_grad():
        assert torch.equal(model(X), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_weights_of_its_own(model: nn.Module, expected: torch.Tensor, copied: Any):
    attach_align_device_hook(model, "cpu", offload=True, **PRELOADED)
    twin = copied(model)
    model._hf_hook.weights_map["first.weight"].zero_()
    with torch.no_grad():
        assert torch.equal(twin(X), expected)
        assert not torch.equal(model(X), expected)
    remove_hook_from_submodules(twin)
    assert where(twin) == {"cpu"}
    assert where(model) == {"meta"}


@pytest.mark.parametrize(
    "move", [nn.Module.half, nn.Module.double, lambda m: m.to("meta"), lambda m: m.to_empty(device="meta")]
)
@pytest.mark.parametrize("whole", [True, False])
def test_moving_or_casting_what_is_offloaded_is_refused_with_what_to_do(
    model: nn.Module, expected: torch.Tensor, move: Any, whole: bool
):
    attach_align_device_hook(model, "cpu", offload=True, **PRELOADED if whole else {})
    for part in (model, model.first):
        with pytest.raises(StreamedModelError, match=r"remove_hook_from_submodules\(model\)"):
            move(part)
    remove_hook_from_submodules(model)
    with torch.no_grad():
        assert torch.equal(model(X), expected)
    assert move(model) is model


def test_moving_offloaded_weights_to_where_they_are_does_nothing(model: nn.Module, expected: torch.Tensor):
    attach_align_device_hook(model, "cpu", offload=True, **PRELOADED)
    for each in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert each.to("cpu").float() is each
        assert each.first.weight.is_meta
        with torch.no_grad():
            assert torch.equal(each(X), expected)


def test_offloaded_weights_are_shared_with_other_processes_where_they_are_kept(model: nn.Module):
    attach_align_device_hook(model, "cpu", offload=True, **PRELOADED)
    model.share_memory()
    assert all(weight.is_shared() for weight in model._hf_hook.weights_map.values())
    assert model.norm.running_mean.is_shared()


def test_a_gradient_that_would_be_lost_is_refused_by_name(model: nn.Module):
    attach_align_device_hook(model, "cpu", offload=True, **PRELOADED)
    with pytest.raises(ConfigurationError, match=r"of Tied is offloaded, so its gradient would be lost"):
        model(X).sum().backward()


def test_other_parameters_are_trained_beside_offloaded_ones(model: nn.Module):
    added = nn.Linear(4, 4)
    model.requires_grad_(False)
    plain = copy.deepcopy(added), copy.deepcopy(model)
    attach_align_device_hook(model, "cpu", offload=True, **PRELOADED)
    model(added(X)).sum().backward()
    plain[1](plain[0](X)).sum().backward()
    assert torch.equal(added.weight.grad, plain[0].weight.grad)


def test_inputs_are_moved_but_for_the_keys_that_are_skipped():
    class Devices(nn.Module):
        def forward(self, x: Any, cache: Any = None, mask: Any = None) -> Any:
            return [x[0].device.type, cache["states"].device.type, mask.device.type]

    module = add_hook_to_module(Devices(), AlignDevicesHook("meta", skip_keys="cache"))
    assert module([X], cache={"states": X}, mask=X) == ["meta", "cpu", "meta"]


def test_the_output_returns_to_where_the_input_came_from():
    empty = torch.empty(2, 4, device="meta")
    layer = add_hook_to_module(nn.Linear(4, 4), AlignDevicesHook("cpu"))
    layer.forward = lambda x: torch.ones(2, 4)
    # As a model of transformers has it set, while the hook is attached.
    layer._hf_hook.io_same_device = True
    assert layer(x=X).device.type == "cpu"
    moved = add_hook_to_module(nn.Identity(), AlignDevicesHook("meta"))
    assert moved(X).is_meta
    same = add_hook_to_module(nn.Identity(), AlignDevicesHook(io_same_device=True))
    same.forward = lambda x: torch.ones(1)
    assert same(empty).is_meta


def test_a_module_that_is_where_it_belongs_gets_its_inputs_as_they_are():
    hook = AlignDevicesHook("cpu")
    layer = add_hook_to_module(nn.Linear(4, 4), hook)
    args, kwargs = (X, None), {"x": X}
    given, named = hook.pre_forward(layer, *args, **kwargs)
    assert given[0] is X
    assert named["x"] is X
    assert (len(layer._forward_pre_hooks), len(layer._forward_hooks)) == (1, 0)


def test_execution_hooks_are_on_each_module_that_holds_tensors_within_it(model: nn.Module):
    whole = nn.Sequential(model, nn.ReLU(), nn.Sequential(nn.Dropout()))
    attach_execution_device_hook(whole, "cpu", preload_module_classes=["Tied"])
    hooked = [name for name, module in whole.named_modules() if hasattr(module, "_hf_hook")]
    assert hooked == ["", "0"]


def test_blocks_are_placed_and_offloaded_as_listed(expected: torch.Tensor):
    torch.manual_seed(0)
    blocks = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("a", "b", "c")})
    model = nn.Sequential(blocks["a"], nn.Sequential(blocks["b"]), blocks["c"])
    before = model(X)
    attach_align_device_hook_on_blocks(
        model,
        execution_device={"0": "cpu", "1": "cpu", "2": "meta"},
        offload={"0": False, "1": True, "2": False},
        weights_map=model.state_dict(),
    )
    assert [where(each) for each in model] == [{"cpu"}, {"meta"}, {"meta"}]
    assert [has_offloaded_params(each) for each in (model[0], model[1][0], model[2])] == [False, True, False]
    with torch.no_grad():
        assert torch.equal(model[1](model[0](X)), model[1][0](model[0](X)))
        assert model[2](model[1](X)).is_meta
    assert model._hf_hook.io_same_device
    assert model[0]._hf_hook.execution_device == "cpu"
    remove_hook_from_module(model[1], recurse=True)
    assert before.shape == (2, 4)


def test_a_module_that_is_used_in_two_places_is_offloaded_once():
    layer = nn.Linear(4, 4)
    model = nn.ModuleList([nn.Sequential(layer), nn.Sequential(layer)])
    attach_align_device_hook(model, "cpu", offload=True)
    assert isinstance(layer._hf_hook, AlignDevicesHook)
    assert torch.equal(model[0](X), model[1](X))


def test_hooks_of_others_stay_beside_offloading(model: nn.Module):
    class Doubled(AlignDevicesHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 2

    layer = nn.Linear(4, 4)
    expected = layer(X) * 2
    add_hook_to_module(layer, Doubled())
    attach_align_device_hook(layer, "cpu", offload=True)
    assert isinstance(layer._hf_hook, SequentialHook)
    assert has_offloaded_params(layer)
    assert torch.equal(layer(X), expected)


def test_weights_are_there_within_the_context(model: nn.Module):
    attach_align_device_hook(model, "cpu", offload=True)
    with align_module_device(model.norm):
        assert where(model.norm) == {"cpu"}
        assert where(model.first) == {"meta"}
    with pytest.raises(KeyError), align_module_device(model.norm, "cpu"):
        raise KeyError
    assert where(model) == {"meta"}
    assert model.norm._hf_hook.execution_device == "cpu"
    plain = nn.Linear(4, 4)
    with align_module_device(plain):
        assert where(plain) == {"cpu"}
    with align_module_device(plain, "cpu"):
        assert where(plain) == {"cpu"}


def test_weights_that_another_hook_keeps_are_the_same_after_the_context():
    class Streamed(ModelHook):
        offload, execution_device = True, "meta"

    layer = add_hook_to_module(nn.Linear(4, 4), Streamed())
    weight = layer.weight
    with align_module_device(layer):
        assert where(layer) == {"meta"}
    assert layer.weight is weight
    assert has_offloaded_params(layer)


def test_a_compiled_block_brings_its_weights(model: nn.Module, expected: torch.Tensor):
    attach_align_device_hook(model, "cpu", offload=True, **PRELOADED)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled(X), expected)
    assert where(model) == {"meta"}


def test_a_compiled_block_that_is_in_its_place_is_one_graph(model: nn.Module, expected: torch.Tensor):
    attach_execution_device_hook(model, "cpu")
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(X), expected)


def test_what_is_missing_is_named(model: nn.Module):
    weights = dict(model.state_dict())
    weights["first.wait"] = weights.pop("first.weight")
    with pytest.raises(CheckpointError, match=r"weights_map has no 'weight'. Did you mean 'wait'"):
        attach_align_device_hook(model, "cpu", offload=True, weights_map=weights)
    with pytest.raises(ConfigurationError, match=r"'weight' of Linear is on the meta device.*weights_map"):
        attach_align_device_hook(nn.Linear(4, 4, device="meta"), "cpu", offload=True)
    with pytest.raises(CheckpointError, match=r"2 tensors .* 'weight'"):
        get_state_dict_offloaded_model(nn.Linear(4, 4, device="meta"))

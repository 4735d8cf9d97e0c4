"""Models of transformers and diffusers, tiny and random: from memory and disk, outputs are the plain model's bits."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import (
    StreamOptions,
    compute_module_sizes,
    cpu_offload,
    disk_offload,
    dispatch_model,
    find_tied_parameters,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from drivetrain.checkpoint import save_safetensors
from drivetrain.compat.aliases import install
from drivetrain.inference.offloaded import mapped_range
from tests.pool import run_in_processes
from tests.simulated.devices import simulated as simulated
from tests.simulated.devices import start

pytestmark = pytest.mark.compat

WORDS = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}


def _language(kind: str, **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, f"{kind}Config")(**{**WORDS, **config})
        return getattr(transformers, f"{kind}ForCausalLM" if kind != "GPT2" else "GPT2LMHeadModel")(made)

    return build


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=99, decoder_start_token_id=0, eos_token_id=None, **sizes))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=99, **LLAMA))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **LLAMA))


UNET = {
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "attention_head_dim": 4,
    "sample_size": 16,
}


def _unet() -> nn.Module:
    from diffusers import UNet2DModel

    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    return UNet2DModel(in_channels=3, out_channels=3, down_block_types=down, up_block_types=up, **UNET)


def _unet_with_text() -> nn.Module:
    from diffusers import UNet2DConditionModel

    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    return UNet2DConditionModel(
        in_channels=3, out_channels=3, cross_attention_dim=8, down_block_types=down, up_block_types=up, **UNET
    )


ZOO: dict[str, Callable[[], nn.Module]] = {
    "GPT-2, tied": _language("GPT2", n_embd=32, n_layer=3, n_head=4),
    "Llama": _language("Llama", num_key_value_heads=2, **LLAMA),
    "Mixtral, a mixture of experts": _language("Mixtral", num_key_value_heads=2, num_local_experts=4, **LLAMA),
    "T5, tied three ways": _t5,
    "BERT": _bert,
    "ViT": _vit,
    "UNet": _unet,
    "UNet that attends to a text": _unet_with_text,
}
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    if not hasattr(model, "main_input_name"):
        image, text = torch.linspace(-1, 1, 2 * 3 * 16 * 16), torch.linspace(-1, 1, 2 * 5 * 8)
        given = {"sample": image.reshape(2, 3, 16, 16).to(model.dtype), "timestep": torch.tensor([3, 40])}
        attends = "encoder_hidden_states" in inspect.signature(model.forward).parameters
        return {**given, "encoder_hidden_states": text.reshape(2, 5, 8).to(model.dtype)} if attends else given
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)}
    decoder = {"decoder_input_ids": IDS[:, :2]} if model.config.is_encoder_decoder else {}
    return {"input_ids": IDS, **decoder}


def results(model: Any) -> list[torch.Tensor]:
    """Logits or samples of two forwards, and what is generated with a cache."""
    with torch.no_grad():
        outputs = [model(**inputs_of(model)) for _ in range(2)]
    found = [output.logits if "logits" in output else output.sample for output in outputs]
    if hasattr(model, "can_generate") and model.can_generate():
        found.append(model.generate(IDS, max_new_tokens=6, do_sample=False))
    return found


def halves(model: nn.Module) -> dict[str, str]:
    """A map that leaves every second part of a model on disk, and what is tied in memory."""
    tied = {name for group in find_tied_parameters(model) for name in group}
    places: dict[str, str] = {}

    def divide(module: nn.Module, name: str, depth: int) -> None:
        own = [f"{name}.{key}".lstrip(".") for key, _ in module.named_parameters(recurse=False)]
        places.update(dict.fromkeys(own, "cpu"))
        for key, child in module.named_children():
            path = f"{name}.{key}".lstrip(".")
            if depth and any(True for _ in child.children()):
                divide(child, path, depth - 1)
            elif any(True for _ in child.parameters()):
                ties = any(name.startswith(f"{path}.") for name in tied)
                places[path] = "disk" if len(places) % 2 and not ties else "cpu"

    divide(model, "", 3)
    return places


def whole(model: Any, build: Callable[[], Any], folder: Path) -> Any:
    return load_checkpoint_and_dispatch(build(), folder, {"": "cpu"}, strict=False)


def offloaded(model: Any, build: Callable[[], Any], folder: Path) -> Any:
    return cpu_offload(model, execution_device="cpu", offload_buffers=True)


def from_disk(model: Any, build: Callable[[], Any], folder: Path) -> Any:
    return load_checkpoint_and_dispatch(build(), folder, "disk", main_device="cpu", stream=StreamOptions(budget=0))


def written(model: Any, build: Callable[[], Any], folder: Path) -> Any:
    return disk_offload(model, folder / "off", execution_device="cpu", offload_buffers=True)


def mixed(model: Any, build: Callable[[], Any], folder: Path) -> Any:
    return dispatch_model(model, halves(model), main_device="cpu", offload_dir=folder / "off")


def mixed_from_files(model: Any, build: Callable[[], Any], folder: Path) -> Any:
    return load_checkpoint_and_dispatch(build(), folder, halves(model), main_device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_outputs_are_those_of_the_plain_model(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = ZOO[name]().eval().to(dtype)
    save_safetensors(plain.state_dict(), tmp_path)  # save_pretrained gives some of them other names
    expected = results(plain)

    def empty() -> nn.Module:
        with init_empty_weights():
            return ZOO[name]().eval().to(dtype)

    for way in (whole, from_disk, mixed_from_files, offloaded, written, mixed):
        model = way(plain, empty, tmp_path)
        on_disk = [each for each in model.parameters() if mapped_range(each) is not None]
        assert bool(on_disk) == (way not in (whole, offloaded))
        for found, wanted in zip(results(model), expected, strict=True):
            assert torch.equal(found, wanted), way.__name__
        del model


def on_two_devices(model: Any) -> dict[Any, Any]:
    """What two devices may take of a model, so that both have a part of it."""
    size = compute_module_sizes(model)[""]
    return {0: int(0.75 * size), 1: int(0.75 * size)}


def split(plain: Any, build: Callable[[], Any], folder: str) -> Any:
    return load_checkpoint_and_dispatch(build(), folder, "balanced", max_memory=on_two_devices(plain))


def split_in_memory(plain: Any, build: Callable[[], Any], folder: str) -> Any:
    model = copy.deepcopy(plain)
    return dispatch_model(model, infer_auto_device_map(model, on_two_devices(plain)))


def streamed_from_memory(plain: Any, build: Callable[[], Any], folder: str) -> Any:
    return cpu_offload(copy.deepcopy(plain), execution_device=0)


def streamed_from_disk(plain: Any, build: Callable[[], Any], folder: str) -> Any:
    return load_checkpoint_and_dispatch(build(), folder, "disk", main_device=0)


def over_devices_memory_and_disk(plain: Any, build: Callable[[], Any], folder: str) -> Any:
    size = compute_module_sizes(plain)[""]
    memory = {0: int(0.6 * size), 1: int(0.3 * size), "cpu": int(0.2 * size)}
    return load_checkpoint_and_dispatch(build(), folder, "sequential", max_memory=memory)


SPLITS = (split, split_in_memory, streamed_from_memory, streamed_from_disk, over_devices_memory_and_disk)


def placed_on_simulated_devices(folder: str, name: str, dtype: torch.dtype) -> tuple[dict[str, Any], set[str]]:
    """How far outputs are from those of the model on one device for each way to place it, and the places used.

    On one device kernels are not all those of the CPU, so how far that is from the plain model is the first of them.
    """
    sim = start(2)

    def built() -> Any:
        model: Any = ZOO[name]().eval().to(dtype)
        if "experts" in name:
            model.set_experts_implementation("eager")  # what there is for accelerators has no kernel on the CPU
        return model

    torch.manual_seed(0)
    plain = built()
    save_safetensors(plain.state_dict(), folder)
    expected = results(dispatch_model(copy.deepcopy(plain), {"": 0}, force_hooks=True))
    assert sim.peak(0) > compute_module_sizes(plain)[""]

    def empty() -> nn.Module:
        with init_empty_weights():
            return built()

    gaps, places = {"plain": gap(results(plain), expected)}, set()
    for way in SPLITS:
        model = way(plain, empty, folder)
        places |= {str(each) for each in model.hf_device_map.values()} if hasattr(model, "hf_device_map") else set()
        gaps[way.__name__] = gap(results(model), expected)
        del model
    return gaps, places


def gap(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max().detach()) for one, other in zip(found, expected, strict=True))


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_outputs_over_devices_are_those_of_the_plain_model(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    arguments = (str(tmp_path), name, dtype)
    ((gaps, places),) = run_in_processes(placed_on_simulated_devices, 1, args=arguments, timeout=120)
    assert gaps.pop("plain") <= (1e-5 if dtype == torch.float32 else 0.05)
    assert gaps == {way.__name__: 0.0 for way in SPLITS}
    assert places == {"0", "1", "cpu", "disk"}


MAPS = {
    "GPT-2, tied": {"": "disk", "transformer.wte": "cpu", "lm_head": "cpu"},
    "Llama": {"": "disk", "model.layers.1": "cpu", "model.rotary_emb": "cpu"},
}


def opened_by_transformers(folder: str) -> dict[str, list[bool]]:
    """Whether what transformers opens through ours in Accelerate's place computes and is saved as the plain model."""
    install("accelerate")
    from transformers import AutoModelForCausalLM

    found = {}
    for name, device_map in MAPS.items():
        torch.manual_seed(0)
        plain, path = ZOO[name]().eval(), f"{folder}/{name}"
        plain.save_pretrained(path)
        opened = AutoModelForCausalLM.from_pretrained(path, device_map=device_map, offload_folder=f"{path}/off")
        opened.save_pretrained(f"{path}/again")
        again = AutoModelForCausalLM.from_pretrained(f"{path}/again")
        expected = results(plain)
        found[name] = [
            any(mapped_range(each) is not None for each in opened.parameters()),
            all(map(torch.equal, results(opened), expected)),
            all(map(torch.equal, results(again.eval()), expected)),
        ]
    return found


def test_transformers_opens_and_saves_models_that_are_partly_on_disk(tmp_path: Path) -> None:
    (found,) = run_in_processes(opened_by_transformers, 1, args=[str(tmp_path)], timeout=120)
    assert found == {name: [True, True, True] for name in MAPS}

"""Which modules a stage holds, what crosses between stages, and which models cannot be split, in one process."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain import ConfigurationError

try:
    from drivetrain.strategies.parallel.pipeline.schedule import SCHEDULES, rank_of_stage, schedule_kind
    from drivetrain.strategies.parallel.pipeline.split import (
        ModelOutline,
        TensorShape,
        choose_splits,
        find_pipelined,
        lay_out,
    )
    from drivetrain.strategies.parallel.pipeline.stage import Call, StageModule
except ConfigurationError as error:
    pytest.skip(str(error), allow_module_level=True)
from tests.conformance.language_model import GPT, LENGTH, WIDTH
from tests.trainer.tasks import Weight

CPU = torch.device("cpu")
TOKENS = torch.arange(2 * LENGTH).reshape(2, LENGTH) % 7
POSITIONS = torch.arange(LENGTH).expand(2, -1)


def outline(module: nn.Module, splits: list[str] | None = None, placed: dict[str, int] | None = None) -> ModelOutline:
    layout = lay_out(module, choose_splits(module, 2) if splits is None else splits, placed)
    return ModelOutline(module, layout, CPU)


def in_stages(module: nn.Module, splits: list[str], *args: Tensor, placed: dict[str, int] | None = None) -> Tensor:
    """Run all stages one after the other, in one process that has all parameters."""
    layout = lay_out(module, splits, placed)
    route = ModelOutline(module, layout, CPU).route(args, {}, module.training)
    handed_over: tuple[Tensor, ...] = ()
    for stage in range(layout.count):
        runs = StageModule(module, layout, stage, CPU, torch.enable_grad)
        handed_over = runs(*handed_over, inputs=(args, {}), call=Call(args, {}, route))
    return handed_over


# what is chosen


def test_blocks_are_spread_evenly_by_their_parameters():
    assert choose_splits(GPT(8), 4) == ("layers.2", "layers.4", "layers.6")
    uneven = nn.Sequential(*(nn.Linear(size, 8) for size in (64, 8, 8, 8, 8, 8)))
    assert choose_splits(uneven, 2) == ("1",)


def test_too_few_blocks_are_refused_with_the_numbers():
    with pytest.raises(ConfigurationError, match="layers has 4 blocks, too few for 8 stages"):
        choose_splits(GPT(), 8)


def test_the_module_to_split_is_the_one_that_holds_most_parameters():
    task = Weight()
    task.model, task.other = GPT(), nn.Linear(2, 2)
    assert find_pipelined(task, None) == "model"
    assert find_pipelined(GPT(8), None) == ""
    task.teacher = GPT()
    with pytest.raises(ConfigurationError, match=r"model, other, teacher. Choose the one to split"):
        find_pipelined(task, None)
    with pytest.raises(ConfigurationError, match="Did you mean 'model'"):
        find_pipelined(task, "modl")


def test_parameters_go_to_the_stage_that_began_last_before_them():
    layout = lay_out(GPT(), ["layers.1", "layers.3"])
    assert layout.owners["positions.weight"] == 0
    assert layout.owners["layers.2.ffn.w1.weight"] == 1
    assert layout.owners["head.weight"] == 2


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (["layers.9"], "not a module of GPT"),
        (["layers"], "Use the first block of the stage instead, such as layers.0"),
        (["layers.3", "layers.1"], "in the order in which they are registered"),
    ],
)
def test_names_that_no_stage_can_begin_with_are_refused(splits, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        lay_out(GPT(), splits)


# stages together compute what the whole model does


class Odd(nn.Module):
    """Parameters of its own, two values through the blocks, a mask and a table that all use, and sums in between."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.tokens = nn.Embedding(7, WIDTH)
        self.register_buffer("table", torch.randn(LENGTH, WIDTH), persistent=False)
        self.dropout = nn.Dropout(0.0)
        self.layers = nn.ModuleList(nn.ModuleDict({"mix": nn.Linear(WIDTH, WIDTH)}) for _ in range(4))
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x += self.start
        x = self.dropout(x) + self.table
        for layer in self.layers:
            x = 2 * x + layer["mix"](x * mask[..., None])
        return self.head(x * self.scale)


class TwoValues(GPT):
    """Hands two values from block to block, one of them by name."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        state = {"x": self.tokens(tokens), "p": self.positions(positions)}
        for layer in self.layers:
            state = self.run(layer, **state)
        return self.head(self.norm(state["x"] + state["p"]))

    def run(self, layer: nn.Module, x: Tensor, p: Tensor) -> dict[str, Tensor]:
        return layer({"x": x, "p": p})


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": self.linear(state["x"]) + state["p"], "p": state["p"] * 2}


def two_values() -> nn.Module:
    model = TwoValues()
    model.layers = nn.ModuleList(Both() for _ in range(4))
    return model


MODELS = {
    "gpt": (GPT, ["layers.1", "layers.3"], (TOKENS, POSITIONS)),
    "head alone": (GPT, ["layers.2", "head"], (TOKENS, POSITIONS)),
    "inside a block": (GPT, ["layers.1.ffn"], (TOKENS, POSITIONS)),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)),
        ["1", "3"],
        (torch.randn(5, 4),),
    ),
    "sequence in a sequence": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 8))),
        ["1.1", "1.2"],
        (torch.randn(5, 4),),
    ),
    "odd": (Odd, ["layers.1.mix", "layers.3.mix"], (TOKENS, torch.ones(2, LENGTH))),
    "two values": (two_values, ["layers.1", "layers.2"], (TOKENS, POSITIONS)),
}


class Skips(GPT):
    """Uses what an early module returned, and what it computes from that, at the end and as an output of its own."""

    def forward(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = self.tokens(tokens)
        doubled = 2 * first + self.positions(positions)
        x = first
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x + doubled)), first, doubled


class Attends(nn.Module):
    """One layer of an encoder or a decoder, which mixes what another part has returned into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + torch.tanh(self.linear(x))
        return x if memory is None else x + self.other(memory)


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(Attends() for _ in range(count)), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x, memory)
        return {"last": self.norm(x)}


class Translates(nn.Module):
    """An encoder and a decoder, each of whose blocks uses what the encoder returned."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, WIDTH)
        self.encoder, self.targets, self.decoder = Blocks(3), nn.Embedding(7, WIDTH), Blocks(4)
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.encoder(self.tokens(tokens))["last"]
        return self.head(self.decoder(self.targets(targets), memory)["last"]), memory


MODELS |= {
    "skips": (Skips, ["layers.1", "layers.3"], (TOKENS, POSITIONS)),
    "decoder": (Translates, ["decoder.blocks.1", "decoder.blocks.2"], (TOKENS, TOKENS)),
    "encoder and decoder": (Translates, ["encoder.blocks.1", "decoder.blocks.0", "head"], (TOKENS, TOKENS)),
}


def gradients(output: Tensor | tuple[Tensor, ...], model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    sum((each * each).sum() for each in ([output] if isinstance(output, Tensor) else output)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "odd"])
def test_stages_compute_what_the_model_does(name):
    make, splits, args = MODELS[name]
    model = make()
    expected, found = model(*args), in_stages(model, splits, *args)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    torch.testing.assert_close(gradients(found, model), gradients(expected, model))


def test_blocks_of_an_encoder_and_a_decoder_are_spread_together_where_the_model_says_that_it_has_both():
    model = Translates()
    assert choose_splits(model, 2) == ("decoder.blocks.2",)
    model.config = SimpleNamespace(is_encoder_decoder=True)
    assert choose_splits(model, 2) == ("decoder.blocks.0",)
    assert choose_splits(model, 4) == ("encoder.blocks.1", "decoder.blocks.0", "decoder.blocks.2")


def test_what_a_module_returned_is_handed_over_once_and_as_far_as_it_is_used():
    splits = ["decoder.blocks.1", "decoder.blocks.2", "head"]
    route = outline(Translates(), splits).route((TOKENS, TOKENS), {}, True)
    assert [len(route.cuts[stage].tensors) for stage in (1, 2, 3)] == [2, 2, 2]  # the state, and the encoder's output
    route = outline(GPT()).route((TOKENS, POSITIONS), {}, True)
    assert route.cuts[1].returned == (None,)


def test_a_value_that_goes_around_the_first_module_of_a_stage_is_refused():
    make, splits, args = MODELS["odd"]
    with pytest.raises(
        ConfigurationError, match=r"uses a value of stage 0 in stage 1 \(by aten\..* computed from start outside"
    ):
        outline(make(), splits).route(args, {}, True)


def test_parameters_of_the_model_itself_and_tables_that_all_use():
    class Residual(Odd):
        def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
            x = self.tokens(tokens)
            x += self.start
            x = self.dropout(x) + self.table
            for layer in self.layers:
                x = layer["mix"](x * mask[..., None]) * self.table
            return self.head(x * self.scale)

    torch.manual_seed(0)
    model = Residual()
    args = (TOKENS, torch.ones(2, LENGTH))
    output = in_stages(model, ["layers.1.mix", "layers.3.mix"], *args, placed={"scale": 2})
    torch.testing.assert_close(output, model(*args), atol=0, rtol=0)


def test_the_model_is_as_before_after_a_stage_has_run():
    model = GPT()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    in_stages(model, ["layers.2"], TOKENS, POSITIONS)
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()


def test_what_is_handed_over_is_known_without_running_the_model():
    route = outline(GPT()).route((TOKENS, POSITIONS), {}, True)
    assert route.cuts[1].tensors == (TensorShape((2, LENGTH, WIDTH), torch.float32),)
    with torch.autocast("cpu", torch.bfloat16):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
        route = outline(model).route((torch.randn(5, 4),), {}, True)
    assert route.cuts[1].tensors == (TensorShape((5, 8), torch.bfloat16),)


# refusals


class Draws(GPT):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens)
        noisy = self.noisy(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x + noisy))

    def noisy(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x)


class AddsNoise(Draws):
    def noisy(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x).abs()


class Shares(Draws):
    """Calls a module itself that one of its blocks calls before."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = {"inner": Calls(self.tokens), **self._modules}

    def noisy(self, x: Tensor) -> Tensor:
        return self.inner(TOKENS) + self.tokens(TOKENS)


class Calls(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others, self.weight = [other], nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight * self.others[0](tokens)


class ChangesInPlace(Draws):
    def noisy(self, x: Tensor) -> Tensor:
        x[..., 0] += 1
        return x


class Backwards(GPT):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(self.norm(x))


class Repeats(GPT):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in (*self.layers, self.layers[2]):
            x = layer(x)
        return self.head(self.norm(x))


class Checkpoints(GPT):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


class LooksAtValues(GPT):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) if x.sum() > 0 else self.head(x)


class TiedByUse(GPT):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.tokens.weight.T


class HeadFirst(GPT):
    def __init__(self) -> None:
        super().__init__()
        self._modules = {"head": self._modules["head"], **self._modules}


REFUSED = [
    (Draws, r"Draws uses a value of stage 0 in stage 1 \(by aten.add\.Tensor\) that was drawn at random"),
    (AddsNoise, r"uses a value of stage 0 in stage 1 \(by aten.add\.Tensor\) that was drawn at random"),
    (Shares, r"that tokens returned, which other modules call too"),
    (ChangesInPlace, r"uses a value of stage 0 in stage 1 .* that was changed in place after a module had returned it"),
    (Backwards, r"Backwards uses layers.3.* in stage 0, but the order .* places it on stage 1"),
    (
        Repeats,
        r"first modules of its stages once each and in the order \['layers.2'\], but it called layers.2 in stage 1",
    ),
    (Checkpoints, r"layers.2, the first module of a stage, through torch.utils.checkpoint"),
    (LooksAtValues, r"cannot run on shapes alone.* must not depend on the values"),
    (TiedByUse, r"uses tokens.weight in stage 1, but the order .* places it on stage 0"),
    (HeadFirst, r"uses head.weight in stage 1, .* pp_place=\{'head.weight': 1\}"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_be_split_is_refused_by_name(make, message):
    with pytest.raises(ConfigurationError, match=re.compile(message, re.DOTALL)):
        outline(make()).route((TOKENS, POSITIONS), {}, True)


def test_modules_can_be_placed_by_hand():
    route = outline(HeadFirst(), placed={"head": -1}).route((TOKENS, POSITIONS), {}, True)
    assert set(route.cuts) == {1}
    with pytest.raises(ConfigurationError, match=r"Did you mean 'head.weight'"):
        outline(HeadFirst(), placed={"head.wight": -1})


def test_weights_that_two_stages_share_are_refused_by_name():
    model = GPT()
    model.head.weight = model.tokens.weight
    with pytest.raises(
        ConfigurationError, match=r"tokens.weight and head.weight are one parameter, but stages 0 and 1"
    ):
        lay_out(model, choose_splits(model, 2))


# schedules


@pytest.mark.parametrize("name", ["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble", "looped-bfs"])
def test_schedules_go_by_torchs_names_too(name):
    assert schedule_kind(name, None)[0] in SCHEDULES.values()


def test_schedules_that_do_not_exist_or_cannot_run_so_many_stages_are_refused():
    with pytest.raises(ConfigurationError, match=r"Unknown pp_schedule '1f1c'.*Did you mean '1f1b'"):
        schedule_kind("1f1c", None)
    with pytest.raises(
        ConfigurationError, match=r"'1f1b' supports 1 stage\(s\) on each process, got pp_stages_per_rank=2"
    ):
        schedule_kind("1f1b", 2)
    with pytest.raises(ConfigurationError, match=r"'zbv_zero_bubble' supports 2 stage\(s\)"):
        schedule_kind("zbv_zero_bubble", 3)


def test_stages_go_round_or_fold_back():
    around, folded = SCHEDULES["interleaved_1f1b"], SCHEDULES["zbv_zero_bubble"]
    assert [rank_of_stage(around, stage, 2) for stage in range(4)] == [0, 1, 0, 1]
    assert [rank_of_stage(folded, stage, 3) for stage in range(6)] == [0, 1, 2, 2, 1, 0]

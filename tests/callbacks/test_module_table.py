"""The rows of a summary: parameters, modes, operations and sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import ConfigurationError, ModelSummary, RichModelSummary, Task, Trainer
from drivetrain.callbacks.model_summary import ModuleTable
from tests.pool import device
from tests.trainer.tasks import Weight, ones


class Branches(Task):
    """Two inputs, three layers, one of them never used, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(10, 2)
        self.join = nn.Sequential(nn.Linear(7, 9), nn.Dropout(0.5))
        self.first = nn.Linear(3, 5, dtype=torch.float32)
        self.unused = nn.Conv2d(1, 1, 1)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.example_input_array = torch.rand(2, 3), torch.rand(2, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        assert not self.training
        assert not self.join.training
        return self.join(torch.cat([self.first(x), self.second(y)], 1))


def test_each_module_has_its_sizes_and_operations() -> None:
    model = Branches()
    model.first.eval()
    table = ModuleTable(model, max_depth=-1)
    rows = {layer.name: layer for layer in table.layers}
    assert {name: (layer.in_size, layer.out_size) for name, layer in rows.items()} == {
        "second": ([2, 10], [2, 2]),
        "join": ([2, 7], [2, 9]),
        "join.0": ([2, 7], [2, 9]),
        "join.1": ([2, 9], [2, 9]),
        "first": ([2, 3], [2, 5]),
        "unused": ("?", "?"),
    }
    flops = {name: layer.flops for name, layer in rows.items()}
    # Two rows, and an addition and a multiplication for each weight.
    assert flops == {"second": 80, "join": 252, "join.0": 252, "join.1": 0, "first": 60, "unused": 0}
    assert table.total_flops == 80 + 252 + 60
    assert [layer.mode for layer in table.layers] == ["train"] * 4 + ["eval", "train"]
    assert table.modes == {"train": 5, "eval": 1}
    assert (model.training, model.join.training, model.first.training) == (True, True, False)
    elements = 22 + 72 + 20 + 2
    assert table.parameters == (elements + 4, elements + 4)
    assert table.other_parameters == 4
    assert table.megabytes == (elements * 4 + 4 * 8) / 1e6
    assert not any(module._forward_hooks for module in model.modules())


def test_a_forward_of_the_summary_draws_nothing() -> None:
    class Drawing(Branches):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return super().forward(x + torch.randn_like(x), y)

    model = Drawing()
    before = torch.get_rng_state()
    assert ModuleTable(model).layers
    assert torch.equal(torch.get_rng_state(), before)


def test_an_example_that_the_model_cannot_run_leaves_out_the_sizes(caplog: pytest.LogCaptureFixture) -> None:
    model = Branches()
    model.example_input_array = torch.rand(2, 4), torch.rand(2, 10)
    titles = [title for title, _ in ModuleTable(model).columns()]
    assert "In sizes" not in titles
    assert "failed on its example_input_array" in caplog.text
    assert model.training


@pytest.mark.parametrize("depth", [-2, "2", None])
def test_a_depth_that_cannot_be_is_refused(depth: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"ModelSummary\(max_depth="):
        ModelSummary(max_depth=depth)


class Sized(Weight):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, bias=False)
        self.example_input_array = torch.rand(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


def fit(tmp_path: Path, summary: ModelSummary) -> None:
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_steps=1, accelerator=device(), callbacks=[summary], default_root_dir=tmp_path, **options)
    trainer.fit(Sized(), ones(1))


def test_a_scripted_module_has_its_parameters_and_no_sizes() -> None:
    class Scripted(Task):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.jit.script(nn.Linear(3, 2))
            self.example_input_array = torch.rand(2, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x)

    [row] = ModuleTable(Scripted(), max_depth=1).layers
    assert (row.kind, row.parameters, row.in_size) == ("RecursiveScriptModule", 8, "?")


def test_fit_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, ModelSummary())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "name"
    assert lines[0].split() == ["name", "type", "params", "mode", "flops", "in", "sizes", "out", "sizes"]
    assert lines[2].split() == ["layer", "Linear", "6", "train", "48", "[4,", "3]", "[4,", "2]"]
    assert lines[3].split() == ["other", "params", "n/a", "1", "n/a", "0", "n/a", "n/a"]
    assert lines[5] == "7 parameters (0.000 MB), 7 of them trainable, 48 floating-point operations in a forward"


def test_rich_shows_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich", reason='rich is missing: pip install "drivetrain[rich]"')
    fit(tmp_path, RichModelSummary())
    text = capsys.readouterr().out
    assert "[4, 3]" in text
    assert "48 floating-point operations in a forward" in " ".join(text.split())


def test_a_class_may_show_the_summary_in_another_way(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Kept(ModelSummary):
        @staticmethod
        def summarize(summary_data: Any, *totals: Any, **options: Any) -> None:
            seen.update(columns=dict(summary_data), totals=totals, options=options)

    fit(tmp_path, Kept(max_depth=1, title="mine"))
    assert list(seen["columns"]) == [" ", "Name", "Type", "Params", "Mode", "FLOPs", "In sizes", "Out sizes"]
    assert seen["totals"] == (7, 7, 2.8e-05, {"train": 1, "eval": 0})
    assert seen["options"] == {"total_flops": 48, "title": "mine"}

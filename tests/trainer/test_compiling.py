"""`Trainer(compile=)`: the same numbers and names, no break for what is logged, and a line about what was compiled."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, ConfigurationError, Task
from drivetrain.trainer.compiling import CACHE, compile_plugin, describe
from tests.pool import run_in_processes
from tests.trainer.tasks import quiet


class Block(nn.Module):
    """A block with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.inner(x)
        return result


class Blocks(Task):
    """Four equal blocks and a head; every step logs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"double": 2 * loss, "index": float(batch_idx)})
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(rows: int = 16, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(rows, 4, generator=torch.Generator().manual_seed(2))), batch_size)


def weights_after(compiled: Any, batch_size: int = 4, root: str | None = None, **options: Any) -> dict[str, Tensor]:
    """The weights after an epoch of two."""
    trainer = quiet(compile=compiled, default_root_dir=root, **options)
    trainer.fit(Blocks(), data(batch_size=batch_size), data(batch_size=batch_size))
    state: dict[str, Tensor] = trainer.accelerator.get_state_dict(trainer.model)
    return state


def counted_run(compiled: Any, rows: int = 16) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """What torch's compiler counted in a run: graphs, breaks; and the names in a checkpoint's state."""
    from torch._dynamo import utils

    trainer = quiet(compile=compiled)
    task = Blocks()
    trainer.fit(task, data(rows), data())
    return dict(utils.counters["stats"]), dict(utils.counters["graph_break"]), list(task.state_dict())


@pytest.mark.slow  # imports torch's compiler
def test_nothing_that_is_logged_breaks_a_graph_and_no_name_changes() -> None:
    ((stats, breaks, names),) = run_in_processes(counted_run, 1, args=({"backend": "eager", "blocks": True},))
    assert stats["unique_graphs"] > 0
    assert breaks == {}
    assert names == list(Blocks().state_dict())


class Widths(Blocks):
    """More kinds of torch's own modules than torch compiles versions of one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width + 1) for width in range(4, 16))
        self.head = nn.Sequential(nn.Linear(16, 1))


def versions(task: type[Blocks]) -> tuple[int, list[str]]:
    """How many graphs a run compiled, and why those that were compiled again."""
    from torch._dynamo import utils

    quiet(compile={"backend": "eager"}).fit(task(), data())
    records = utils.get_compilation_metrics()
    return len(records), [each.recompile_reason for each in records if each.recompile_reason]


@pytest.mark.slow  # imports torch's compiler
def test_modules_of_different_kinds_are_no_versions_of_each_other() -> None:
    ((graphs, again),) = run_in_processes(versions, 1, args=(Widths,))
    assert (graphs, again) == (13, [])


@pytest.mark.slow  # imports torch's compiler
def test_a_run_that_is_compiled_trains_as_one_that_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    alone = weights_after(None)
    (state,) = run_in_processes(weights_after, 1, args=({"backend": "aot_eager"},))
    assert "Compiled " in capfd.readouterr().out
    for strategy in ("ddp", "fsdp"):
        for shards in run_in_processes(
            weights_after, args=({"backend": "aot_eager", "blocks": True}, 2), kwargs={"strategy": strategy}
        ):
            state = shards or state
            assert state.keys() == alone.keys()
            for name, tensor in state.items():
                torch.testing.assert_close(tensor, alone[name], rtol=0, atol=1e-6)


def record(reason: str | None = None, is_forward: bool = True) -> Any:
    return SimpleNamespace(is_forward=is_forward, recompile_reason=reason, duration_us=500_000)


def test_what_was_compiled_again_is_said_in_words() -> None:
    again = "0/0: tensor 'x' size mismatch at index 0. expected 4, actual 2"
    records = [record(), record(again), record("GLOBAL_STATE changed: grad_mode ")]
    assert describe(records, {}) == (
        "Compiled 3 graphs in 1.5 s, 2 of them again: dimension 0 of x was 4, then 2; it ran with gradients and "
        "without."
    )
    assert describe(records[:1], {}) == "Compiled 1 graph in 0.5 s."
    assert describe(records[:1], Counter({"call to\n  print": 2})) == (
        "Compiled 1 graph in 0.5 s. 2 graph breaks, the most for: call to print."
    )
    assert describe([record(), record(is_forward=False)], {}) == "Compiled 1 graph in 1.0 s."
    assert describe([], {}) == ""


REFUSED: list[tuple[Any, str]] = [
    ("block", "compile='block'.* is not valid.*Did you mean 'blocks'"),
    ({"backnd": "eager"}, "unknown key 'backnd'.*Did you mean 'backend'"),
    (3, "compile=3.* is not valid. Use True"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=str)
def test_what_cannot_be_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        compile_plugin(given)


def test_an_accelerator_that_is_given_compiles_as_it_was_asked_to() -> None:
    with pytest.raises(ConfigurationError, match="so compile cannot be passed to the Trainer"):
        quiet(accelerator=Accelerator(cpu=True), compile=True)


def graphs_from_the_cache(root: str) -> tuple[int, int]:
    """How many compiled graphs were found in the run's folder, and how many were not."""
    from torch._dynamo import utils

    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    weights_after("blocks", root=root)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ or root not in os.environ["TORCHINDUCTOR_CACHE_DIR"]
    found = utils.counters["aot_autograd"]
    return found["autograd_cache_hit"], found["autograd_cache_miss"]


@pytest.mark.slow  # compiles with inductor
def test_a_second_run_in_the_same_folder_starts_with_what_the_first_has_compiled(tmp_path: Path) -> None:
    ((hits, misses),) = run_in_processes(graphs_from_the_cache, 1, args=(str(tmp_path),), timeout=300)
    assert (hits, misses > 0) == (0, True)
    assert any((tmp_path / CACHE).iterdir())
    ((hits, misses),) = run_in_processes(graphs_from_the_cache, 1, args=(str(tmp_path),), timeout=300)
    assert (hits > 0, misses) == (True, 0)

"""A run that one strategy saved continues under any other as if nothing had happened, optimizer and all."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Callback, Trainer
from drivetrain.checkpoint import describe_run_state
from tests.conformance import language_model, test_megatron
from tests.conformance.harness import MAX_NORM
from tests.conformance.language_model import LanguageTask, Run
from tests.conformance.strategies import LANGUAGE, LAYERS, ROWS, Row
from tests.pool import ROOT, device, run_in_processes
from tests.strategies.megatron import cpu_shim, models
from tests.strategies.quiet import quiet_trainer

RUN = Run(accumulate=2, layers=2)
SAVED_AFTER, STEPS = 2, 4
Parameters = dict[str, torch.Tensor]


class SaveOnce(Callback):
    def __init__(self, directory: str) -> None:
        self.directory = directory

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == SAVED_AFTER and (batch_idx + 1) % RUN.accumulate == 0:
            trainer.save_checkpoint(self.directory)


def train(
    name: str, resume: str | None = None, save_to: str | None = None, initial: Parameters | None = None
) -> Parameters:
    """Train to the end from a checkpoint, or up to where one is saved; the weights, on rank 0."""
    torch.set_num_threads(1)
    row = ROWS[name]
    options: dict[str, Any] = {"max_steps": SAVED_AFTER, "callbacks": [SaveOnce(save_to)]} if save_to else {}
    trainer = FAMILIES[row.family].train(row, resume, initial, options)
    assert trainer.global_step == (SAVED_AFTER if save_to else STEPS)
    return trainer.strategy.state.model(trainer.model, full=True)


def train_language(row: Row, resume: str | None, initial: Parameters | None, options: dict[str, Any]) -> Trainer:
    common = {"accelerator": row.device, "accumulate_grad_batches": RUN.accumulate, "gradient_clip_val": MAX_NORM}
    trainer = quiet_trainer(row.make(), **common, **options)
    rows = RUN.rows(trainer.strategy.topology.data_shard.count)
    trainer.fit(LanguageTask(layers=RUN.layers), DataLoader(RUN.data(), batch_size=rows), resume=resume)
    return trainer


def train_layers(row: Row, resume: str | None, initial: Parameters | None, options: dict[str, Any]) -> Trainer:
    cpu_shim.install()
    strategy = row.make()
    makes_task = models.GPT if getattr(strategy, "name", strategy) == "megatron" else models.WholeGPT
    task = makes_task(models.two_groups, tied=True, **test_megatron.REFERENCES["tied"]["config"])
    trainer = models.fit(strategy, task, initial=initial, evaluate=False, resume=resume, **options).trainer
    assert trainer is not None
    return trainer


def plain_language() -> tuple[Parameters, None]:
    """What one plain process has in the end; nothing has to be given to the others to begin with the same."""
    whole = language_model.train_plain(RUN).parameters
    return {f"model.{name}": value for name, value in whole.items()}, None


def plain_layers() -> tuple[Parameters, Parameters]:
    """What one plain process has in the end, and with which weights all begin."""
    cpu_shim.install()
    torch.set_num_threads(1)
    outcome, initial = test_megatron.train_plain("tied", models.two_groups)
    return outcome.parameters, initial


class Family(NamedTuple):
    """Runs of one model.

    Attributes:
        train: Trains it under a row's strategy.
        plain: Trains it in one plain process.
    """

    train: Callable[[Row, str | None, Parameters | None, dict[str, Any]], Trainer]
    plain: Callable[[], tuple[Parameters, Parameters | None]]


FAMILIES = {LANGUAGE: Family(train_language, plain_language), LAYERS: Family(train_layers, plain_layers)}


def resume_each(name: str, directories: list[str]) -> list[Parameters]:
    return [train(name, resume=directory) for directory in directories]


class Saved:
    """What the strategies have saved, each once for all readers, and what a plain process has in the end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._plain: dict[str, tuple[Parameters, Parameters | None]] = {}

    def plain(self, family: str) -> tuple[Parameters, Parameters | None]:
        if family not in self._plain:
            self._plain[family] = run_in_processes(FAMILIES[family].plain, 1, timeout=120)[0]
        return self._plain[family]

    def by(self, writer: str) -> str:
        row, directory = ROWS[writer], self.root / writer
        if not directory.exists():
            given = {"save_to": str(directory), "initial": self.plain(row.family)[1]}
            run_in_processes(train, row.processes, args=(writer,), kwargs=given, timeout=200, env=row.env)
        return str(directory)

    def check(self, writers: list[str], reader: str) -> None:
        """Raise where what a reader makes of a checkpoint differs from a plain process that was never interrupted."""
        row = ROWS[reader]
        directories = [self.by(writer) for writer in writers]
        expected = self.plain(row.family)[0]
        found = run_in_processes(resume_each, row.processes, args=(reader, directories), timeout=600, env=row.env)[0]
        for writer, parameters in zip(writers, found, strict=True):
            assert parameters.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(
                    parameters[name],
                    value,
                    atol=5e-6,
                    rtol=5e-6,
                    msg=lambda m, w=writer, n=name: f"{w} to {reader}, {n}: {m}",
                )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("any_to_any"))


def lane_of(name: str) -> str:
    """Over four processes everything is slow."""
    return "slow" if ROWS[name].processes > 2 else ROWS[name].lane


def rows_of(lane: str) -> tuple[str, ...]:
    return tuple(name for name, row in ROWS.items() if row.moves and lane_of(name) == lane)


LANES = ("sharded", "slow", "xla", "megatron")
# Beside the rows of a lane, others that its environment can run: every pair with one of the lane's own is tried.
BESIDE = {"slow": rows_of("sharded"), "xla": ("single", "fsdp")}


def writers_of(reader: str, lane: str) -> list[str]:
    """Whose checkpoints a reader opens in a lane."""
    own = rows_of(lane)
    writers = [*BESIDE.get(lane, ()), *own] if reader in own else [*own]
    return [name for name in writers if device() == "cpu" or not ROWS[name].on_cpu]


def readers(lane: str) -> list[Any]:
    found = []
    for name in [*BESIDE.get(lane, ()), *rows_of(lane)]:
        marks = [getattr(pytest.mark, lane), *([pytest.mark.cpu(ROWS[name].on_cpu)] if ROWS[name].on_cpu else [])]
        found.append(pytest.param(name, lane, marks=marks, id=name if lane == "sharded" else f"{name}, {lane}"))
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("reader", "lane"), [*readers("sharded"), *readers("megatron"), *readers("xla")])
def test_continues_under_another_strategy(reader: str, lane: str, saved: Saved) -> None:
    saved.check(writers_of(reader, lane), reader)


def layout_of(entry: Any) -> Any:
    """What a checkpoint holds where, without its values; extra state of layers is None but for TransformerEngine's."""
    if isinstance(entry, torch.Tensor):
        return tuple(entry.shape), entry.dtype
    if isinstance(entry, dict):
        return {key: layout_of(value) for key, value in entry.items() if not str(key).endswith("._extra_state")}
    return [layout_of(value) for value in entry] if isinstance(entry, list | tuple) else type(entry).__name__


def differences(found: Any, expected: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """By their places, what two layouts hold otherwise."""
    if isinstance(found, list) and isinstance(expected, list):
        found, expected = (dict(enumerate(entries)) for entries in (found, expected))
    if not (isinstance(found, dict) and isinstance(expected, dict)):
        return {} if found == expected else {path: (found, expected)}
    gaps: dict[str, tuple[Any, Any]] = {}
    for key in {*found, *expected}:
        gaps |= differences(found.get(key), expected.get(key), f"{path}/{key}")
    return gaps


@pytest.mark.megatron
@pytest.mark.timeout(900)
def test_megatron_writes_what_one_plain_process_writes_for_the_same_layers(saved: Saved) -> None:
    """So what reads the one, as XLA devices do in another environment, reads the other."""
    expected = layout_of(describe_run_state(saved.by("single-its-layers"))["engine"])
    assert expected["models"][0]
    for writer in ("megatron", "megatron-data", "megatron-tp", "megatron-pp"):
        found = layout_of(describe_run_state(saved.by(writer))["engine"])
        for part in ("models", "optimizers", "schedulers", "loaders"):
            assert differences(found[part], expected[part]) == {}, writer


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("reader", "lane"), readers("slow"))
def test_continues_over_four_processes_and_back(reader: str, lane: str, saved: Saved) -> None:
    saved.check(writers_of(reader, lane), reader)


def test_the_page_names_who_is_tried_with_whom() -> None:
    block = (ROOT / "docs" / "checkpoints.md").read_text().split("<!-- any to any")[1].split("<!-- end -->")[0]
    lines = [line.split("|")[2] for line in block.splitlines() if line.startswith("| ") and "`" in line]
    assert len(lines) == len(LANES)
    for lane, line in zip(LANES, lines, strict=True):
        own, _, beside = line.partition("and with")
        assert tuple(re.findall(r"`([\w-]+)`", own)) == rows_of(lane)
        assert lane == "slow" or tuple(re.findall(r"`([\w-]+)`", beside)) == BESIDE.get(lane, ())

"""A raw loop written for Fabric."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import ConfigurationError
from drivetrain.compat.lightning import Fabric
from drivetrain.compat.lightning.fabric import is_wrapped
from drivetrain.compat.lightning.fabric.utilities.seed import pl_worker_init_function, reset_seed, seed_everything
from drivetrain.compat.lightning.fabric.utilities.throughput import Throughput
from drivetrain.compat.lightning.fabric.wrappers import FabricModule
from drivetrain.compat.lightning.pytorch.demos.boring_classes import BoringModel
from drivetrain.compat.lightning.pytorch.loggers import CSVLogger


def trained(fabric: Any, path: Path) -> nn.Module:
    """Train two epochs, and save in between."""
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(8.0)[:, None] / 8), batch_size=2))
    assert is_wrapped(model)
    assert is_wrapped(optimizer)
    for epoch in range(2):
        for (batch,) in loader:
            optimizer.zero_grad()
            loss = (model(batch) - 2 * batch).square().mean()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
        fabric.log("loss", loss, step=epoch)
        if epoch == 0:
            fabric.save(path, {"model": model, "optimizer": optimizer, "epoch": epoch})
    return model


def plain() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for batch in (torch.arange(8.0)[:, None] / 8).split(2):
            optimizer.zero_grad()
            (model(batch) - 2 * batch).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return model


def test_a_loop_computes_what_plain_torch_does_and_its_state_is_loaded_again(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fabric = Fabric(accelerator="cpu", loggers=logger)
    assert fabric.launch(lambda fabric, factor: fabric.world_size * factor, 3) == 3
    model = trained(fabric, tmp_path / "saved.ckpt")
    torch.testing.assert_close(dict(model.state_dict()), dict(plain().state_dict()))

    again = nn.Linear(1, 1)
    again, optimizer = fabric.setup(again, torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9))
    state = {"model": again, "optimizer": optimizer, "epoch": -1}
    assert fabric.load(tmp_path / "saved.ckpt", state) == {}
    assert state["epoch"] == 0
    assert optimizer.state_dict()["state"]
    with pytest.raises(KeyError, match="has no 'scheduler'"):
        fabric.load(tmp_path / "saved.ckpt", {"scheduler": 1})
    logger.finalize()
    assert "loss" in (Path(logger.log_dir) / "metrics.csv").read_text()


def test_optimizer_state_from_a_file_is_laid_out_as_its_parameters_are(tmp_path: Path) -> None:
    def stepped(parameter: nn.Parameter, optimizer: Any, value: float) -> None:
        parameter.grad = (torch.arange(6.0).view(2, 3) * value).t()
        optimizer.step()

    def made() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        parameter = nn.Parameter(torch.zeros(2, 3).t())
        return parameter, torch.optim.AdamW([parameter], lr=0.1, fused=True)

    fabric = Fabric(accelerator="cpu")
    whole, optimizer = made()
    stepped(whole, optimizer, 1.0)
    state = optimizer.state_dict()
    contiguous = {key: value.contiguous() for key, value in state["state"][0].items()}
    torch.save({"optimizer": {**state, "state": {0: contiguous}}}, tmp_path / "saved.ckpt")
    again, resumed = made()
    again.data.copy_(whole.detach())
    resumed = fabric.setup_optimizers(resumed)
    fabric.load(tmp_path / "saved.ckpt", {"optimizer": resumed})
    for one in ((whole, optimizer), (again, resumed)):
        stepped(*one, -3.0)
    assert torch.equal(whole, again)


def test_collectives_of_one_process_and_callbacks() -> None:
    class Counts:
        calls = 0

        def on_step(self, by: int) -> None:
            self.calls += by

    counts = Counts()
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[counts, object()])
    value = torch.tensor([2.0])
    assert torch.equal(fabric.all_gather(value), value)
    assert torch.equal(fabric.all_reduce(value), value)
    assert fabric.broadcast({"a": 1}) == {"a": 1}
    fabric.call("on_step", by=2)
    assert counts.calls == 2
    assert fabric.is_global_zero
    with pytest.raises(ConfigurationError, match="takes one of clip_val and max_norm"):
        fabric.clip_gradients(nn.Linear(1, 1), None)


class Doubled(nn.Module):
    """What a strategy might put around a module: it doubles what the module returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, *args: Any) -> Any:
        return self.inner(*args) * 2


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factor

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) + 1

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def name(self) -> str:
        return "scale"


def test_a_module_shows_its_own_attributes_and_runs_its_steps_through_the_wrapper() -> None:
    own = Scale().requires_grad_(False)
    nn.init.ones_(own.layer.weight)
    module, one = FabricModule(Doubled(own), None, own), torch.ones(1)
    assert (float(module(one)), float(module.training_step(one)), module.name()) == (2.0, 4.0, "scale")
    module.factor, module.added = 3.0, nn.Linear(1, 1)
    assert (own.factor, "added" in dict(own.named_children())) == (3.0, True)
    assert module.module is own
    assert set(module.state_dict()) == {"layer.weight", "added.weight", "added.bias"}
    assert "forward" not in vars(own)
    with pytest.raises(RuntimeError, match=r"the method `Scale.generate\(\)`.*mark_forward_method\('generate'\)"):
        module.generate(one)
    module.mark_forward_method(own.generate)
    assert float(module.generate(one)) == 2.0
    for given, kind in (("forward", ValueError), ("factor", AttributeError), (len, TypeError)):
        with pytest.raises(kind):
            module.mark_forward_method(given)  # type: ignore[arg-type]


class Records:
    def __init__(self) -> None:
        self.called: list[Any] = []

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        self.called.append(("setup", type(module).__name__))

    def on_after_optimizer_step(self, optimizer: Any) -> None:
        self.called.append(("step", type(optimizer).__name__))

    def on_epoch(self, epoch: int) -> None:
        self.called.append(("epoch", epoch))


class Written:
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((metrics, step))


def test_a_lightning_module_finds_fabric_where_it_would_find_a_trainer() -> None:
    records, written = Records(), Written()
    fabric = Fabric(accelerator="cpu", callbacks=records, loggers=written)
    own = BoringModel()
    model, optimizer = fabric.setup(own, torch.optim.SGD(own.parameters(), lr=0.1))
    assert (model.fabric is fabric, model.optimizers() is optimizer, model.trainer.global_rank) == (True, True, 0)
    for batch in fabric.setup_dataloaders(own.train_dataloader()):
        model.log("loss", 1)
        model.backward(model.training_step(batch, 0)["loss"])
        before = own.layer.weight.clone()
        model.clip_gradients(optimizer, 1e-3, "value")
        optimizer.step()
        break
    assert float((own.layer.weight - before).abs().max().detach()) == pytest.approx(1e-4, abs=1e-7)
    fabric.call("on_epoch", epoch=2, loss=0.5)
    assert records.called == [("setup", "FabricModule"), ("step", "SGD"), ("epoch", 2)]
    assert written.rows == [({"loss": 1}, None)]
    with pytest.raises(AttributeError, match=r"self.trainer.current_epoch"):
        _ = model.trainer.current_epoch
    for values, words in (
        ({"a": [1]}, "`list` values"),
        ({"a": {"b": 1}}, "nested dict"),
        ({"a": torch.ones(2)}, "single"),
    ):
        with pytest.raises(ValueError, match=words):
            model.log_dict(values)
    assert copy.deepcopy(own).optimizers() is optimizer
    assert pickle.loads(pickle.dumps(own)).fabric is None


REFUSED: list[tuple[Callable[[Any, Any, Any, Any], Any], type[Exception], str]] = [
    (lambda f, m, o, d: f.setup(m), ValueError, "A model should be passed only once"),
    (lambda f, m, o, d: f.setup(nn.Linear(1, 1), o), ValueError, "An optimizer should be passed only once"),
    (lambda f, m, o, d: f.setup_dataloaders(d), ValueError, "A dataloader should be passed only once"),
    (lambda f, m, o, d: f.setup_dataloaders(), ValueError, "at least one dataloader"),
    (lambda f, m, o, d: f.setup_dataloaders(range(2)), TypeError, "Only PyTorch DataLoader"),
    (lambda f, m, o, d: f.no_backward_sync(nn.Linear(1, 1)), TypeError, "set up the model first"),
    (lambda f, m, o, d: f.launch(lambda: None), TypeError, "at least one argument"),
    (lambda f, m, o, d: f.launch(3), TypeError, "needs to be a callable"),
    (lambda f, m, o, d: f.save("x", {"a": {}}, filter="a"), TypeError, "should be a dict"),
    (lambda f, m, o, d: f.save("x", {"a": {}}, filter={"a": 1}), TypeError, "should be a callable"),
    (lambda f, m, o, d: f.save("x", {"a": {}}, filter={"b": bool}), ValueError, "not present in the state"),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED, ids=[case[2] for case in REFUSED])
def test_what_cannot_be_set_up_is_refused(call: Any, kind: type[Exception], words: str) -> None:
    fabric = Fabric(accelerator="cpu")
    own = nn.Linear(1, 1)
    model, optimizer = fabric.setup(own, torch.optim.SGD(own.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(2, 1))))
    with pytest.raises(kind, match=words):
        call(fabric, model, optimizer, loader)


def ranks(fabric: Any, add: int) -> tuple[int, int]:
    return fabric.world_size, int(fabric.all_reduce(torch.tensor(float(fabric.global_rank)), reduce_op="sum")) + add


@pytest.mark.slow
def test_processes_are_started_for_a_function() -> None:
    fabric = Fabric(accelerator="cpu", strategy="ddp_spawn", devices=2)
    assert fabric.launch(ranks, 3) == (2, 4)
    with pytest.raises(TypeError, match=r"`launch\(\)` needs to be called with a function"):
        fabric.launch()


def test_throughput_is_computed_over_a_window() -> None:
    throughput = Throughput(available_flops=50, window_size=2, using_sparse_model=False)
    throughput.update(time=1, batches=1, samples=2, lengths=4, flops=10)
    assert throughput.compute() == {"time": 1, "batches": 1, "samples": 2, "lengths": 4}
    throughput.update(time=3, batches=2, samples=6, lengths=24, flops=10)
    rates = {"batches_per_sec": 0.5, "samples_per_sec": 2.0, "items_per_sec": 10.0, "flops_per_sec": 5.0, "mfu": 0.1}
    assert throughput.compute().items() >= {f"device/{name}": rate for name, rate in rates.items()}.items()
    for values in ({"time": 3}, {"samples": 1}, {"lengths": 5}):
        with pytest.raises(ValueError, match="Expected"):
            throughput.update(**{"time": 4, "batches": 3, "samples": 8, "lengths": 30, **values})


def test_seeds_are_set_again_and_differ_between_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.warns(UserWarning, match="No seed found"):
        assert seed_everything() == 0
    Fabric.seed_everything(7, verbose=False)
    first = torch.rand(1)
    reset_seed()
    assert torch.equal(torch.rand(1), first)
    drawn = set()
    for worker in range(3):
        seed_everything(7, verbose=False)
        pl_worker_init_function(worker, rank=1)
        drawn.add((float(torch.rand(1)), random.random()))
    assert len(drawn) == 3

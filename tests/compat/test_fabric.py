"""A raw loop written for Fabric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.compat.lightning import Fabric
from drivetrain.compat.lightning.fabric import is_wrapped
from drivetrain.compat.lightning.pytorch.loggers import CSVLogger
from drivetrain.runtime.errors import ConfigurationError


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

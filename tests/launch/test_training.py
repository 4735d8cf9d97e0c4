"""Scripts that `drivetrain launch` starts train on the devices of their session, whatever their number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launching import launch, on_device, write_script
from tests.pool import device

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
    import json
    import pathlib
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from drivetrain import Accelerator, Task, Trainer

    class Line(Task):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    def rows(processes):
        generator = torch.Generator().manual_seed(1)
        return DataLoader(TensorDataset(torch.randn(16, 4, generator=generator)), batch_size=8 // processes)

    quiet = dict(logger=False, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False)
    task, trainer = Line(), Trainer(max_epochs=3, **quiet)
    trainer.fit(task, rows(trainer.world_size))

    accelerator, raw = Accelerator(), Line()
    data, model, optimizer = accelerator.prepare(rows(accelerator.num_processes), raw.layer, raw.configure_optimizers())
    for _ in range(3):
        for (x,) in data:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    facts = {
        "device": str(accelerator.device),
        "processes": accelerator.num_processes,
        "weights": [each.layer.weight.flatten().tolist() for each in (task, raw)],
    }
    pathlib.Path(f"rank{accelerator.process_index}.json").write_text(json.dumps(facts))
"""


def train(folder: Path, processes: int) -> list[dict[str, Any]]:
    folder.mkdir()
    write_script(folder, SCRIPT)
    ended = launch("--num_processes", processes, *on_device("script.py"), cwd=folder)
    assert ended.code == 0, ended.err
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.parametrize("processes", [2, 4])
def test_both_drivers_train_as_one_process_does(tmp_path: Path, processes: int) -> None:
    alone, ranks = train(tmp_path / "alone", 1)[0], train(tmp_path / "together", processes)
    for rank, facts in enumerate(ranks):
        assert facts["device"] == ("cpu" if device() == "cpu" else f"{device()}:{rank}")
        assert facts["processes"] == processes
        for found in facts["weights"]:
            assert found == pytest.approx(alone["weights"][0], abs=1e-6)

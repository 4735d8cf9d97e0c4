"""A run that Accelerate began is continued here, step for step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.compat

SCRIPT = """
import json, sys
import torch
from drivetrain import Accelerator, DataLoaderConfiguration, set_seed

class Counter:
    n = 3
    def state_dict(self):
        return {"n": self.n}
    def load_state_dict(self, state):
        self.n = state["n"]

folder, load = sys.argv[1], len(sys.argv) > 2
set_seed(1)
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
loader = torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=2, shuffle=True)
model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
counter = Counter()
accelerator.register_for_checkpointing(counter)

def epoch():
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses

if load:
    counter.n = 0
    accelerator.load_state(folder)
    assert counter.n == 3
    loader.set_epoch(1)
else:
    epoch()
    accelerator.save_state(folder, safe_serialization=SAFE)
print("LOSSES" + json.dumps(epoch()))
"""


def losses(package: str, safe: bool, *arguments: str) -> Any:
    source = SCRIPT.replace("SAFE", str(safe)).replace("from drivetrain import", f"from {package} import")
    if package == "accelerate":
        source = source.replace("import Accelerator, DataLoaderConfiguration, set_seed", "import Accelerator")
        source = f"from accelerate.utils import DataLoaderConfiguration, set_seed\n{source}"
    done = subprocess.run([sys.executable, "-c", source, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.split("LOSSES")[1])


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "torch"])
def test_a_run_of_accelerate_is_continued_exactly(tmp_path: Path, safe: bool) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is missing: it is in the environment of make test-compat")
    expected = losses("accelerate", safe, str(tmp_path / "state"))
    assert losses("drivetrain", safe, str(tmp_path / "state"), "load") == expected

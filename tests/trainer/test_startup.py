"""What `from drivetrain import Accelerator, Trainer` imports: what takes long comes when it is used."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = {
    "matplotlib",
    "psutil",
    "pandas",
    "sklearn",
    "sympy",
    "tensorboard",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torchao",
    "torchmetrics",
    "torchvision",
    "transformers",
    "yaml",
}


def imported_by(statement: str) -> set[str]:
    """What a statement imports beside torch."""
    code = f"import json, sys, torch\nbefore = set(sys.modules)\n{statement}"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint(json.dumps(sorted(set(sys.modules) - before)))"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_first_import_brings_nothing_heavy_beside_torch() -> None:
    loaded = imported_by("from drivetrain import Accelerator, Trainer")
    assert "drivetrain.accelerator.accelerator" in loaded
    assert loaded & HEAVY == set()

"""Runs programs with the original framework and with ours in its place, and compares what they report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.pool import DEVICE, ROOT, device
from tests.pool_server import _free_port as free_port

PROGRAMS = Path(__file__).parent / "programs"
SEVERAL = Path(__file__).parent / "several.py"
# Packages that must not be found by others: see the Makefile.
APART = os.path.join(sys.prefix, "torchvision")
TIMEOUT = 480
# What takes long, and each name that is looked up late, by framework.
IMPORTED = {
    "accelerate": (
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "accelerate",
        "datasets",
        "evaluate",
        "sklearn.metrics",
        "transformers.trainer",
        "transformers.models.bert.modeling_bert",
        "transformers.models.llama.modeling_llama",
        "peft",
        "trl.trainer.sft_trainer",
        "diffusers.pipelines.ddpm.pipeline_ddpm",
        "diffusers.training_utils",
    ),
    # Not Lightning itself: it looks for torchvision, which is apart, as it is imported.
    "lightning": ("torch._dynamo", "torch.distributed.checkpoint", "torchmetrics"),
}


@dataclass
class Job:
    """One run of a program.

    Attributes:
        name: What it is called among the runs of a launch.
        script: The program.
        arguments: What it is given.
        variables: Environment variables of it alone.
        path: Folders that it finds packages in before all others.
        unlike: Checks that are expected to fail.
        before: A file of this package, whose `prepare` is called before the program.
        place: The folder that it runs in; one of its own if empty.
        alone: Whether it starts its own processes, so that it must not find a launcher's variables.
        timeout: Seconds.
    """

    name: str
    script: str
    arguments: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    path: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)
    before: str = ""
    place: str = ""
    alone: bool = False
    timeout: float = 100

    def listed(self, root: Path) -> dict:
        """The run as several.py reads it."""
        folder, base = root / (self.place or self.name), root / self.name
        folder.mkdir(parents=True, exist_ok=True)
        return {**asdict(self), "folder": str(folder), "base": str(base), "result": f"{base}.json", "port": free_port()}


class Launch:
    """What several runs in one launch left.

    Args:
        root: The folder of the launch.
        processes: How many.
        output: What the launcher wrote.
    """

    def __init__(self, root: Path, processes: int, output: str) -> None:
        self.root, self.processes, self.output = root, processes, output

    def passed(self, name: str) -> None:
        """Assert that a run ended well on each rank."""
        for rank in range(self.processes):
            end = self.root / f"{name}.rank{rank}.end"
            assert end.exists(), f"{name} was not started; the launcher wrote:\n{self.output[-6000:]}"
        ends = [json.loads((self.root / f"{name}.rank{rank}.end").read_text()) for rank in range(self.processes)]
        said = [self.log(name, rank) for rank, end in enumerate(ends) if end["code"]]
        assert not said, "\n".join(said)

    def log(self, name: str, rank: int) -> str:
        """The last that a rank wrote."""
        return f"--- {name}, rank {rank}\n{(self.root / f'{name}.rank{rank}.log').read_text()[-5000:]}"

    def reported(self, name: str) -> dict[str, float]:
        """What a program reported."""
        self.passed(name)
        return json.loads((self.root / f"{name}.json").read_text())


def launch(
    kind: str,
    processes: int,
    jobs: list[Job],
    root: Path,
    framework: str = "accelerate",
    timeout: float = TIMEOUT,
) -> Launch:
    """Run programs one after the other.

    Args:
        kind: `"original"`, by torchrun, or `"ours"`, by `drivetrain launch --as accelerate` (or lightning).
        processes: How many.
        jobs: The runs.
        root: A folder for all that they write.
        framework: What the programs are written for.
        timeout: Seconds for all of them.
    """
    root.mkdir(parents=True, exist_ok=True)
    listed = root / "jobs.json"
    listed.write_text(json.dumps([IMPORTED[framework], [job.listed(root) for job in jobs]]))
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    hub = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "hub"), "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **one_thread, **hub, "PYTHONPATH": path}
    if kind == "ours":
        start = ["-m", "drivetrain", "launch", "--num_processes", str(processes), "--as", framework]
        start += ["--cpu"] if device() == "cpu" else []
    elif processes > 1:
        # --standalone would have the ranks meet at this machine's name, which need not resolve.
        meeting = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
        start = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", *meeting]
    else:
        start = []
    if kind == "original":
        environment[DEVICE] = "cpu"
        if framework == "accelerate":
            environment["ACCELERATE_USE_CPU"] = "true"
    command = [sys.executable, *start, str(SEVERAL), str(listed)]
    done = subprocess.run(
        command, env=environment, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    return Launch(root, processes, done.stdout)


def furthest(theirs: dict[str, float], ours: dict[str, float]) -> float:
    """The largest difference between values of the same name."""
    assert theirs.keys() == ours.keys()
    return max(abs(theirs[name] - ours[name]) / max(1.0, abs(theirs[name])) for name in theirs)

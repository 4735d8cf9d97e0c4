"""Several kinds of parallelism at once: who loads which data, what is gathered, and checkpoints from any to any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from drivetrain import Accelerator, Parallel
from tests.conformance.language_model import LENGTH, LanguageTask, Texts
from tests.conformance.test_parallel import layers_split, sequences_split_between
from tests.pool import run_in_processes
from tests.strategies.quiet import quiet_trainer

pytestmark = pytest.mark.sharded

SAMPLES = 16


class Watching(LanguageTask):
    """Notes which tokens its steps see."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch["tokens"].clone())
        return super().training_step(batch, batch_idx)


def watched(grids: list[dict[str, int]]) -> list[dict[str, Any]]:
    """What the steps of this process see in one epoch under each grid, and what it gathers from all."""
    torch.set_num_threads(1)
    found = []
    for grid in grids:
        strategy = Parallel(tp_plan=layers_split(), **grid)
        task, trainer = Watching(), quiet_trainer(strategy)
        trainer.fit(task, DataLoader(Texts(SAMPLES), batch_size=4, shuffle=True))
        accelerator = Accelerator(cpu=True, strategy=Parallel(tp_plan=layers_split(), **grid))
        loader = accelerator.prepare(DataLoader(range(10), batch_size=2))
        numbers = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader]).tolist()
        at = strategy.place_in_mesh.coordinates()
        found.append({"seen": torch.cat(task.seen), "at": at, "numbers": numbers})
    return found


def test_processes_that_share_a_batch_get_the_same_and_all_together_see_every_sample_once():
    grids = [{"tp": 2}, {"cp": 2}, {"tp": 2, "dp_replicate": 2}, {"tp": 2, "cp": 2}]
    every = sorted(Texts(SAMPLES).tokens.tolist())
    results = run_in_processes(watched, 4, args=(grids,), timeout=90)
    for index in range(len(grids)):
        ranks = [result[index] for result in results]
        whole: list[list[int]] = []
        for shard in {(each["at"]["dp_replicate"], each["at"]["dp_shard"]) for each in ranks}:
            peers = [each for each in ranks if (each["at"]["dp_replicate"], each["at"]["dp_shard"]) == shard]
            parts = {}
            for each in peers:
                part = parts.setdefault(each["at"]["cp"], each["seen"])
                assert torch.equal(part, each["seen"]), "tensor-parallel processes see the same tokens"
            rows = torch.cat([parts[place] for place in sorted(parts)], dim=1)
            if len(parts) == 2:  # the first process has the outer quarters of each sequence, the second the inner ones
                first, inner, last = rows.split((LENGTH // 4, LENGTH // 4, LENGTH // 2), dim=1)
                rows = torch.cat((first, last, inner), dim=1)
            whole += rows.tolist()
        assert sorted(whole) == every
        assert all(each["numbers"] == list(range(10)) for each in ranks)


LAYOUTS: dict[str, tuple[Any, int]] = {
    "single": (lambda: "single", 1),
    "tp": (lambda: Parallel(tp=2, tp_plan=layers_split()), 2),
    "sp": (lambda: Parallel(tp=2, tp_plan=sequences_split_between()), 2),
    "cp": (lambda: Parallel(cp=2), 2),
    "fsdp": (lambda: "fsdp", 2),
    "tp x fsdp": (lambda: Parallel(tp=2, tp_plan=layers_split()), 4),
    "sp x cp": (lambda: Parallel(tp=2, cp=2, tp_plan=sequences_split_between()), 4),
}


def text_loader(trainer: Any) -> DataLoader[Any]:
    return DataLoader(Texts(SAMPLES), batch_size=8 // trainer.strategy.topology.data_shard.count)


def write(root: str, layouts: list[str]) -> None:
    """One epoch in each layout, and a checkpoint at its end."""
    torch.set_num_threads(1)
    for layout in layouts:
        trainer = quiet_trainer(LAYOUTS[layout][0]())
        trainer.fit(LanguageTask(layers=1), text_loader(trainer))
        trainer.save_checkpoint(f"{root}/{layout}")


def go_on(root: str, layouts: list[str], sources: list[str]) -> dict[tuple[str, str], dict[str, Tensor]]:
    """The second epoch in each layout from each checkpoint; the parameters are returned by rank 0."""
    torch.set_num_threads(1)
    found = {}
    for layout in layouts:
        for source in sources:
            trainer = quiet_trainer(LAYOUTS[layout][0](), max_epochs=2)
            trainer.fit(LanguageTask(layers=1), text_loader(trainer), resume=f"{root}/{source}")
            found[source, layout] = trainer.strategy.state.model(trainer.model, full=True)
    return found


def two_epochs() -> dict[str, Tensor]:
    torch.set_num_threads(1)
    trainer = quiet_trainer("single", max_epochs=2)
    trainer.fit(LanguageTask(layers=1), text_loader(trainer))
    return trainer.strategy.state.model(trainer.model, full=True)


def check_all(root: Path, layouts: list[str]) -> None:
    expected = run_in_processes(two_epochs, 1)[0]
    by_size: dict[int, list[str]] = {}
    for layout in layouts:
        by_size.setdefault(LAYOUTS[layout][1], []).append(layout)
    for processes, own in by_size.items():
        run_in_processes(write, processes, args=(str(root), own), timeout=90)
    for processes, own in by_size.items():
        for (source, layout), state in run_in_processes(go_on, processes, args=(str(root), own, layouts), timeout=120)[
            0
        ].items():
            assert state.keys() == expected.keys()
            gap = max((state[name] - value).abs().max().item() for name, value in expected.items())
            assert gap < 5e-6, f"from {source} to {layout}: {gap}"


def test_checkpoints_go_from_one_process_to_split_layers_and_back(tmp_path):
    check_all(tmp_path, ["single", "sp", "tp x fsdp"])


@pytest.mark.slow
def test_checkpoints_go_from_any_layout_to_any_other(tmp_path):
    check_all(tmp_path, list(LAYOUTS))


def clipped() -> list[float]:
    """Norms and clipped gradients of parameters on two meshes and on none, against those of whole ones."""
    gaps = []
    for norm_type in (1.0, 2.0, float("inf")):
        accelerator = Accelerator(cpu=True, strategy=Parallel(tp=2, tp_plan=layers_split()))
        torch.manual_seed(3)
        plain, split = LanguageTask(layers=1), LanguageTask(layers=1)
        split.load_state_dict(plain.state_dict())
        model = accelerator.prepare(split.model)
        batch = torch.arange(2 * LENGTH).view(2, LENGTH) % 40
        positions = torch.arange(LENGTH).expand(2, LENGTH)
        for module in (plain.model, model):
            module(batch, positions).square().mean().backward()
        meshes = {str(p.grad.device_mesh.mesh_dim_names) for p in model.parameters() if isinstance(p.grad, DTensor)}
        assert len(meshes) == 2, meshes
        expected = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1e-3, norm_type)
        total = accelerator.clip_grad_norm_(model.parameters(), 1e-3, norm_type)
        assert total is not None
        gaps.append(abs(total.item() / expected.item() - 1))
        for one, other in zip(model.parameters(), plain.model.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            gaps.append((one.grad.full_tensor() - other.grad).abs().max().item())
    return gaps


def test_clipping_sees_one_vector_over_two_meshes():
    for gaps in run_in_processes(clipped, 4):
        assert max(gaps) < 1e-6, gaps

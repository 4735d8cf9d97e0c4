"""Steps per second of a transformer under each strategy, beside the same thing written straight on torch or deepspeed.

    python benchmarks/strategies.py
    python benchmarks/strategies.py --only FSDP --rounds 40 --json strategies.json

Two processes on the CPU, four where two dimensions are crossed, one thread each. A few steps of the Trainer and as many
of the bare loop take turns in the same processes, each with a model and an optimizer of its own. See
benchmarks/README.md.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import click
import torch
import torch.distributed as dist
from processes import measure_in_processes
from tables import as_table
from torch import Tensor, nn
from torch.nn import functional as F
from transformer import (
    LENGTH,
    WIDTH,
    Block,
    LanguageModel,
    Transformer,
    loss_of,
    make_batch,
    make_model,
    make_optimizer,
    tensor_parallel_plan,
)

from drivetrain import Callback, Trainer, gather_object

PROCESSES = {"TP x FSDP": 4}  # of those that take more than two
TARGET = 0.99
MICRO_BATCHES = 4  # of the pipeline
# Turns that do not count: in the first the Trainer asks for a batch ahead, and in the last it has that one already.
FIRST, LAST = 2, 1
Batch = tuple[Tensor, ...]  # tokens and targets, and positions where sequences are split
Step = Callable[[Batch], Tensor | None]
Times = tuple[float, float]  # seconds a step: gone by, and computed


# The bare loops: each builds what it trains, and returns what runs one optimizer step on this process's batch.


def bare_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Batch) -> Tensor:
        tokens, targets = batch
        optimizer.zero_grad()
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def bare_ddp() -> Step:
    model = nn.parallel.DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    return bare_step(model, make_optimizer(model.parameters()))


def bare_fsdp() -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = make_model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return bare_step(model, make_optimizer(model.parameters()))


def bare_tp() -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(make_model(), mesh, tensor_parallel_plan())
    return bare_step(model, make_optimizer(model.parameters()))


def bare_tp_fsdp() -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = parallelize_module(make_model(), mesh["tp"], tensor_parallel_plan())
    for block in model.blocks:
        fully_shard(block, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    return bare_step(model, make_optimizer(model.parameters()))


def bare_cp() -> Step:
    """Sequences split over processes: keys and values gathered, a chunk from the front and one from the back each."""
    from torch.distributed import _functional_collectives as collectives
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, count = dist.get_rank(), dist.get_world_size()
    positions = torch.arange(LENGTH).chunk(2 * count)
    of_each = [torch.cat([positions[n], positions[-1 - n]]) for n in range(count)]
    own, everywhere = of_each[rank], torch.cat(of_each)
    mask = own[:, None] >= everywhere
    gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd

    class GatheringBlock(Block):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (collectives.wait_tensor(gather(each.contiguous(), 2, dist.group.WORLD)) for each in (k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    model, mesh = make_model(), init_device_mesh("cpu", (count,))
    for block in model.blocks:
        block.__class__ = GatheringBlock
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters())

    def step(batch: Batch) -> Tensor:
        tokens, targets, positions = (each[:, own] for each in batch)
        optimizer.zero_grad()
        loss = loss_of(model(tokens, positions), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class Stage(nn.Module):
    """Half of the transformer."""

    def __init__(self, whole: Transformer, index: int) -> None:
        super().__init__()
        half = len(whole.blocks) // 2
        self.blocks = whole.blocks[half:] if index else whole.blocks[:half]
        if index:
            self.norm, self.head = whole.norm, whole.head
        else:
            self.tokens, self.positions = whole.tokens, whole.positions
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        if not self.index:
            x = self.tokens(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.index else x


def bare_pp() -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    part = Stage(make_model(), rank)
    stage = PipelineStage(part, rank, dist.get_world_size(), torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_of)
    optimizer = make_optimizer(part.parameters())

    def step(batch: Batch) -> Tensor | None:
        tokens, targets = batch
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step(tokens)
        optimizer.step()
        return losses[-1].detach() if losses else None

    return step


def bare_deepspeed(stage: int) -> Step:
    import deepspeed

    model = make_model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,  # else it is 1.0
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=make_optimizer(model.parameters()), config=config, dist_init_required=False
    )

    def step(batch: Batch) -> Tensor:
        tokens, targets = batch
        loss = loss_of(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def drivetrain_strategy(name: str) -> Any:
    if name.startswith("DeepSpeed"):
        from drivetrain import DeepSpeed

        return DeepSpeed(stage=int(name[-1]))
    if name in ("DDP", "FSDP"):
        return name.lower()
    from drivetrain import Parallel

    sizes = {"TP": {"tp": 2}, "CP": {"cp": 2}, "PP": {"pp": 2}, "TP x FSDP": {"tp": 2, "dp_shard": 2}}[name]
    return Parallel(**sizes, tp_plan=tensor_parallel_plan() if "tp" in sizes else None)


# name -> the bare loop
STRATEGIES: dict[str, Callable[[], Step]] = {
    "DDP": bare_ddp,
    "FSDP": bare_fsdp,
    "TP": bare_tp,
    "CP": bare_cp,
    "PP": bare_pp,
    "TP x FSDP": bare_tp_fsdp,
    "DeepSpeed ZeRO-2": lambda: bare_deepspeed(2),
    "DeepSpeed ZeRO-3": lambda: bare_deepspeed(3),
}


class TakingTurns:
    """The Trainer's batches. After every few steps it waits, while the bare loop runs as many.

    Args:
        step: runs a step of the bare loop.
        batch: this process's batch of one step.
        micro_batches: into how many the Trainer's are split.
        block: steps of each before it is the other's turn.
        rounds: turns of each that count.
    """

    def __init__(self, step: Step, batch: Batch, micro_batches: int, block: int, rounds: int) -> None:
        self.step, self.batch, self.block, self.rounds = step, batch, block, rounds
        self.micro_batches = list(zip(*(part.chunk(micro_batches) for part in batch), strict=True))
        self.bare: list[Times] = []  # for each turn
        self.own: list[Times] = []
        self.bare_loss: Tensor | None = None

    def __len__(self) -> int:
        return (FIRST + self.rounds + LAST) * self.block * len(self.micro_batches)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(FIRST + self.rounds + LAST):
            start = self.now()
            for _ in range(self.block):
                self.bare_loss = self.step(self.batch)
            middle = self.now()
            for _ in range(self.block):
                yield from self.micro_batches
            end = self.now()
            if FIRST <= number < FIRST + self.rounds:
                self.bare.append(((middle[0] - start[0]) / self.block, (middle[1] - start[1]) / self.block))
                self.own.append(((end[0] - middle[0]) / self.block, (end[1] - middle[1]) / self.block))
        del self.step  # DDP must go before the process group does

    def now(self) -> Times:
        """When all processes are here."""
        dist.barrier()
        return perf_counter(), process_time()


class KeepLoss(Callback):
    """The last loss: both must compute the same."""

    loss: Tensor | None = None

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.loss = outputs["loss"]


def measure(name: str, rows: int, block: int, rounds: int) -> dict[str, Any]:
    """Let both train in this process."""
    torch.set_num_threads(1)
    piped = MICRO_BATCHES if name == "PP" else 1
    keeping = KeepLoss()
    trainer = Trainer(
        accelerator="cpu",
        strategy=drivetrain_strategy(name),
        devices=PROCESSES.get(name, 2),
        max_epochs=1,
        accumulate_grad_batches=piped,
        use_distributed_sampler=False,
        callbacks=[keeping],
        barebones=True,
    )
    shard = trainer.strategy.topology.data_shard
    whole: Batch = make_batch(rows)
    if name == "CP":
        whole = (*whole, torch.arange(LENGTH).expand(rows, -1))
    batch = tuple(part.chunk(shard.count)[shard.index].contiguous() for part in whole)
    turns = TakingTurns(STRATEGIES[name](), batch, piped, block, rounds)
    trainer.fit(LanguageModel(), turns)
    losses = [None if loss is None else float(loss) for loss in (turns.bare_loss, keeping.loss)]
    losses = gather_object([losses])[-1]
    return {"name": name, "bare": turns.bare, "own": turns.own, "losses": losses}


def ratios(result: dict[str, Any], clock: int) -> tuple[float, float]:
    """The median of the paired ratios of speed, and half the distance between their quartiles.

    Args:
        result: the times of all turns.
        clock: 0 for the time gone by, 1 for the time computed.
    """
    each = [bare[clock] / own[clock] for bare, own in zip(result["bare"], result["own"], strict=True)]
    low, middle, high = statistics.quantiles(each, n=4) if len(each) > 1 else each * 3
    return middle, (high - low) / 2


def cells_of(result: dict[str, Any]) -> list[str]:
    """A row of the table."""
    bare, own = (1 / statistics.median(wall for wall, _ in result[key]) for key in ("bare", "own"))
    figures = [f"{figure:.3f}" for figure in (*result["ratio"], *result["cpu_ratio"])]
    return [result["name"], f"{bare:.2f}", f"{own:.2f}", *figures]


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(STRATEGIES)), help="Can be given several times.")
@click.option("--rounds", default=60, show_default=True, help="Turns of each.")
@click.option("--block", default=1, show_default=True, help="Steps in a turn.")
@click.option("--rows", default=4, show_default=True, help="Sequences in a step, over both processes.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there too.")
@click.option("--measure", "measured", hidden=True, help="Measure this one here, as the launcher's processes do.")
def main(
    only: tuple[str, ...], rounds: int, block: int, rows: int, json_file: Path | None, measured: str | None
) -> None:
    if measured is not None:
        result = measure(measured, rows, block, rounds)
        from drivetrain import PartialState

        if PartialState().is_main_process:
            assert json_file is not None
            json_file.write_text(json.dumps(result))
        return
    results = []
    for name in only or STRATEGIES:
        result = measure_in_processes(__file__, name, PROCESSES.get(name, 2), rows=rows, block=block, rounds=rounds)
        results.append({**result, "ratio": ratios(result, 0), "cpu_ratio": ratios(result, 1)})
        bare, own = results[-1]["losses"]
        found = " +- ".join(f"{figure:.3f}" for figure in results[-1]["ratio"])
        print(f"{name}: {found}, last losses {bare:.6f} and {own:.6f}", file=sys.stderr, flush=True)
    millions = sum(parameter.numel() for parameter in make_model().parameters()) / 1e6
    print(
        f"A transformer of {millions:.1f} M parameters, width {WIDTH}; {rounds} turns of "
        f"{block} steps each. torch {torch.__version__}.\n"
    )
    columns = ["", "bare, steps/s:", "drivetrain, steps/s:", "ratio:", "±:", "by CPU time:", "±:"]
    print(as_table(columns, map(cells_of, results)))
    if json_file is not None:
        json_file.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=2))
    missed = [f"{each['name']} {each['ratio'][0]:.3f}" for each in results if each["ratio"][0] < TARGET]
    if missed:
        raise click.ClickException(f"below {TARGET} of the bare loop's speed: {', '.join(missed)}")


if __name__ == "__main__":
    main()

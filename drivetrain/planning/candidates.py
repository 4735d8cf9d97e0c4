"""Ways to train a model on a cluster: strategy, precision, sizes of the device mesh, batch and recomputation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from drivetrain.planning.hardware import Cluster
from drivetrain.runtime.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from drivetrain.strategies import Strategy


@dataclass(frozen=True)
class Kind:
    """Properties of a training strategy, such as FSDP, which tell `drivetrain plan` what options to try.

    Attributes:
        class_name: Name of its class in Python, or an empty text if its name is enough.
        distributed_type: Its name in a launcher's configuration file.
        is_single: True if it trains in one process.
        has_buckets: True if it reduces whole gradients in buckets.
        is_sharded: True for FSDP, whose options differ from those of a mesh.
        is_meshed: True if it takes the sizes of a device mesh.
        recomputes: True if it can recompute the activations of blocks.
        has_engine: True if it builds an engine around the optimizer, as DeepSpeed does.
    """

    class_name: str = ""
    distributed_type: str = "MULTI_GPU"
    is_single: bool = False
    has_buckets: bool = False
    is_sharded: bool = False
    is_meshed: bool = False
    recomputes: bool = False
    has_engine: bool = False


KINDS = {
    "single": Kind(distributed_type="NO", is_single=True),
    "ddp": Kind(has_buckets=True),
    "fsdp": Kind("FSDP", "FSDP", is_sharded=True, recomputes=True),
    "parallel": Kind("Parallel", is_meshed=True, recomputes=True),
    "deepspeed": Kind("DeepSpeed", "DEEPSPEED", has_engine=True),
}
"""Kinds of strategies by name."""


@dataclass(frozen=True)
class Candidate:
    """One way to train a model: strategy, precision, batch size and sizes of the device mesh.

    Attributes:
        strategy: A name of `KINDS`.
        world_size: Number of processes, each with one device.
        precision: Name of a precision.
        batch: Rows of a micro-batch in each data-parallel process.
        accumulation: Micro-batches of a step.
        dp_replicate: Number of groups that hold a copy of the model each. Parameters are sharded within a group.
        tp: Processes that share each layer.
        cp: Processes that share each sequence.
        pp: Pipeline stages.
        checkpointing: True to recompute the activations of each block.
        stage: ZeRO stage of DeepSpeed.
        offload: True to keep parameters, gradients and optimizer state in host memory.
    """

    strategy: str
    world_size: int
    precision: str = "bf16"
    batch: int = 1
    accumulation: int = 1
    dp_replicate: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    checkpointing: bool = False
    stage: int = 0
    offload: bool = False

    @property
    def kind(self) -> Kind:
        return KINDS[self.strategy]

    @property
    def data_parallel(self) -> int:
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def rows(self) -> int:
        return self.batch * self.accumulation * self.data_parallel

    @property
    def way(self) -> str:
        if self.kind.has_engine:
            return f"{self.strategy}:{self.stage}"
        sizes = [(name, getattr(self, name)) for name in ("dp_replicate", "tp", "cp", "pp")]
        more = ["offload"] if self.offload else []
        return "+".join([self.strategy, *more, *(f"{name}={size}" for name, size in sizes if size > 1)])

    @property
    def label(self) -> str:
        parts = [self.way, self.precision, f"batch {self.batch}"]
        parts += [f"accumulation {self.accumulation}"] if self.accumulation > 1 else []
        parts += ["recomputed"] if self.checkpointing else []
        return ", ".join(parts)

    # The strategy, as an object and as text

    @property
    def _is_meshed(self) -> bool:
        return self.kind.is_meshed or self.dp_replicate > 1

    @property
    def _shards(self) -> int:
        return self.data_parallel // self.dp_replicate

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.checkpointing:
            options["activation_checkpointing"] = True
        if self.offload:
            options["cpu_offload"] = True
        if self.kind.has_engine:
            options["stage"] = self.stage
        if self.kind.is_sharded and self.dp_replicate > 1:
            options["replicate_size"] = self.dp_replicate
        if self.kind.is_meshed:
            sizes = {"dp_replicate": self.dp_replicate, "tp": self.tp, "cp": self.cp, "pp": self.pp}
            options.update({name: size for name, size in sizes.items() if size > 1})
            if self._shards == 1:
                options["dp_shard"] = 1
        return options

    def make(self, tp_plan: Any = None) -> Strategy:
        # `setup` has not been called on the returned strategy.
        import drivetrain
        from drivetrain.strategies.base import Strategy

        if not self.kind.class_name:
            return Strategy()  # torch's DDP does not run on fake tensors: its buckets are added to the base class
        options = self._options()
        if self.tp > 1:
            options["tp_plan"] = tp_plan
        made: Strategy = getattr(drivetrain, self.kind.class_name)(**options)
        return made

    def python(self) -> str:
        """Return a Python example that trains with this candidate's strategy, precision and batch size."""
        options = self._options()
        if self.tp > 1:
            options["tp_plan"] = "auto"
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        name = self.kind.class_name
        strategy = f"{name}({given})" if name else f'"{self.strategy}"'
        more = f", accumulate_grad_batches={self.accumulation}" if self.accumulation > 1 else ""
        return (
            f"from drivetrain import {f'{name}, ' if name else ''}Trainer\n"
            f'trainer = Trainer(strategy={strategy}, precision="{self.precision}"{more})\n'
            f"trainer.fit(task, data)  # a loader with batch_size={self.batch}"
        )

    def flags(self, cluster: Cluster) -> list[str]:
        flags = [f"--num_processes {self.world_size}"]
        flags += [f"--num_machines {cluster.machines}"] if cluster.machines > 1 else []
        flags += [f"--mixed_precision {self.precision}"]
        flags += [f"--gradient_accumulation_steps {self.accumulation}"] if self.accumulation > 1 else []
        if self.kind.is_sharded:
            flags.append("--use_fsdp")
        if self.kind.has_engine:
            flags += ["--use_deepspeed", f"--zero_stage {self.stage}"]
        if self.offload:
            flags.append("--fsdp_offload_params true")
        if self.checkpointing:
            flags.append("--fsdp_activation_checkpointing true")
        # Pipeline stages have no flag: the script sets them.
        if self._is_meshed:
            flags.append("--use_parallelism_config")
            flags += [f"--{name} {size}" for name, size in self._mesh().items() if size > 1]
        return flags

    def _mesh(self) -> dict[str, int]:
        return {
            "parallelism_config_dp_replicate_size": self.dp_replicate,
            "parallelism_config_dp_shard_size": self._shards,
            "parallelism_config_tp_size": self.tp,
            "parallelism_config_cp_size": self.cp,
        }

    def configuration(self, cluster: Cluster) -> dict[str, Any]:
        """Return the settings of a launch configuration file, as a dict, to train with this candidate on `cluster`.

        Args:
            cluster: The devices.
        """
        found: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": self.kind.distributed_type,
            "num_processes": self.world_size,
            "num_machines": cluster.machines,
            "mixed_precision": self.precision,
        }
        if self.kind.recomputes:
            found["fsdp_config"] = {
                "fsdp_version": 2,
                "fsdp_activation_checkpointing": self.checkpointing,
                "fsdp_offload_params": self.offload,
            }
        if self.kind.has_engine:
            found["deepspeed_config"] = {"zero_stage": self.stage}
        if self._is_meshed:
            found["parallelism_config"] = self._mesh()
        return found


@dataclass(frozen=True)
class Facts:
    """Properties of a model, from which the planner decides what strategies can train the model.

    Attributes:
        blocks: Number of repeated blocks.
        plans_tp: True if there is a tensor-parallel plan.
        heads: Number of attention heads, or 0 if unknown.
        width: Largest width that tensor parallelism would split, or 0 if unknown.
        seq: Tokens of a sequence, or 0 if the batch has no sequences.
        rows: Rows of the batch that was given.
    """

    blocks: int = 0
    plans_tp: bool = False
    heads: int = 0
    width: int = 0
    seq: int = 0
    rows: int = 1


def candidates(
    cluster: Cluster,
    facts: Facts,
    batches: Sequence[int],
    strategies: Sequence[str],
    precisions: Sequence[str] = ("bf16",),
    recompute: Sequence[bool] = (False, True),
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the combinations of settings that can train a model on a cluster, and why others cannot.

    Args:
        cluster: The devices.
        facts: What is known of the model.
        batches: Rows of a micro-batch.
        strategies: Names from `WAYS`.
        precisions: Names of precisions.
        recompute: Whether activations are recomputed, with strategies that can do it.

    Raises:
        ConfigurationError: A name is unknown, or a number is not positive.
    """
    for name in strategies:
        if name not in WAYS:
            raise ConfigurationError(f"--strategies has {name!r}. Use names of {', '.join(WAYS)}.{nearest(name, WAYS)}")
    for number in batches:
        if number < 1:
            raise ConfigurationError(f"A batch of {number} rows is not possible. Use a positive number.")
    found: list[Candidate] = []
    refused: dict[str, str] = {}
    for name in strategies:
        strategy, sizes_of = WAYS[name]
        kind = KINDS[strategy]
        if True in recompute and (reason := _no_recomputation(name, kind, facts)):
            refused[f"{name}, recomputed"] = reason
        again = [each for each in recompute if not each or (kind.recomputes and facts.blocks)]
        for sizes, reason in sizes_of(cluster, facts):
            if reason:
                refused[", ".join([name, *(f"{key}={value}" for key, value in sizes.items())])] = reason
                continue
            base = replace(Candidate(strategy, 1 if kind.is_single else cluster.world_size), **sizes)  # type: ignore[arg-type]
            base = replace(base, accumulation=base.pp)  # each stage needs a micro-batch at a time
            found += [
                replace(base, precision=precision, batch=batch, checkpointing=recomputed)
                for precision, recomputed, batch in itertools.product(precisions, again, batches)
            ]
    return found, refused


def _no_recomputation(name: str, kind: Kind, facts: Facts) -> str:
    if not kind.recomputes:
        return f"{name} leaves recomputation to the model; fsdp recomputes blocks"
    return "" if facts.blocks else "the model has no repeated blocks to recompute"


# Sizes of the device mesh, each with the reason why it is not possible, or an empty text


Sizes = Iterator[tuple[dict[str, int], str]]


def _one(cluster: Cluster, facts: Facts) -> Sizes:
    yield {}, ""


def _several(cluster: Cluster, facts: Facts) -> Sizes:
    yield {}, "" if cluster.world_size > 1 else "it needs several devices"


def _replicas(cluster: Cluster, facts: Facts) -> Sizes:
    yield {"dp_replicate": cluster.machines}, "" if cluster.machines > 1 else "it needs several machines"


def _tensor(cluster: Cluster, facts: Facts) -> Sizes:
    if cluster.world_size == cluster.devices > 1:  # otherwise, copies are left, which fsdp+tp shards
        yield {"tp": cluster.world_size}, _no_tensor_parallelism(cluster.world_size, facts)


def _sharded_tensor(cluster: Cluster, facts: Facts) -> Sizes:
    for size in _divisors(cluster.devices):
        if size < cluster.world_size:
            yield {"tp": size}, _no_tensor_parallelism(size, facts)


def _no_tensor_parallelism(size: int, facts: Facts) -> str:
    if not facts.plans_tp:
        return "the model has no tp_plan; give one with --tp-plan"
    if facts.heads and facts.heads % size:
        return f"{facts.heads} attention heads are not divisible by {size}"
    return f"a width of {facts.width} is not divisible by {size}" if facts.width and facts.width % size else ""


def _context(cluster: Cluster, facts: Facts) -> Sizes:
    for size in _divisors(cluster.devices):
        reason = f"{facts.seq} tokens are not divisible by 2 x {size}" if facts.seq % (2 * size) else ""
        yield {"cp": size}, reason if facts.seq else "the batch has no sequences"


def _stages(cluster: Cluster, facts: Facts) -> Sizes:
    for size in _divisors(min(cluster.world_size, 8)):
        if cluster.world_size % size == 0:
            yield {"pp": size}, f"{facts.blocks} blocks do not fill {size} stages" if facts.blocks < size else ""


def _offloaded(cluster: Cluster, facts: Facts) -> Sizes:
    yield {"offload": True}, next(_several(cluster, facts))[1]


def _zero(stage: int) -> Callable[[Cluster, Facts], Sizes]:
    def sizes(cluster: Cluster, facts: Facts) -> Sizes:
        missing = "" if find_spec("deepspeed") else 'it needs DeepSpeed: pip install "drivetrain[deepspeed]"'
        yield {"stage": stage}, missing or next(_several(cluster, facts))[1]

    return sizes


def _divisors(count: int) -> list[int]:
    return [size for size in range(2, count + 1) if count % size == 0]


WAYS: dict[str, tuple[str, Callable[[Cluster, Facts], Sizes]]] = {
    "single": ("single", _one),
    "ddp": ("ddp", _several),
    "fsdp": ("fsdp", _several),
    "fsdp+offload": ("fsdp", _offloaded),
    "hsdp": ("fsdp", _replicas),
    "tp": ("parallel", _tensor),
    "fsdp+tp": ("parallel", _sharded_tensor),
    "cp": ("parallel", _context),
    "pp": ("parallel", _stages),
    **{f"deepspeed:{stage}": ("deepspeed", _zero(stage)) for stage in (1, 2, 3)},
}
"""Names that `--strategies` takes, each with the kind of strategy and the sizes that are tried."""

DEFAULT = ("single", "ddp", "fsdp", "hsdp", "tp", "fsdp+tp", "cp")
"""Names that are tried by default. Pipelines and DeepSpeed run all blocks, which takes minutes for large models."""

"""`plan`: which strategy fits a model on given devices, and how fast it trains."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import Any

from drivetrain.planning.candidates import DEFAULT, Candidate, Facts, candidates
from drivetrain.planning.hardware import Cluster, read_hardware
from drivetrain.planning.measure import STEPS, measure
from drivetrain.planning.run import Estimate, estimate, facts_of
from drivetrain.planning.workload import Workload
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.host import as_bytes


@dataclass(frozen=True)
class Result:
    """Predicted memory and speed of training a model with one combination of strategy and settings.

    Attributes:
        candidate: The candidate.
        estimate: What a process needs, or None if it could not be estimated.
        memory: Bytes that a device offers, after the headroom.
        cluster: The devices.
        seq: Tokens of a sequence, if they were given for this result.
        error: Why there is no estimate.
    """

    candidate: Candidate
    estimate: Estimate | None
    memory: float
    cluster: Cluster
    seq: int | None = None
    error: str = ""

    @property
    def fits(self) -> bool:
        """True if the training step's predicted peak memory is at most the memory that a device offers."""
        return self.estimate is not None and self.estimate.peak <= self.memory

    @property
    def rate(self) -> float:
        """Predicted tokens per second of all processes together, or rows per second if the data has no sequences."""
        if self.estimate is None:
            return 0.0
        return self.candidate.rows * self.estimate.tokens / self.estimate.seconds

    @property
    def utilisation(self) -> float:
        """Share of the device's peak speed that the training step reaches."""
        if self.estimate is None:
            return 0.0
        import torch

        dtype = torch.float32 if self.candidate.precision.startswith(("32", "no", "fp32")) else torch.bfloat16
        return self.estimate.flops / self.estimate.seconds / self.cluster.device.flops(dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the predicted memory and speed, and the training settings, as a dict that JSON can represent."""
        found: dict[str, Any] = {"candidate": vars(self.candidate) | {"label": self.candidate.label}, "fits": self.fits}
        found["hardware"] = str(self.cluster)
        if self.estimate is None:
            return {**found, "error": self.error}
        phase, module = self.estimate.place
        return {
            **found,
            "peak_bytes": round(self.estimate.peak),
            "host_bytes": round(self.estimate.host),
            "bytes": {kind: round(size) for kind, size in self.estimate.kinds.items()},
            "peak_at": {"phase": phase, "module": module},
            "seconds": self.estimate.seconds,
            "waiting_seconds": self.estimate.waiting,
            "tokens_per_second": self.rate,
            "utilisation": self.utilisation,
            "collectives": {
                name: {"count": round(count), "bytes": round(size)}
                for name, (count, size) in self.estimate.traffic.items()
            },
            "flops": self.estimate.flops,
            "checkpoint_bytes": round(self.estimate.checkpoint_bytes),
        }


@dataclass(frozen=True)
class Plan:
    """Ranking of the ways to train a model on given devices, best first.

    Attributes:
        results: Those that fit by speed, then the others by memory.
        refused: Candidates that the model or the cluster does not allow, each with the reason.
        cluster: The devices.
        workload: What is trained.
        notes: What else is to be known, such as the comparison with measured steps.
    """

    results: tuple[Result, ...]
    refused: Mapping[str, str]
    cluster: Cluster
    workload: Workload
    notes: tuple[str, ...] = field(default=())

    @property
    def best(self) -> Result | None:
        """The fastest result whose predicted memory fits in the devices, or None if all need too much memory."""
        return self.results[0] if self.results and self.results[0].fits else None

    @property
    def advice(self) -> str:
        """A sentence that recommends the fastest strategy that fits in memory, or says what to change if none fits."""
        best = self.best
        counted = [result for result in self.results if result.estimate is not None]
        if best is None or best.estimate is None:
            if not counted:
                return "Nothing could be estimated: " + "; ".join(sorted({r.error for r in self.results}))
            least = min(counted, key=lambda result: result.estimate.peak if result.estimate else math.inf)
            assert least.estimate is not None
            return (
                f"Nothing fits: {least.candidate.label} needs least, {as_bytes(least.estimate.peak)} of "
                f"{as_bytes(least.memory)}. Use more devices, a smaller batch, shorter sequences, or --strategies "
                "fsdp+offload."
            )
        need = f"it needs {as_bytes(best.estimate.peak)} of {as_bytes(best.memory)} in each device"
        if best.candidate.offload:
            need += f" and {as_bytes(best.estimate.host * best.cluster.devices)} of host memory in each machine"
        others = [result for result in counted if result.candidate.strategy != best.candidate.strategy]
        second = next((result for result in others if result.fits), None)
        larger = next((result for result in others if not result.fits), None)
        why = ""
        if second is not None:
            why = f"; {second.candidate.label} would reach {second.rate / best.rate:.0%} of its speed"
        elif larger is not None and larger.estimate is not None:
            why = f"; {larger.candidate.label} needs {as_bytes(larger.estimate.peak)}"
        return (
            f"Use {best.candidate.label} on {best.cluster}: {need} and trains about {best.rate:,.0f} {self.unit} per "
            f"second{why}."
        )

    @property
    def unit(self) -> str:
        """Unit in which training speed is counted: `"tokens"`, or `"rows"` if the model's batches contain no tokens."""
        tokens = max((r.estimate.tokens for r in self.results if r.estimate is not None), default=1)
        return "tokens" if tokens > 1 else "rows"

    def to_dict(self) -> dict[str, Any]:
        """Return the plan's advice, results and launch command as a dict of plain values, for JSON."""
        best = self.best
        return {
            "advice": self.advice,
            "hardware": str(self.cluster),
            "results": [result.to_dict() for result in self.results],
            "refused": dict(self.refused),
            "launch": launch_line(best, self.workload) if best is not None else None,
            "configuration": best.candidate.configuration(best.cluster) if best is not None else None,
            "python": best.candidate.python() if best is not None else None,
            "notes": list(self.notes),
        }


def launch_line(result: Result, workload: Workload) -> str:
    script = workload.source if workload.source.endswith(".py") else "train.py"
    return " ".join(["drivetrain launch", *result.candidate.flags(result.cluster), script, *workload.arguments])


# Estimates in processes of their own


class Workers:
    """Pool of processes that predict the memory and speed of several ways to train a model in parallel.

    Args:
        count: Number of processes, by default one for each core.
        progress: Called with the number of estimates that are done and of those that were asked for.
    """

    def __init__(self, count: int | None = None, progress: Callable[[int, int], None] | None = None) -> None:
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        workers = count or min(8, os.cpu_count() or 1)
        self._pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(list(sys.path),))
        self._progress = progress
        self._asked = self._done = 0

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: Any) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def facts(self, workload: Workload) -> Facts:
        found: Facts = self._result(self._pool.submit(facts_of, workload))
        return found

    def estimates(
        self, workload: Workload, cases: Iterable[tuple[Candidate, Cluster, int | None]], headroom: float, full: bool
    ) -> list[Result]:
        chosen = list(cases)
        self._asked += len(chosen)
        waiting = [self._pool.submit(estimate, workload, c, cluster, seq, full) for c, cluster, seq in chosen]
        found = []
        for (candidate, cluster, seq), future in zip(chosen, waiting, strict=True):
            memory = cluster.device.memory * (1 - headroom)
            try:
                found.append(Result(candidate, self._result(future), memory, cluster, seq))
            except ConfigurationError as error:
                found.append(Result(candidate, None, memory, cluster, seq, str(error)))
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, self._asked)
        return found

    def measure(self, workload: Workload, cluster: Cluster, precision: str, batch: int) -> tuple[float, float]:
        found: tuple[float, float] = self._result(self._pool.submit(measure, workload, cluster, precision, batch))
        return found

    def _result(self, future: Future[Any]) -> Any:
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise ConfigurationError(
                "A process that ran the model on fake tensors has died, for example because memory ran out. Use "
                "fewer processes with --jobs 1, and leave out --real-init."
            ) from error


def _begin(path: list[str]) -> None:
    import torch

    sys.path[:] = path
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed's calls of renamed collectives
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    parent = multiprocessing.parent_process()
    if parent is not None:

        def watch() -> None:  # so that no worker outlives its parent
            parent.join()
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()


# Plans


def plan(
    source: str,
    hardware: str | Cluster,
    *,
    arguments: Sequence[str] = (),
    kwargs: Mapping[str, Any] | None = None,
    inputs: Sequence[str] = (),
    seq: int | None = None,
    batch: int | Sequence[int] | None = None,
    strategies: Sequence[str] = DEFAULT,
    precisions: Sequence[str] = ("bf16",),
    recompute: Sequence[bool] = (False, True),
    optimizer: str = "adamw",
    tp_plan: Mapping[str, str] | str | None = None,
    headroom: float = 0.1,
    full: bool = False,
    real_init: bool = False,
    measures: bool = False,
    sample_inputs: str | None = None,
    trust_remote_code: bool = False,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Predict which strategies can train a model on the given devices, and how fast. Return a `Plan`.

    The strategies run one optimizer step on fake tensors, which have no memory, in a fake process group. No device and
    no weights are needed.

    Args:
        source: A script, the config.json of a transformers model or its folder, or `package.module:Class`.
        hardware: Devices, such as `"8xH100-80GB"` or `"8xH100-80GBx4"` for four machines, `"this"`, a YAML file, or a
            `Cluster`.
        arguments: Arguments of the script.
        kwargs: Arguments of the class.
        inputs: Shapes of the model's inputs, such as `"8x128:int64"`. The first dimension is the batch.
        seq: Tokens of a sequence, for a config.json.
        batch: Rows of a micro-batch in each process, or several to compare. Default: those of `inputs` or the script.
        strategies: Names of `single`, `ddp`, `fsdp`, `fsdp+offload`, `hsdp`, `tp`, `fsdp+tp`, `cp`, `pp` and
            `deepspeed:1` to `deepspeed:3`. Default: all but offloading, and `pp` and DeepSpeed, which take minutes for
            large models.
        precisions: Names of precisions.
        recompute: Whether to recompute the activations of blocks, or both values to compare.
        optimizer: Name of the optimizer. A script's own optimizer is used in place of it.
        tp_plan: Styles of layers for tensor parallelism by name. Default: the model's own plan.
        headroom: Share of a device's memory that stays free, for fragmentation and libraries.
        full: True to run all blocks of a model, in place of extrapolation from a few.
        real_init: True to build the model with values in host memory, if it cannot be built without.
        sample_inputs: File of a batch with values, or `"first"` for the first batch of a script. The step then runs on
            values in host memory, for models whose forward depends on them.
        measures: True to train ten steps on a device of this machine first. The times of all candidates are multiplied
            by the ratio of the measured to the predicted time.
        trust_remote_code: True to run code that the config.json names.
        jobs: Number of processes, by default one for each core.
        progress: Called with the number of candidates that are done and of all.

    Returns:
        The plan.

    Raises:
        ConfigurationError: An argument is invalid, or the model cannot run on fake tensors.
    """
    if not 0 <= headroom < 1:
        raise ConfigurationError(f"The headroom must be at least 0 and below 1, got {headroom}.")
    cluster = read_hardware(hardware) if isinstance(hardware, str) else hardware
    workload = Workload(
        source,
        tuple(arguments),
        dict(kwargs or {}),
        tuple(inputs),
        seq,
        optimizer,
        tp_plan,
        real_init,
        trust_remote_code,
        sample_inputs,
    )
    if seq is not None and seq < 1:
        raise ConfigurationError(f"A sequence of {seq} tokens is not possible. Use a positive number.")
    with Workers(jobs, progress) as workers:
        facts = workers.facts(workload)
        given = [batch] if isinstance(batch, int) else list(batch or [facts.rows])
        chosen, refused = candidates(cluster, facts, given, strategies, precisions, recompute)
        if not chosen:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
            raise ConfigurationError(f"No candidate is possible on {cluster}. {reasons}.")
        notes = []
        if measures:
            measured, predicted = workers.measure(workload, cluster, precisions[0], min(given))
            ratio = measured / predicted
            notes.append(
                f"A step of one process with batch {min(given)} took {1000 * measured:,.0f} ms here (median of "
                f"{STEPS}), and {1000 * predicted:,.0f} ms were predicted. Times of computation are multiplied by "
                f"{ratio:.2f}."
            )
            cluster = cluster.slowed(ratio)
        results = workers.estimates(workload, [(each, cluster, None) for each in chosen], headroom, full)
    return Plan(tuple(ranked(results)), refused, cluster, workload, tuple(notes))


def ranked(results: Iterable[Result]) -> list[Result]:
    # Results that fit come first, by speed, then the others, by memory. Failed ones are last.
    def key(result: Result) -> tuple[int, float]:
        if result.estimate is None:
            return 2, 0.0
        return (0, -result.rate) if result.fits else (1, result.estimate.peak)

    return sorted(results, key=key)


# What if


def vary(
    made: Plan,
    batch: Sequence[int] = (),
    seq: Sequence[int] = (),
    world: Sequence[int] = (),
    headroom: float = 0.1,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Result]:
    # Only the plan's best result is varied, or its smallest if none fits.
    for name, numbers in (("batch", batch), ("seq", seq), ("world", world)):
        for number in numbers:
            if number < 1:
                raise ConfigurationError(f"--vary {name}={number} is not possible. Use positive numbers.")
    base = made.results[0]
    cases = []
    for size in world or [base.cluster.world_size]:
        cluster = base.cluster.with_world_size(size)
        lengths: list[int | None] = [*seq] or [base.seq]
        for length in lengths:
            for rows in batch or [base.candidate.batch]:
                parts = base.candidate.tp * base.candidate.cp * base.candidate.pp * base.candidate.dp_replicate
                if size % parts:
                    raise ConfigurationError(
                        f"A world size of {size} is not divisible by {parts}, as {base.candidate.label} needs."
                    )
                candidate = replace(base.candidate, world_size=size, batch=rows)
                if candidate.kind.is_single:
                    candidate = replace(candidate, world_size=1)
                cases.append((candidate, cluster, length))
    with Workers(jobs, progress) as workers:
        return workers.estimates(made.workload, cases, headroom, False)


def largest(made: Plan, what: str, headroom: float = 0.1, jobs: int | None = None) -> Result | None:
    # Only the plan's best result is changed, or its smallest if none fits. `what` is "batch", "seq" or "world".
    base = made.results[0]
    with Workers(jobs) as workers:

        def at(value: int) -> Result:
            candidate, cluster, length = base.candidate, base.cluster, base.seq
            if what == "batch":
                candidate = replace(candidate, batch=value)
            elif what == "seq":
                length = value
            else:
                cluster = cluster.with_world_size(value)
                candidate = replace(candidate, world_size=value)
            return workers.estimates(made.workload, [(candidate, cluster, length)], headroom, False)[0]

        if what == "world":
            for size in _worlds(base):
                found = at(size)
                if found.fits:
                    return found
            return None
        unit = 1 if what == "batch" else 2 * base.candidate.cp * 64
        return _bisect(at, unit)


def _worlds(base: Result) -> Iterator[int]:
    parts = base.candidate.tp * base.candidate.cp * base.candidate.pp
    inside = [size for size in (2**power for power in range(20)) if size <= base.cluster.devices]
    machines = [base.cluster.devices * 2**power for power in range(1, 11)]
    yield from (size for size in [*inside, *machines] if size % parts == 0)


def _bisect(at: Callable[[int], Result], unit: int) -> Result | None:
    best, low, high = None, 0, 1
    while (found := at(high * unit)).fits:
        best, low, high = found, high, 2 * high
        if high > 2**20:
            return best
    while high - low > 1:
        middle = (low + high) // 2
        found = at(middle * unit)
        if found.fits:
            best, low = found, middle
        else:
            high = middle
        if low and high - low <= low // 16:  # within 6 %
            break
    return best


@dataclass(frozen=True)
class Epoch:
    """Predicted time and price of one training epoch, and the interval at which to save checkpoints.

    Attributes:
        seconds: Seconds of training.
        checkpoint_seconds: Seconds in which a checkpoint is written.
        save_every: Seconds between checkpoints that lose least time, or None without failures.
        failures: Expected number of failures, or None.
        price: Price of all devices, or None.
    """

    seconds: float
    checkpoint_seconds: float
    save_every: float | None = None
    failures: float | None = None
    price: float | None = None


def epoch_of(
    result: Result, count: float, price: float | None = None, mean_hours_between_failures: float | None = None
) -> Epoch:
    """Predict the time and price of training on `count` tokens or rows, and how often to save checkpoints.

    The interval between checkpoints is that of Young (1974): the root of twice the time of a checkpoint times the mean
    time between failures of the cluster.

    Args:
        result: A result with an estimate.
        count: Tokens, or rows, of the epoch.
        price: Price of a device for an hour.
        mean_hours_between_failures: Mean hours until a device fails.
    """
    assert result.estimate is not None
    seconds = count / result.rate
    written = result.estimate.checkpoint_bytes * result.cluster.devices
    saving = written / result.cluster.disk_speed
    every = failures = None
    if mean_hours_between_failures is not None:
        between = 3600 * mean_hours_between_failures / result.candidate.world_size
        every, failures = math.sqrt(2 * saving * between), seconds / between
    cost = None if price is None else price * result.candidate.world_size * seconds / 3600
    return Epoch(seconds, saving, every, failures, cost)

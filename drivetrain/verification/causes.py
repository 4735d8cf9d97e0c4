"""Diagnosis of a difference: its most likely cause, the evidence, and the fix."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from drivetrain.verification.compare import Comparison, Difference, Run, difference, generators_apart, relative

_CLOSE = 1e-3
"""Largest relative difference of numbers that count as equal in a diagnosis."""


@dataclass
class Finding:
    """First difference that `drivetrain verify` found between two runs, with its cause and how to remove it.

    Attributes:
        cause: Short name of the cause.
        step: The step, from 0.
        quantity: The quantity that differs first.
        sentence: The cause in words.
        remedy: The change that mends it.
        evidence: Measurements that support the cause.
    """

    cause: str
    step: int
    quantity: str
    sentence: str
    remedy: str
    evidence: list[str] = field(default_factory=list)


def diagnose(compared: Comparison, again: Run) -> Finding | None:
    # `again` is a second run on one process, which shows whether the script is deterministic.
    if (unstable := _nondeterminism(compared.single, again)) is not None:
        return unstable
    if (start := _start(compared) or _untrained(compared.subject)) is not None:
        return start
    first, apart = compared.first, _drift(compared.subject)
    if apart is not None and (first is None or apart[0] <= first.step):
        step, quantity, _ = apart
        # Equal gradients but different weights after the step: the weights differed before it.
        is_older = quantity == "weights" and not compared.subject.disagreeing(step, "gradients")
        if first is None or first.step > step or first.quantity not in _BEFORE_WEIGHTS or is_older:
            return _drifted(compared.subject, *apart)
    if first is None:
        return _logged(compared)
    return _EXPLAIN[first.quantity](compared, first)


_BEFORE_WEIGHTS = ("rows", "loss", "gradients", "clipped gradients", "learning rates", "skipped steps")


def _finding(first: Difference, cause: str, sentence: str, remedy: str, *evidence: str) -> Finding:
    return Finding(cause, first.step, first.quantity, sentence, remedy, [each for each in evidence if each])


def _names(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _nondeterminism(reference: Run, again: Run) -> Finding | None:
    for step in range(min(reference.steps, again.steps)):
        for quantity in ("rows", "loss", "gradients", "weights"):
            found = difference(step, quantity, again, reference)
            if found is None or found.size == 0.0:
                continue
            if quantity == "rows":
                sentence = "The script trains on other data each time it is started, already in one process."
                remedy = "Seed what chooses the data (set_seed), and take no data from the clock or the network."
            elif quantity in ("gradients", "weights") and found.size < 1e-6:
                return None  # threads sum in a varying order
            else:
                sentence = "One process computes other numbers each time it is started, with the same data."
                remedy = (
                    "Seed all random numbers (set_seed), including those of `random`, NumPy and own generators. "
                    "torch.use_deterministic_algorithms(True) names operations that are not deterministic."
                )
            apart = generators_apart(again, reference)
            states = f"other states of random generators: {apart}" if apart else ""
            return _finding(found, "nondeterminism", sentence, remedy, f"relative difference {found.size:.2g}", states)
    return None


def _start(compared: Comparison) -> Finding | None:
    subject, reference = compared.subject, compared.reference
    found = Difference(0, "initial weights", 0.0)
    start = subject.first.get("start") or {}
    for number, rank in enumerate(subject.ranks[1:], 1):
        own = rank.get("start") or {}
        shared = {name: values for name, values in own.items() if name in start}
        found.size, found.name = relative(shared, {name: start[name] for name in shared})
        if found.size > 0.0:
            return _finding(
                found,
                "initial weights",
                f"Processes start with different weights: {found.name} of rank {number} is not that of rank 0.",
                "Use the same seed on all processes when the model is created, and prepare the model before training.",
            )
    found.size, found.name = relative(start, reference.first.get("start") or {})
    # FSDP holds weights in the precision of the forward pass at this moment.
    if found.size > (0.03 if compared.is_low else 1e-6):
        return _finding(
            found,
            "initial weights",
            f"The weights at step 0 are not those of {reference.name}, first in {found.name}.",
            "Create the model with a seed that does not depend on the rank or on the number of processes.",
        )
    return None


def _untrained(subject: Run) -> Finding | None:
    start, names = subject.first.get("start") or {}, subject.first.get("not_held") or []
    if not names or len(names) < len(start):
        return None
    return _finding(
        Difference(0, "weights", math.inf, names[0]),
        "parameters not in the optimizer",
        "The optimizer holds no parameter of the prepared model, so the model does not train, on one process neither.",
        "Create the optimizer from the model that is trained, and pass both to prepare.",
    )


def _drift(subject: Run) -> tuple[int, str, list[str]] | None:
    for step in range(subject.steps):
        for quantity in ("weights", "buffers"):
            names = subject.disagreeing(step, quantity)
            if quantity == "buffers" and subject.first.get("normalizations"):
                names = [name for name in names if not name.endswith(("running_mean", "running_var"))]
            if names:
                return step, quantity, names
    return None


def _drifted(subject: Run, step: int, quantity: str, names: list[str]) -> Finding:
    first = Difference(step, quantity, math.inf, names[0])
    if quantity == "buffers":
        return _own_buffer(first, f"{names[0]} differs between processes")
    gradients = subject.disagreeing(step, "gradients")
    if gradients:
        return _unreduced(subject, Difference(step, "gradients", math.inf, gradients[0]), gradients)
    return _finding(
        first,
        "drift",
        f"The weights {_names(names)} differ between processes after the step, although their gradients are equal.",
        "Change weights only through the optimizer, on all processes alike; a change under `if rank == 0` is lost on "
        "the others.",
    )


def _own_buffer(first: Difference, which: str, *evidence: str) -> Finding:
    return _finding(
        first,
        "buffer of one rank",
        f"The buffer {which}: it follows the rows of one process.",
        "Update it with values that are equal on all processes: reduce them first (accelerator.reduce).",
        *evidence,
    )


def _unreduced(subject: Run, first: Difference, names: list[str]) -> Finding:
    everything = len(names) >= 0.9 * len(subject.values(first.step, "gradients"))
    if everything:
        sentence = "No gradient is averaged over the processes: each has the gradients of its own data."
        remedy = (
            "Call the prepared model itself in each step, not model.module or the model from before prepare, do not "
            "leave no_sync open, and use accelerator.backward(loss)."
        )
    else:
        sentence = f"The gradients of {_names(names)} are not averaged over the processes."
        remedy = (
            "Use these parameters inside of the prepared model's forward, prepare the module that holds them, and set "
            "requires_grad before prepare."
        )
    return _finding(first, "gradients not reduced", sentence, remedy, f"{len(names)} tensors differ between ranks")


# One function for each quantity


def _explain_rows(compared: Comparison, first: Difference) -> Finding:
    subject, reference, step = compared.subject, compared.reference, first.step
    parts, expected = subject.rows(step) or [], list(chain(*reference.rows(step) or []))
    own = list(chain(*parts))
    counts, wanted = Counter(own), Counter(expected)
    evidence = f"rank 0 trains on {len(parts[0])} rows, {reference.name} on {len(expected)}"
    if not subject.first["loaders"]:
        is_whole = all(part == parts[0] for part in parts)
        how = ", so every process trains on the same rows" if is_whole else ": the script divides the data itself"
        return _finding(
            first,
            "loader not prepared",
            f"The loader is not prepared{how}.",
            "Pass it to accelerator.prepare as a DataLoader, which gives each process its part of the data.",
            evidence,
        )
    if len(parts) > 1 and all(Counter(part) == Counter(parts[0]) for part in parts):
        return _finding(
            first,
            "same rows on all ranks",
            "Every process trains on the same rows, so nothing is gained from the others.",
            "Pass the loader to accelerator.prepare, or let only one of script and framework divide the data by rank.",
            evidence,
        )
    twice = [row for row, number in counts.items() if number > wanted.get(row, 0)]
    everything = Counter(row for k in range(reference.steps) for row in chain(*reference.rows(k) or []))
    seen = Counter(row for k in range(subject.steps) for row in chain(*subject.rows(k) or []))
    shared = sum((everything & seen).values())
    if any(number > 1 for number in counts.values()) and max(wanted.values(), default=1) == 1:
        return _finding(
            first,
            "rows repeated",
            f"{len(own) - len(counts)} rows of step {step} are trained on by several processes, and others by none.",
            "Shuffle with the same seed on all processes, and divide the data once.",
            evidence,
        )
    if shared >= 0.9 * sum(everything.values()):
        return _finding(
            first,
            "other order of rows",
            f"The processes train on the rows in another order than {reference.name}.",
            "Seed the sampler alike on all processes, and call loader.set_epoch(epoch) where a sampler needs it.",
            evidence,
        )
    missing = len(wanted - counts)
    return _finding(
        first,
        "other rows",
        f"Step {step} trains on other rows than {reference.name}: {missing} of {len(expected)} are missing, "
        f"{len(twice)} are others.",
        "Do not select data by rank or number of processes in the script: the prepared loader does it. Seed random "
        "samples alike on all processes.",
        evidence,
    )


def _explain_loss(compared: Comparison, first: Difference) -> Finding:
    subject, reference, step = compared.subject, compared.reference, first.step
    expected = reference.loss(step) or 0.0
    own = [loss for rank in subject.readers if (loss := subject.loss_of(rank, step)) is not None]
    ratio = (subject.loss(step) or 0.0) / expected if expected else math.nan
    by_rank = ", ".join(f"{each:.6g}" for each in own)
    evidence = f"loss {subject.loss(step):.6g} ({by_rank} by rank), {reference.name} {expected:.6g}"
    if (weighted := _weighted(subject, step, expected)) is not None:
        return _finding(
            first,
            "mean per rank",
            "The loss is a mean over tokens (or other elements that count), and processes with few of them weigh as "
            "much as those with many.",
            "Return the sum of the losses and its weight: accelerator.backward(loss_sum, weight=tokens), or "
            "{'loss': sum, 'weight': tokens} from training_step.",
            evidence,
            f"weighted by {weighted}, the losses of the ranks give that of {reference.name}",
        )
    for factor, said in (
        (subject.shards, f"{subject.shards} times larger"),
        (1 / subject.shards, f"{subject.shards} times smaller"),
    ):
        if subject.shards > 1 and abs(ratio - factor) < _CLOSE * factor:
            return _finding(
                first,
                "loss scaled",
                f"The loss is {said} than in {reference.name}: the script multiplies or divides it by the number of "
                "processes.",
                "Remove this factor. Gradients are averaged over processes already.",
                evidence,
            )
    if padding := sum(each["padding"] for rank in subject.ranks for each in rank["steps"][step].get("batches", ())):
        return _finding(
            first,
            "padding rows",
            f"The last batch is filled with {padding} rows that were used before, and they count in the loss.",
            "Set drop_last=True, DataLoaderConfiguration(even_batches=False) with accelerator.join_uneven_inputs, or "
            "pass the number of rows to accelerator.backward(loss, weight=...).",
            evidence,
        )
    if subject.first.get("normalizations"):
        return _normalized(first, subject, evidence)
    if subject.first.get("unplaced"):
        return _finding(
            first,
            "random numbers",
            f"The step draws random numbers whose shape does not follow the batch: {subject.first['unplaced'][0]}.",
            "Draw them with the batch's number of rows as their first dimension: torch.randn(len(batch), ...).",
            evidence,
        )
    if names := subject.disagreeing(step, "buffers"):
        return _own_buffer(first, f"{names[0]} differs between processes", evidence)
    return _finding(
        first,
        "loss over the batch",
        "The loss of a batch is not the mean of its rows' losses: it compares rows with each other, as contrastive "
        "losses do, or depends on the batch size or the rank.",
        "Compute it over the rows of all processes: gather the embeddings with their gradients "
        "(torch.distributed.nn.functional.all_gather), and do not use the rank in the step.",
        evidence,
    )


def _normalized(first: Difference, subject: Run, evidence: str) -> Finding:
    return _finding(
        first,
        "batch normalization",
        f"{', '.join(subject.first['normalizations'])} normalizes with the statistics of each process's own rows.",
        "Trainer(sync_batchnorm=True), or torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).",
        evidence,
    )


def _weighted(subject: Run, step: int, expected: float) -> str | None:
    steps = [subject.ranks[rank]["steps"][step] for rank in subject.readers]
    batches, losses = [each.get("batches", ()) for each in steps], [each.get("losses", ()) for each in steps]
    number = len(batches[0])  # of micro-batches
    if not number or any(len(each) != number for each in (*batches, *losses)):
        return None
    for name in batches[0][0]["counts"]:
        weights = [[each["counts"].get(name, 0.0) for each in rank] for rank in batches]
        totals = [sum(each) for each in zip(*weights, strict=True)]
        if not all(totals) or all(each == weights[0] for each in weights):
            continue
        mean = sum(
            weights[rank][micro] * losses[rank][micro] / totals[micro]
            for rank in range(len(steps))
            for micro in range(number)
        )
        if abs(mean - expected) <= 1e-5 * max(abs(expected), 1e-2):
            return f"tensor {name}: {', '.join(f'{sum(each):.0f}' for each in weights)}"
    return None


def _explain_gradients(compared: Comparison, first: Difference) -> Finding:
    subject, reference, step = compared.subject, compared.reference, first.step
    names = subject.disagreeing(step, "gradients")
    if names:
        return _unreduced(subject, first, names)
    own, expected = subject.values(step, "gradients"), reference.values(step, "gradients")
    without = sorted(set(expected) - set(own))
    if without or set(own) - set(expected):
        which = without or sorted(set(own) - set(expected))
        return _finding(
            first,
            "other parameters",
            f"{_names(which)} {'have no gradient' if without else 'have gradients'} on several processes, but "
            f"{'have one' if without else 'have none'} in {reference.name}.",
            "Train the same parameters whatever the rank and the number of processes.",
        )
    sizes = {name: math.hypot(*values) for name, values in expected.items()}
    ratios = {name: math.hypot(*own[name]) / size for name, size in sizes.items() if size > 1e-12}
    middle = statistics.median(ratios.values()) if ratios else math.nan
    even = [name for name, ratio in ratios.items() if abs(ratio - middle) <= 0.01 * abs(middle)]
    if ratios and len(even) >= 0.8 * len(ratios) and abs(middle - 1) > _CLOSE:
        return _scaled(compared, first, middle)
    wrong = [name for name in own if relative({name: own[name]}, {name: expected[name]})[0] > max(first.allowed, 1e-4)]
    if subject.first.get("normalizations"):
        return _normalized(first, subject, f"largest difference in {first.name}")
    return _finding(
        first,
        "other gradients",
        f"The losses agree, but the gradients of {_names(wrong or [first.name])} do not.",
        "Look for code between loss and gradients that depends on the process: detach() or no_grad() under a condition "
        "on the rank, hooks, and gathers that cut the graph (accelerator.gather has no gradient).",
        f"relative difference {first.size:.2g}, rounding allows {first.allowed:.1g}",
    )


def _scaled(compared: Comparison, first: Difference, ratio: float) -> Finding:
    shards = compared.subject.shards
    said = f"{ratio:.4g} times those of {compared.reference.name}"
    if shards > 1 and abs(ratio - shards) <= 0.01 * shards:
        why = f"All gradients are {said}: they are summed over the {shards} processes instead of averaged."
        remedy = "Average them (ReduceOp.AVG), or divide the sum by the number of processes."
    elif shards > 1 and abs(ratio * shards - 1) <= 0.01:
        why = f"All gradients are {said}: they are divided by the number of processes twice."
        remedy = "Do not divide the loss or the gradients by the number of processes: gradients are averaged already."
    else:
        factor = ratio if ratio > 1 else 1 / ratio
        why = f"All gradients are {said}."
        remedy = (
            f"Look for a factor of {factor:.4g}, such as the number of accumulated micro-batches: accelerator.backward "
            "divides by it already."
        )
    return _finding(first, "gradients scaled", why, remedy)


def _explain_clipped(compared: Comparison, first: Difference) -> Finding:
    step = first.step
    subject, reference = compared.subject, compared.reference
    ratio = subject.scalar(step, "clipped") / max(reference.scalar(step, "clipped"), 1e-30)
    if any(abs(ratio - factor) <= 0.01 * factor for factor in (subject.shards, 1 / subject.shards) if factor != 1):
        return _scaled(compared, first, ratio)
    return _finding(
        first,
        "clipping",
        "The gradients agree before clipping and differ after it: each process clips by a norm of its own.",
        "Clip once all gradients are reduced and unscaled, by the norm of the whole model: "
        "accelerator.clip_grad_norm_(model.parameters(), ...), or Trainer(gradient_clip_val=...).",
        f"norm after clipping {ratio:.6g} times that of {reference.name}",
    )


def _explain_rates(compared: Comparison, first: Difference) -> Finding:
    subject, reference, step = compared.subject, compared.reference, first.step
    own, expected = subject.scalar(step, "rates"), reference.scalar(step, "rates")
    count = len(subject.ranks)
    ahead = [k for k in range(reference.steps) if k != step and reference.scalar(k, "rates") == own]
    is_ahead = count > 1 and step * count in ahead
    return _finding(
        first,
        "scheduler",
        f"The learning rate of step {step} is {own[0]:.6g}, in {reference.name} {expected[0]:.6g}"
        + (f": that of step {step * count}, as if it stepped once per process." if is_ahead else "."),
        "A prepared scheduler steps once per process for each optimizer step, so write schedules for one process: "
        "their length must not depend on the number. Accelerator(step_scheduler_per_process=False) steps it once.",
    )


def _explain_skipped(compared: Comparison, first: Difference) -> Finding:
    return _finding(
        first,
        "overflow",
        f"Step {first.step} was skipped on "
        f"{'several processes' if compared.subject.scalar(first.step, 'skipped') else compared.reference.name} only, "
        "because gradients overflowed in fp16.",
        "Use bf16, or a lower initial loss scale.",
    )


def _explain_weights(compared: Comparison, first: Difference) -> Finding:
    if names := compared.subject.first.get("not_held"):
        return _finding(
            first,
            "parameters not in the optimizer",
            f"The optimizer does not hold {_names(names)} of the prepared model.",
            "Create the optimizer from the model that is trained, and pass both to prepare.",
        )
    return _finding(
        first,
        "update",
        f"Gradients and learning rates agree, but the optimizer updates {first.name} differently.",
        "Look for state of the optimizer that depends on the process, and for weights that are changed outside of it.",
        f"relative difference {first.size:.2g}, rounding allows {first.allowed:.1g}",
    )


def _explain_buffers(compared: Comparison, first: Difference) -> Finding:
    if compared.subject.first.get("normalizations") and first.name.endswith(("running_mean", "running_var")):
        return _normalized(first, compared.subject, f"largest difference in {first.name}")
    return _own_buffer(first, f"{first.name} has another value than in {compared.reference.name}")


_EXPLAIN: dict[str, Callable[[Comparison, Difference], Finding]] = {
    "rows": _explain_rows,
    "loss": _explain_loss,
    "gradients": _explain_gradients,
    "clipped gradients": _explain_clipped,
    "learning rates": _explain_rates,
    "skipped steps": _explain_skipped,
    "weights": _explain_weights,
    "buffers": _explain_buffers,
}


def _logged(compared: Comparison) -> Finding | None:
    # Weights agree if this is called, so a difference comes from how values are logged.
    subject, reference, rounding = (
        {(each["step"], name): value for each in run.first["logged"] for name, value in each["values"].items()}
        for run in (compared.subject, compared.reference, compared.rounding)
    )
    for key, value in reference.items():
        own = subject.get(key)
        if own is None or (value != value and own != own):
            continue
        noise = abs(rounding.get(key, value) - value)
        scale = max(abs(value), 1e-2)
        if abs(own - value) > 4 * noise + (1e-2 if compared.is_low else 1e-5) * scale:
            step, name = key
            first = Difference(int(step or 0), "logged values", abs(own - value) / scale, str(name))
            return _finding(
                first,
                "metric",
                f"The logged value {name!r} is {own:.6g}, in {compared.reference.name} {value:.6g}, although the "
                "weights agree: it is a mean over parts of different sizes, counts padding, or is that of one process.",
                "Gather predictions with accelerator.gather_for_metrics, log through self.log(..., sync_dist=True), or "
                "use a metric of torchmetrics.",
            )
    return None


def notes(compared: Comparison, again: Run) -> list[str]:
    firsts = [run.first for run in (compared.subject, compared.reference, compared.single)]
    found = []
    if any(each.get("dropout") for each in firsts):
        found.append("Dropout was switched off in all runs, because its masks differ between processes.")
    if any(each.get("loaders") == 0 for each in firsts):
        found.append("No loader was passed to prepare, so rows could not be compared.")
    # Only of equal runs: frameworks draw seeds of their own on several processes.
    if apart := generators_apart(again, compared.single):
        found.append(
            f"Two runs on one process have other states of {apart}: the script seeds it differently each time. This "
            "does not count as a difference, because random numbers of steps are replaced."
        )
    return found

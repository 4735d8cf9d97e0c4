"""What a process holds under each strategy and precision: the formulas of docs/strategies.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from drivetrain.cli.model_size import ModelSize
from drivetrain.runtime.errors import ConfigurationError, nearest


@dataclass(frozen=True)
class PerParameter:
    """Bytes that one parameter takes in a precision.

    Attributes:
        weight: As it is stored.
        gradient: Its gradient.
        moment: One value that the optimizer keeps for it.
        gathered: As FSDP gathers it for its computation.
    """

    weight: float
    gradient: float
    moment: float
    gathered: float


PRECISIONS = {
    "32": PerParameter(4, 4, 4, 4),
    "bf16": PerParameter(4, 4, 4, 2),
    "fp16": PerParameter(4, 4, 4, 2),
    "bf16-true": PerParameter(2, 2, 2, 2),
    "fp16-true": PerParameter(2, 2, 2, 2),
    "64": PerParameter(8, 8, 8, 8),
    "fp8": PerParameter(4, 4, 4, 2),
}
# ZeRO keeps weights and gradients in 16 bits under these, beside a master copy in 32.
_IN_16_BITS = ("bf16", "fp16", "bf16-true", "fp16-true")

OPTIMIZERS = {"adamw": 2, "adam": 2, "adagrad": 1, "rmsprop": 1, "sgd_momentum": 1, "sgd": 0}
"""Values that an optimizer keeps for each parameter."""

INFERENCE = {
    "float32": (4.0, 4.0),
    "bfloat16": (2.0, 2.0),
    "float16": (2.0, 2.0),
    "int8": (1.0, 1.0),
    "int4": (0.5, 0.5),
    "nf4": (0.5 + 4 / 64, 2.0),
    "nf4_double": (0.5 + 1 / 64 + 4 / (64 * 256), 2.0),
}
"""Bytes of a parameter where nothing but the model is held: of the matrices of repeated layers, and of others.

bitsandbytes' 4 bits have a scale for each 64 values, which double quantisation stores in 8 bits; the rest is bfloat16.
"""


@dataclass(frozen=True)
class Use:
    """Bytes that one process holds in training.

    Attributes:
        weights: Parameters and buffers.
        gradients: Gradients, with their buckets.
        optimizer: What the optimizer keeps.
        gathered: Parameters of others, gathered for computation.
        activations: What a forward keeps for its backward.
        temporaries: What the optimizer's step takes for a moment, when activations are no longer there.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float = 0.0
    activations: float = 0.0
    temporaries: float = 0.0

    @property
    def total(self) -> float:
        """The most of them that are there at once."""
        kept = self.weights + self.gradients + self.optimizer
        return kept + max(self.gathered + self.activations, self.temporaries)


@dataclass(frozen=True)
class Case:
    """What is to be estimated.

    Attributes:
        size: The model.
        bytes: Of each parameter, in the precision.
        is_16_bit: Whether the precision computes in 16 bits, for engines that then keep weights in 16 bits.
        moments: Values that the optimizer keeps for each parameter.
        processes: How many share the work.
        activations: Bytes of activations of one process's batch.
    """

    size: ModelSize
    bytes: PerParameter
    is_16_bit: bool
    moments: int
    processes: int
    activations: float


def _copies(case: Case) -> Use:
    size, each = case.size, case.bytes
    return Use(
        size.parameters * each.weight + size.buffers,
        size.trainable * each.gradient,
        size.trainable * each.moment * case.moments,
        activations=case.activations,
    )


def _sharded(case: Case) -> Use:
    """FSDP: all is sharded; one unit is in use while the next is prefetched."""
    whole, count = _copies(case), case.processes
    units = min(2 * case.size.largest_unit, case.size.parameters) if count > 1 else 0
    return Use(
        (whole.weights - case.size.buffers) / count + case.size.buffers,
        whole.gradients / count,
        whole.optimizer / count,
        units * case.bytes.gathered,
        case.activations,
    )


def _zero(stage: int) -> Callable[[Case], Use]:
    """DeepSpeed: the optimizer holds a master copy in 32 bits beside its moments, in every precision."""

    def use(case: Case) -> Use:
        size, count = case.size, case.processes
        each = 2 if case.is_16_bit else 4
        optimizer = size.trainable * 4 * (case.moments + 1) / count
        weights, gradients, gathered = float(size.parameters * each), size.trainable * each / count, 0.0
        if stage == 3:
            weights /= count
            gathered = case.size.largest_unit * each if count > 1 else 0
        elif count > 1:
            gradients += size.parameters * each / 32  # the bucket in which gradients are reduced
        return Use(weights + size.buffers, gradients, optimizer, gathered, case.activations)

    return use


def _split_layers(case: Case) -> Use:
    """Tensor parallel: matrices of repeated layers are split, the rest is whole."""
    whole, count = _copies(case), case.processes
    share = 1 - case.size.matrices / max(1, case.size.parameters) * (1 - 1 / count)
    return Use(
        (whole.weights - case.size.buffers) * share + case.size.buffers,
        whole.gradients * share,
        whole.optimizer * share,
        activations=case.activations,
    )


def _stages(case: Case) -> Use:
    """Pipeline: a share of the layers, and activations of as many micro-batches as there are stages."""
    whole, count = _copies(case), case.processes
    return Use(whole.weights / count, whole.gradients / count, whole.optimizer / count, activations=case.activations)


def _split_sequences(case: Case) -> Use:
    """Context parallel: sharded as by FSDP, with a share of every sequence."""
    sharded = _sharded(case)
    return Use(
        sharded.weights, sharded.gradients, sharded.optimizer, sharded.gathered, case.activations / case.processes
    )


STRATEGIES: dict[str, Callable[[Case], Use]] = {
    "single": _copies,
    "ddp": _copies,
    "fsdp": _sharded,
    "deepspeed_stage_1": _zero(1),
    "deepspeed_stage_2": _zero(2),
    "deepspeed_stage_3": _zero(3),
    "tp": _split_layers,
    "cp": _split_sequences,
    "pp": _stages,
}


def estimate_training(
    size: ModelSize,
    strategy: str,
    precision: str = "32",
    processes: int = 1,
    optimizer: str = "adamw",
    activations: float = 0.0,
    temporaries: float = 0.0,
) -> Use:
    """Bytes that one process holds in training.

    Args:
        size: The model.
        strategy: One of `STRATEGIES`.
        precision: One of `PRECISIONS`.
        processes: How many share the work.
        optimizer: One of `OPTIMIZERS`.
        activations: Bytes of activations of one process's batch.
        temporaries: Bytes that the optimizer's step takes for a moment where nothing is sharded.

    Raises:
        ConfigurationError: A name that is none of these.
    """
    choices: tuple[tuple[str, str, Mapping[str, object]], ...] = (
        ("strategy", strategy, STRATEGIES),
        ("precision", precision, PRECISIONS),
        ("optimizer", optimizer, OPTIMIZERS),
    )
    for what, given, allowed in choices:
        if given not in allowed:
            raise ConfigurationError(
                f"{what} is {given!r}, but must be one of {', '.join(allowed)}.{nearest(given, allowed)}", code="DT-001"
            )
    case = Case(
        size,
        PRECISIONS[precision],
        precision in _IN_16_BITS,
        OPTIMIZERS[optimizer],
        processes,
        activations,
    )
    use = STRATEGIES[strategy](case)
    share = use.gradients / max(1.0, _copies(case).gradients)
    return replace(use, temporaries=temporaries * share)

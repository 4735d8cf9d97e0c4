"""Scripts for `drivetrain verify`, with the cause that it has to name. Sound scripts have none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """A script to verify.

    Attributes:
        script: File name of the script in this folder.
        case: Its argument.
        cause: The cause to name. None if the script is sound.
        quantity: The quantity that differs first.
        step: The first step that differs.
        flags: Flags before the script.
        needs: Package that the script imports.
    """

    script: str
    case: str
    cause: str | None = None
    quantity: str = ""
    step: int = 0
    flags: tuple[str, ...] = ()
    needs: str = ""

    @property
    def name(self) -> str:
        return " ".join((*self.flags, Path(self.script).stem, self.case))

    @property
    def command(self) -> list[str]:
        """Arguments of `drivetrain verify`."""
        return ["--steps", "4", "--cpu", *self.flags, str(HERE / self.script), self.case]


def _raw(case: str, cause: str | None = None, quantity: str = "", step: int = 0, *flags: str) -> Case:
    return Case("raw_loop.py", case, cause, quantity, step, flags)


def _task(case: str, cause: str | None = None, quantity: str = "", step: int = 0, *flags: str) -> Case:
    return Case("trainer_task.py", case, cause, quantity, step, flags)


def _accelerate(case: str, cause: str | None = None, quantity: str = "", step: int = 0) -> Case:
    return Case("accelerate_loop.py", case, cause, quantity, step, ("--as", "accelerate"), "accelerate")


def _lightning(case: str, cause: str | None = None, quantity: str = "", step: int = 0) -> Case:
    return Case("lightning_task.py", case, cause, quantity, step, ("--as", "lightning"), "lightning")


SOUND = [
    *map(_raw, ("plain", "sgd", "clipping", "accumulation", "no_shuffle", "drop_last", "generator", "noise", "stream")),
    *map(_raw, ("batch_divided", "module_not_prepared", "parameter_outside_of_forward", "clock_in_a_name", "epochs")),
    _raw("vocabulary"),
    *map(
        _task,
        ("plain", "vision_transformer", "clipped", "averaged", "augmented", "workers", "accumulated", "own_sampler"),
    ),
    *map(_task, ("language", "language_accumulated", "tied", "gan", "epochs")),
    *map(_accelerate, ("plain", "bf16", "accumulation", "no_clipping", "epochs")),
    *map(_lightning, ("plain", "clipped", "epochs_without_a_seed")),
    *(
        Case(script, case, flags=("--strategies", strategy, "--precision", precision))
        for script, case in (("raw_loop.py", "plain"), ("trainer_task.py", "vision_transformer"))
        for strategy in ("ddp", "fsdp", "deepspeed:1", "deepspeed:2", "deepspeed:3")
        for precision in ("32", "bf16")
    ),
]
"""Scripts that train the same on two processes."""

MISTAKES = [
    _raw("divided_loss", "loss scaled", "loss"),
    _raw("multiplied_loss", "loss scaled", "loss"),
    _raw("token_mean", "mean per rank", "loss", 1),
    _raw("contrastive", "loss over the batch", "loss"),
    _raw("branch_on_rank", "loss over the batch", "loss"),
    _raw("branch_on_data", "loss over the batch", "loss", 2),
    _raw("batch_norm", "batch normalization", "loss"),
    _raw("detached_on_a_rank", "other gradients", "gradients"),
    _raw("loader_not_prepared", "loader not prepared", "rows"),
    _raw("ready_batches", "loader not prepared", "rows"),
    _raw("rank_arithmetic", "other rows", "rows"),
    _raw("stream_by_rank", "error", "run"),
    _raw("collective_on_a_rank", "hang", "run"),
    _raw("around_the_wrapper", "error", "run"),
    _raw("no_sync", "gradients not reduced", "gradients"),
    _raw("vocabulary_row_of_each_rank", "gradients not reduced", "gradients"),
    _raw("vocabulary_row_summed", "other gradients", "gradients"),
    _raw("summed_again", "gradients scaled", "gradients"),
    _raw("clipped_by_the_world", "clipping", "clipped gradients"),
    _raw("clipped_by_shard", "other gradients", "gradients", 0, "--use_fsdp"),
    _raw("weights_on_a_rank", "drift", "weights", 1),
    _raw("seed_of_the_world", "initial weights", "initial weights"),
    _raw("schedule_of_processes", "scheduler", "learning rates", 1),
    _raw("batch_divided_but_not_the_schedule", "scheduler", "learning rates", 1),
    _raw("buffer_of_each_rank", "buffer of one rank", "buffers"),
    _raw("metric_of_a_rank", "metric", "logged values"),
    _raw("data_of_the_clock", "nondeterminism", "rows"),
    _task("batch_norm", "batch normalization", "loss"),
    _task("center", "buffer of one rank", "loss"),
    _task("skipped_on_a_rank", "loss over the batch", "loss"),
    _task("seed_of_the_clock", "nondeterminism", "loss"),
    _task("gathered_without_gradient", "other gradients", "gradients"),
    _raw("optimizer_of_another_model", "parameters not in the optimizer", "weights"),
    _task("token_mean", "mean per rank", "loss"),
    _task("token_mean_accumulated", "mean per rank", "loss"),
    _task("metric_of_a_rank", "metric", "logged values", 4),
    _task("gan_plain_backward", "error", "run"),
    _task("gan_clipped_by_hand", "error", "run"),
    _accelerate("schedule_of_processes", "scheduler", "learning rates", 1),
    _accelerate("unwrapped", "error", "run"),
    _accelerate("times_processes", "loss scaled", "loss"),
    _accelerate("padding_counted", "metric", "logged values"),
    _accelerate("metric_of_a_rank", "metric", "logged values"),
    _lightning("contrastive", "loss over the batch", "loss"),
    _lightning("divided", "loss scaled", "loss"),
]
"""Scripts with a planted mistake."""

NOT_COMPARABLE = {
    "trains_nothing": "no Trainer or Accelerator",
    "fails": "Run on one process, the script failed: ValueError: the script's own mistake",
    "asks": "the script asked for input, but its stdin is closed. Pass what it asks for as arguments.",
    "too_large": "the script ran out of memory.",
    "killed": "the script ran out of memory.",
}
"""Arguments of `raw_loop.py` that make it impossible to compare runs, and what the message says."""

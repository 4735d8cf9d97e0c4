"""What the lane runs under ours; `python -m tests.compat.cases` writes it into docs/compatibility-accelerate.md."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.compat.pages import written
from tests.pool import ROOT

PAGE = ROOT / "docs" / "compatibility-accelerate.md"


@dataclass(frozen=True)
class Program:
    """A program over a package, run with the original Accelerate and with ours.

    Attributes:
        name: The program's file in tests/compat/programs.
        what: What of which package it runs.
        processes: How many.
        options: What the program is asked for.
        reference: What the original is asked for, where it is something else.
        tolerance: How far the losses may be apart, relative to those above 1; 0 is equal to the last bit.
        reason: Why the original is asked for something else, or losses differ at all.
    """

    name: str
    what: str
    processes: int
    options: tuple[str, ...] = ()
    reference: tuple[str, ...] | None = None
    tolerance: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        return self.named(self.options)

    def named(self, options: Iterable[str]) -> str:
        """What a run of the program with some options is called."""
        return "-".join([self.name.removesuffix(".py"), *options, str(self.processes)])

    @property
    def original(self) -> tuple[str, ...]:
        """What the original is asked for."""
        return self.options if self.reference is None else self.reference


@dataclass(frozen=True)
class Script:
    """One of Accelerate's own test scripts.

    Attributes:
        name: Its path below accelerate/test_utils/scripts.
        processes: How many.
        unlike: Checks that do not hold here, each with the reason.
        runs: The arguments of each of its runs, which share a folder.
        before: The file of tests/compat that gives it what it lacks here.
        starts: How many processes it starts by itself, where that is its purpose.
        on_cpu: Why it runs on the CPU alone, if it does.
    """

    name: str
    processes: int
    unlike: dict[str, str] = field(default_factory=dict)
    runs: tuple[tuple[str, ...], ...] = ((),)
    before: str = ""
    starts: int = 0
    on_cpu: str = ""

    def __str__(self) -> str:
        return f"{Path(self.name).stem}-{self.processes}"


_ON_CPU = (
    "With FSDP or DeepSpeed on a CPU, Accelerate falls back to DDP, while drivetrain shards. The losses are equal."
)
_SHARDED_NORM = (
    "With FSDP or DeepSpeed and gradient clipping, drivetrain sums the norm shard by shard, so its last bit may "
    "differ. Without clipping the losses are equal."
)
_NUMBERED = (
    "On two processes, denoising-diffusion-pytorch runs without random flips, because under Accelerate the workers of "
    "all processes draw the same numbers. Accelerate does not split its batches, so it gets half the batch size there. "
    "It also numbers CPUs (`cpu:0`), for which the test teaches torch to load files."
)


def _features(processes: int, *names: str, **differing: Any) -> list[Program]:
    what = "Accelerate's examples by feature: `{}`"
    return [Program("by_feature.py", what.format(name), processes, (name,), **differing) for name in names]


_TRAINER = "`transformers.Trainer`: train, evaluate, predict, save, resume"
_SFT = "`trl.SFTTrainer`: train, evaluate, save"
_PEFT = "peft: the loop of its examples"
_NOISE = "diffusers: `train_unconditional`, with resume"
_DENOISING = "denoising-diffusion-pytorch: `Trainer`, train, save, load"
_CLM = "transformers: `run_clm_no_trainer`, with resume"
_IMAGES = "Accelerate's `complete_cv_example`, with resume"
# One of each, and those that differ with the number of processes on both.
_ALONE = ("nlp", "complete_nlp", "gradient_accumulation", "checkpointing", "memory", "profiler", "cross_validation")
_TOGETHER = (
    "nlp",
    "complete_nlp",
    "gradient_accumulation",
    "automatic_gradient_accumulation",
    "autoregressive",
    "checkpointing",
    "tracking",
    "early_stopping",
    "local_sgd",
    "ddp_comm_hook",
    "multi_process_metrics",
    "cross_validation",
    "schedule_free",
)

PROGRAMS = (
    Program("transformers_trainer.py", _TRAINER, 1),
    Program("transformers_trainer.py", _TRAINER, 1, ("bf16",)),
    Program("transformers_trainer.py", _TRAINER, 2),
    Program("transformers_trainer.py", _TRAINER, 2, ("fsdp",), (), 1e-6, _SHARDED_NORM),
    Program("transformers_trainer.py", _TRAINER, 2, ("deepspeed",), (), 1e-6, _SHARDED_NORM),
    Program("trl_sft.py", _SFT, 1),
    Program("trl_sft.py", _SFT, 2),
    Program("trl_sft.py", _SFT, 2, ("peft",)),
    Program("peft_loop.py", _PEFT, 1),
    Program("peft_loop.py", _PEFT, 2),
    Program("diffusers_unconditional.py", _NOISE, 1),
    Program("diffusers_unconditional.py", _NOISE, 2),
    Program("denoising_diffusion.py", _DENOISING, 1),
    Program(
        "denoising_diffusion.py", _DENOISING, 2, ("unflipped", "split"), ("unflipped", "numbered"), reason=_NUMBERED
    ),
    Program("clm_no_trainer.py", _CLM, 1),
    Program("clm_no_trainer.py", _CLM, 2),
    Program("images.py", _IMAGES, 1),
    Program("images.py", _IMAGES, 2),
    *_features(1, *_ALONE),
    *_features(2, *_TOGETHER),
    *_features(2, "fsdp", "deepspeed", reference=("nlp",), reason=_ON_CPU),
)

_INSTANCE = "State belongs to the instance, so an Accelerator still works after the shared state was reset."
_SHORT = "The gradient of a short last window is the mean over its own micro-batches, not over `num_steps`."
_SAMPLER = "The loader's samplers are kept and only their output is sharded."

_SAVED_AND_RESUMED = (
    ("--output_dir", ".", "--partial_train_epoch", "1"),
    ("--output_dir", ".", "--resume_from_checkpoint", "epoch_0"),
)
_PERFORMANCE = (("--output_dir", ".", "--performance_lower_bound", "0.9"),)

_FORKS = "it forks, which a process may not that has started a device"

_READS_LOGGERS = "on a device it looks for a logger by the name of Accelerate's own module"

SCRIPTS = (
    Script("test_script.py", 1, {"test_reinstantiated_state": _INSTANCE}),
    Script(
        "test_script.py",
        2,
        {"test_reinstantiated_state": _INSTANCE, "check_seedable_sampler_in_batch_sampler_shard": _SAMPLER},
    ),
    Script("test_sync.py", 1),
    Script("test_sync.py", 2, {"test_gradient_accumulation_with_opt_and_scheduler": _SHORT}),
    Script("test_ops.py", 1),
    Script("test_ops.py", 2),
    Script("test_distributed_data_loop.py", 2),
    Script("test_ddp_comm_hook.py", 2, before="on_cpu.py"),
    Script("test_merge_weights.py", 2, before="whole_tensors.py"),
    Script("test_notebook.py", 1, starts=2, before="not_yet_imported.py", on_cpu=_FORKS),
    Script("test_cli.py", 1),
    Script("external_deps/test_metrics.py", 1, on_cpu=_READS_LOGGERS),
    Script("external_deps/test_metrics.py", 2, on_cpu=_READS_LOGGERS),
    Script("external_deps/test_checkpointing.py", 1, runs=_SAVED_AND_RESUMED, before="without_hub.py"),
    Script("external_deps/test_checkpointing.py", 2, runs=_SAVED_AND_RESUMED, before="without_hub.py"),
    Script("external_deps/test_performance.py", 1, runs=_PERFORMANCE, before="without_hub.py"),
    Script("external_deps/test_performance.py", 2, runs=_PERFORMANCE, before="without_hub.py"),
)

GIVEN = {
    "on_cpu.py": "Without a GPU, DDP ignores the device numbers of the script",
    "whole_tensors.py": "`torch.allclose` is replaced by one that gathers sharded tensors, which a GPU needs too",
    "not_yet_imported.py": "bitsandbytes is treated as not imported, because peft imports it in a shared process",
    "without_hub.py": "Data, metric and model are created locally, without the hub",
}


def table() -> str:
    """The two tables of the page."""
    lines = [
        "| program | processes | options | losses | lines changed |",
        "|---|---:|---|---|---:|",
    ]
    for program in PROGRAMS:
        losses = "equal" if not program.tolerance else f"equal to {program.tolerance:g}"
        options = "fp32" if program.name == "by_feature.py" else ", ".join(program.options) or "fp32"
        lines.append(f"| {program.what} | {program.processes} | {options} | {losses} | 0 |")
    notes = {program.reason for program in PROGRAMS if program.reason}
    lines += ["", *(f"- {note}" for note in sorted(notes)), ""] if notes else [""]
    lines += ["| test script of Accelerate | processes | checks that pass | lines changed |", "|---|---:|---|---:|"]
    for script in SCRIPTS:
        held = "all" if not script.unlike else "all but " + ", ".join(f"`{name}`" for name in script.unlike)
        given = f". {GIVEN[script.before]}" if script.before else ""
        lines.append(f"| `{Path(script.name).name}` | {script.starts or script.processes} | {held}{given} | 0 |")
    reasons = {name: reason for script in SCRIPTS for name, reason in script.unlike.items()}
    lines += ["", "Checks that fail because of an intended difference:", ""]
    lines += [f"- `{name}`: {reason}" for name, reason in reasons.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), table()))

"""Run a script on several processes and on one, and check that it trained the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from drivetrain.runtime.environment import RESUME_VARIABLE
from drivetrain.runtime.errors import ConfigurationError, DrivetrainError
from drivetrain.runtime.exit_codes import RESUME_EXIT_CODE
from drivetrain.verification.causes import Finding, diagnose, notes
from drivetrain.verification.compare import QUANTITIES, Comparison, Run

_HANG_SECONDS = 60
_HANGS = "a rank waits for one that does not come."
_KEPT = {"cpu": "--cpu", "stand_in": "--as", "gradient_accumulation_steps": "--gradient_accumulation_steps"}
"""Flags of the launcher that apply to the run on one process too."""


class ComparisonError(DrivetrainError):
    """Raised by `verify` if a script's runs cannot be compared. The message says what to change."""


class ScriptFailed(ComparisonError):
    """Raised by `verify` if the script itself fails in one of the runs, for example with an exception.

    Args:
        message: The message.
        reason: Why the script failed.
        run: The records that it wrote before the failure.
        processes: Number of processes.
    """

    def __init__(self, message: str, reason: str, run: Run, processes: int) -> None:
        super().__init__(message)
        self.reason, self.run, self.processes = reason, run, processes

    @property
    def traceback(self) -> str:
        """Traceback of the first rank that failed, or an empty string."""
        return next((rank["traceback"] for rank in self.run.ranks if rank.get("traceback")), "")


class OutOfMemory(ScriptFailed):
    """Raised if a run of the script did not fit into memory."""


@dataclass
class VerificationResult:
    """Result of `verify`: whether a script trains equally in two runs, and if not, why.

    Attributes:
        verdict: `"identical"`, `"same"` up to rounding, or `"different"`.
        steps: Number of compared optimizer steps.
        processes: Number of processes of the run that was judged.
        strategy: Name of its strategy.
        precision: Name of its precision.
        finding: The first difference and its cause, or None.
        table: Largest difference and largest allowed one of each quantity over all steps.
        notes: Remarks on how the runs were compared.
    """

    verdict: Literal["identical", "same", "different"]
    steps: int
    processes: int
    strategy: str
    precision: str
    finding: Finding | None
    table: dict[str, tuple[float, float]]
    notes: list[str] = field(default_factory=list)
    comparison: Comparison | None = field(default=None, repr=False)

    @property
    def is_same(self) -> bool:
        return self.verdict != "different"

    @classmethod
    def of(cls, comparison: Comparison, again: Run, precision: str) -> VerificationResult:
        """Create the result of `comparison`, using the repeated run `again` to recognize random differences.

        Args:
            comparison: The comparison.
            again: The run on one process, a second time.
            precision: Precision of the run that is judged.
        """
        finding = diagnose(comparison, again)
        table = {}
        for quantity in QUANTITIES:
            of = list(comparison.of(quantity))
            if of:
                worst = max(of, key=lambda each: each.size - each.allowed)
                table[quantity] = (worst.size, worst.allowed)
        subject, reference = comparison.subject, comparison.reference
        same: Literal["identical", "same"] = "identical" if comparison.is_identical else "same"
        return cls(
            "different" if finding is not None else same,
            min(subject.steps, reference.steps),
            len(subject.ranks),
            str(subject.first.get("strategy")),
            precision,
            finding,
            table,
            notes(comparison, again),
            comparison,
        )

    @classmethod
    def failed(cls, error: ScriptFailed) -> VerificationResult:
        """Create the result of `verify` for a script that runs on one process, but fails on several."""
        run = error.run
        hangs = error.reason.startswith(_HANGS)
        finding = Finding(
            "hang" if hangs else "error",
            run.steps,
            "run",
            error.reason[0].upper() + error.reason[1:],
            "Let all ranks call the same collectives (gather, reduce, save, forward and backward of the model), also "
            "those that are hidden in functions under a condition on the rank."
            if hangs
            else "Mend what the message names.",
            [error.traceback] if error.traceback else [],
        )
        first = run.first if run.ranks else {}
        strategy, precision = str(first.get("strategy", "")), str(first.get("precision", ""))
        return cls("different", run.steps, error.processes, strategy, precision, finding, {})

    def assert_same(self) -> None:
        """Raise `AssertionError`, with the cause, if the two runs of the script differ beyond rounding errors."""
        if not self.is_same:
            raise AssertionError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return this result as a dict of plain values, which can be written as JSON."""
        kept = {name: value for name, value in vars(self).items() if name not in ("comparison", "finding")}
        return {**kept, "finding": None if self.finding is None else asdict(self.finding)}

    def __str__(self) -> str:
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        on = f"{processes} ({self.strategy}, {self.precision})" if self.strategy else processes
        other = "one process" if self.comparison is None else self.comparison.reference.name
        found = self.finding
        if found is not None:
            fails = f"different: the script fails on {on} and not on one process."
            lines = [
                fails
                if found.quantity == "run"
                else f"different: {on} and {other} differ from step {found.step} on, first in {found.quantity}.",
                "",
                f"Cause:    {found.sentence}",
                f"Change:   {found.remedy}",
                *(f"Evidence: {each}" for each in found.evidence),
            ]
        else:
            said = "identical" if self.verdict == "identical" else "same up to rounding"
            lines = [f"{said}: {self.steps} steps on {on} give the numbers of {other}."]
        rows = [("largest relative difference", "found", "allowed")] if self.table else []
        rows += [(name, f"{size:.2g}", f"{allowed:.2g}") for name, (size, allowed) in self.table.items()]
        lines += ["", *(f"  {name:<28} {size:>9} {allowed:>9}" for name, size, allowed in rows)]
        return "\n".join([*lines, *(["", *self.notes] if self.notes else [])])


def verify(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    num_processes: int | None = None,
    strategy: str | None = None,
    precision: str | None = None,
    uneven: bool = False,
    resume: bool = False,
    flags: Sequence[str] = (),
    against: Sequence[str] | None = None,
    compare: str | os.PathLike[str] | None = None,
    record: str | os.PathLike[str] | None = None,
    options: Sequence[str] = (),
    steps: int = 8,
    timeout: float = 600.0,
    progress: Callable[[str], Any] = lambda _: None,
) -> VerificationResult:
    """Run a script's first optimizer steps on several processes and on one, and compare everything that they compute.

    The script is not changed. It runs four times:

    1. as the arguments say;
    2. on one process with `strategy="single"`, in float32 and with the same global batches;
    3. the same again, which shows whether the script is deterministic;
    4. once more on one process, with the rows of each batch reversed and in the precision of the first run, which shows
       how large rounding is.

    The first run may differ from the second by four times the rounding. Experiment trackers get nothing, and
    checkpoints are written to a temporary folder.

    Args:
        script: Path of the script, which uses a Trainer or an Accelerator.
        arguments: Arguments of the script.
        num_processes: Number of processes of the run to judge. None leaves it to the flags, or else 2.
        strategy: Strategy of this run in place of the script's: `"ddp"`, `"fsdp"`, `"deepspeed:3"`, or sizes of
            `Parallel`, such as `"pp2"` or `"fsdp+tp2"`.
        precision: Precision of this run in place of the script's, such as `"bf16-mixed"`.
        uneven: True to cut epochs to two and a half batches of all processes and a row, so that the last one is uneven.
        resume: True to stop this run after half of the steps, resume it, and compare it with one that is not stopped.
            The script needs a Trainer.
        flags: Further flags of `drivetrain launch` for this run, such as `["--use_fsdp"]`.
        against: Flags of a run to compare with in place of the one on one process.
        compare: Folder in which an earlier call has recorded its run, to compare with in place of one process.
        record: Folder to record this run in, for later calls with `compare`.
        options: Options of the script's `TrainerCLI` to set in all runs, such as `["model.layers=2"]`.
        steps: Number of steps of each optimizer.
        timeout: Seconds after which a run is ended.
        progress: Called with a line before each run.

    Returns:
        The result. `result.assert_same()` raises if there is a difference.

    Raises:
        ComparisonError: The script failed, took no step of a prepared optimizer, or cannot be run on one process.
        ConfigurationError: A flag or an argument is not valid.

    Example:
        ```python
        from drivetrain import verify

        def test_training_is_the_same_on_two_processes():
            verify("train.py", ["--epochs", "1"], num_processes=2).assert_same()
        ```
    """
    common = {"options": options, "steps": steps, "timeout": timeout, "progress": progress, "uneven": uneven}
    with _Runs.open(script, arguments, **common) as runs:
        given = _with_processes(list(flags), num_processes)
        return runs.judge(given, strategy, precision, resume=resume, against=against, compare=compare, record=record)


def verify_all(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    world_sizes: Sequence[int] = (2,),
    strategies: Sequence[str | None] = (None,),
    precision: str | None = None,
    uneven: bool = False,
    flags: Sequence[str] = (),
    options: Sequence[str] = (),
    steps: int = 8,
    timeout: float = 600.0,
    progress: Callable[[str], Any] = lambda _: None,
) -> dict[tuple[str, int], VerificationResult | ComparisonError]:
    """Call `verify` for every combination of `strategies` and `world_sizes` on a script, and return all results.

    All combinations share the runs on one process.

    Args:
        script: Path of the script.
        arguments: Arguments of the script.
        world_sizes: Numbers of processes.
        strategies: Strategies as for `verify`.
        precision: As for `verify`.
        uneven: As for `verify`.
        flags: As for `verify`.
        options: As for `verify`.
        steps: As for `verify`.
        timeout: As for `verify`.
        progress: As for `verify`.

    Returns:
        The result, or the error of a failed comparison, by strategy and number of processes.
    """
    found: dict[tuple[str, int], VerificationResult | ComparisonError] = {}
    common = {"options": options, "steps": steps, "timeout": timeout, "progress": progress, "uneven": uneven}
    with _Runs.open(script, arguments, **common) as runs:
        for name in strategies:
            for count in world_sizes:
                try:
                    result: VerificationResult | ComparisonError = runs.judge(
                        _with_processes(list(flags), count), name, precision
                    )
                except ComparisonError as error:
                    result = error
                found[name or "script's", count] = result
    return found


def _divides_batches(subject: Run, reference: Run) -> bool:
    rows, expected = subject.rows(0), reference.rows(0)
    if not rows or not expected or subject.shards == 1 or not subject.first["loaders"]:
        return False
    return sum(map(len, rows)) * subject.shards == sum(map(len, expected))


def _with_processes(flags: list[str], count: int | None) -> list[str]:
    if count is not None:
        return [*flags, "--num_processes", str(count)]
    named = ("--num_processes", "--num-processes", "-n", "--nproc_per_node", "--config_file", "--config-file")
    return flags if any(flag.split("=")[0] in named for flag in flags) else [*flags, "--num_processes", "2"]


def launch_options(given: Sequence[str]) -> dict[str, Any]:
    from drivetrain.cli.launch import launch

    return launch.make_context("drivetrain verify", list(given)).params


def _processes(flags: Sequence[str]) -> int:
    return int(launch_options([*flags, __file__])["num_processes"] or 1)


@dataclass
class _Runs:
    # The fields are arguments of `verify`. Each run has a folder of its own below `folder`.
    script: str
    arguments: list[str]
    folder: Path
    options: Sequence[str]
    steps: int
    timeout: float
    progress: Callable[[str], Any]
    uneven: bool
    _alone: dict[tuple[Any, ...], dict[str, Run]] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def open(cls, script: str | os.PathLike[str], arguments: Sequence[str], **given: Any) -> Iterator[_Runs]:
        with tempfile.TemporaryDirectory(prefix="drivetrain_verify_", ignore_cleanup_errors=True) as folder:
            yield cls(os.fspath(script), list(arguments), Path(folder), **given)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigurationError(f"steps={self.steps} is not valid. Compare at least 1 step.")
        for option in self.options:
            if "=" not in option:
                raise ConfigurationError(f"--set {option} is not valid. Use NAME=VALUE, as in --set model.layers=2.")

    def judge(
        self,
        flags: list[str],
        strategy: str | None,
        precision: str | None,
        *,
        resume: bool = False,
        against: Sequence[str] | None = None,
        compare: str | os.PathLike[str] | None = None,
        record: str | os.PathLike[str] | None = None,
    ) -> VerificationResult:
        kept = self._kept(flags)
        asked: dict[str, Any] = {"strategy": strategy, "precision": precision}
        asked["uneven_over"] = _processes(flags) if self.uneven else None
        self.progress(f"The script with {' '.join(flags)}")
        try:
            subject = self._resumed(flags, asked) if resume else self._run("the run", flags, **asked)
        except OutOfMemory:
            raise
        except ScriptFailed as error:
            if strategy is not None and "ConfigurationError:" in error.reason:
                raise  # the strategy needs an option that the script does not set, such as a tp_plan
            self.progress("It failed. The script on one process")
            self._run("one process", ["--num_processes", "1", *kept], strategy="single", precision="32")
            return VerificationResult.failed(error)
        if record is not None:
            subject.write(Path(record))
        low = str(subject.first.get("precision", "32"))
        alone = self._on_one_process(kept, subject, low)
        reference = alone["reference"]
        if resume:
            self.progress("The script without a stop")
            reference = self._run("the run without a stop", flags, **asked, steps=subject.steps)
        elif compare is not None:
            reference = Run.read(Path(compare), "the recorded run")
            if not reference.ranks:
                raise ComparisonError(f"{os.fspath(compare)} holds no recorded run. Record one with --record.")
        elif against is not None:
            other = _with_processes([*kept, *against], None)
            self.progress(f"The script with {' '.join(other)}")
            reference = self._run("the other run", other)
            if subject.shards != reference.shards:
                raise ComparisonError(
                    f"The run trains on {subject.shards} batches in each step and the other run on {reference.shards}. "
                    "Compare runs with the same number of data-parallel processes."
                )
        comparison = Comparison(subject, reference, alone["reference"], alone["rounding"])
        return VerificationResult.of(comparison, alone["again"], low)

    def _resumed(self, flags: list[str], asked: dict[str, Any]) -> Run:
        half = self.steps // 2
        if half < 1:
            raise ConfigurationError(f"--resume stops after half of the steps, so it needs 2 steps, got {self.steps}.")
        # A Trainer checks for signals only periodically, so it takes a few more steps.
        first = self._run("the stopped run", flags, **asked, stop_after=half, steps=10**9)
        self.progress(f"The same, resumed after {first.steps} steps")
        again = {RESUME_VARIABLE: "auto"}
        second = self._run("the resumed run", flags, again, **asked, steps=half, output=first.folder)
        ranks = [
            {**one, **{name: one[name] + other[name] for name in ("steps", "logged")}}
            for one, other in zip(first.ranks, second.ranks, strict=True)
        ]
        return Run(ranks, "the resumed run")

    def _on_one_process(self, flags: list[str], subject: Run, low: str) -> dict[str, Run]:
        uneven_over = len(subject.ranks) if self.uneven else None
        key = subject.shards, len(subject.ranks), low, uneven_over
        if key not in self._alone:
            self.progress("The script on one process, three times")
            common = {"strategy": "single", "uneven_over": uneven_over}
            found = self._at_once(flags, low, shards=subject.shards, processes=len(subject.ranks), **common)
            if _divides_batches(subject, found["reference"]):
                found = self._at_once(flags, low, shards=1, **common)
            self._alone[key] = found
        return self._alone[key]

    def _at_once(self, flags: list[str], low: str, **asked: Any) -> dict[str, Run]:
        runs: dict[str, dict[str, Any]] = {
            "reference": {"precision": "32"},
            "again": {"precision": "32"},
            "rounding": {"precision": low, "reversed": True},
        }
        alone = ["--num_processes", "1", *flags]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            started = {name: pool.submit(self._run, "one process", alone, **asked, **own) for name, own in runs.items()}
            # They may fail because they write to the same files. Then they run one after the other.
            with suppress(ScriptFailed):
                return {name: future.result() for name, future in started.items()}
        return {name: self._run("one process", alone, **asked, **own) for name, own in runs.items()}

    def _kept(self, flags: list[str]) -> list[str]:
        from drivetrain.launch.options import LaunchOptions

        parsed = launch_options([*flags, self.script, *self.arguments])
        if parsed["module"] or parsed["no_python"]:
            raise ConfigurationError("drivetrain verify runs a Python file. Pass the path of the file, without -m.")
        LaunchOptions().check_script(parsed["script"])
        kept: list[str] = []
        for name, flag in _KEPT.items():
            if parsed[name] is not None:
                kept += [flag] if parsed[name] is True else [flag, str(parsed[name])]
        return kept

    def _run(self, name: str, flags: Sequence[str], variables: Mapping[str, str] | None = None, **asked: Any) -> Run:
        # Error messages call the run `name`. `asked` holds fields of `Recording`.
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        request = folder / "recording.json"
        request.write_text(
            json.dumps({"steps": self.steps, **asked, "options": list(self.options), "folder": str(folder)})
        )
        command = [sys.executable, "-m", "drivetrain", "launch", "--hang_timeout", str(_HANG_SECONDS), *flags]
        process = subprocess.Popen(
            [*command, "-m", "drivetrain.verification.record", str(request), self.script, *self.arguments],
            env={"OMP_NUM_THREADS": "1", **os.environ, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=self.timeout)
        except subprocess.TimeoutExpired:
            _end(process)
            raise ComparisonError(
                f"{name.capitalize()} took fewer than {self.steps} steps in {self.timeout:.0f} s. Pass --timeout "
                "SECONDS, or arguments of the script that make the model or the data smaller."
            ) from None
        except BaseException:
            _end(process)
            raise
        run = Run.read(folder, name)
        if any(rank.get("ignores_options") for rank in run.ranks):
            raise ComparisonError(
                f"--set {self.options[0]} sets an option of a TrainerCLI, and the script creates none. Pass the "
                "script's own arguments after its name."
            )
        problem = next((rank["problem"] for rank in run.ranks if rank.get("problem")), "")
        if asked.get("stop_after") is not None:
            if process.returncode != RESUME_EXIT_CODE or not run.steps:
                raise ComparisonError("The script did not save when it got SIGTERM. --resume needs a Trainer.")
        elif process.returncode or problem:
            reason = _reason(problem, errors, process.returncode)
            where = "on one process" if name == "one process" else f"with {' '.join(flags)}"
            kind, said = _failure(run, reason, errors, process.returncode)
            raise kind(f"Run {where}, the script {said}", reason, run, _processes(list(flags)))
        if not run.ranks or not run.steps:
            raise ComparisonError(_nothing_recorded(run))
        return run


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _failure(run: Run, reason: str, errors: str, code: int) -> tuple[type[ScriptFailed], str]:
    # The text continues a sentence that begins with "the script", and says what the user can change.
    if any(rank.get("out_of_memory") for rank in run.ranks) or code == -signal.SIGKILL or "(SIGKILL)" in errors:
        return OutOfMemory, (
            "ran out of memory. One process holds the whole model and trains on the rows of all processes. Make them "
            "smaller with the script's arguments (fewer rows or layers) or with --set, or pass --cpu if the CPU has "
            "more memory."
        )
    if reason.startswith("EOFError"):
        return ScriptFailed, "asked for input, but its stdin is closed. Pass what it asks for as arguments."
    return ScriptFailed, f"failed: {reason}"


def _reason(problem: str, errors: str, code: int) -> str:
    lines = [line.rstrip() for line in errors.splitlines() if line.strip()]
    if any("the run hangs" in line for line in lines):
        start = next(n for n, line in enumerate(lines) if "the run hangs" in line)
        return "\n".join([_HANGS, *lines[start : start + 40]])
    if problem.startswith("exit code"):  # such as of a parser of options, which says why before
        printed = [line for line in lines if not line.startswith("drivetrain: ")]
        said = next((line for line in reversed(printed) if line.startswith("error: ") or ": error: " in line), "")
        problem = said or "\n".join([problem, *printed[-5:]])
    return problem or (lines[-1] if lines else f"exit code {code}")


def _nothing_recorded(run: Run) -> str:
    if any("strategy" in rank for rank in run.ranks):
        return (
            "The script took no step of a prepared optimizer. Pass model, optimizer and loader to accelerator.prepare, "
            "and call the step of the prepared optimizer."
        )
    return (
        "The script has created no Trainer or Accelerator, so nothing could be compared. For a script of Accelerate or "
        "Lightning, add --as accelerate or --as lightning."
    )

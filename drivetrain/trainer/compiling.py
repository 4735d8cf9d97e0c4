"""Compilation of a task's modules with `torch.compile`: options, cache folder, and a summary line."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.accelerator.accelerate_names import TorchDynamoPlugin
from drivetrain.callbacks.base import Stage
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.trainer.hooks import is_overridden
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


CACHE = "compile_cache"
"""Name of the folder with inductor's cache, in the run's `default_root_dir`."""

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_OPTIONS = ("backend", "mode", "fullgraph", "dynamic", "options", "blocks")
_MOST_RECORDS = 4096  # torch keeps only the last 64 by default
_MOST_REASONS = 5

# torch's reason for a recompilation -> the reason in plain words
_REASONS = (
    (
        r"tensor '(?P<name>.+)' size mismatch at index (?P<dim>\d+)\. expected (?P<old>\d+), actual (?P<new>\d+)",
        "dimension {dim} of {name} was {old}, then {new}",
    ),
    (
        r"tensor '(?P<name>.+)' dtype mismatch\. expected (?P<old>.+), actual (?P<new>.+)",
        "{name} was {old}, then {new}",
    ),
    (r"tensor '(?P<name>.+)' requires_grad mismatch.*", "{name} needed gradients in some calls only"),
    (r"GLOBAL_STATE changed: (?:grad_mode|inference_mode).*", "it ran with gradients and without"),
    (r"GLOBAL_STATE changed: (?P<what>.+?) *", "torch's {what} changed"),
    (r".*\.training\b.*", "it ran in training and in evaluation"),
)


def compile_plugin(given: bool | str | Mapping[str, Any]) -> TorchDynamoPlugin:
    """Convert the Trainer's argument `compile` to the compilation options of its Accelerator."""
    if isinstance(given, bool):
        # False disables compilation even if the launcher asks for it.
        return TorchDynamoPlugin("inductor", disable=not given)
    if given == "blocks":
        given = {"blocks": True}
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"Trainer(compile={given!r}) is not valid. Use True, False, 'blocks' to compile only the repeated blocks "
            f"of the model, or a dict with the keys {', '.join(_OPTIONS)}.{nearest(str(given), ('blocks', *_OPTIONS))}",
        )
    for name in given:
        if name not in _OPTIONS:
            raise ConfigurationError(
                f"Trainer(compile=...) has the unknown key {name!r}. Allowed: {', '.join(_OPTIONS)}."
                f"{nearest(str(name), _OPTIONS)}",
            )
    chosen = {"backend": "inductor", **given}
    return TorchDynamoPlugin(use_regional_compilation=bool(chosen.pop("blocks", False)), **chosen)


@contextmanager
def compilations_watched(trainer: Trainer) -> Iterator[None]:
    # The `with` block keeps compiled code in the run's folder, and ends with a line on what `torch.compile` did.
    if trainer.accelerator.preparation.compilation is None:
        yield
        return
    from torch._dynamo import utils  # importing it takes seconds

    utils.set_compilation_metrics_limit(_MOST_RECORDS)
    # The process may have compiled other code before, which is subtracted at the end.
    seen, breaks = len(utils.get_compilation_metrics()), Counter(utils.counters["graph_break"])
    try:
        with _cache_in(trainer.default_root_dir):
            yield
    finally:
        line = describe(utils.get_compilation_metrics()[seen:], Counter(utils.counters["graph_break"]) - breaks)
        if line and not trainer.barebones:
            trainer.announce(line)


@contextmanager
def _cache_in(root: str) -> Iterator[None]:
    # Torch sets the variable to its default when it needs the folder, which is no choice of the user.
    is_named = _CACHE_VARIABLE in os.environ and os.environ[_CACHE_VARIABLE] != _default_cache()
    if is_named or "://" in root:  # inductor writes local files
        yield
        return
    before = os.environ.get(_CACHE_VARIABLE)
    os.environ[_CACHE_VARIABLE] = str(Path(root).absolute() / CACHE)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_CACHE_VARIABLE, None)
        else:
            os.environ[_CACHE_VARIABLE] = before


def _default_cache() -> str:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.path.abspath(default_cache_dir())


def describe(records: Sequence[Any], breaks: Mapping[str, int]) -> str:
    # There are also records of backwards, and of code that had nothing to compile.
    forwards = [each for each in records if getattr(each, "has_guarded_code", True) and each.is_forward is not False]
    if not forwards:
        return ""
    # All records count for the time, including those of backwards.
    seconds = sum(each.duration_us or 0 for each in records) / 1e6
    again = Counter(_in_words(each.recompile_reason) for each in forwards if each.recompile_reason)
    line = f"Compiled {_plural(len(forwards), 'graph')} in {seconds:.1f} s"
    if again:
        count = sum(again.values())
        reasons = [f"{reason}{f' ({times} times)' * (times > 1)}" for reason, times in again.most_common(_MOST_REASONS)]
        line += f", {count} of them again: {'; '.join(reasons)}"
    if breaks:
        reason = re.sub(r"\s+", " ", max(breaks, key=lambda each: breaks[each])).strip()[:120]
        line += f". {_plural(sum(breaks.values()), 'graph break')}, the most for: {reason}"
    return f"{line}."


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _in_words(reason: str) -> str:
    """Return torch's reason for a recompilation in plain words.

    Unknown reasons are returned unchanged.
    """
    first = reason.strip().splitlines()[0]
    first = re.sub(r"^\d+/\d+: *", "", first)  # the number of the compiled version that did not match
    for pattern, words in _REASONS:
        found = re.fullmatch(pattern, first)
        if found:
            return words.format(**found.groupdict())
    return first


# Tasks that the user has compiled with `torch.compile(task)`


_STEPS = ("forward", *(stage.step_name for stage in Stage))
_LOGGING = ("log", "log_dict")
_BEFORE = "_before_compiling"


def uncompiled(model: Any) -> Any:
    compiler = sys.modules.get("torch._dynamo")  # takes seconds to import, and nothing is compiled without it
    if compiler is None or not isinstance(model, compiler.OptimizedModule) or not isinstance(model._orig_mod, Task):
        return model
    task: Task = model._orig_mod
    if not is_compiled(task):
        # Attributes of the instance that the compiled versions hide until `leave_compiled`.
        task.__dict__[_BEFORE] = {name: task.__dict__[name] for name in (*_STEPS, *_LOGGING) if name in task.__dict__}
        for name in _STEPS:
            if is_overridden(task, Task, name):
                task.__dict__[name] = model.dynamo_ctx(getattr(task, name))
        for name in _LOGGING:
            # Logging is Python code with side effects, so it stays out of the compiled graphs.
            task.__dict__[name] = torch.compiler.disable(getattr(task, name))  # type: ignore[no-untyped-call]
    return task


def is_compiled(task: Task) -> bool:
    """Return True if a task's forward and step methods are compiled with `torch.compile`."""
    return _BEFORE in task.__dict__


def leave_compiled(task: Task) -> None:
    before = task.__dict__.pop(_BEFORE, {})
    for name in (*_STEPS, *_LOGGING):
        task.__dict__.pop(name, None)
    task.__dict__.update(before)

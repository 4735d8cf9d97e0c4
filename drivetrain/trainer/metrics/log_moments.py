"""When a value can be logged, and with which meaning: what `self.log` refuses."""

from __future__ import annotations

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.trainer.metrics.log_scopes import LogScope
from drivetrain.trainer.metrics.logged_value import Arguments, LoggedValue

ARGUMENTS = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "sync_dist",
    "add_dataloader_idx",
    "metric_attribute",
    "rank_zero_only",
)


def moments_of(
    name: str,
    scope: LogScope,
    arguments: Arguments,
    on_step: bool | None,
    on_epoch: bool | None,
    known: LoggedValue | None,
) -> tuple[bool, bool]:
    """Decide whether a value is kept for its step, and for its epoch.

    Args:
        name: Its name.
        scope: Where it is logged.
        arguments: The arguments of `Task.log`, in the order of `ARGUMENTS`.
        on_step: What was asked for; the scope's own if None.
        on_epoch: What was asked for; the scope's own if None.
        known: What is logged under this name in this scope already.

    Raises:
        ConfigurationError: Nothing can be logged there, or not so.
    """
    if scope.on_step is None:
        raise ConfigurationError(
            f"You can't call self.log({name!r}, ...) here ({scope.stage}): there is no step or epoch that the "
            "value belongs to. Log in a step, or in a hook between the start of training or evaluation and "
            "the end of its epoch.",
            code="DT-091",
        )
    if known is not None:
        raise ConfigurationError(
            f"{name!r} is logged with two meanings: first with {_readable(known.arguments)} from the "
            f"{moment_of(known.scope)}, now with {_readable(arguments)} from the {moment_of(scope)}. "
            "Give the two different names.",
            code="DT-091",
        )
    steps = scope.on_step if on_step is None else on_step
    epochs = bool(scope.on_epoch if on_epoch is None else on_epoch)
    if not (steps or epochs):
        raise ConfigurationError(
            f"log({name!r}, on_step=False, on_epoch=False) is not useful: it would keep nothing.", code="DT-091"
        )
    if steps and not scope.has_batch:
        raise ConfigurationError(
            f"log({name!r}, on_step=True) from the {moment_of(scope)}: there is no step there. Use on_epoch=True.",
            code="DT-091",
        )
    return steps, epochs


def _readable(arguments: Arguments) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in zip(ARGUMENTS, arguments, strict=True))


def moment_of(scope: LogScope) -> str:
    """Name a scope, such as "train step"."""
    return f"{scope.stage} {'step' if scope.has_batch else 'epoch'}"

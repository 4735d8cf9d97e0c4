"""Where a task or its data module keeps a number that a search changes, such as its learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.task import Task


class MissingAttributeError(ConfigurationError, AttributeError):
    """Neither the task nor its data module has the attribute that a search is to change."""

    code = "DT-081"


class TunedAttribute:
    """One number, in every place where it is kept: attributes and hyper-parameters of the task and the data module.

    Args:
        name: Its name.
        task: The task.
        data: Its data module, if there is one.

    Attributes:
        is_twice_in_task: Whether the task keeps it both as an attribute and as a hyper-parameter.
    """

    def __init__(self, name: str, task: Task, data: DataModule | None) -> None:
        self.name = name
        self._holders = list(_holders(name, task, data))
        self.is_twice_in_task = len(list(_holders(name, task, None))) > 1

    @classmethod
    def find(cls, names: Sequence[str], task: Task, data: DataModule | None, advice: str) -> TunedAttribute:
        """The first of some names that is kept anywhere.

        Args:
            names: The names.
            task: The task.
            data: Its data module, if there is one.
            advice: What to do where there is none.

        Raises:
            MissingAttributeError: None is.
        """
        for name in names:
            found = cls(name, task, data)
            if found.is_kept:
                return found
        given = sorted({*vars(task), *task.hparams, *(() if data is None else (*vars(data), *data.hparams))})
        known = [name for name in given if not name.startswith("_")]
        raise MissingAttributeError(
            f"{type(task).__name__}, its hparams and its data module should have one of these fields, and have none: "
            f"{', '.join(names)}. {advice}{nearest(names[0], known)}"
        )

    @property
    def is_kept(self) -> bool:
        """Whether there is such a number at all."""
        return bool(self._holders)

    @property
    def value(self) -> Any:
        """The number; that of the data module where it differs."""
        holder = self._holders[-1]
        return holder[self.name] if isinstance(holder, Mapping) else getattr(holder, self.name)

    def write(self, value: Any) -> None:
        """Change it everywhere.

        Args:
            value: The number.
        """
        for holder in self._holders:
            if isinstance(holder, Mapping):
                holder[self.name] = value  # type: ignore[index]
            else:
                setattr(holder, self.name, value)


def _holders(name: str, task: Task, data: DataModule | None) -> Iterator[Any]:
    for owner in (task, data):
        if owner is None:
            continue
        if hasattr(owner, name):
            yield owner
        if name in owner.hparams:
            yield owner.hparams

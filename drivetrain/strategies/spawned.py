"""What stands in a Trainer's own process for the strategy of the processes that it starts for each verb."""

from __future__ import annotations

from collections.abc import Callable

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import Capability, RunOptions, Strategy
from drivetrain.strategies.capabilities import StartsProcesses
from drivetrain.strategies.single import Single


class Spawned(Single, StartsProcesses):
    """Each verb of the Trainer runs in processes of its own, under another strategy, and they end with it.

    In the process of the Trainer itself nothing is computed: the weights stay as they were given, until a verb has
    ended and those of its first process come back.

    Args:
        name: The name under which it is asked for, such as `"ddp_spawn"`.
        within: Makes the strategy of the processes.
        start_method: `"spawn"` for new interpreters, or `"fork"`.
    """

    def __init__(self, name: str, within: Callable[[], Strategy], start_method: str) -> None:
        self.name = name  # type: ignore[misc]
        self.within, self.start_method = within, start_method
        self.num_processes, self.kind = 0, ""

    def setup(self, state: PartialState) -> None:
        """Take this process's place, which only a Trainer gives it.

        Raises:
            ConfigurationError: There is no Trainer, whose verbs could run in other processes.
        """
        if not self.num_processes:
            raise ConfigurationError(
                f"strategy={self.name!r} runs each verb of a Trainer in processes of its own, and an Accelerator has "
                "no verbs. Start processes for a function of yours with drivetrain.notebook_launcher, or for the "
                "script with drivetrain launch, and use strategy='ddp' there.",
                code="DT-068",
            )
        super().setup(state)

    def check(self, options: RunOptions) -> None:
        """Refuse what cannot work with the strategy of the processes."""
        self.within().check(options)

    def capability(self, kind: type[Capability]) -> Capability | None:
        """What the strategy of the processes can do; and to start them."""
        return self if kind is StartsProcesses else self.within().capability(kind)  # type: ignore[return-value]

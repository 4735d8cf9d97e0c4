"""The DeepSpeed strategy under loops that count micro-batches by themselves."""

from __future__ import annotations

from dataclasses import replace

from drivetrain.strategies.base import RunOptions
from drivetrain.strategies.deepspeed import DeepSpeed


class CountedByTheLoop(DeepSpeed):
    """`drivetrain.DeepSpeed`, whose configuration may name another number of micro-batches in a step than the loop."""

    def check(self, options: RunOptions) -> None:
        """Refuse what DeepSpeed cannot compute in; the configuration's number of micro-batches stays as it is."""
        counted = options.gradient_accumulation_steps
        in_use = self.config.get("gradient_accumulation_steps")
        if in_use not in (None, "auto"):
            options = replace(options, gradient_accumulation_steps=counted._replace(value=in_use))
        super().check(options)

"""DeepSpeed strategy for training loops that count micro-batches themselves."""

from __future__ import annotations

from dataclasses import replace

from drivetrain.strategies.base import RunOptions
from drivetrain.strategies.deepspeed import DeepSpeed


class CountedByTheLoop(DeepSpeed):
    """`drivetrain.DeepSpeed` whose configured accumulation steps may differ from the loop's."""

    def check(self, options: RunOptions) -> None:
        """Raise for options that DeepSpeed does not support. The configured accumulation steps are kept."""
        counted = options.gradient_accumulation_steps
        in_use = self.config.get("gradient_accumulation_steps")
        if in_use not in (None, "auto"):
            options = replace(options, gradient_accumulation_steps=counted._replace(value=in_use))
        super().check(options)

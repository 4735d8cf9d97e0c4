"""Seeding."""

from __future__ import annotations

from drivetrain.compat.lightning.fabric.utilities.seed import isolate_rng, seed_everything

__all__ = ["isolate_rng", "seed_everything"]

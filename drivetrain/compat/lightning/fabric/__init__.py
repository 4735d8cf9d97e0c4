"""`lightning.fabric`, also `lightning_fabric`: Fabric on top of the Accelerator, and code shared with the Trainer."""

from __future__ import annotations

from drivetrain.compat.lightning.fabric.fabric import Fabric
from drivetrain.compat.lightning.fabric.utilities import disable_possible_user_warnings
from drivetrain.compat.lightning.fabric.utilities.seed import seed_everything
from drivetrain.compat.lightning.fabric.wrappers import is_wrapped
from drivetrain.compat.lightning.version import VERSION as __version__

__all__ = ["Fabric", "__version__", "disable_possible_user_warnings", "is_wrapped", "seed_everything"]

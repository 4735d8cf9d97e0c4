"""Takes the place of Accelerate in processes that have this directory on their module path."""

import drivetrain.compat

drivetrain.compat.install("accelerate")

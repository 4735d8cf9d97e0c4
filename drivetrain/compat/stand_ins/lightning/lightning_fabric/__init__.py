"""Takes the place of Lightning in processes that have this directory on their module path."""

import drivetrain.compat

drivetrain.compat.install("lightning_fabric")

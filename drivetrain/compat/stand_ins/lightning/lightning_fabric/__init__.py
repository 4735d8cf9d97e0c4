"""Package `lightning_fabric` for processes with this directory on `sys.path`: imports the mirror."""

import drivetrain.compat

drivetrain.compat.install("lightning_fabric")

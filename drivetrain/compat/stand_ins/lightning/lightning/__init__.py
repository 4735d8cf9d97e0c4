"""Package `lightning` for processes with this directory on `sys.path`: imports the mirror."""

import drivetrain.compat

drivetrain.compat.install("lightning")

"""Package `pytorch_lightning` for processes with this directory on `sys.path`: imports the mirror."""

import drivetrain.compat

drivetrain.compat.install("pytorch_lightning")

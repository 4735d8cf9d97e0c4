"""The `drivetrain` command line, with one module per command."""

"""The settings of a launch: each defined once, with its flag, its key in a file, its variable and its help."""

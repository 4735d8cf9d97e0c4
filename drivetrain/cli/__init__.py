"""The command line: one command a file, and nothing heavy imported before it is needed."""

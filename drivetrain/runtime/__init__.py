"""Process-level foundations of a run: environment, devices, collectives, seeds and logging."""

"""What the callbacks that guard a run against bad steps share."""

"""Reasons why drivetrain lacks some of Lightning's names, for error messages."""

from __future__ import annotations

CALLBACK = "This callback is not part of drivetrain yet. Leave it out, or override drivetrain.Callback's hooks."
TUNER = "Searches are methods of the tuner: Tuner(trainer).lr_find(task), Tuner(trainer).scale_batch_size(task)."
LOGGER = "Give another logger, or subclass drivetrain.Tracker."
SERVE = "Serving is not a part of drivetrain. Export the model, and serve it with a tool made for that."
PLUGIN = (
    "Devices and the layers that are synchronised have one implementation each, which this would replace. Leave it out."
)
XLA_FILES = "Checkpoints hold tensors on the CPU, whatever they were on. Give TorchCheckpointIO(), or leave it out."
STRATEGY = "Give drivetrain's own strategy: Parallel(tp=...), XLA(), or a subclass of drivetrain.Strategy."
INTERNAL = "It is a part of Lightning's own machinery, which drivetrain does not have. Use the Trainer's methods."

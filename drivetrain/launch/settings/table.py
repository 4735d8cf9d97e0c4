"""All settings of a launch, by name, in the order of the help."""

from __future__ import annotations

from drivetrain.launch.settings.megatron import MEGATRON
from drivetrain.launch.settings.numbers import DYNAMO, FP8, MPI
from drivetrain.launch.settings.processes import TOP
from drivetrain.launch.settings.setting import Group, Setting
from drivetrain.launch.settings.sharding import DEEPSPEED, FSDP, GRID

GROUPS: dict[str, Group] = {group.name: group for group in (FSDP, DEEPSPEED, GRID, MEGATRON, FP8, DYNAMO, MPI)}
SETTINGS: dict[str, Setting] = {
    setting.name: setting for setting in (*TOP, *(each for group in GROUPS.values() for each in group.settings))
}
# Of each, one: a stronger source that gives one takes the place of a weaker source's others.
ALTERNATIVES = (
    ("use_fsdp", "use_deepspeed", "use_megatron_lm"),
    ("cpu", "multi_gpu", "tpu"),
    ("module", "no_python"),
    ("preload", "no_preload"),
)

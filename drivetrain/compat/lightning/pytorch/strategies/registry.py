"""Registry of strategies: built-in ones and those that scripts register."""

from __future__ import annotations

from typing import Any

from drivetrain.compat.lightning.pytorch.strategies.ddp import DDPStrategy
from drivetrain.compat.lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy
from drivetrain.compat.lightning.pytorch.strategies.fsdp import FSDPStrategy
from drivetrain.compat.lightning.registry import STRATEGIES as StrategyRegistry

__all__ = ["StrategyRegistry"]

for _name, _method in {"ddp": "popen", "ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_notebook": "fork"}.items():
    StrategyRegistry.register(_name, DDPStrategy, "A copy of the model on each process", start_method=_method)
    for _finds in (False, True):
        StrategyRegistry.register(
            f"{_name}_find_unused_parameters_{str(_finds).lower()}",
            DDPStrategy,
            f"The same, with find_unused_parameters={_finds}",
            find_unused_parameters=_finds,
            start_method=_method,
        )

StrategyRegistry.register("fsdp", FSDPStrategy, "Parameters, gradients and optimizer states sharded")
StrategyRegistry.register("fsdp_cpu_offload", FSDPStrategy, "The same, on the CPU", cpu_offload=True)

_OFFLOADED: dict[int, dict[str, Any]] = {
    2: {"offload_optimizer": True},
    3: {"offload_parameters": True, "offload_optimizer": True},
}
StrategyRegistry.register("deepspeed", DeepSpeedStrategy, "DeepSpeed's ZeRO")
for _stage in (1, 2, 3):
    StrategyRegistry.register(f"deepspeed_stage_{_stage}", DeepSpeedStrategy, f"ZeRO's stage {_stage}", stage=_stage)
for _stage, _options in _OFFLOADED.items():
    StrategyRegistry.register(
        f"deepspeed_stage_{_stage}_offload", DeepSpeedStrategy, "The same, on the CPU", stage=_stage, **_options
    )

StrategyRegistry.built_in.update(StrategyRegistry)

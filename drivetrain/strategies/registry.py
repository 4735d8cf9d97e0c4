"""Registry of strategies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import RunOptions, StartsProcesses, Strategy
from drivetrain.strategies.ddp import DDP

StrategyName = Literal[
    "auto",
    "single",
    "ddp",
    "ddp_find_unused_parameters_true",
    "ddp_find_unused_parameters_false",
    "ddp_spawn",
    "ddp_spawn_find_unused_parameters_true",
    "ddp_spawn_find_unused_parameters_false",
    "ddp_fork",
    "ddp_fork_find_unused_parameters_true",
    "ddp_fork_find_unused_parameters_false",
    "ddp_notebook",
    "ddp_notebook_find_unused_parameters_true",
    "ddp_notebook_find_unused_parameters_false",
    "fsdp",
    "fsdp_cpu_offload",
    "deepspeed",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_3",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3_offload",
    "xla",
    "xla_fsdp",
    "megatron",
]
"""Names of the built-in strategies, which editors complete."""


# Strategy for a single process


class Single(Strategy):
    """Strategy for training in one process on one device, without any communication."""

    name = "single"
    repeats_steps = True

    def setup(self, state: PartialState) -> None:
        environment = state.environment
        if environment.world_size > 1:
            raise ConfigurationError(
                f"strategy={self.name!r} supports only one process, but this is rank {environment.rank} of "
                f"{environment.world_size} (from {environment.source}). Use strategy='ddp' or 'auto', or start one "
                "process.",
            )
        super().setup(state)


# Strategies that start processes for each Trainer method


class Spawned(Single, StartsProcesses):
    """Strategy that starts new processes for each Trainer call such as `fit`.

    The main process computes nothing. It receives the weights of the first process when the call has ended.
    """

    def __init__(self, name: str, within: Callable[[], Strategy], start_method: str) -> None:
        self.name = name  # type: ignore[misc]
        self.within, self.start_method = within, start_method
        self.num_processes, self.kind = 0, ""

    def setup(self, state: PartialState) -> None:
        if not self.num_processes:
            raise ConfigurationError(
                f"strategy={self.name!r} starts new processes for each Trainer method such as fit, so an Accelerator "
                "cannot use it. Start the processes with drivetrain.notebook_launcher (a function) or drivetrain "
                "launch (a script), and use strategy='ddp'.",
            )
        super().setup(state)

    def check(self, options: RunOptions) -> None:
        self.within().check(options)

    @property
    def repeats_steps(self) -> bool:  # type: ignore[override]
        return self.within().repeats_steps


# Name -> function without arguments that creates the strategy.
_STRATEGIES: dict[str, Callable[[], Strategy]] = {}

# Names of strategies that start processes for each Trainer method, with the start method.
_OF_A_VERB = {"ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_notebook": "fork"}

# Names that users try for `Parallel`, which is not registered because it needs sizes.
_NEEDS_SIZES = ("parallel", "tp", "sp", "cp", "pp", "tensor_parallel", "context_parallel", "pipeline", "model_parallel")


def register_strategy(name: str, factory: Callable[[], Strategy], *, replace: bool = False) -> None:
    """Register a strategy under a name for `Trainer(strategy=name)`.

    Args:
        name: The name.
        factory: A `Strategy` class, or a function without arguments that returns a strategy.
        replace: Replace a strategy that is already registered under the name.

    Raises:
        ConfigurationError: The name is registered and `replace` is False.
    """
    if (name == "auto" or name in _STRATEGIES) and not replace:
        raise ConfigurationError(f"A strategy named {name!r} is already registered. Pass replace=True to replace it.")
    _STRATEGIES[name] = factory


# Classes that are imported on first use, since their modules are slow to import.
# A class whose package folder is missing is not registered.
_CLASSES = {
    "fsdp": "drivetrain.strategies.fsdp:FSDP",
    "deepspeed": "drivetrain.strategies.deepspeed:DeepSpeed",
    "xla": "drivetrain.strategies.xla:XLA",
    "xla_fsdp": "drivetrain.strategies.xla:XLAFSDP",
    "megatron": "drivetrain.strategies.megatron:Megatron",
}
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp", {}),
    "fsdp_cpu_offload": ("fsdp", {"cpu_offload": True}),
    "deepspeed": ("deepspeed", {}),
    "deepspeed_stage_1": ("deepspeed", {"stage": 1}),
    "deepspeed_stage_2": ("deepspeed", {"stage": 2}),
    "deepspeed_stage_3": ("deepspeed", {"stage": 3}),
    "deepspeed_stage_2_offload": ("deepspeed", {"stage": 2, "offload_optimizer": "cpu"}),
    "deepspeed_stage_3_offload": ("deepspeed", {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}),
    "xla": ("xla", {}),
    "xla_fsdp": ("xla_fsdp", {}),
    "megatron": ("megatron", {}),
}


def strategy_class(name: str) -> Any:
    """Return the class of a built-in strategy by its name.

    The strategy's module is imported only at this point.
    """
    module, _, attribute = _CLASSES[name].partition(":")
    if find_spec(module) is None:
        raise ConfigurationError(
            f"strategy={name!r}: {module} is missing from this installation. Reinstall drivetrain."
        )
    return getattr(import_module(module), attribute)


def _make(name: str, options: Mapping[str, Any]) -> Strategy:
    made: Strategy = strategy_class(name)(**options)
    return made


register_strategy("single", Single)
_DDP: dict[str, Callable[[], Strategy]] = {
    "": DDP,
    "_find_unused_parameters_true": partial(DDP, find_unused_parameters=True),
    "_find_unused_parameters_false": partial(DDP, find_unused_parameters=False),
}
for _options, _factory in _DDP.items():
    register_strategy(f"ddp{_options}", _factory)
for _name, _method in _OF_A_VERB.items():
    for _options, _factory in _DDP.items():
        register_strategy(_name + _options, partial(Spawned, _name + _options, _factory, _method))
for _name, (_class, _arguments) in _VARIANTS.items():
    if find_spec(_CLASSES[_class].partition(":")[0]) is not None:
        register_strategy(_name, partial(_make, _class, _arguments))


def available_strategies() -> list[str]:
    """Return the names of all strategies that can be passed as `Trainer(strategy=name)`."""
    return ["auto", *_STRATEGIES]


def resolve_strategy(spec: Any, environment: ProcessEnvironment, kind: DeviceKind | None = None) -> Strategy:
    """Turn a `strategy` argument such as `"fsdp"` or `"auto"` into a `Strategy` object.

    Args:
        spec: A registered name, a `Strategy`, or `"auto"`, which selects `"ddp"` for several processes and `"single"`
            for one.
        environment: Rank and world size of this process.
        kind: The device type. If it has strategies of its own, `"auto"` selects the first of them.

    Raises:
        ConfigurationError: No strategy has this name.
    """
    if isinstance(spec, Strategy):
        return spec
    if isinstance(spec, type):
        raise ConfigurationError(
            f"strategy must be a name or a Strategy object, got the class {spec.__name__}. Use {spec.__name__}().",
        )
    if not isinstance(spec, str):
        raise ConfigurationError(
            f"strategy must be a name or a Strategy object, got {type(spec).__name__}. Names: "
            f"{', '.join(available_strategies())}.",
        )
    usual = "ddp" if environment.world_size > 1 else "single"
    name = (kind.strategies[0] if kind is not None and kind.strategies else usual) if spec == "auto" else spec
    if name in _NEEDS_SIZES and name not in _STRATEGIES:
        raise ConfigurationError(
            f"strategy={spec!r} needs the number of processes for each dimension. Use strategy=Parallel(tp=2, "
            "tp_plan={...}), Parallel(cp=2), Parallel(pp=2), or several of these sizes at once.",
        )
    if name not in _STRATEGIES:
        raise ConfigurationError(
            f"Unknown strategy {spec!r}. Allowed: {', '.join(available_strategies())}."
            f"{nearest(name, available_strategies())} Add your own with drivetrain.register_strategy.",
        )
    return _STRATEGIES[name]()


def started_by_verbs(spec: Any) -> Spawned | None:
    # None if the strategy does not start processes in each call such as `Trainer.fit`.
    if isinstance(spec, str):
        factory = _STRATEGIES.get(spec) if spec.startswith(tuple(_OF_A_VERB)) else None
        spec = None if factory is None else factory()
    return spec if isinstance(spec, Spawned) else None


def resolve_ddp(spec: Any, environment: ProcessEnvironment, given: str, **options: Any) -> Strategy:
    # `given` shows the options as the user wrote them, for the error message.
    if isinstance(spec, DDP) and set(options) == {"sync_batchnorm"}:
        spec.sync_batchnorm = environment.is_distributed
        return spec
    if spec not in ("auto", DDP.name):
        raise ConfigurationError(
            f"{given} is only supported with strategy={DDP.name!r}, got strategy={spec!r}. Remove one of the two.",
        )
    return DDP(**options) if environment.is_distributed else resolve_strategy("auto", environment)


# Ranks along the dimensions of a device mesh


def grid_rank(strategy: Strategy, dimension: str) -> int:
    """Return this process's index along one dimension of the device mesh.

    Without a mesh, all processes lie along `dp_replicate`, and the index in other dimensions is 0.
    """
    place = getattr(strategy, "place_in_mesh", None)
    if place is None:
        return strategy.topology.data_shard.index if dimension == "dp_replicate" else 0
    index: int = place.coordinates()[dimension]
    return index

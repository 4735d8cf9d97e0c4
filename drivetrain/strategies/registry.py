"""Strategies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import RunOptions, StartsProcesses, Strategy
from drivetrain.strategies.ddp import DDP

# One process on one device


class Single(Strategy):
    """One process on one device: the base class as it is."""

    name = "single"
    repeats_steps = True

    def setup(self, state: PartialState) -> None:
        """Take this process's place; there must be no peers."""
        environment = state.environment
        if environment.world_size > 1:
            raise ConfigurationError(
                f"strategy={self.name!r} runs one process, but this is rank {environment.rank} of "
                f"{environment.world_size} (from {environment.source}). Use strategy='ddp' or 'auto', "
                "or start one process.",
            )
        super().setup(state)


# What stands in a Trainer's own process for the strategy of the processes that it starts for each verb


class Spawned(Single, StartsProcesses):
    """Each verb of the Trainer runs in processes of its own, under another strategy, and they end with it.

    In the process of the Trainer itself nothing is computed: the weights stay as they were given, until a verb has
    ended and those of its first process come back.
    """

    def __init__(self, name: str, within: Callable[[], Strategy], start_method: str) -> None:
        self.name = name  # type: ignore[misc]
        self.within, self.start_method = within, start_method
        self.num_processes, self.kind = 0, ""

    def setup(self, state: PartialState) -> None:
        """Take this process's place, which only a Trainer gives it."""
        if not self.num_processes:
            raise ConfigurationError(
                f"strategy={self.name!r} runs each verb of a Trainer in processes of its own, and an Accelerator has "
                "no verbs. Start processes for a function of yours with drivetrain.notebook_launcher, or for the "
                "script with drivetrain launch, and use strategy='ddp' there.",
            )
        super().setup(state)

    def check(self, options: RunOptions) -> None:
        """Refuse what cannot work with the strategy of the processes."""
        self.within().check(options)

    @property
    def repeats_steps(self) -> bool:  # type: ignore[override]
        """Whether the strategy of the processes does."""
        return self.within().repeats_steps


_STRATEGIES: dict[str, Callable[[], Strategy]] = {}

# How the processes start in which a Trainer runs DDP for one verb.
_OF_A_VERB = {"ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_notebook": "fork"}

# What people may call `Parallel`, which has no sizes to begin with.
_NEEDS_SIZES = ("parallel", "tp", "sp", "cp", "pp", "tensor_parallel", "context_parallel", "pipeline", "model_parallel")


def register_strategy(name: str, factory: Callable[[], Strategy], *, replace: bool = False) -> None:
    """Make a strategy available under a name.

    Args:
        name: What users will write, as in `Trainer(strategy=name)`.
        factory: A `Strategy` class, or anything that makes one without arguments.
        replace: Whether the name may be taken over.

    Raises:
        ConfigurationError: The name is taken and `replace` is False.
    """
    if (name == "auto" or name in _STRATEGIES) and not replace:
        raise ConfigurationError(f"A strategy named {name!r} is registered already; pass replace=True to replace it.")
    _STRATEGIES[name] = factory


# The strategies that are imported when they are asked for: their class, and the arguments that a name stands for.
# A folder that is not there leaves its names out.
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
    """Import the class of a strategy that is only imported when it is asked for."""
    module, _, attribute = _CLASSES[name].partition(":")
    if find_spec(module) is None:
        raise ConfigurationError(
            f"strategy={name!r}: {module} is not a part of this installation. Install drivetrain again."
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
    """Every name that `resolve_strategy` takes."""
    return ["auto", *_STRATEGIES]


def resolve_strategy(spec: Any, environment: ProcessEnvironment, kind: DeviceKind | None = None) -> Strategy:
    """Turn a name into a strategy.

    Args:
        spec: A registered name, `"auto"` (`"ddp"` among several processes, else `"single"`), or a `Strategy`.
        environment: This process among its peers.
        kind: The kind of device, which may need a strategy of its own: `"auto"` is then that one.

    Raises:
        ConfigurationError: No strategy has this name.
    """
    if isinstance(spec, Strategy):
        return spec
    if isinstance(spec, type):
        raise ConfigurationError(
            f"strategy must be a name or a Strategy, got the class {spec.__name__}. Make one: {spec.__name__}().",
        )
    if not isinstance(spec, str):
        raise ConfigurationError(
            f"strategy must be a name or a Strategy, got {type(spec).__name__}. "
            f"Names: {', '.join(available_strategies())}.",
        )
    usual = "ddp" if environment.world_size > 1 else "single"
    name = (kind.strategies[0] if kind is not None and kind.strategies else usual) if spec == "auto" else spec
    if name in _NEEDS_SIZES and name not in _STRATEGIES:
        raise ConfigurationError(
            f"strategy={spec!r} needs to know over how many processes: give strategy=Parallel(tp=2, tp_plan={{...}}), "
            "Parallel(cp=2), Parallel(pp=2), or several of these sizes at once.",
        )
    if name not in _STRATEGIES:
        raise ConfigurationError(
            f"Unknown strategy {spec!r}. Allowed: {', '.join(available_strategies())}."
            f"{nearest(name, available_strategies())} Another one can be added with drivetrain.register_strategy.",
        )
    return _STRATEGIES[name]()


def started_by_verbs(spec: Any) -> Spawned | None:
    """What stands for a strategy that runs in processes of a Trainer's verbs; None for any other.

    Args:
        spec: A registered name, `"auto"`, or a `Strategy`.
    """
    if isinstance(spec, str):
        factory = _STRATEGIES.get(spec) if spec.startswith(tuple(_OF_A_VERB)) else None
        spec = None if factory is None else factory()
    return spec if isinstance(spec, Spawned) else None


def resolve_ddp(spec: Any, environment: ProcessEnvironment, given: str, **options: Any) -> Strategy:
    """Turn a name into a strategy where arguments that only DDP takes are given beside it.

    Args:
        spec: `"auto"` or `"ddp"`; or a `DDP`, which takes `sync_batchnorm`.
        environment: This process among its peers.
        given: Those arguments as the user wrote them, for the message.
        options: Of `DDP`; one process needs none of them.

    Raises:
        ConfigurationError: Another strategy was asked for.
    """
    if isinstance(spec, DDP) and set(options) == {"sync_batchnorm"}:
        spec.sync_batchnorm = environment.is_distributed
        return spec
    if spec not in ("auto", DDP.name):
        raise ConfigurationError(
            f"{given}: options of strategy={DDP.name!r}, but strategy={spec!r} was given. Leave one of the two out.",
        )
    return DDP(**options) if environment.is_distributed else resolve_strategy("auto", environment)


# A strategy as a `DistributedType`, for scripts that ask


def grid_rank(strategy: Strategy, dimension: str) -> int:
    """This process's index along one dimension of a grid of processes; without a grid all are replicas."""
    place = getattr(strategy, "place_in_mesh", None)
    if place is None:
        return strategy.topology.data_shard.index if dimension == "dp_replicate" else 0
    index: int = place.coordinates()[dimension]
    return index

"""`DeepSpeed` strategy: trains models with DeepSpeed's engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.collectives import broadcast
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import (
    Configured,
    Given,
    RunOptions,
    Strategy,
    View,
    needs_closure,
    refuse_several_losses,
)
from drivetrain.strategies.deepspeed import config as configuration
from drivetrain.strategies.deepspeed import ops, zero_state
from drivetrain.strategies.deepspeed.config import (
    DummyOptim,
    Known,
    Settings,
    arguments_from,
    build_config,
    check_zero_options,
    dummy_scheduler_of,
    require_deepspeed,
    uses_nvme,
)
from drivetrain.strategies.deepspeed.engine import (
    EngineGradients,
    Engines,
    TrainedModel,
    added_to,
    complete,
    listed,
)
from drivetrain.strategies.deepspeed.ops import DeepSpeedGroup, refuse_other_device
from drivetrain.strategies.deepspeed.zero_state import ZeroState, is_partitioned, merge_native
from drivetrain.strategies.precision import Precision, resolve_precision
from drivetrain.strategies.precision.mixed import Float16Mixed

# Precisions as `mixed_precision` spells them: "bf16" means bfloat16 weights with float32 master weights.
_ACCELERATE_NAMES = {"32": "no", "bf16-true": "bf16", "fp16-true": "fp16"}


class DeepSpeed(Configured):
    """Strategy that shards training over processes by DeepSpeed's ZeRO.

    Stage 1 shards the optimizer state, stage 2 also the gradients, and stage 3 also the parameters.

    Args:
        stage: ZeRO stage from 0 to 3. None uses the stage in `config`, or else 2.
        offload_optimizer: Where optimizer state is kept: `"cpu"`, `"nvme"`, or DeepSpeed's section as a dict.
        offload_param: Where parameters are kept at stage 3, with the values of `offload_optimizer`.
        nvme_path: The folder for `"nvme"`.
        gradient_clipping: Largest gradient norm in each step, like a Trainer's `gradient_clip_val`.
        gradient_accumulation_steps: Number of micro-batches in each optimizer step. Must agree with the loop's number.
        zero_init: Shard parameters at construction in `init_context`. None does so at stage 3.
        moe_layers: Names of module classes that ZeRO-3 gathers as a whole, such as mixtures of experts.
        shared_memory: Use DeepSpeed's shared-memory operator between processes on one machine's CPU. None uses it if it
            is already compiled.
        config: A complete DeepSpeed configuration as a dict, the path of a JSON file, or JSON text. Values of `"auto"`
            are filled in.
        **zero_options: Further keys of DeepSpeed's `zero_optimization` section, such as `overlap_comm`.

    Raises:
        ConfigurationError: The deepspeed package is not installed, or an option is invalid.
    """

    name = "deepspeed"

    def __init__(
        self,
        stage: int | None = None,
        *,
        offload_optimizer: str | Mapping[str, Any] | None = None,
        offload_param: str | Mapping[str, Any] | None = None,
        nvme_path: str | os.PathLike[str] | None = None,
        gradient_clipping: float | None = None,
        gradient_accumulation_steps: int | None = None,
        zero_init: bool | None = None,
        moe_layers: Sequence[str | type[nn.Module]] = (),
        shared_memory: bool | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        **zero_options: Any,
    ) -> None:
        require_deepspeed()
        config, stage = build_config(
            config,
            stage,
            {"offload_optimizer": offload_optimizer, "offload_param": offload_param},
            nvme_path,
            {"gradient_clipping": gradient_clipping, "gradient_accumulation_steps": gradient_accumulation_steps},
            zero_options,
        )
        partitions = stage == 3 if zero_init is None else zero_init and stage == 3
        self.settings = Settings(config, stage, partitions, list(moe_layers))
        self.shared_memory = shared_memory
        self.needs_even_batches = stage == 3
        self._run: RunOptions | None = None
        self._group: DeepSpeedGroup | None = None
        self._engines = Engines()
        self._configurations: dict[str, Settings] = {}

    arguments_from = staticmethod(arguments_from)
    merge_native = staticmethod(merge_native)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DeepSpeed:
        """Create a `DeepSpeed` strategy from a launcher's configuration file.

        Args:
            config: The options by key, as in a launcher's YAML file.

        Returns:
            The strategy.

        Raises:
            ConfigurationError: A key is unknown. The message names the most similar key.
        """
        return cls(**arguments_from(config))

    @property
    def config(self) -> configuration.Config:
        """The DeepSpeed configuration for the model to prepare next, before `"auto"` values are filled in."""
        return self.settings.config

    @property
    def stage(self) -> int:
        """ZeRO stage, from 0 to 3, with which DeepSpeed will shard the next prepared model."""
        return self.settings.stage

    @property
    def zero_init(self) -> bool:
        """True if `init_context` shards a model's parameters while the model is constructed, at ZeRO stage 3."""
        return self.settings.zero_init

    @property
    def moe_layers(self) -> Sequence[str | type[nn.Module]]:
        """Classes of modules, such as mixture-of-experts layers, that ZeRO-3 gathers with all their submodules."""
        return self.settings.moe_layers

    # processes

    def setup(self, state: PartialState) -> None:
        super().setup(state)
        topology = self.topology
        self.gradients = EngineGradients(self._engines, topology)
        self.state = ZeroState(self, self._engines)
        state.before_leaving(self._release)
        refuse_other_device(topology.environment, topology.device)
        if self._group is None:
            self._group = DeepSpeedGroup(topology.environment, topology.kind.name, self.shared_memory)
        self.check_settings(self.settings)

    def check(self, options: RunOptions) -> None:
        precision, kind = options.precision, self.topology.kind
        if precision.name == "64":
            raise ConfigurationError(
                "precision='64' cannot run under strategy='deepspeed': ZeRO keeps its master weights in 32 bits. Use "
                "'32', or another strategy.",
                see="precision.md",
            )
        if precision.name in ("fp16", "fp16-true") and kind.name == "cpu":
            raise ConfigurationError(
                f"precision={precision.name!r} cannot run under strategy='deepspeed' on the CPU: DeepSpeed computes "
                "in float16 on GPUs only. Use 'bf16' or '32'.",
                see="precision.md",
            )
        if precision.name not in ("32", "bf16", "bf16-true", "fp16", "fp16-true"):
            raise ConfigurationError(
                f"precision={precision.name!r} is not supported by DeepSpeed. Use '32', 'bf16', 'bf16-true' or 'fp16'.",
                see="precision.md",
            )
        if isinstance(precision, Float16Mixed):
            # The engine scales the loss, because only the engine sees overflows in sharded gradients.
            precision.scaler = torch.amp.GradScaler(kind.autocast_type, enabled=False)
        self._run = options
        for settings in (self.settings, *self._configurations.values()):
            self.check_settings(settings)

    def check_settings(self, settings: Settings) -> None:
        """Raise an error if a DeepSpeed configuration conflicts with the installation or the run's precision.

        Args:
            settings: The configuration, together with the strategy's options for it.
        """
        check_zero_options(settings.config)
        if uses_nvme(settings.config):
            ops.require_async_io()
        precision = None if self._run is None else self._run.precision
        if precision is not None and precision.name in ("fp16", "fp16-true") and settings.stage == 0:
            raise ConfigurationError(
                f"precision={precision.name!r} cannot run under DeepSpeed's stage 0, which divides gradients by the "
                "loss scale without scaling the loss (DeepSpeed 0.19). Use stage 1, 2 or 3.",
                see="precision.md",
            )

    def _known(self, optimizer: Optimizer | None, model: nn.Module | None = None) -> Known:
        given: dict[str, Given] = {}
        if self._run is not None:
            given["gradient_accumulation_steps"] = self._run.gradient_accumulation_steps
            if self._run.gradient_clipping is not None:
                given["gradient_clipping"] = self._run.gradient_clipping
        return Known(
            world_size=self.topology.environment.world_size,
            precision=None if self._run is None else self._run.precision,
            given=given,
            optimizer=optimizer,
            scheduler=None if optimizer is None else dummy_scheduler_of(optimizer),
            model=model,
        )

    def add_configuration(self, name: str, other: Strategy) -> None:
        settings = getattr(other, "settings", None)
        if not isinstance(settings, Settings):
            raise ConfigurationError(f"{name!r} is {other!r}, but {self!r} accepts only DeepSpeed configurations.")
        self.check_settings(settings)
        self._configurations[name] = replace(settings, shards_frozen=settings.stage == 3)
        if settings.stage == 3:
            self.needs_even_batches = True

    def select_configuration(self, name: str) -> None:
        self.settings = self._configurations[name]

    def choose_precision(self, given: str | Precision | None) -> str | Precision | None:
        own = configuration.precision_of(self.config)
        if own is None or given is None:
            return own or given
        return own if _ACCELERATE_NAMES.get(own) == resolve_precision(given).name else given

    def accelerate_name(self, precision: Precision) -> str:
        return _ACCELERATE_NAMES.get(precision.name, precision.name)

    # model

    def init_context(self) -> AbstractContextManager[Any]:
        if not self.zero_init:
            return nullcontext()
        DeepSpeedGroup.forget_secondary_group()
        completed = configuration.complete(self.settings.without_training, self._known(None))
        with configuration.explain_rejection(completed):
            return self._package().zero.Init(config_dict_or_path=completed)  # type: ignore[no-any-return]

    def _place(self, model: nn.Module, precision: Precision, move: bool) -> nn.Module:
        if not any(is_partitioned(parameter) for parameter in model.parameters()):
            if not self.settings.shards_frozen:
                return super().prepare(model, None, precision, move)[0]
            model = precision.convert(model)
            _make_contiguous(model)
            DeepSpeedGroup.forget_secondary_group()
        completed = configuration.complete(self.settings.without_training, self._known(None, self.unwrap(model)))
        self._engines.forget(self.unwrap(model))
        with configuration.explain_rejection(completed):
            engine, *_ = self._package().initialize(model=model, config=completed, dist_init_required=False)
        self._engines.add(TrainedModel(engine, self.unwrap(model), [], self.settings))
        return engine.module  # type: ignore[no-any-return]

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer] | None, precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        if not optimizers:
            return self._place(model, precision, move), []
        if len(optimizers) > 1:
            raise ConfigurationError(
                f"DeepSpeed supports one optimizer per model, but {len(optimizers)} hold parameters of this "
                f"{type(self.unwrap(model)).__name__}. Use one optimizer with several parameter groups, prepare "
                "a separate model for each optimizer (Accelerator.prepare), or use another strategy.",
            )
        bare, optimizer = super().unwrap(model), optimizers[0]
        if needs_closure(optimizer):
            _refuse_closure(optimizer)
        self._engines.forget(bare)
        # Before the engine is built, which replaces the parameters in the optimizer's groups by flat tensors.
        names = {id(parameter): name for name, parameter in bare.named_parameters()}
        groups = _names_of_groups(optimizer, names)
        # A model from `init_context` is already partitioned, which leaves nothing to convert.
        if not any(is_partitioned(parameter) for parameter in bare.parameters()):
            model = precision.convert(model)
            _make_contiguous(bare)
            DeepSpeedGroup.forget_secondary_group()
        if self.stage > 0:
            _refuse_several_dtypes(optimizer, names)
        if self.stage in (1, 2):
            _refuse_frozen_groups(optimizer, names)
        if self.stage == 3:
            _refuse_compiled(model)
        self._mark_leaves(bare)
        engine, scheduler = self._initialize(model, optimizer, bare)
        trained = TrainedModel(engine, bare, groups, self.settings)
        ops.make_state(trained.layout)
        if isinstance(optimizer, DummyOptim):
            # A scheduler over the placeholder must change the learning rates of the real optimizer.
            optimizer.param_groups = trained.layout.inner.param_groups
        dummy = dummy_scheduler_of(optimizer)
        if dummy is not None:
            dummy.attach(scheduler)
        engine.register_forward_hook(lambda *_: self._engines.record_forward(trained))
        self._engines.add(trained)
        return engine, [trained.optimizer]

    def _initialize(self, model: nn.Module, optimizer: Optimizer, bare: nn.Module) -> tuple[Any, Any]:
        known = self._known(optimizer, bare)
        completed = configuration.complete(self.config, known)
        # The strategy clips instead, before the engine's step. The norm can then be logged before the step, and
        # gradients that are weighted after their backward pass are clipped too.
        completed["gradient_clipping"] = 0.0
        arguments: dict[str, Any] = {"optimizer": optimizer}
        if isinstance(optimizer, DummyOptim):
            ops.prefer_built_optimizer(completed["optimizer"], self.topology.kind.name, completed["zero_optimization"])
            arguments = {"model_parameters": [dict(group) for group in optimizer.param_groups]}
        if known.scheduler is not None and known.scheduler.lr_scheduler_callable is not None:
            arguments["lr_scheduler"] = known.scheduler.lr_scheduler_callable
        with configuration.explain_rejection(completed), ops.keep_adagrad(optimizer):
            engine, _, _, scheduler = self._package().initialize(
                model=model, config=completed, dist_init_required=False, **arguments
            )
            engine.set_gradient_accumulation_boundary(True)
        return engine, scheduler

    def _mark_leaves(self, model: nn.Module) -> None:
        # Processes may use different experts of a layer, but must gather the same parameters.
        if not self.moe_layers or self.stage != 3:
            return
        classes = {type(module).__name__: type(module) for module in model.modules()}
        chosen = []
        for given in self.moe_layers:
            name = given if isinstance(given, str) else given.__name__
            if name not in classes:
                raise ConfigurationError(
                    f"moe_layers names {name!r}, but the model has no module of this class.{nearest(name, classes)} "
                    f"It has: {', '.join(sorted(classes))}.",
                )
            chosen.append(classes[name])
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, chosen)

    def view(self, model: nn.Module, stage: View) -> nn.Module:
        if stage != "evaluate":
            return model
        # Batch statistics differ between processes. All evaluate with those of rank 0, which checkpoints contain.
        broadcast(list(self.unwrap(model).buffers()))
        trained = self._engines.find(model)
        return model if trained is None else trained.engine.module

    def unwrap(self, model: nn.Module) -> nn.Module:
        trained = self._engines.find(model)
        return trained.bare if trained is not None and model is trained.engine else super().unwrap(model)

    # one optimizer step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if kwargs.get("inputs") is not None:
            refuse_several_losses("A DeepSpeed engine runs one backward per step, for all of its parameters.")
        unknown = sorted(set(kwargs) - {"retain_graph"})
        if unknown:
            raise ConfigurationError(f"DeepSpeed's backward accepts only retain_graph, got {', '.join(unknown)}.")
        ran = self._engines.take_part()
        if not ran or loss.numel() != 1 or not loss.requires_grad:
            # Torch reports what is wrong with the loss, or computes gradients that no engine is involved in.
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
            return
        # Accumulated gradients wait for this factor until the window ends. New gradients get it too, so divide first.
        scale = max((trained.pending_scale for trained in ran if trained.holds_gradients), default=1.0)
        for trained in ran:
            trained.participation.require_known()
            trained.holds_gradients, trained.pending_scale = True, scale
        if scale != 1.0:
            loss = loss / scale
        engine = ran[-1].engine  # hooks on outputs start the other engines that the loss depends on
        unspread = any(trained.settings.stage == 0 for trained in ran)
        if unspread:
            # Stage 0 has a hook on the model's output that would divide by the number of micro-batches once more if the
            # output itself is the loss. The product is another tensor.
            loss = loss * 1.0
        try:
            with ExitStack() as stack:
                for trained in ran:
                    stack.enter_context(added_to(trained))
                engine.backward(loss, scale_wrt_gas=False, **kwargs)
                for trained in ran:
                    trained.is_complete = bool(trained.engine.is_gradient_accumulation_boundary())
                    if trained.is_complete:
                        trained.layout.finish_window()
        except RuntimeError as error:
            if unspread and len(ran) > 1:
                raise ConfigurationError(
                    "A loss depends on several models, which DeepSpeed's stage 0 cannot differentiate together. Use "
                    "stage 1, 2 or 3, or combine the models in one module.",
                ) from error
            raise

    def optimizer_step(
        self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool:
        if closure is not None:
            _refuse_closure(optimizer)
        trained = self._engines.stepped_by(optimizer)
        complete(trained)
        configured = trained.settings.clipping
        if configured is not None and not trained.clipped:
            self.gradients.clip_norm(list(trained.all_trained()), configured)
        trained.step()
        return bool(trained.engine.was_step_applied())

    def _release(self) -> None:
        self._engines.destroy()
        if self._group is not None:
            self._group.leave()
            self._group = None

    # what only DeepSpeed has

    def engine_of(self, model: nn.Module) -> Any:
        """Return the `DeepSpeedEngine` of a prepared model.

        Args:
            model: A prepared model, or the module that was given to `prepare`.

        Raises:
            ConfigurationError: The model was not prepared together with an optimizer.
        """
        return self._engines.require(model).engine

    def save_native(self, model: nn.Module, directory: str | os.PathLike[str], tag: str = "native") -> None:
        """Save a model's checkpoint in DeepSpeed's own format.

        A collective call: each process writes its part.

        Args:
            model: A prepared model.
            directory: The checkpoint directory.
            tag: Name of the checkpoint's folder within the directory.
        """
        zero_state.save(self._engines.require(model), directory, tag)

    def load_native(self, model: nn.Module, directory: str | os.PathLike[str], tag: str | None = None) -> None:
        """Load a checkpoint that `save_native` wrote on the same number of processes.

        A collective call.

        Args:
            model: A prepared model.
            directory: The checkpoint directory.
            tag: Name of the checkpoint's folder. None selects the latest one.

        Raises:
            CheckpointError: There is no checkpoint, or another number of processes wrote it.
        """
        zero_state.load(self._engines.require(model), directory, tag, self.topology.environment.world_size)

    def _package(self) -> Any:
        if self._group is None:
            raise ConfigurationError("strategy='deepspeed' is not set up yet. Pass it to a Trainer or Accelerator.")
        return self._group.package

    def __repr__(self) -> str:
        return f"DeepSpeed(stage={self.stage})"


def _refuse_closure(optimizer: Optimizer) -> NoReturn:
    raise ConfigurationError(
        f"{type(optimizer).__name__} computes gradients in its step (a closure), which DeepSpeed does not support. "
        "Use another optimizer or another strategy.",
    )


def _make_contiguous(model: nn.Module) -> None:
    """Make a model's parameters and buffers contiguous, because ZeRO flattens them."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_contiguous():
            tensor.data = tensor.data.contiguous()


def _refuse_compiled(model: nn.Module) -> None:
    """Raise an error if a submodule was compiled, because ZeRO-3 cannot shard it."""
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod"):
            inner = type(module._orig_mod).__name__
            raise ConfigurationError(
                f"{inner}{f' ({name})' if name else ''} was wrapped by torch.compile before prepare, so that "
                "DeepSpeed's stage 3 cannot partition it. Compile it in place with model.compile(), after prepare, "
                "or with Accelerator(dynamo_backend=...) or Trainer(compile=...). Stages 1 and 2 have no such limit.",
            )


def _refuse_several_dtypes(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    # ZeRO joins the trained parameters, which must therefore have one dtype.
    by_dtype: dict[torch.dtype, list[str]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, []).append(names.get(id(parameter), "?"))
    if len(by_dtype) > 1:
        found = "; ".join(f"{dtype}: {listed(own, 4)}" for dtype, own in by_dtype.items())
        raise ConfigurationError(
            f"DeepSpeed trains parameters of one dtype, but the optimizer holds {found}. Convert them to one dtype "
            "before prepare (parameter.data = parameter.data.float()), or use precision='bf16-true' or "
            'strategy="ddp".',
            see="precision.md",
        )


def _refuse_frozen_groups(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    # ZeRO cannot flatten a group without trained parameters.
    for number, group in enumerate(optimizer.param_groups):
        if group["params"] and not any(parameter.requires_grad for parameter in group["params"]):
            held = listed([names.get(id(parameter), "?") for parameter in group["params"]], 4)
            raise ConfigurationError(
                f"All parameters in the optimizer's group {number} are frozen ({held}), but ZeRO needs a trained one "
                'in each group. Remove the group, or use strategy="ddp" or "fsdp".',
            )


def _names_of_groups(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    # Empty groups are left out.
    groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} holds a parameter that does not belong to the prepared model. "
                    "DeepSpeed steps the parameters of one model only.",
                )
        if group["params"]:
            groups.append([names[id(parameter)] for parameter in group["params"]])
    return groups

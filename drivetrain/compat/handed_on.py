"""Modules of other frameworks that only re-export names: which module exports which names, and from where.

`drivetrain.compat.aliases` creates these modules on import, so they need no files.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from drivetrain.runtime.errors import DrivetrainError

# Names that scripts import and drivetrain lacks. They raise an error when called.


class AbsentNameError(DrivetrainError, NotImplementedError):
    """Raised when a script calls a class or function of another framework that drivetrain does not have."""


def absent(name: str, reason: str, package: str = "accelerate") -> type:
    """Return a class that can be imported and subclassed, but raises `AbsentNameError` when called."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise AbsentNameError(f"{package}'s {name} was called. {reason}")

    return type(name, (), {"__new__": refuse, "__doc__": f"Not in drivetrain. {reason}"})


def absent_names(module: str, *groups: tuple[str, Iterable[str]], room: str | None = None) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which creates missing names and re-export modules on access."""
    package = module.removeprefix("drivetrain.compat.").partition(".")[0]
    reasons = {name: reason for reason, names in groups for name in names}
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in reasons:
            if f"{module}.{name}".removeprefix("drivetrain.compat.") in HANDED_ON:
                return import_module(f"{module}.{name}")
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if name not in made:
            found = None if room is None else getattr(importlib.import_module(room), name, None)
            made[name] = absent(name, reasons[name], package) if found is None else found
        return made[name]

    return get


PREFIX = "drivetrain.compat."


HANDED_ON: dict[str, dict[str, str]] = {
    "accelerate.big_modeling": {
        "drivetrain.inference": (
            "attach_layerwise_casting_hooks cpu_offload cpu_offload_with_hook disk_offload "
            "dispatch_model init_empty_weights init_on_device load_checkpoint_and_dispatch"
        )
    },
    "accelerate.checkpointing": {},
    "accelerate.hooks": {
        "drivetrain.inference": (
            "AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook "
            "UserCpuOffloadHook add_hook_to_module attach_align_device_hook "
            "attach_align_device_hook_on_blocks attach_execution_device_hook remove_hook_from_module "
            "remove_hook_from_submodules"
        )
    },
    "accelerate.inference": {"drivetrain.inference": "prepare_pippy"},
    "accelerate.local_sgd": {"drivetrain.accelerator.local_sgd": "LocalSGD"},
    "accelerate.memory_utils": {"drivetrain.compat.accelerate.utils.memory": "find_executable_batch_size"},
    "accelerate.utils.launch": {},
    "accelerate.utils.megatron_lm": {},
    "accelerate.utils.offload": {
        "drivetrain.inference": (
            "OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict "
            "load_offloaded_weight offload_state_dict offload_weight save_offload_index"
        )
    },
    "accelerate.utils.rich": {},
    "accelerate.utils.torch_xla": {},
    "lightning.fabric.accelerators.accelerator": {"drivetrain.compat.lightning.accelerators": "Accelerator"},
    "lightning.fabric.accelerators.cpu": {"drivetrain.compat.lightning.accelerators": "CPUAccelerator"},
    "lightning.fabric.accelerators.cuda": {
        "drivetrain.compat.lightning.accelerators": "CUDAAccelerator find_usable_cuda_devices num_cuda_devices"
    },
    "lightning.fabric.accelerators.mps": {"drivetrain.compat.lightning.accelerators": "MPSAccelerator"},
    "lightning.fabric.accelerators.xla": {"drivetrain.compat.lightning.accelerators": "XLAAccelerator"},
    "lightning.fabric.loggers.logger": {
        "drivetrain.compat.lightning.pytorch.loggers.logger": "Logger rank_zero_experiment"
    },
    "lightning.fabric.plugins.io.checkpoint_io": {"drivetrain.compat.lightning.checkpoint_io": "CheckpointIO"},
    "lightning.fabric.plugins.io.torch_io": {"drivetrain.compat.lightning.checkpoint_io": "TorchCheckpointIO"},
    "lightning.fabric.plugins.precision.amp": {"drivetrain.compat.lightning.plugins": "MixedPrecision"},
    "lightning.fabric.plugins.precision.deepspeed": {"drivetrain.compat.lightning.plugins": "DeepSpeedPrecision"},
    "lightning.fabric.plugins.precision.double": {"drivetrain.compat.lightning.plugins": "DoublePrecision"},
    "lightning.fabric.plugins.precision.fsdp": {"drivetrain.compat.lightning.plugins": "FSDPPrecision"},
    "lightning.fabric.plugins.precision.half": {"drivetrain.compat.lightning.plugins": "HalfPrecision"},
    "lightning.fabric.plugins.precision.precision": {"drivetrain.compat.lightning.plugins": "Precision"},
    "lightning.fabric.strategies.ddp": {"drivetrain.compat.lightning.pytorch.strategies.ddp": "DDPStrategy"},
    "lightning.fabric.strategies.deepspeed": {
        "drivetrain.compat.lightning.pytorch.strategies.deepspeed": "DeepSpeedStrategy"
    },
    "lightning.fabric.strategies.fsdp": {"drivetrain.compat.lightning.pytorch.strategies.fsdp": "FSDPStrategy"},
    "lightning.fabric.strategies.registry": {
        "drivetrain.compat.lightning.pytorch.strategies.registry": "StrategyRegistry as STRATEGY_REGISTRY"
    },
    "lightning.fabric.strategies.single_device": {
        "drivetrain.compat.lightning.pytorch.strategies.strategy": "SingleDeviceStrategy"
    },
    "lightning.fabric.strategies.strategy": {"drivetrain.compat.lightning.pytorch.strategies.strategy": "Strategy"},
    "lightning.fabric.utilities.enums": {"drivetrain.compat.lightning.enums": "LightningEnum"},
    "lightning.fabric.utilities.exceptions": {
        "drivetrain.runtime.errors": "ConfigurationError as MisconfigurationException"
    },
    "lightning.pytorch.accelerators.accelerator": {"drivetrain.compat.lightning.accelerators": "Accelerator"},
    "lightning.pytorch.accelerators.cuda": {
        "drivetrain.compat.lightning.accelerators": "CUDAAccelerator find_usable_cuda_devices"
    },
    "lightning.pytorch.accelerators.mps": {"drivetrain.compat.lightning.accelerators": "MPSAccelerator"},
    "lightning.pytorch.accelerators.xla": {"drivetrain.compat.lightning.accelerators": "XLAAccelerator"},
    "lightning.pytorch.callbacks.batch_size_finder": {},
    "lightning.pytorch.callbacks.callback": {"drivetrain.callbacks": "Callback"},
    "lightning.pytorch.callbacks.device_stats_monitor": {},
    "lightning.pytorch.callbacks.early_stopping": {
        "drivetrain.callbacks.early_stopping": "EarlyStopping EarlyStoppingReason"
    },
    "lightning.pytorch.callbacks.finetuning": {},
    "lightning.pytorch.callbacks.gradient_accumulation_scheduler": {},
    "lightning.pytorch.callbacks.lambda_function": {},
    "lightning.pytorch.callbacks.lr_finder": {},
    "lightning.pytorch.callbacks.lr_monitor": {"drivetrain.callbacks": "LearningRateMonitor"},
    "lightning.pytorch.callbacks.model_summary": {"drivetrain.callbacks": "ModelSummary"},
    "lightning.pytorch.callbacks.on_exception_checkpoint": {},
    "lightning.pytorch.callbacks.pruning": {},
    "lightning.pytorch.callbacks.rich_model_summary": {},
    "lightning.pytorch.callbacks.stochastic_weight_avg": {},
    "lightning.pytorch.callbacks.timer": {"drivetrain.callbacks": "Timer"},
    "lightning.pytorch.callbacks.weight_averaging": {},
    "lightning.pytorch.core.hooks": {
        "drivetrain.trainer.data_module": "DataHooks",
        "drivetrain.trainer.task": "TaskHooks as CheckpointHooks TaskHooks as ModelHooks",
    },
    "lightning.pytorch.loggers.csv_logs": {
        "drivetrain.compat.lightning.pytorch.loggers.experiment_writer": "ExperimentWriter",
        "drivetrain.compat.lightning.pytorch.loggers.files": "CSVLogger",
    },
    "lightning.pytorch.loggers.litlogger": {},
    "lightning.pytorch.loggers.neptune": {},
    "lightning.pytorch.loggers.tensorboard": {"drivetrain.compat.lightning.pytorch.loggers.files": "TensorBoardLogger"},
    "lightning.pytorch.plugins.io.checkpoint_plugin": {"drivetrain.compat.lightning.checkpoint_io": "CheckpointIO"},
    "lightning.pytorch.plugins.io.torch_plugin": {"drivetrain.compat.lightning.checkpoint_io": "TorchCheckpointIO"},
    "lightning.pytorch.profilers.advanced": {"drivetrain.trainer.profilers": "AdvancedProfiler"},
    "lightning.pytorch.profilers.base": {"drivetrain.trainer.profilers": "PassThroughProfiler"},
    "lightning.pytorch.profilers.profiler": {"drivetrain.trainer.profilers": "Profiler"},
    "lightning.pytorch.profilers.simple": {"drivetrain.trainer.profilers": "SimpleProfiler"},
    "lightning.pytorch.profilers.xla": {"drivetrain.trainer.profilers": "XLAProfiler"},
    "lightning.pytorch.strategies.single_device": {
        "drivetrain.compat.lightning.pytorch.strategies.strategy": "SingleDeviceStrategy"
    },
    "lightning.pytorch.trainer.connectors.callback_connector": {},
    "lightning.pytorch.trainer.connectors.checkpoint_connector": {},
    "lightning.pytorch.trainer.connectors.data_connector": {},
    "lightning.pytorch.trainer.connectors.logger_connector": {},
    "lightning.pytorch.trainer.connectors.logger_connector.fx_validator": {},
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector": {},
    "lightning.pytorch.trainer.connectors.logger_connector.result": {},
    "lightning.pytorch.trainer.connectors.signal_connector": {},
    "lightning.pytorch.tuner.batch_size_scaling": {},
    "lightning.pytorch.tuner.lr_finder": {"drivetrain.trainer.tuning.lr_search": "LRFinder as _LRFinder"},
    "lightning.pytorch.tuner.tuning": {"drivetrain.trainer.tuning.tuner": "Tuner"},
    "lightning.pytorch.utilities.enums": {"drivetrain.compat.lightning.enums": "GradClipAlgorithmType LightningEnum"},
    "lightning.pytorch.utilities.exceptions": {
        "drivetrain.runtime.errors": "ConfigurationError as MisconfigurationException",
        "drivetrain.compat.lightning.signals": "SIGTERMException",
    },
    "lightning.pytorch.utilities.seed": {
        "drivetrain.compat.lightning.fabric.utilities.seed": "isolate_rng seed_everything"
    },
}
"""By module, without `drivetrain.compat.`: names by the module that defines them, separated by spaces."""

ABSENT: dict[str, tuple[str | None, list[tuple[str, str]]]] = {
    "accelerate.checkpointing": (
        None,
        [
            (
                "accelerate.absent:INTERNAL",
                ("load_accelerator_state load_custom_state save_accelerator_state save_custom_state"),
            )
        ],
    ),
    "accelerate.inference": (
        None,
        [("accelerate.absent:INTERNAL", ("build_pipeline find_pippy_batch_size generate_device_map pippy_forward"))],
    ),
    "accelerate.utils.launch": (
        None,
        [
            (
                "accelerate.absent:OTHER_LAUNCHER",
                (
                    "PrepareForLaunch _filter_args prepare_deepspeed_cmd_env prepare_multi_gpu_env "
                    "prepare_simple_launcher_cmd_env prepare_tpu"
                ),
            ),
            ("accelerate.absent:SAGEMAKER", "prepare_sagemager_args_inputs"),
        ],
    ),
    "accelerate.utils.megatron_lm": (
        None,
        [
            (
                "accelerate.absent:MEGATRON",
                (
                    "AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader "
                    "MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper "
                    "T5TrainStep add_model_config_to_megatron_parser avg_losses_across_data_parallel_group "
                    "gather_across_data_parallel_groups initialize megatron_lm_initialize "
                    "megatron_lm_prepare_data_loader megatron_lm_prepare_model_optimizer_scheduler "
                    "megatron_lm_prepare_optimizer megatron_lm_prepare_scheduler prepare_data_loader "
                    "prepare_model_optimizer_scheduler prepare_optimizer prepare_scheduler"
                ),
            )
        ],
    ),
    "accelerate.utils.torch_xla": (None, [('Install it with pip install "drivetrain[xla]".', "install_xla")]),
    "lightning.pytorch.callbacks.batch_size_finder": (
        "drivetrain.callbacks",
        [("lightning.reasons:CALLBACK", "BatchSizeFinder")],
    ),
    "lightning.pytorch.callbacks.device_stats_monitor": (
        "drivetrain.callbacks",
        [("lightning.reasons:CALLBACK", "DeviceStatsMonitor")],
    ),
    "lightning.pytorch.callbacks.finetuning": (
        "drivetrain.callbacks",
        [("lightning.reasons:CALLBACK", "BackboneFinetuning BaseFinetuning")],
    ),
    "lightning.pytorch.callbacks.gradient_accumulation_scheduler": (
        "drivetrain.callbacks",
        [("lightning.reasons:CALLBACK", "GradientAccumulationScheduler")],
    ),
    "lightning.pytorch.callbacks.lambda_function": (
        "drivetrain.callbacks",
        [("lightning.reasons:CALLBACK", "LambdaCallback")],
    ),
    "lightning.pytorch.callbacks.lr_finder": (
        "drivetrain.callbacks",
        [("lightning.reasons:CALLBACK", "LearningRateFinder")],
    ),
    "lightning.pytorch.callbacks.on_exception_checkpoint": (
        "drivetrain.callbacks",
        [("lightning.reasons:CALLBACK", "OnExceptionCheckpoint")],
    ),
    "lightning.pytorch.callbacks.pruning": ("drivetrain.callbacks", [("lightning.reasons:CALLBACK", "ModelPruning")]),
    "lightning.pytorch.callbacks.rich_model_summary": (
        "drivetrain.callbacks",
        [("lightning.reasons:CALLBACK", "RichModelSummary")],
    ),
    "lightning.pytorch.callbacks.stochastic_weight_avg": (
        "drivetrain.callbacks",
        [("lightning.reasons:CALLBACK", "StochasticWeightAveraging")],
    ),
    "lightning.pytorch.callbacks.weight_averaging": (
        "drivetrain.callbacks",
        [("lightning.reasons:CALLBACK", "EMAWeightAveraging WeightAveraging")],
    ),
    "lightning.pytorch.loggers.litlogger": (None, [("lightning.reasons:LOGGER", "LitLogger")]),
    "lightning.pytorch.loggers.neptune": (None, [("lightning.reasons:LOGGER", "NeptuneLogger")]),
    **{
        f"lightning.pytorch.trainer.connectors.{module}": (None, [("lightning.reasons:INTERNAL", names)])
        for module, names in {
            "callback_connector": "_CallbackConnector",
            "checkpoint_connector": "_CheckpointConnector",
            "data_connector": "_DataConnector _DataHookSelector _DataLoaderSource",
            "logger_connector": "_LoggerConnector",
            "logger_connector.fx_validator": "_FxValidator",
            "logger_connector.logger_connector": "_LoggerConnector",
            "logger_connector.result": "_Metadata _ResultCollection _ResultMetric _Sync",
            "signal_connector": "_SignalConnector",
        }.items()
    },
    "lightning.pytorch.tuner.batch_size_scaling": (None, [("lightning.reasons:TUNER", "scale_batch_size")]),
    "lightning.pytorch.tuner.lr_finder": (None, [("lightning.reasons:TUNER", "lr_find")]),
}
"""By module: the package of drivetrain to look in first, and the names that raise when they are called, by reason."""


class HandedOnLoader(Loader):
    """Import loader for re-export modules, which have no file."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create the module, or return the one already created under another name."""
        return sys.modules.setdefault(self._name, ModuleType(self._name))

    def exec_module(self, module: ModuleType) -> None:
        """Import the re-exported names into the module."""
        key, names = self._name.removeprefix(PREFIX), {}
        for source, words in HANDED_ON[key].items():
            for word in words.replace(" as ", "=").split():
                name, _, alias = word.partition("=")
                names[alias or name] = getattr(importlib.import_module(source), name)
        vars(module).update(names, __all__=[name for name in names if not name.startswith("_")])
        room, reasons = ABSENT.get(key, (None, []))
        if reasons:
            groups = [(_reason(reason), words.split()) for reason, words in reasons]
            vars(module)["__getattr__"] = absent_names(self._name, *groups, room=room)


def import_module(name: str) -> ModuleType:
    """Import a module of `drivetrain.compat`, with or without its own file."""
    if name.removeprefix(PREFIX) not in HANDED_ON:
        return importlib.import_module(name)
    loader = HandedOnLoader(name)
    module = loader.create_module(ModuleSpec(name, loader))
    if not hasattr(module, "__all__"):
        loader.exec_module(module)
    return module


def _reason(text: str) -> str:
    """Return the text, or the constant that `module:NAME` refers to."""
    module, _, name = text.rpartition(":")
    return str(getattr(importlib.import_module(PREFIX + module), name)) if name.isupper() else text

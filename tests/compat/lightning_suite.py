"""Lightning's own tests of its public interface, run against `drivetrain.compat.lightning`.

    python -m tests.compat.lightning_suite CHECKOUT trainer/test_states.py loops

runs files or folders of `CHECKOUT/tests/tests_pytorch` (`fabric:` before a name: of `CHECKOUT/tests/tests_fabric`) with
our names in the place of Lightning's, and prints for each file how many cases passed, failed and were left out. `--why`
prints the reason of each case too; `-k`, `-x` and what else follows `--` goes to pytest.

A case that fails is left out where it is about Lightning's own machinery: where it imports, replaces or reads something
whose name begins with an underscore, or that is in one of the modules of `MACHINERY`, or a loop's own methods; where it
puts a method of its own into a strategy, does by hand what Fabric does with one, or pretends that there are devices
which are not there; and where `LEFT_OUT` names it, with its reason. What skips itself, for want of a GPU or a package,
is counted apart.

`--public` selects by the sources alone, so that the same cases can be run with Lightning itself. A case is not run if
its source names a part of the machinery, or puts something in the place of a part of Lightning. Every other case that
does not pass has failed: `LEFT_OUT` has no effect. `-- --collect-only` prints the names of the selected cases.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import drivetrain.compat
from drivetrain import LaunchError
from drivetrain.compat.aliases import STAND_INS
from drivetrain.compat.lightning.pytorch.trainer import arguments
from drivetrain.compat.lightning.pytorch.trainer.views import EpochLoopView, FitLoopView
from drivetrain.trainer import Trainer as CoreTrainer

MACHINERY = (
    "lightning.fabric.strategies.launchers",
    "lightning.fabric.utilities.distributed",
    "lightning.fabric.utilities.imports",
    "lightning.fabric.utilities.testing",
    "lightning.pytorch.loops",
    "lightning.pytorch.overrides",
    "lightning.pytorch.strategies.launchers",
    "lightning.pytorch.trainer.call",
    "lightning.pytorch.trainer.configuration_validator",
    "lightning.pytorch.trainer.connectors",
    "lightning.pytorch.utilities._pytree",
    "lightning.pytorch.utilities.imports",
    "lightning.pytorch.utilities.migration",
    "lightning.pytorch.utilities.signature_utils",
    "lightning.pytorch.utilities.testing",
)
"""Modules that Lightning's reference does not list, or that hold its own loops and connectors."""

ALONE = "makes a Trainer of more processes than the test is, which are started here when it is made"
SEARCHES = "expects that several processes cannot search, which they can here"
EXACT = "warns that the data cannot continue within an epoch, which they do here"
SERVER = "needs fsspec's packages for http, and does not skip itself"
SERVED = "expects signatures to be refused which are served here: what takes the loader's number gets it"
LAST = "counts the calls of torch.save, which `last` needs none of here: it is another name of the file"
INSTALLED = "pretends that a package is installed"
WITHIN = "expects to validate within a step of several batches, after which it is done here"
WORDING = "compares the wording of a message"
OWN_STRATEGY = "calls or overrides what Lightning's own loops call of a strategy"
WORKS = "expects an error for what works here"
HOOK_ALONE = "calls a hook by itself, for a check that is made here before a run begins"
MOCK_CALLBACK = "puts a mock in the place of a callback, whose class attributes are then mocks"
PEERS = "pretends to be one of several processes, whose peers a Trainer waits for when it is made"

LOCAL = "expects logs at a URL; a run's report and logs are files of this machine, which a warning names"
BEFORE = "expects a hook to get the batch before its own, whose batch it gets here"

LEFT_OUT = {
    "test_val_check_interval.py::test_time_and_epoch_gated_val_check": "counts the calls of time.monotonic",
    "test_val_check_interval.py::test_time_based_val_check_interval": "counts the calls of time.monotonic",
    "test_trainer.py::test_trainer_calls_strategy_on_exception": "replaces a hook of Lightning's own strategies",
    "test_trainer.py::test_trainer_integration_suggestions[True]": "expects advice to install other products",
    "test_logger_connector.py::test_fx_validator": "compares the methods of Lightning's own callbacks",
    "test_logger_connector.py::test_fx_validator_integration": "expects lr_scheduler_step not to log, which may here",
    "test_train_loop_logging.py::test_logging_raises": "expects reduce_fx to be no function, which it may be here",
    "test_trainer.py::test_train_loop_system": "expects the forward within optimizer.step, before which it comes here",
    "test_trainer.py::test_trainer_min_steps_and_min_epochs_not_reached": "reads the log of a module of Lightning's",
    "test_trainer.py::test_trainer_config_strategy[trainer_kwargs2-DDPStrategy-CPUAccelerator-1]": ALONE,
    "test_trainer.py::test_trainer_config_strategy[trainer_kwargs8-DDPStrategy-CPUAccelerator-2]": ALONE,
    "test_trainer.py::test_trainer_config_strategy[trainer_kwargs11-DDPStrategy-CPUAccelerator-2]": ALONE,
    "test_trainer.py::test_trainer_config_device_ids[trainer_kwargs3-expected_device_ids3]": ALONE,
    "test_accelerator_connector.py::test_check_fsdp_strategy_and_fallback": "expects an error for what works here",
    "test_accelerator_connector.py::test_custom_accelerator": PEERS,
    "test_accelerator_connector.py::test_custom_cluster_environment_in_slurm_environment": PEERS,
    "test_accelerator_connector.py::test_parallel_devices_in_strategy_confilict_with_accelerator": "gives a strategy "
    "its devices, which it does not take",
    "test_accelerator_connector.py::test_strategy_choice_ddp_cpu_kubeflow": PEERS,
    "test_accelerator_connector.py::test_strategy_choice_ddp_cpu_slurm": PEERS,
    "test_accelerator_connector.py::test_sync_batchnorm_invalid_choice": "replaces how layers are synchronised",
    "test_accelerator_connector.py::test_sync_batchnorm_set_in_custom_strategy": "reads the private _layer_sync",
    "test_callback_connector.py::test_configure_external_callbacks": "expects no callback beside; a run has its report",
    "test_data_connector.py::test_replace_distributed_sampler": "expects a sampler of torch's in the loader",
    "test_signal_connector.py::test_signal_connector_in_thread": "reads the private _signal_connector, in a thread",
    "test_signal_connector.py::test_sigterm_handler_can_be_added": "expects that a script's own handler is joined by "
    "another one, which is left alone here",
    "test_trainer.py::test_fit_ckpt_path_epoch_restored[True]": SERVER,
    "test_trainer.py::test_no_val_module[True]": SERVER,
    "test_trainer.py::test_strict_model_load[True]": SERVER,
    "test_tuning.py::test_tuner_with_distributed_strategies": SEARCHES,
    "test_scale_batch_size.py::test_batch_size_finder_with_distributed_strategies": SEARCHES,
    "test_scale_batch_size.py::test_auto_scale_batch_size_duplicate_attribute_warning": WORDING,
    "test_lr_finder.py::test_lr_finder_callback_restarting": "expects max_steps to be another while it searches",
    "test_lr_finder.py::test_trainer_reset_correctly": "reads a method of Lightning's own strategies",
    "test_scale_batch_size.py::test_dataloader_batch_size_updated_on_failure": "replaces what knows errors of memory",
    "test_dataloaders.py::test_fit_multiple_train_loaders[sequential-128]": "expects an error for what works here",
    "test_dataloaders.py::test_warning_with_small_dataloader_and_logging_interval": WORDING,
    "test_dataloaders.py::test_warning_with_iterable_dataset_and_len": "warns of what cannot come twice here",
    "test_combined_loader.py::test_combined_loader_length_must_call_iter_first": "expects no length yet; here is one",
    "test_seed.py::test_isolate_rng_cuda": "counts the calls of torch.cuda.set_rng_state_all",
    "test_all_gather_grad.py::test_all_gather_ddp_spawn": "makes a strategy of Lightning's parts, and no Trainer",
    "test_no_removal_version.py::test_bitsandbytes_precision_plugin": INSTALLED,
    "test_no_removal_version.py::test_transformer_engine_precision_plugin": INSTALLED,
    "test_no_removal_version.py::test_xla_precision_plugin": INSTALLED,
    "test_val_check_interval.py::test_validation_check_interval_exceed_data_length_correct[2-False]": WITHIN,
    "test_val_check_interval.py::test_validation_check_interval_exceed_data_length_correct[2-True]": WITHIN,
    "test_distributed_logging.py::test_first_logger_call_in_subprocess": "gives a mock for a logger",
    "test_eval_loop_logging.py::test_validation_step_log_with_tensorboard": "expects hp_metric, which is not logged",
    "test_dataloaders.py::test_iterable_dataset_stop_iteration_at_epoch_beginning": "expects no error without any data",
    "test_hooks.py::test_trainer_model_hook_system_predict": "expects no call of on_predict_model_train",
    "test_trainer.py::test_model_checkpoint_options": "sets a Trainer's counters by hand, and runs nothing",
    "test_cli.py::test_lightning_cli_jsonnet": "needs the package jsonnet, and does not skip itself without it",
    "test_cli.py::test_pytorch_profiler_init_args": "expects what is found in the source of Lightning's class",
    "test_lightning_module.py::test_toggle_untoggle_optimizer_are_compiler_disabled": "is about torch's compiler",
    "test_automatic_loop.py::test_skip_training_step_not_allowed[2]": "expects that several processes may not leave "
    "batches out, which they may here",
    "test_loops.py::test_validation_during_gradient_accumulation_window": WITHIN,
    "test_loops.py::test_fit_loop_save_and_restore_dataloaders": "reads where Lightning's loops keep the states of "
    "loaders; here loaders without one continue too, and one without batches is refused",
    "test_closure.py::test_optimizer_step_no_closure_raises": "expects an optimizer that ignores its closure to be "
    "refused; here its gradients are there before it steps",
    "test_fabric.py::test_launch_and_cli_not_allowed": "is about the processes of Lightning's own launcher",
    "test_fabric.py::test_overridden_run_and_cli_not_allowed": "is about the processes of Lightning's own launcher",
    "test_fabric.py::test_seed_everything": "expects a function for workers; here each sample has a seed of its own",
    **{
        f"{file}::test_invalid_dataloader_idx_raises_{where}": SERVED
        for file in ("test_evaluation_loop.py", "test_prediction_loop.py")
        for where in ("step", "batch_start", "batch_end")
    },
    **{
        f"test_wrappers.py::{name}": "constructs Lightning's private wrapper around a mock of its strategies"
        for name in (
            "test_fabric_module_setattr",
            "test_fabric_optimizer_load_state_dict",
            "test_fabric_optimizer_state_dict",
            "test_fabric_optimizer_steps",
            "test_fabric_optimizer_wraps",
            "test_fabric_optimizer_zero_grad_kwargs",
            "test_is_wrapped",
            "test_step_method_redirection",
        )
    },
    "test_upgrade_checkpoint.py": "is a command of Lightning's own",
    "strategies/test_registry.py::test_available_strategies_in_registry": "compares the names of all its strategies",
    "test_registry.py::test_xla_debug_strategy_registry": "pretends that there is a TPU",
    "test_registry.py::test_deepspeed_strategy_registry_with_trainer": "makes DeepSpeed for float16 on the CPU",
    "test_amp.py::test_amp_forward_context_restores_grad_mode_context_managers": "expects that torch's functions are "
    "replaced, around an error that torch has mended",
    "test_deepspeed_precision.py::test_invalid_precision_with_deepspeed_precision": WORDING,
    "test_double.py::test_double_precision[DoublePrecisionBoringModelComplexBuffer]": "expects complex buffers not "
    "to follow the number format",
    "test_cluster_integration.py::test_ranks_available_manual_strategy_selection": "hands a strategy devices that are "
    "not there",
    "test_custom_strategy.py::test_strategy_lightning_restore_optimizer_and_schedulers": OWN_STRATEGY,
    "accelerators/test_cpu.py::test_restore_checkpoint_after_pre_setup": OWN_STRATEGY,
    "accelerators/test_cpu.py::test_restore_checkpoint_after_pre_setup_default": OWN_STRATEGY,
    "test_deepspeed.py::test_deepspeed_load_checkpoint_validate_path": OWN_STRATEGY,
    "test_deepspeed.py::test_deepspeed_with_invalid_config_path": WORDING,
    "test_deepspeed.py::test_error_with_invalid_accelerator": WORKS,
    "test_deepspeed.py::test_validate_parallel_devices_indices": "hands a strategy devices that are not there",
    "test_fsdp.py::test_invalid_on_cpu": WORKS,
    "test_fsdp.py::test_save_checkpoint_storage_options": OWN_STRATEGY,
    "test_fsdp.py::test_save_checkpoint_unknown_state_dict_type": OWN_STRATEGY,
    "test_fsdp.py::test_use_orig_params": "reads an option of torch's older FSDP, in whose place is fully_shard here",
    "test_multiprocessing.py::test_fit_twice_raises": WORKS,
    "test_deepspeed.py::test_deepspeed_only_compatible_with_cuda": WORKS,
    "test_model_parallel.py::test_device_mesh_access": "makes the strategy under which a module shards itself in "
    "configure_model; here Parallel shards it by a plan",
    "test_deepspeed.py::test_deepspeed_save_checkpoint_exclude_frozen_parameters": OWN_STRATEGY,
    "test_deepspeed.py::test_deepspeed_save_checkpoint_warn_colliding_keys": OWN_STRATEGY,
    "test_deepspeed.py::test_deepspeed_engine_is_steppable": "is about the class of another package",
    "test_litlogger.py": "is about a client of Lightning's own hosted service, which is not here",
    "test_mlflow.py::test_mlflow_logger_no_synchronous_support": "pretends that MLflow is older than it is",
    **{
        f"test_comet.py::{name}": "reads the calls of an internal interface of Comet's, which names Lightning"
        for name in ("test_comet_epoch_logging", "test_comet_log_hyperparams", "test_comet_log_graph")
    },
    "test_all.py::test_logger_with_prefix_all": "reads the calls of an internal interface of Comet's",
    "test_all.py::test_logger_initialization[CometLogger]": "leaves Comet's archive, where that package is installed",
    "test_all.py::test_loggers_pickle_all[CometLogger]": "leaves Comet's archive, where that package is installed",
    "test_cuda.py::test_force_nvml_based_cuda_check": "expects a variable that the import of Lightning sets",
    "test_csv.py::test_log_metrics_column_order_sorted": "compares the order of columns; the step comes first here",
    "test_csv.py::test_csv_logger_remotefs": LOCAL,
    "test_csv.py::test_log_hyperparams": "expects an error for what works here",
    "test_csv.py::test_manual_versioning_file_exists": "expects the table of an earlier run to be removed",
    "test_model_checkpoint.py::test_model_checkpoint_no_extraneous_invocations": "counts the calls of state_dict, of "
    "which one hands the states to the processes here",
    "test_no_removal_version.py::test_configure_sharded_model": "expects the older name of configure_model to work, "
    "which is refused here with the present one",
    **{
        f"plugins/precision/test_fsdp.py::test_fsdp_precision_{name}": "calls what Lightning's loops call"
        for name in ("backward", "optimizer_step_with_scaler", "optimizer_step_without_scaler")
    },
    "plugins/precision/test_transformer_engine.py::test_configure_model": INSTALLED,
    "test_model_helpers.py::test_restricted_classmethod": "calls a private decorator of Lightning's",
    "test_prediction_writer.py::test_batch_level_batch_indices": "reads what Lightning's loop of predictions keeps",
    "test_checkpoint_connector.py::test_local_cross_device_checkpoint": LOCAL,
    "test_evaluation_loop.py::test_evaluation_loop_dataloader_iter_multiple_dataloaders": BEFORE,
    "test_prediction_loop.py::test_prediction_loop_with_iterable_dataset": BEFORE,
    "test_training_epoch_loop.py::test_training_loop_dataloader_iter_multiple_dataloaders": BEFORE,
    "test_training_epoch_loop.py::test_resume_mid_epoch_warning": EXACT,
    "test_fetchers.py::test_fetching_is_profiled": "expects the names of Lightning's private loops in a profile",
    "test_fetchers.py::test_stop_iteration_with_dataloader_iter[True]": "reads the number of a step from Lightning's "
    "loops, which is that of a batch here, where a step takes several",
    "test_callbacks.py::test_resume_callback_state_saved_by_type_stateful": "gives a class for the key of a state, "
    "which only unpickling would bring back",
    "test_callbacks.py::test_resume_incomplete_callbacks_list_warning": WORDING,
    "test_multiple_optimizers.py::test_multiple_optimizers_automatic_optimization_raises": WORKS,
    "test_manual_optimization.py::test_multiple_optimizers_manual_call_counts": OWN_STRATEGY,
    "test_manual_optimization.py::test_multiple_optimizers_manual_log": OWN_STRATEGY,
    "test_manual_optimization.py::test_step_with_optimizer_closure": OWN_STRATEGY,
    "test_manual_optimization.py::test_step_with_optimizer_closure_2": OWN_STRATEGY,
    "test_manual_optimization.py::test_step_with_optimizer_closure_with_different_frequencies": "replaces the steps of "
    "torch's optimizers, and expects them to get the closure, whose gradients they find here",
    "test_optimizers.py::test_plateau_scheduler_lr_step_interval_updated_after_saving[False]": "expects the state of a "
    "scheduler from before the step that the checkpoint is of",
    "test_hparams.py::test_model_save_hyper_parameters_interpolation_with_hydra": "needs hydra, and says not so",
    "test_hparams.py::test_collect_init_arguments[AggSubClassBoringModel]": "expects a module among "
    "the hyper-parameters in the file, which would need unpickling to open; it is left out with a warning here",
    "test_hparams.py::test_save_hparams_to_yaml": "needs omegaconf, and does not skip itself",
    "test_restore.py::test_restarting_mid_epoch_raises_warning[ExceptionModel-True]": EXACT,
    "test_restore.py::test_restarting_mid_epoch_raises_warning[ShouldStopModel-True]": EXACT,
    "test_restore.py::test_strict_model_load_less_params[True]": SERVER,
    "test_restore.py::test_strict_model_load_more_params[True]": SERVER,
    "test_legacy_checkpoints.py": "needs files that Lightning keeps apart from its repository",
    "test_checkpoint_callback_frequency.py::test_top_k[True-1-1-1.0-1]": LAST,
    "test_checkpoint_callback_frequency.py::test_top_k[True-2-1-0.25-4]": LAST,
    "test_checkpoint_callback_frequency.py::test_top_k[True-2-2-0.3-6]": LAST,
    "test_checkpoint_callback_frequency.py::test_top_k[True-2-2-1.0-2]": LAST,
    **{
        f"test_model_checkpoint.py::{name}": "reads the calls of a private function of Lightning's loops"
        for name in (
            "test_model_checkpoint_score_and_ckpt[True-False-False-val_log]",
            "test_model_checkpoint_score_and_ckpt[True-True-False-train_log_epoch]",
            "test_model_checkpoint_score_and_ckpt[True-False-True-val_log]",
            "test_model_checkpoint_score_and_ckpt_val_check_interval[0.25-True-True]",
        )
    },
    "test_model_checkpoint.py::test_checkpoint_repeated_strategy": "expects no list of runs, which is kept here",
    "test_model_checkpoint.py::test_model_checkpoint_train_time_interval": "replaces the clock of Lightning's module",
    "test_model_checkpoint.py::test_pickling": "compares the private attributes of Lightning's class",
    "test_tqdm_progress_bar.py::test_tqdm_progress_bar_print_disabled": "expects that a run prints nothing of its own",
    "test_callbacks.py::test_callbacks_configured_in_model": MOCK_CALLBACK,
    "test_callbacks.py::test_configure_callbacks_hook_multiple_calls": MOCK_CALLBACK,
    "test_device_stats_monitor.py::test_device_stats_cpu[None]": "counts the calls of a function of Lightning's own",
    "test_device_stats_monitor.py::test_device_stats_cpu[True]": "counts the calls of a function of Lightning's own",
    "test_finetuning_callback.py::test_unsupported_strategies": HOOK_ALONE,
    "test_gradient_accumulation_scheduler.py::test_unsupported_manual_optimization": HOOK_ALONE,
    "test_gradient_accumulation_scheduler.py::test_warn_if_model_has_overridden_optimization_hooks": HOOK_ALONE,
    "test_lambda_function.py::test_lambda_call": "takes every method of the base class for a hook; ours has others",
    **{
        f"test_weight_averaging.py::{name}": "counts the calls of private methods of Lightning's class"
        for name in (
            "test_ema",
            "test_ema_configure_model",
            "test_ema_ddp_spawn_cpu",
            "test_ema_resume",
            "test_ema_resume_ddp",
            "test_swa",
            "test_weight_averaging_deepcopy",
        )
    },
    **{
        f"test_stochastic_weight_avg.py::{name}": "reads fit_loop._skip_backward, and Lightning's scheduler"
        for name in (
            "test_swa_callback",
            "test_swa_callback_ddp_cpu",
            "test_swa_callback_scheduler_step",
            "test_swa_resume_training_from_checkpoint",
            "test_swa_resume_training_from_checkpoint_custom_scheduler",
            "test_swa_resume_training_from_checkpoint_ddp",
        )
    },
    "test_stochastic_weight_avg.py::test_swa_multiple_lrs": "reads what Lightning's scheduler leaves in an optimizer",
    "test_stochastic_weight_avg.py::test_swa_raises": "expects an error for a rate that is a whole number",
    "test_stochastic_weight_avg.py::test_swa_warns": WORDING,
    "test_timer.py::test_timer_parse_duration_misconfiguration[60 minutes]": "expects an error for what is taken here",
    "test_timer.py::test_timer_time_remaining": "replaces the clock in Lightning's own module",
    "test_throughput_monitor.py::test_throughput_monitor_fit_with_validation": "counts the calls of time.perf_counter",
    "test_lightning_optimizer.py::test_lightning_optimizer": "compares how an optimizer is printed",
    "test_lightning_optimizer.py::test_lightning_optimizer_automatic_optimization_optimizer_step": (
        "expects that the closure is of a class of Lightning's own loops"
    ),
    "test_metric_result_integration.py::test_compute_not_a_tensor_raises": WORKS,
    "test_metric_result_integration.py::test_result_collection_reload": "reads fit_loop._results",
    "test_results.py::test_result_reduce_ddp": "tests the private _Sync over Lightning's launcher",
    **{
        f"test_pruning_callback[{lottery}-TestPruningMethod-False-{given}]": "expects an error for what works here"
        for lottery in (False, True)
        for given in (False, True)
    },
    "test_pruning.py::test_pruning_misconfiguration": "expects an error for names of parameters that may be given here",
    "test_pruning.py::test_multiple_pruning_callbacks": WORDING,
    "test_lightning_optimizer.py::test_lightning_optimizer_manual_optimization_and_accumulated_gradients": (
        "replaces the step of torch's optimizer, and expects what the mock returned"
    ),
    "test_saving.py::test_load_from_checkpoint_blocks_untrusted_instantiator": WORDING,
    "test_saving.py::test_load_from_checkpoint_allows_lightning_instantiator": "replaces a function of Lightning's own",
    "test_profiler.py::test_profile_callbacks": "expects that a hook is called which nothing overrides",
    "test_profiler.py::test_pytorch_profiler_describe": "is expected to fail with Lightning itself",
    "test_profiler.py::test_simple_profiler_logs": "reads the report in a log, where it is printed here",
    "test_profiler.py::test_trainer_profiler_incorrect_str_arg": WORDING,
    "test_model_summary.py::test_model_size_warning_on_unsupported_precision": (
        "expects a warning that the size of the model is not known, which it is here"
    ),
}
"""Further cases, by the end of their names: why they are not about what Lightning documents."""

OUTCOMES = ("passed", "failed", "left out", "skipped")


class Stop(BaseException):
    """Not an `Exception`: a test that expects an error must not take it for that."""


class MachineryUsed(Stop):
    """A test used a part of Lightning's machinery."""


class DevicesPretended(Exception):
    """A fixture pretended that there are devices: an `Exception`, the only kind after which pytest runs the test."""


class NameMissing(Stop):
    """A test used a public name that the mirror does not have."""


class Absent(type):
    """The metaclass of what stands for a name that the mirror does not have: it can be imported, not used."""

    is_running = False

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        cls._refuse()
        return super().__call__()

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        cls._refuse()
        return stand_in_for(f"{cls.__name__}.{name}")

    def _refuse(cls) -> None:
        if Absent.is_running:
            machinery = [each.__name__ for each in cls.__mro__ if is_machinery(each.__name__)]
            raise MachineryUsed(machinery[0]) if machinery else NameMissing(cls.__name__)


def stand_in_for(name: str) -> Any:
    return Absent(name, (), {})


def is_machinery(name: str) -> bool:
    """Whether a dotted name is a part of Lightning's machinery rather than of its public interface."""
    private = any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    return private or any(name == each or name.startswith(f"{each}.") for each in MACHINERY)


# What the suite's own helpers and fixtures need of the machinery.


def _reasons_to_skip(**needs: Any) -> tuple[list[str], dict[str, Any]]:
    """What of a case's needs this machine does not meet."""
    import torch

    reasons = [name for name in ("min_cuda_gpus", "mps", "tpu", "standalone", "bf16_cuda") if needs.get(name)]
    least, below = needs.get("min_torch"), needs.get("max_torch")
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")))
    if least and version < tuple(map(int, least.split("."))):
        reasons.append(f"torch>={least}")
    if below and version >= tuple(map(int, below.split("."))):
        reasons.append(f"torch<{below}")
    packages = {"sklearn": "sklearn", "rich": "rich", "omegaconf": "omegaconf", "psutil": "psutil", "onnx": "onnx"}
    for name, package in {**packages, "deepspeed": "deepspeed", "thunder": "thunder"}.items():
        if needs.get(name) and importlib.util.find_spec(package) is None:
            reasons.append(package)
    return reasons, {}


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def _leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _load(path: Any, map_location: Any = None, weights_only: bool | None = False) -> Any:
    import torch

    return torch.load(path, map_location=map_location, weights_only=bool(weights_only))


class _Signals:
    def __init__(self, trainer: Any) -> None:
        raise MachineryUsed("_SignalConnector")

    @staticmethod
    def _valid_signals() -> set[Any]:
        import signal

        return set(signal.valid_signals())


class _Snapshots:
    """Checkpoints before a scheduler ends a job, which a helper of the suite writes and reads again."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def hpc_save_path(self, folder: Any) -> str:
        return str(Path(folder) / "hpc_ckpt_1.ckpt")

    def restore(self, path: Any) -> None:
        self._trainer.lightning_module.load_state_dict(_load(path)["state_dict"])

    vars()["_CheckpointConnector__get_max_ckpt_path_from_folder"] = hpc_save_path


HELPERS: dict[str, Any] = {
    "lightning.fabric.plugins.environments.lightning.find_free_network_port": _free_port,
    "lightning.fabric.strategies.launchers.subprocess_script._ChildProcessObserver": type("Observer", (), {}),
    "lightning.fabric.utilities.cloud_io._load": _load,
    "lightning.fabric.utilities.distributed._destroy_dist_connection": _leave_process_group,
    "lightning.fabric.utilities.testing._runif_reasons": _reasons_to_skip,
    "lightning.pytorch.strategies.ddp._DDP_FORK_ALIASES": ("ddp_fork", "ddp_notebook"),
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector": _Signals,
    "lightning.pytorch.utilities.testing._runif_reasons": _reasons_to_skip,
}


def _helper(name: str) -> Any:
    """The suite's own need by its dotted name: flags of the machine, and `HELPERS`; None for anything else."""
    last = name.rpartition(".")[2]
    if name in HELPERS:
        return HELPERS[name]
    if last == "_IS_WINDOWS":
        return False
    compared = re.fullmatch(
        r"_(TORCH|TORCHMETRICS|PYTHON)_(GREATER_EQUAL|EQUAL|LESSER_EQUAL)_(\d+)_(\d+)(?:_\d+)?", last
    )
    if compared:
        package, how, *wanted = compared.groups()
        found = _version_of(package.lower())
        number = tuple(map(int, wanted))
        return {"GREATER_EQUAL": found >= number, "EQUAL": found == number}.get(how, found <= number)
    available = re.fullmatch(r"_(\w+?)_AVAILABLE", last)
    if available:
        return importlib.util.find_spec(available[1].lower().replace("torch_xla", "torch_xla")) is not None
    return None


def _version_of(package: str) -> tuple[int, ...]:
    if package == "python":
        return sys.version_info[:2]
    return tuple(map(int, importlib.import_module(package).__version__.split("+")[0].split(".")[:2]))


class Devices(ModuleType):
    """A module in which a test may put that there are no devices, not that there are some."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in PRETENDED and (value() if callable(value) else value):
            raise DevicesPretended("devices that are not there")
        super().__setattr__(name, value)


PRETENDED = {
    "num_cuda_devices": "lightning.fabric.accelerators.cuda lightning.pytorch.accelerators.cuda",
    "_get_all_available_mps_gpus": "lightning.fabric.accelerators.mps",
    "_XLA_AVAILABLE": "lightning.fabric.accelerators.xla lightning.fabric.plugins.environments.xla "
    "lightning.fabric.plugins.io.xla lightning.fabric.strategies.launchers.xla lightning.pytorch.plugins.precision.xla "
    "lightning.pytorch.strategies.launchers.xla lightning.pytorch.strategies.single_xla "
    "lightning.pytorch.strategies.xla",
}


FLAGS = {
    "lightning.pytorch.loggers.comet": "_COMET_AVAILABLE",
    "lightning.pytorch.loggers.mlflow": "_MLFLOW_AVAILABLE _MLFLOW_SYNCHRONOUS_AVAILABLE _get_resolve_tags",
    "lightning.pytorch.loggers.wandb": "_WANDB_AVAILABLE",
    "lightning.pytorch.trainer.connectors.callback_connector": "_RICH_AVAILABLE",
}
"""What cases replace on their way, which is not what they are about: mostly whether a package is there."""


PUBLIC_HERE = {
    "drivetrain.callbacks.LearningRateFinder": {"_num_training_steps": "tried.num_training"},
    "drivetrain.callbacks.ModelCheckpoint": {"_every_n_train_steps": "every_n_train_steps"},
    "drivetrain.callbacks.ModelSummary": {"_max_depth": "max_depth"},
    "drivetrain.callbacks.StochasticWeightAveraging": {
        "_annealing_epochs": "annealing_epochs",
        "_annealing_strategy": "annealing_strategy",
        "_avg_fn": "avg_fn",
        "_swa_epoch_start": "swa_epoch_start",
        "_swa_lrs": "swa_lrs",
    },
    "drivetrain.callbacks.Timer": {"_duration": "duration"},
    "drivetrain.callbacks.WeightAveraging": {"_average_model": ""},
}
"""What cases read under a private name, and has a public one here (an empty one: the object itself has it)."""


class Connector(ModuleType):
    """A module in which a test may put that rich is not installed, so that a Trainer gets the other bar."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_RICH_AVAILABLE":
            vars(arguments)["find_spec"] = importlib.util.find_spec if value else lambda package: None
        super().__setattr__(name, value)


def make_importable(tests: Path, given: list[Path]) -> None:
    """Let tests, and the helpers that they import, import what they name; stand-ins are for what the mirror lacks.

    Args:
        tests: The folder of the suites.
        given: Files and folders of tests.
    """
    left = [path for each in given for path in (sorted(each.rglob("*.py")) if each.is_dir() else [each])]
    left += [path for each in given for folder in each.parents for path in folder.glob("conftest.py")]
    seen: set[Path] = set()
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names, imported = [alias.name for alias in node.names], []
            elif isinstance(node, ast.ImportFrom):
                names, imported = [node.module or ""], [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                if name.split(".")[0] == "lightning":
                    _provide(_module(name), name, imported)
                elif name.startswith("tests_"):
                    place = tests.joinpath(*name.split("."))
                    inner = [place / f"{each}.py" for each in imported]
                    left += [
                        each for each in (place.with_suffix(".py"), place / "__init__.py", *inner) if each.is_file()
                    ]


def _provide(module: ModuleType, path: str, names: list[str]) -> None:
    for name in names:
        helper = None if name in vars(module) else _helper(f"{path}.{name}")
        if helper is not None:
            setattr(module, name, helper)
        elif isinstance(getattr(module, name, None), type):
            _let_be_made_while_collecting(getattr(module, name))
        elif not hasattr(module, name) and name != "*":
            try:
                importlib.import_module(f"{path}.{name}")
            except ImportError:
                setattr(module, name, stand_in_for(f"{path}.{name}"))


def _let_be_made_while_collecting(kind: Any) -> None:
    """Let a table of cases hold objects of a class that the mirror has in name only, though nothing may use them."""
    refuse = vars(kind).get("__new__")
    if not (kind.__doc__ or "").startswith("Not in drivetrain.") or refuse is None:
        return

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return refuse.__get__(None, cls)(cls, *args, **kwargs) if Absent.is_running else object.__new__(cls)

    kind.__new__ = make


def _module(path: str) -> ModuleType:
    """The mirror's module of this path, or an empty one in its place."""
    try:
        return importlib.import_module(path)
    except ImportError:
        parent, _, name = path.rpartition(".")
        module = sys.modules[path] = ModuleType(path)
        module.__path__ = []
        module.__getattr__ = lambda attribute: _absent_attribute(path, attribute)  # type: ignore[method-assign]
        setattr(_module(parent), name, module)
        return module


def _absent_attribute(path: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return stand_in_for(f"{path}.{name}")


# The outcome of each case.


LOOPS = (
    r"_loop\.(?:setup_data|run|reset|advance|load_state_dict|state_dict|on_\w+|_\w+)|strategy\.connect\b|\.launcher\b"
    r"|\bstrategy(?:\.\w+)+(?= = )"  # puts something into a strategy
    r"|\bstrategy\.(?:save_checkpoint|load_checkpoint|clip_gradients_norm|setup_optimizer)\("  # does Fabric's part
)
PRIVATE = rf"(?<!self)\.(_[a-z]\w*)|({LOOPS})|[\"']((?:lightning|pytorch_lightning)\.[\w.]+)[\"']"


NAMES = ("lightning", "pytorch_lightning", "lightning_fabric")
FLAG = r"[\"']_[A-Z][A-Z_]*[\"']"
DEVICES = r"cuda_count_[1-9]|mps_count_[1-9]|(mock_)?(xla|tpu)_available|mock_(cuda|mps)_count"
REPLACING = r"(?:^|\.)(?:patch|patch\.object|patch\.multiple|monkeypatch\.setattr)$"

NOT_LIGHTNINGS = ("_modules", "_parameters", "_buffers", "_is_currently_logging", "_trainer")


def why_source_is_left_out(function: Any, names: Mapping[str, Any] | None = None) -> str | None:
    """The part of the machinery that the source of a test, or of what it uses, names, if it names one."""
    function = inspect.unwrap(function)
    source = inspect.getsource(function)
    for name in set(re.findall(r"\w+", source)):
        imported = (function.__globals__ if names is None else names).get(name)
        if isinstance(imported, Absent) and is_machinery(imported.__name__):
            return f"names {imported.__name__}"
        if isinstance(imported, type) and is_machinery(imported.__module__.removeprefix("drivetrain.compat.")):
            return f"names {imported.__name__}"
    own = {*own_names(inspect.getsourcefile(function) or ""), *NOT_LIGHTNINGS}
    for private, loop, path in re.findall(PRIVATE, source):
        if private and private not in own:
            return f"names {private}"
        if loop:
            return f"names {loop}"
        module, _, name = path.rpartition(".")
        if path and is_machinery(path) and name not in FLAGS.get(module, "").split():
            return f"names {path}"
    return None


def uses_only_public_names(item: Any) -> bool:
    """Whether a case, with what it uses of its file, names and replaces nothing of the machinery.

    A case that pretends that there are devices replaces what finds them.
    """
    if any(re.fullmatch(DEVICES, name) for name in item.fixturenames):
        return False
    left, seen = [inspect.unwrap(item.function)], set()
    while left:
        one = left.pop()
        is_public, used = _uses(one)
        if not is_public:
            return False
        seen.add(one)
        left += [each for each in used if each not in seen]
    return True


@functools.cache
def _uses(one: Any) -> tuple[bool, list[Any]]:
    """Whether the source of a function or class is about public names, and what it uses of its file."""
    names = vars(inspect.getmodule(one))
    source = textwrap.dedent(inspect.getsource(one))
    words = set(re.findall(r"\w+", source))
    if any(re.fullmatch(DEVICES, word) for word in words):
        return False, []
    inherited = set(re.findall(r"self\.(_[a-z]\w*)", source)) - own_names(inspect.getsourcefile(one) or "")
    if inherited - {*NOT_LIGHTNINGS}:
        return False, []
    if why_source_is_left_out(one, names) or re.search(FLAG, source) or _replaces(names, source):
        return False, []
    used = [names[word] for word in words & names.keys()]
    own = [each for each in used if inspect.isfunction(each) or inspect.isclass(each)]
    is_public = not words & _private_imports(inspect.getsourcefile(one) or "")
    return is_public, [each for each in own if each is not one and each.__module__ == names["__name__"]]


@functools.cache
def _private_imports(file: str) -> set[str]:
    """The names that begin with an underscore which a file imports from Lightning."""
    imports = (node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.ImportFrom))
    names = {each.name for node in imports if (node.module or "").startswith(NAMES) for each in node.names}
    return {name for name in names if name.startswith("_")}


def _replaces(names: dict[str, Any], source: str) -> bool:
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or not call.args or not re.search(REPLACING, ast.unparse(call.func)):
            continue
        target = ast.unparse(call.args[0]).strip("\"'")
        named = names.get(target.partition(".")[0])
        path = getattr(named, "__module__", None) or getattr(named, "__name__", None) or target
        if str(path).partition(".")[0] in (*NAMES, "drivetrain"):
            return True
    return False


@functools.cache
def own_names(file: str) -> frozenset[str]:
    """The names that begin with an underscore which a test's file defines itself, for its own classes to use.

    What a class of the file calls of its base class, through `super()`, is the base's.
    """
    source = Path(file).read_text()
    defined: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            defined.update([node.attr] if ast.unparse(node.value) == "self" else [])
        elif isinstance(node, ast.ClassDef):
            targets = [each for part in node.body for each in getattr(part, "targets", [getattr(part, "target", None)])]
            defined.update(each.id for each in targets if isinstance(each, ast.Name))
    inherited = set(re.findall(r"super\(.*?\)\.(_\w+)", source))
    return frozenset(name for name in defined - inherited if name.startswith("_"))


def why_left_out(error: BaseException) -> str | None:
    """The part of the machinery that an error is about, if it is about one."""
    if isinstance(error, MachineryUsed | DevicesPretended):
        return f"uses {error}"
    text = str(error)
    called = re.match(r"lightning's (_\w+) was called", text)  # the mirror has it, as a name alone
    if called:
        return f"uses {called[1]}"
    if isinstance(error, LaunchError) and "no script to run" in text:
        return ALONE
    if type(error).__name__ in ("NotebookError", "ProcessRaisedException"):
        found = re.findall(r"AttributeError: .*attribute '(_\w+|launcher)'", text)
        return f"reads {found[-1]}" if found else None
    if isinstance(error, AttributeError | ImportError):
        name = getattr(error, "name", None) or (re.findall(r"attribute '(\w+)'", text) or [""])[-1]
        if name == "launcher" or (name.startswith("_") and not name.startswith("__")):
            return f"reads {name}"
        for path in re.findall(r"(?:lightning|drivetrain\.compat\.lightning)[\w.]*", text):
            if is_machinery(path.removeprefix("drivetrain.compat.")):
                return f"uses {path}"
    return None


class Outcomes:
    """A plugin of pytest that sorts the cases."""

    def __init__(self, public: bool = False) -> None:
        self.public = public
        self.cases: dict[str, tuple[str, str]] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = (yield).get_result()
        name = report.nodeid
        if report.skipped and not hasattr(report, "wasxfail"):
            self.cases[name] = ("skipped", str(report.longrepr[2] if report.longrepr else ""))
        elif call.excinfo is not None and not report.skipped:
            machinery = why_left_out(call.excinfo.value) or why_source_is_left_out(item.function)
            machinery = None if self.public else machinery
            words = f"{type(call.excinfo.value).__name__}: {call.excinfo.value}".replace("\n", " ")
            outcome = ("failed", words[:300]) if machinery is None else ("left out", machinery)
            if self.cases.get(name, ("passed", ""))[0] == "passed":
                self.cases[name] = outcome
        elif report.when == "call":
            self.cases[name] = ("passed", "") if report.passed or report.skipped else ("failed", "passed unexpectedly")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> Any:
        """Let a case fail, not the whole session end, where an interrupt or an exit that it caused gets out."""
        outcome = yield
        if outcome.excinfo is not None and issubclass(outcome.excinfo[0], KeyboardInterrupt | SystemExit):
            outcome.force_exception(AssertionError(f"{outcome.excinfo[0].__name__} left the test"))

    def pytest_runtest_setup(self, item: Any) -> None:
        Absent.is_running = True

    def pytest_runtest_teardown(self, item: Any) -> None:
        Absent.is_running = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.public:
            items[:] = [item for item in items if uses_only_public_names(item)]
            return
        for item in items:
            for end, reason in LEFT_OUT.items():
                if (
                    item.nodeid.endswith(end)
                    or item.nodeid.partition("[")[0].endswith(end)
                    or f"/{end}::" in item.nodeid
                ):
                    self.cases[item.nodeid] = ("left out", reason)
        items[:] = [item for item in items if item.nodeid not in self.cases]

    def show(self, why: bool) -> None:
        files: dict[str, Counter[str]] = {}
        for name, (outcome, reason) in sorted(self.cases.items()):
            files.setdefault(name.partition("::")[0], Counter())[outcome] += 1
            if why and outcome != "passed":
                print(f"{outcome:9} {name}  {reason}")
        print(f"{'file':62}" + "".join(f"{outcome:>10}" for outcome in OUTCOMES))
        for file, counts in [*files.items(), ("all", sum(files.values(), Counter()))]:
            print(f"{file:62}" + "".join(f"{counts[outcome]:10}" for outcome in OUTCOMES))


GIVEN = "LIGHTNING_SUITE_GIVEN"
"""The folder of the suites and the tests that are run, for processes that a test starts."""


def _reading(name: str) -> property:
    """A property that reads an attribute by its dotted name; 0 where nothing was given."""

    def read(owner: Any) -> Any:
        for part in name.split(".") if name else ():
            owner = getattr(owner, part)
        return 0 if owner is None else owner

    return property(read)


def take_place() -> None:
    """Put our names in the place of Lightning's, also in processes that a test starts."""
    drivetrain.compat.install(*NAMES)
    paths = [str(STAND_INS / "lightning"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning's import does, and DeepSpeed's again
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(each for each in paths if each))
    tests, *given = map(Path, os.environ.get(GIVEN, "").split(os.pathsep))
    make_importable(tests, given)
    for path, flags in FLAGS.items():
        _provide(_module(path), path, flags.split())
    _module("lightning.pytorch.trainer.connectors.callback_connector").__class__ = Connector
    vars(_module("lightning.fabric.wrappers"))["_in_fabric_backward"] = False  # a fixture of theirs puts it back
    for path, names in PUBLIC_HERE.items():
        package, _, kind = path.rpartition(".")
        for private, public in names.items():
            setattr(getattr(importlib.import_module(package), kind), private, _reading(public))
    CoreTrainer._checkpoint_connector = property(_Snapshots)  # type: ignore[attr-defined]  # in `run_model_test`
    CoreTrainer._teardown = lambda trainer: None  # type: ignore[attr-defined]  # called where a run is over
    FitLoopView.state_dict = lambda view: view._trainer.progress.state_dict()  # type: ignore[attr-defined]
    EpochLoopView._get_monitor_value = None  # type: ignore[attr-defined]  # a helper puts a counter around it
    for name, modules in PRETENDED.items():
        for module in map(_module, modules.split()):
            setattr(module, name, lambda: 0)
            module.__class__ = Devices


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of Lightning's repository")
    parser.add_argument("files", nargs="+", help="files or folders of its tests")
    parser.add_argument("--public", action="store_true", help="select by the sources alone")
    parser.add_argument("--why", action="store_true", help="print the reason of each case that has not passed")
    own, _, others = " ".join(sys.argv[1:]).partition(" -- ")
    given = parser.parse_args(own.split())
    tests = given.checkout.resolve() / "tests"
    paths = [
        f"tests_fabric/{name.removeprefix('fabric:')}" if name.startswith("fabric:") else f"tests_pytorch/{name}"
        for name in given.files
    ]
    os.environ[GIVEN] = os.pathsep.join([str(tests), *(str(tests / path.partition("::")[0]) for path in paths)])
    take_place()
    os.chdir(tests)
    sys.path.insert(0, str(tests))
    outcomes = Outcomes(given.public)
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--no-header", "--tb=short"]
    pytest.main([*options, "--continue-on-collection-errors", *paths, *others.split()], [outcomes])
    outcomes.show(given.why)
    return int(any(outcome == "failed" for outcome, _ in outcomes.cases.values()))


if __name__ == "__main__":
    sys.exit(main())
if __name__ == "__mp_main__":
    take_place()

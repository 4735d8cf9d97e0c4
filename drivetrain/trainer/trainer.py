"""`Trainer`: owns the loop, and delegates placement, number formats and everything around the loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain import checkpoint
from drivetrain.accelerator import Accelerator, PreparedOptimizer
from drivetrain.accelerator.run_state import Moment
from drivetrain.accelerator.step import StepHooks
from drivetrain.callbacks import Callback
from drivetrain.data import BatchInfo
from drivetrain.runtime.durations import parse_duration
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.exit_codes import RESUME_EXIT_CODE
from drivetrain.runtime.nested import find_batch_size
from drivetrain.runtime.seeds import set_seed
from drivetrain.strategies import StepModule, Strategy
from drivetrain.strategies.precision import Precision
from drivetrain.trackers import Tracker
from drivetrain.trainer import options
from drivetrain.trainer.state.saved_run import SavedRun, moment_of, save_run
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.loops.evaluation_loop import EvaluationLoop
from drivetrain.trainer.loops.fit_loop import FitLoop, training_batches
from drivetrain.trainer.hooks import Hooks, call_setup_hooks, call_teardown_hooks
from drivetrain.trainer.loops.loader_source import LoaderSource
from drivetrain.trainer.metrics.log_scopes import NOWHERE, SAVING
from drivetrain.trainer.metrics.logged_value import EpochValue, to_numbers
from drivetrain.trainer.metrics.logged_values import LoggedValues
from drivetrain.trainer.loops.choose_step import choose_step
from drivetrain.trainer.optimizers import SchedulerConfig, parse_configured_optimizers
from drivetrain.trainer.loops.prediction_loop import PredictionLoop
from drivetrain.trainer.state.progress import Progress
from drivetrain.trainer.metrics.results_table import print_results
from drivetrain.trainer.state.resume import find_checkpoint, save_for_resume
from drivetrain.trainer.schedulers import step_epoch_schedulers, step_step_schedulers
from drivetrain.trainer.status import TrainerStatus
from drivetrain.trainer.loops.run_control import Interruption
from drivetrain.trainer.task import Task


class Trainer(TrainerStatus):
    """Runs a `Task` on any hardware.

    Args:
        accelerator: `"auto"`, `"cpu"`, `"gpu"` or another kind of device; or a live `Accelerator` to run on.
        strategy: `"auto"`, `"single"`, `"ddp"`, another registered name, or a `Strategy`.
        devices: how many processes to use on this machine: `"auto"` or a number. Where the script was started
            without a launcher and more than one is asked for, it is started anew under one.
        num_nodes: number of machines; the launcher decides, this is checked.
        precision: `"32"`, `"bf16"`, `"fp16"`, …, Lightning's spellings, or a `Precision`.
        logger: trackers: one, several, True for a `CSVLogger`, False for none.
        callbacks: one or several callbacks.
        fast_dev_run: run this many batches (1 for True) of everything, without loggers and checkpoints.
        max_epochs: epochs to train; 1000 where nothing else ends the run, -1 for no end.
        min_epochs: epochs that no wish to stop cuts short.
        max_steps: optimizer steps to train; -1 for no limit.
        min_steps: optimizer steps that no wish to stop cuts short.
        max_time: how long to train: a timedelta, a dict of its arguments, or `"DD:HH:MM:SS"`.
        limit_train_batches: batches of an epoch to train on: a number, or a fraction.
        limit_val_batches: the same for validation; 0 leaves it out.
        limit_test_batches: the same for testing.
        limit_predict_batches: the same for predicting.
        overfit_batches: train and validate on so many of the same batches, unshuffled.
        val_check_interval: validate after so many batches, such a fraction of an epoch, or such a time.
        check_val_every_n_epoch: validate every so many epochs; None counts `val_check_interval` across epochs.
        num_sanity_val_steps: validation batches to try before training; -1 for all.
        log_every_n_steps: trackers get step values every so many steps.
        enable_checkpointing: whether a `ModelCheckpoint` is added where none is given.
        enable_progress_bar: whether a progress bar is added where none is given.
        enable_model_summary: whether a summary of the model is printed.
        accumulate_grad_batches: micro-batches per optimizer step.
        gradient_clip_val: bound of the gradients.
        gradient_clip_algorithm: `"norm"` or `"value"`.
        deterministic: whether only deterministic algorithms may run; `"warn"` warns instead.
        benchmark: let cuDNN try algorithms.
        inference_mode: evaluate under `torch.inference_mode` rather than `torch.no_grad`.
        use_distributed_sampler: whether loaders are sharded over processes; else each process takes all of its own.
        detect_anomaly: raise where a backward computes NaN, naming the forward that led to it.
        barebones: nothing around the loop: no logger, checkpoint, bar, summary or sanity check.
        sync_batchnorm: batch statistics over all processes (DDP on GPUs).
        reload_dataloaders_every_n_epochs: make the loaders anew every so many epochs.
        default_root_dir: where everything is written by default.
        seed: seed everything with this, samples included, before anything else.

    Raises:
        ConfigurationError: an argument cannot be; the message says what can.
    """

    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: int | str = "auto",
        num_nodes: int = 1,
        precision: str | int | Precision | None = None,
        logger: Tracker | Iterable[Tracker] | bool | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        detect_anomaly: bool = False,
        barebones: bool = False,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | os.PathLike[str] | None = None,
        seed: int | None = None,
    ) -> None:
        options.check_limits(
            limit_train_batches=limit_train_batches,
            limit_val_batches=limit_val_batches,
            limit_test_batches=limit_test_batches,
            limit_predict_batches=limit_predict_batches,
            overfit_batches=overfit_batches,
        )
        options.check_counts(
            max_epochs=(max_epochs, -1),
            min_epochs=(min_epochs, 0),
            max_steps=(max_steps, -1),
            min_steps=(min_steps, 0),
            check_val_every_n_epoch=(check_val_every_n_epoch, 1),
            num_sanity_val_steps=(num_sanity_val_steps, -1),
            log_every_n_steps=(log_every_n_steps, 0),
            accumulate_grad_batches=(accumulate_grad_batches, 1),
            reload_dataloaders_every_n_epochs=(reload_dataloaders_every_n_epochs, 0),
        )
        self.gradient_clip_algorithm = options.check_clipping(gradient_clip_val, gradient_clip_algorithm)
        self.val_check_interval = options.check_validation_interval(val_check_interval)
        self.max_time = parse_duration(max_time, "max_time")
        self.accelerator = options.make_accelerator(
            accelerator, strategy, devices, num_nodes, precision, accumulate_grad_batches, sync_batchnorm
        )
        self.strategy.note_arguments(
            "Trainer",
            gradient_accumulation_steps=("accumulate_grad_batches", accumulate_grad_batches),
            gradient_clipping=("gradient_clip_val", gradient_clip_val),
        )
        if seed is not None:
            set_seed(seed)
        options.set_determinism(deterministic, benchmark)

        runs = int(fast_dev_run)
        if runs:
            max_epochs, max_steps, num_sanity_val_steps = 1, runs, 0
            limit_train_batches = limit_val_batches = limit_test_batches = limit_predict_batches = runs
            log_every_n_steps, self.val_check_interval, check_val_every_n_epoch = 1, None, 1
        quiet = bool(runs) or barebones
        if max_epochs is None:
            endless = max_steps >= 0 or self.max_time is not None
            max_epochs = -1 if endless else 1000
        self.fast_dev_run, self.barebones = fast_dev_run, barebones
        self.max_epochs, self.min_epochs = max_epochs, min_epochs
        self.max_steps, self.min_steps = max_steps, min_steps
        self.limit_train_batches, self.limit_val_batches = limit_train_batches, limit_val_batches
        self.limit_test_batches, self.limit_predict_batches = limit_test_batches, limit_predict_batches
        self.overfit_batches = overfit_batches
        self.check_val_every_n_epoch = check_val_every_n_epoch
        self.num_sanity_val_steps = 0 if barebones else 2 if num_sanity_val_steps is None else num_sanity_val_steps
        self.log_every_n_steps = 0 if barebones else 50 if log_every_n_steps is None else log_every_n_steps
        self.accumulate_grad_batches = accumulate_grad_batches
        self.gradient_clip_val = gradient_clip_val
        self.inference_mode = inference_mode
        self.use_distributed_sampler = use_distributed_sampler
        self.detect_anomaly = detect_anomaly
        self.reload_dataloaders_every_n_epochs = reload_dataloaders_every_n_epochs
        self.default_root_dir = os.fspath(default_root_dir or Path.cwd())

        self.loggers = [] if quiet else options.make_loggers(logger, self.default_root_dir)
        self.callbacks = options.make_callbacks(
            callbacks,
            checkpointing=False if quiet else enable_checkpointing,
            progress_bar=False if barebones else enable_progress_bar,
            summary=False if barebones else enable_model_summary,
            quiet=quiet,
        )

        self.progress = Progress()
        self.logged = LoggedValues(self._find_batch_size, self.accelerator.strategy.value_ranks)
        self.interruption = Interruption()
        self.batch: Any = None
        self.batch_info: BatchInfo | None = None
        self.task_optimizers: list[PreparedOptimizer] = []
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self.steps_schedulers = False
        self.num_training_batches: float = 0
        self.num_evaluation_batches: dict[str, list[float]] = {}
        self.should_stop = self.should_stop_agreed = False
        self.interrupted = self.preempted = self.stopped_by_time = False
        self.stage: str | None = None
        self.sanity_checking = False
        self.task: Task | None = None
        self.datamodule: DataModule | None = None
        self.model: nn.Module | None = None
        self._fitted: nn.Module | None = None  # what the engine has prepared for the last fit
        self.fit_loop: FitLoop | None = None
        self._training: LoaderSource | None = None
        self.saves: checkpoint.SaveQueue | None = None
        self.rollback_path: str | None = None
        self.batches_to_skip: set[tuple[int, int]] = set()
        self._logged_values: dict[str, float] = {}
        self.hooks: Hooks

    # the four verbs

    def fit(
        self,
        model: Task,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        resume: str | os.PathLike[str] | None = None,
    ) -> None:
        """Train a task.

        Args:
            model: the task.
            train_dataloaders: a loader; several, as a list or dict, are combined; or a `DataModule`.
            val_dataloaders: one loader or several, each validated on its own.
            datamodule: where loaders come from instead.
            ckpt_path: Lightning's name for `resume`.
            resume: a checkpoint to go on from, exactly: the same batches, random numbers and values as without the
                break. `"auto"` takes the newest complete one and starts afresh where there is none; `"last"` or
                `"best"` takes the checkpoint callback's.

        Raises:
            SystemExit: the run was preempted (SIGTERM, SIGUSR1), has saved a checkpoint, and should be started again.
            CheckpointError: the checkpoint is missing, damaged or that of another run.
            ConfigurationError: the task or its optimizers cannot be trained so.
            DataError: a loader is missing or empty.
        """
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        options.check_task(model, train_dataloaders, val_dataloaders, datamodule)
        if resume is not None and ckpt_path is not None:
            raise ConfigurationError(f"resume={resume!r} and ckpt_path={ckpt_path!r} mean the same; give one.")
        self._attach(model, datamodule, "fit")
        self.should_stop = self.should_stop_agreed = False
        self.interrupted = self.preempted = self.stopped_by_time = False
        self.rollback_path = None
        self.batches_to_skip.clear()
        self.interruption = Interruption(self._on_interruption)
        self.logged.forget_results()
        training = self._training = LoaderSource(self, model, "train", train_dataloaders, datamodule)
        validating = LoaderSource(self, model, "val", val_dataloaders, datamodule)
        try:
            with self.interruption.watched(), torch.autograd.set_detect_anomaly(self.detect_anomaly):
                self._fit(model, training, validating, ckpt_path if resume is None else resume)
        except KeyboardInterrupt as interruption:
            self._on_exception(model, interruption)
            self.interrupted = True
        except BaseException as error:
            self._on_exception(model, error)
            raise
        finally:
            self._detach(model, "fit")
        if self.preempted:
            self.print(f"Preempted: the run saved a checkpoint after {self.global_step} steps and can be resumed.")
            sys.exit(RESUME_EXIT_CODE)
        if self.interrupted:
            self.print(f"Interrupted: the run ended cleanly after {self.global_step} steps.")

    def _fit(self, task: Task, training: LoaderSource, validating: LoaderSource, resume: Any) -> None:
        """Fit, in the order of hooks that the documentation promises."""
        self._set_up(task, "fit")
        with self.strategy.init_context():
            task.configure_model()
        options.check_training_step(task, self.accumulate_grad_batches, self.gradient_clip_val)
        directory = find_checkpoint(self, resume)
        saved = None if directory is None else SavedRun(self, directory)
        if saved is not None:
            saved.restore_early()
        self._place(task, self._configure_optimizers(task))
        assert self.model is not None
        if saved is not None:
            saved.restore_weights()
        self.progress.begin_epoch(self.progress.epoch)
        self.hooks.call("on_fit_start")
        if saved is not None:
            saved.restore_training()
        self._log_hyper_parameters(task)
        training_model = self.strategy.training_model(self.model, task.automatic_optimization)
        step = choose_step(self, task, training_model)
        validation = self._make_validation(task, self.model, validating)
        if saved is None:
            self._sanity_check(validation)
        self.logged.start(("train", "validate"))
        task.train()
        self.stage = "train"
        self.fit_loop = FitLoop(self, step, training, validation)
        self.accelerator.run_state.moment = partial(moment_of, self)
        if saved is not None:
            self.fit_loop.resume_from(saved)
        self.fit_loop.run()
        if self.preempted:
            save_for_resume(self)
        if self.saves is not None:
            self.saves.finish()
        if self.preempted:
            return
        self.hooks.call("on_fit_end")

    def validate(
        self,
        model: Task | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate on the validation data: every sample once, over all processes.

        Args:
            model: the task; that of the last `fit` if None.
            dataloaders: one loader or several, or a `DataModule`.
            ckpt_path: a checkpoint whose weights to use; `"best"` or `"last"` takes the checkpoint callback's.
            verbose: whether to print the results.
            datamodule: where loaders come from instead.

        Returns:
            For each loader, its logged values by name.
        """
        return self._evaluate("validation", "val", model, dataloaders, ckpt_path, verbose, datamodule)

    def test(
        self,
        model: Task | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate on the test data; see `validate`."""
        return self._evaluate("test", "test", model, dataloaders, ckpt_path, verbose, datamodule)

    def _evaluate(
        self,
        stage: str,
        kind: str,
        model: Task | None,
        dataloaders: Any,
        ckpt_path: str | os.PathLike[str] | None,
        verbose: bool,
        datamodule: DataModule | None,
    ) -> list[dict[str, float]]:
        verb = "validate" if stage == "validation" else "test"
        if isinstance(dataloaders, DataModule):
            dataloaders, datamodule = None, dataloaders
        task = options.check_evaluation(self.task if model is None else model, stage, verb)
        self._attach(task, datamodule or (self.datamodule if model is None and dataloaders is None else None), verb)
        source = LoaderSource(self, task, kind, dataloaders, self.datamodule)
        try:
            self._set_up(task, verb)
            if not source.is_defined():
                raise ConfigurationError(
                    f"{verb}() has no data: pass dataloaders, or give the task or a DataModule a {kind}_dataloader()."
                )
            self._place_for_evaluation(task)
            if ckpt_path is not None:
                SavedRun(self, find_checkpoint(self, ckpt_path) or "").restore_for_evaluation()
            assert self.model is not None
            self.logged.start(("validate" if stage == "validation" else "test",))
            limit = self.limit_val_batches if kind == "val" else self.limit_test_batches
            loop = EvaluationLoop(self, task, self.model, stage, source, limit, f"limit_{kind}_batches")
            self.stage = verb
            results = loop.run()
            for loader in loop.load():
                self.accelerator.forget_loader(loader)
        except BaseException as error:
            self._on_exception(task, error)
            raise
        finally:
            self._detach(task, verb)
        if verbose and self.is_global_zero:
            print_results(verb, results)
        return results

    def predict(
        self,
        model: Task | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool = True,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> list[Any]:
        """Predict: run `predict_step` on every sample once, over all processes.

        Args:
            model: the task; that of the last `fit` if None.
            dataloaders: one loader or several, or a `DataModule`.
            datamodule: where loaders come from instead.
            return_predictions: whether to return them; with False they are gone once callbacks have seen them.
            ckpt_path: a checkpoint whose weights to use.

        Returns:
            What `predict_step` returned for each batch, of all processes in the order of the data, on the CPU.
        """
        if isinstance(dataloaders, DataModule):
            dataloaders, datamodule = None, dataloaders
        task = options.check_evaluation(self.task if model is None else model, "predict", "predict")
        self._attach(
            task, datamodule or (self.datamodule if model is None and dataloaders is None else None), "predict"
        )
        source = LoaderSource(self, task, "predict", dataloaders, self.datamodule)
        try:
            self._set_up(task, "predict")
            if not source.is_defined():
                raise ConfigurationError(
                    "predict() has no data: pass dataloaders, or give the task or a DataModule a predict_dataloader()."
                )
            self._place_for_evaluation(task)
            if ckpt_path is not None:
                SavedRun(self, find_checkpoint(self, ckpt_path) or "").restore_for_evaluation()
            assert self.model is not None
            self.stage = "predict"
            return PredictionLoop(self, task, self.model, source, return_predictions).run()
        except BaseException as error:
            self._on_exception(task, error)
            raise
        finally:
            self._detach(task, "predict")

    # before and after

    def _attach(self, task: Task, data: DataModule | None, stage: str) -> None:
        if not isinstance(task, Task):
            raise ConfigurationError(f"Trainer.{stage} takes a Task, got a {type(task).__name__}.")
        self.task, self.datamodule = task, data
        task.trainer = self
        if data is not None:
            data.trainer = self
        self.logged.enter(NOWHERE)

    def _set_up(self, task: Task, stage: str) -> None:
        self.callbacks = options.with_task_callbacks(self.callbacks, task.configure_callbacks())
        self.hooks = Hooks(self, task)
        owners = [owner for owner in (self.datamodule, task) if owner is not None]
        if any(type(owner).prepare_data not in (DataModule.prepare_data, Task.prepare_data) for owner in owners):
            if self.accelerator.is_local_main_process:
                for owner in owners:
                    owner.prepare_data()
            self.accelerator.wait_for_everyone()
        call_setup_hooks(self, task, self.datamodule, stage)

    def _detach(self, task: Task, stage: str) -> None:
        self.logged.enter(NOWHERE)
        self.accelerator.step.drive(StepHooks())
        self.accelerator.accumulation.end_planned()
        self.batch = self.batch_info = None
        call_teardown_hooks(self, task, self.datamodule, stage)
        for tracker in self.loggers:
            if self.is_global_zero:
                tracker.save()
        self.accelerator.run_state.moment = Moment
        if self.fit_loop is not None:
            self.accelerator.forget_loader(self.fit_loop.loader)
        self.stage, self.sanity_checking = None, False

    def _on_interruption(self) -> None:
        """At Ctrl-C: stop after this step; several processes first agree on which."""
        if self.world_size == 1:
            self.should_stop = True
            self.interrupted = self.interruption.requested
            self.preempted = self.interruption.preempted

    def _on_exception(self, task: Task, error: BaseException) -> None:
        for callback in self.callbacks:
            callback.on_exception(self, task, error)
        task.on_exception(error)
        if self.datamodule is not None:
            self.datamodule.on_exception(error)
        if self.is_global_zero:
            for tracker in self.loggers:
                tracker.finalize("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")

    def _configure_optimizers(self, task: Task) -> list[Optimizer]:
        optimizers, self.lr_scheduler_configs = parse_configured_optimizers(task.configure_optimizers())
        if not optimizers and task.automatic_optimization:
            raise ConfigurationError(
                f"{type(task).__name__}.configure_optimizers returned no optimizer. Return one, or set "
                "automatic_optimization = False to train by hand."
            )
        # A task that optimizes by hand steps its schedulers by hand, too.
        by_step = any(config.interval == "step" for config in self.lr_scheduler_configs)
        self.steps_schedulers = task.automatic_optimization and by_step
        return optimizers

    def _place(self, task: Task, optimizers: list[Optimizer]) -> None:
        """Let the engine prepare the task with its optimizers and schedulers, in the place of those of a fit before."""
        engine = self.accelerator
        before = [one for one in engine.prepared.models if one is self._fitted or self.strategy.unwrap(one) is task]
        for known in before:
            engine.unwrap_model(known, keep_fp32_wrapper=False)  # whose steps open the precision themselves
            engine.prepared.forget_model(known)
        wrapped = StepModule(task, partial_backwards=not task.automatic_optimization)
        self.model, *prepared = engine.prepare(wrapped, *optimizers) if optimizers else [engine.prepare(wrapped)]
        self._fitted = self.model
        self.task_optimizers = prepared
        for config in self.lr_scheduler_configs:
            engine.prepare_scheduler(config.scheduler, steps_per_call=1)

    def _place_for_evaluation(self, task: Task) -> None:
        if self.model is None or self.strategy.unwrap(self.model) is not task:
            with self.strategy.init_context():
                task.configure_model()
            self.model = self.accelerator.prepare_model(StepModule(task), evaluation_mode=True)

    def _make_validation(self, task: Task, model: nn.Module, source: LoaderSource) -> EvaluationLoop | None:
        defined = source.is_defined() and type(task).validation_step is not Task.validation_step
        if not defined or self.limit_val_batches == 0:
            return None
        limit = self.overfit_batches or self.limit_val_batches
        name = "overfit_batches" if self.overfit_batches else "limit_val_batches"
        return EvaluationLoop(self, task, model, "validation", source, limit, name)

    def _sanity_check(self, validation: EvaluationLoop | None) -> None:
        if validation is None or self.num_sanity_val_steps == 0:
            return
        self.stage, self.sanity_checking = "validate", True
        self.logged.start(("validate",))
        self.hooks.call("on_sanity_check_start")
        validation.run(at_most=None if self.num_sanity_val_steps < 0 else self.num_sanity_val_steps, keep=False)
        self.hooks.call("on_sanity_check_end")
        self.sanity_checking = False

    # what steps and loops ask for

    def _find_batch_size(self) -> int:
        """Real rows of the current batch, as its loader knows them or as its tensors say."""
        info = self.batch_info
        if info is not None and info.rows is not None:
            return info.rows - info.padding
        return find_batch_size(self.batch)

    def update_step_schedulers(self) -> None:
        """Step the schedulers that follow optimizer steps."""
        step_step_schedulers(self)

    def update_epoch_schedulers(self, plateau: bool) -> None:
        """Step the schedulers that follow epochs: those that watch a value, or the others."""
        step_epoch_schedulers(self, plateau)

    def finish_logged_epoch(self, stage: str, keep: bool = True) -> list[EpochValue]:
        """Reduce a stage's values over the epoch; training values are written at once."""
        assert self.task is not None
        results = self.logged.finish_epoch(stage, self.task, keep)
        if stage == "train" and keep:
            self.write_epoch_values(results)
        return results

    def write_epoch_values(self, results: list[EpochValue]) -> None:
        """Give an epoch's values to the trackers."""
        values = {result.epoch_name: result.value for result in results if result.logger}
        if values and self.loggers and self.is_global_zero:
            self.log_metrics(to_numbers(values), self.global_step)

    def log_metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Give numbers to the trackers; only the main process does anything.

        Args:
            values: names and numbers.
            step: the optimizer step; the current one if None.
        """
        if not self.is_global_zero or not self.loggers:
            return
        step = self.global_step if step is None else step
        self._logged_values.update(values)
        for tracker in self.loggers:
            tracker.log({"epoch": self.current_epoch, **values}, step)

    def _log_hyper_parameters(self, task: Task) -> None:
        if self.is_global_zero and task.hparams and task.__dict__.get("_log_hyperparams", True):
            for tracker in self.loggers:
                tracker.store_init_configuration(dict(task.hparams))

    # checkpoints

    def save_checkpoint(
        self, filepath: str | os.PathLike[str], weights_only: bool = False, block: bool = True
    ) -> checkpoint.PendingSave:
        """Write a checkpoint; call it on all processes.

        Args:
            filepath: the checkpoint's directory, or a URL; it appears complete or not at all.
            weights_only: leave out everything but the weights and hyper-parameters.
            block: whether to return only when it is durable. Else training goes on while a copy is written; an error
                is raised at the next step, by several processes at the one that they agree on within about a second;
                `fit` waits for it at its end.

        Returns:
            The save; done already where `block` is set.

        Raises:
            CheckpointError: a process could not write; what was there before is intact.
        """
        if self.fit_loop is not None and self.stage in ("train", "validate"):
            self.fit_loop.write_due_values()
        with self.logged.forbidden(SAVING):
            if not block:
                self.saves = self.accelerator.save_queue
            return save_run(self, filepath, weights_only, block)

    @property
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps that `fit` will take, for schedules in `configure_optimizers`; infinite where nothing says.

        Raises:
            ConfigurationError: no `fit` is under way.
        """
        if self._training is None:
            raise ConfigurationError("estimated_stepping_batches is known within fit() only.")
        batches = training_batches(self, self._training.prepare_training())
        epochs = float("inf") if self.max_epochs is None or self.max_epochs < 0 else self.max_epochs
        steps = (
            float("inf") if float("inf") in (batches, epochs) else -(-batches // self.accumulate_grad_batches) * epochs
        )
        return min(steps, self.max_steps) if self.max_steps >= 0 else steps

    # rolling back

    def request_rollback(self, path: str, skip_batches: Collection[tuple[int, int]] = ()) -> None:
        """Go back to a checkpoint after this step, and leave some batches out from then on; call it on all processes.

        Args:
            path: the checkpoint.
            skip_batches: (epoch, batch index) of this process's batches to leave out.
        """
        self.rollback_path = path
        self.batches_to_skip.update(skip_batches)

    @property
    def rollback_requested(self) -> bool:
        """Whether the run goes back to a checkpoint after this step."""
        return self.rollback_path is not None

    @property
    def validation_follows(self) -> bool:
        """Whether the run validates after the step that is being ended."""
        return self.fit_loop is not None and self.fit_loop.validates_after_this_step()

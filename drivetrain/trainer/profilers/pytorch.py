"""Profiler of operations, kernels and memory with `torch.profiler`."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.profiler_util import EventList
from torch.profiler import profile, record_function, schedule

from drivetrain.runtime.devices import detect_device_kind
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.trainer.profilers.base import Profiler

_SYNCHRONISING = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")


class PyTorchProfiler(Profiler):
    """Profiler that records operations, kernels and memory with `torch.profiler`, and writes traces.

    Training, validation, test and prediction are recorded separately. By default, the first step is skipped, the second
    warms up, and the next three are recorded. If an epoch has too few steps, all of them are recorded.

    Traces are files `*.pt.trace.json` in `dirpath`. Open them in https://ui.perfetto.dev or with TensorBoard's profiler
    plugin. The report is a table of operations, with a line for each action that waited for a value from the device,
    for example by `.item()`.

    Args:
        dirpath: Directory of traces and report. None uses `trainer.log_dir`.
        filename: Name of the report's file. None prints the report.
        group_by_input_shapes: If True, record shapes and give each shape of an operation its own row.
        emit_nvtx: If True, only emit NVTX ranges for NVIDIA's tools (`nsys profile python script.py`).
        export_to_chrome: If True, write traces.
        row_limit: Number of rows of the table, or -1 for all.
        sort_by_key: Column to sort by, such as `"self_cpu_time_total"`. None sorts by total time on the device.
        record_module_names: If True, show the forward of each module in the trace, under the module's name.
        table_kwargs: Further arguments of `torch.autograd.profiler_util.EventList.table`.
        **profiler_kwargs: Arguments of `torch.profiler.profile`. `schedule=None` records everything.

    Attributes:
        function_events: Recorded events, or None before the first recording.

    Raises:
        ConfigurationError: If an argument is unknown, or `emit_nvtx` is used without a GPU.

    Example:
        ```python
        import torch

        from drivetrain import PyTorchProfiler, Trainer

        steps = torch.profiler.schedule(wait=10, warmup=2, active=5, repeat=1)
        trainer = Trainer(profiler=PyTorchProfiler(filename="operations", schedule=steps), logger="csv")
        ```
    """

    STEP_FUNCTIONS: ClassVar[set[str]] = {"training_step", "validation_step", "test_step", "predict_step"}
    prefix: ClassVar[str] = "[drivetrain]"

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: dict[str, Any] | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        self._table_options = dict(table_kwargs or {})
        _check_table_options(self._table_options)
        unknown = profiler_kwargs.keys() - inspect.signature(profile.__init__).parameters.keys()
        if unknown:
            raise ConfigurationError(
                f"PyTorchProfiler({sorted(unknown)[0]}=...): torch.profiler.profile has no such argument. Allowed: "
                f"{', '.join(list(inspect.signature(profile.__init__).parameters)[1:])}.",
            )
        if emit_nvtx and detect_device_kind().name != "cuda":
            raise ConfigurationError("PyTorchProfiler(emit_nvtx=True) requires an NVIDIA GPU. Remove emit_nvtx.")
        self.group_by_input_shapes, self.emit_nvtx = group_by_input_shapes, emit_nvtx
        self.export_to_chrome, self.record_module_names = export_to_chrome, record_module_names
        self.row_limit, self.sort_by_key = row_limit, sort_by_key
        usual = schedule(wait=1, warmup=1, active=3, repeat=1)
        self._schedule: Callable[[int], Any] | None = profiler_kwargs.pop("schedule", usual)
        # Without a schedule, recording begins at once and needs no number of steps.
        self._steps_needed = 0 if self._schedule is None else _steps_to_record(self._schedule)
        self._on_trace_ready = profiler_kwargs.pop("on_trace_ready", None)
        self._options: dict[str, Any] = {"record_shapes": group_by_input_shapes, **profiler_kwargs}
        self._count_steps: Callable[[str], float] | None = None
        self._model: nn.Module | None = None
        self._reset()

    def _reset(self) -> None:
        self._blocks: dict[str, Any] = {}
        self._recording: Any = None
        self._kind = ""  # kind of the recorded steps, such as "training_step"
        self._finished: set[str] = set()
        self._traces = 0
        self._contexts = ExitStack()
        self._events: list[EventList] = []

    # Calls of the Trainer

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self._end_recording()
        self._reset()

    def attach(self, model: nn.Module, count_steps: Callable[[str], float]) -> None:
        self._model, self._count_steps = model, count_steps

    def start(self, action_name: str) -> None:
        # Actions are called `[Task]Name.training_step`.
        kind = action_name.rpartition(".")[2]
        if kind in self.STEP_FUNCTIONS and not self.emit_nvtx:
            self._begin_step(kind)
        elif self._recording is None and (self._schedule is None or self.emit_nvtx):
            self._begin_recording(kind="", plan=None)
        if self._recording is not None:
            # The prefix marks the block, so that the report can find actions among the events.
            self._blocks[action_name] = record_function(f"{self.prefix[:-1]}][profile]{action_name}")
            self._blocks[action_name].__enter__()

    def stop(self, action_name: str) -> None:
        block = self._blocks.pop(action_name, None)
        if block is not None:
            block.__exit__(None, None, None)

    def summary(self) -> str:
        self._end_recording()
        events: Any = self.function_events
        if not events:
            return ""
        averages = events.key_averages(group_by_input_shapes=self.group_by_input_shapes)
        key = self.sort_by_key or ("device_time_total" if events._use_device else "cpu_time_total")
        table = averages.table(sort_by=key, row_limit=self.row_limit, **self._table_options)
        stage = "" if self._stage is None else f"{self._stage.upper()} "
        return "\n".join([f"{stage}Profiler Report", table, *self._synchronisations(events)]) + "\n"

    def teardown(self, stage: str | None) -> None:
        self._end_recording()
        self._model = self._count_steps = None
        super().teardown(stage)

    # Results

    @property
    def function_events(self) -> EventList | None:
        """All events that the profiler has recorded, as one list, or None before the first trace."""
        if not self._events:
            return None
        first = self._events[0]
        make: Any = EventList
        together = make(
            [event for events in self._events for event in events],
            use_device=first._use_device,
            profile_memory=first._profile_memory,
            with_flops=first._with_flops,
        )
        together._tree_built = True  # each list has its tree already, and `key_averages` asserts this flag
        joined: EventList = together
        return joined

    def _synchronisations(self, events: Any) -> Iterator[str]:
        found: dict[str, list[Any]] = {}
        for event in events:
            outer = event.cpu_parent
            if event.name not in _SYNCHRONISING or (outer is not None and outer.name in _SYNCHRONISING):
                continue
            while outer is not None and "][profile]" not in outer.name:
                outer = outer.cpu_parent
            # An optimizer's step counter is a CPU tensor, so reading it does not wait for the device.
            if outer is not None and not outer.name.endswith("optimizer_step"):
                found.setdefault(outer.name.partition("][profile]")[2], []).append(event)
        for action, waits in sorted(found.items(), key=lambda item: -len(item[1])):
            calls = sum(event.name.endswith(f"][profile]{action}") for event in events)
            each = len(waits) / max(calls, 1)
            milliseconds = sum(event.cpu_time_total for event in waits) / 1e3
            names = ", ".join(sorted({event.name.removeprefix("aten::") for event in waits}))
            yield (
                f"{action} reads a tensor's value {each:.3g} times per call ({names}; {milliseconds:.3g} ms in total). "
                "On a GPU, each read waits for all operations that were launched before. Log tensors directly, and use "
                ".item(), print and float() only where values are shown."
            )

    # Recording

    def _begin_step(self, kind: str) -> None:
        if self._schedule is None:
            if self._recording is None:
                self._begin_recording(kind="", plan=None)
            return
        # A schedule with `repeat` is over after its last trace.
        if kind in self._finished:
            return
        if self._recording is not None and self._kind == kind:
            # The profiler counts steps; the schedule decides what each step does.
            self._recording.step()
            if kind in self._finished:
                self._end_recording()
            return
        self._end_recording()
        self._begin_recording(kind, self._plan(kind))

    def _plan(self, kind: str) -> Callable[[int], Any]:
        assert self._schedule is not None
        steps = float("inf") if self._count_steps is None else self._count_steps(kind)
        if steps >= self._steps_needed:
            return self._schedule
        warnings.warn(
            f"PyTorchProfiler: an epoch has {steps:g} calls of {kind}, not enough steps to properly record traces: the "
            f"schedule needs {self._steps_needed}. All of them are recorded, without a warm-up.",
            stacklevel=2,
        )
        last = max(int(steps), 1) - 1
        action = torch.profiler.ProfilerAction

        def record_all(step: int) -> Any:
            return action.NONE if step > last else action.RECORD if step < last else action.RECORD_AND_SAVE

        return record_all

    def _begin_recording(self, kind: str, plan: Callable[[int], Any] | None) -> None:
        self._kind = kind
        if self.emit_nvtx:
            emit: Any = torch.autograd.profiler.emit_nvtx
            self._recording = emit(record_shapes=self.group_by_input_shapes)
            self._contexts.enter_context(self._recording)
            return
        ready = partial(self._take_trace, kind, plan)
        self._recording = profile(schedule=plan, on_trace_ready=ready, **self._options)
        self._recording.start()
        if self.record_module_names and self._model is not None:
            self._contexts.enter_context(RegisterRecordFunction(self._model, f"{self.prefix[:-1]}][module]"))

    def _take_trace(self, kind: str, plan: Callable[[int], Any] | None, recording: Any) -> None:
        self._events.append(recording.events())
        if plan is None or _is_over(plan, recording.step_num):
            self._finished.add(kind)
        if self._on_trace_ready is not None:
            self._on_trace_ready(recording)
        elif self.export_to_chrome:
            number = f".{self._traces}" if self._traces else ""
            recording.export_chrome_trace(str(self.output_path(f"{number}.pt.trace.json", kind)))
        self._traces += 1

    def _end_recording(self) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        # Blocks that are still open must end within the recording, the innermost first.
        for block in reversed(self._blocks.values()):
            block.__exit__(None, None, None)
        self._blocks.clear()
        if not self.emit_nvtx:
            recording.stop()
        self._contexts.close()


@contextmanager
def RegisterRecordFunction(model: nn.Module, prefix: str = "[drivetrain][module]") -> Iterator[None]:
    """Label the forward pass of each submodule in traces of `torch.profiler`, for the code in the `with` block."""
    handles = []
    for name, module in model.named_modules():
        # The root module has no name, and TorchScript modules accept no hooks.
        if name and not isinstance(module, torch.jit.ScriptModule):
            kind = type(module)
            block = f"{prefix}{kind.__module__}.{kind.__name__}: {name}"
            opened: list[Any] = []
            handles.append(module.register_forward_pre_hook(partial(_open_block, block, opened)))
            # `always_call` ends the block even if the forward raises.
            handles.append(module.register_forward_hook(partial(_close_block, opened), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _open_block(name: str, opened: list[Any], *_: Any) -> None:
    opened.append(record_function(name))
    opened[-1].__enter__()


def _close_block(opened: list[Any], *_: Any) -> None:
    if opened:
        opened.pop().__exit__(None, None, None)


def _steps_to_record(plan: Callable[[int], Any]) -> int:
    # 0 if the schedule never saves a trace.
    saves = torch.profiler.ProfilerAction.RECORD_AND_SAVE
    # Schedules are functions, so they can only be tried out.
    return next((step + 1 for step in range(100_000) if plan(step) is saves), 0)


def _is_over(plan: Callable[[int], Any], step: int) -> bool:
    idle = torch.profiler.ProfilerAction.NONE
    return all(plan(later) is idle for later in range(step, step + 10_000))


def _check_table_options(given: dict[str, Any]) -> None:
    for name in given:
        if name in ("row_limit", "sort_by"):
            argument = "row_limit" if name == "row_limit" else "sort_by_key"
            raise KeyError(
                f"Found invalid table_kwargs key: {name}. This is already a positional argument of the Profiler. "
                f"Use PyTorchProfiler({argument}=...)."
            )
        allowed = [each for each in inspect.signature(EventList.table).parameters if each not in ("self", "sort_by")]
        if name not in allowed:
            raise KeyError(f"Found invalid table_kwargs key: {name}. Allowed are {', '.join(allowed)}.")

"""What the options of a launch mean on this machine: how many processes, on what, with which settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from drivetrain.launch.cores import THREADS_VARIABLE, threads_per_process
from drivetrain.launch.options import LaunchOptions
from drivetrain.launch.variables import variables_of_run
from drivetrain.launch.worker import AFFINITY_VARIABLE
from drivetrain.runtime.devices import DeviceKind, detect_device_kind, get_device_kind
from drivetrain.runtime.errors import ConfigurationError, DeviceNotAvailableError


@dataclass(frozen=True)
class LaunchPlan:
    """What the options mean on this machine.

    Attributes:
        local_processes: Processes to start here.
        kind: Name of the kind of device that they run on.
        variables: Environment variables through which the options reach them.
    """

    local_processes: int
    kind: str
    variables: dict[str, str]

    @classmethod
    def make(cls, options: LaunchOptions) -> LaunchPlan:
        """Hold the options against this machine's devices and cores.

        Raises:
            ConfigurationError: More processes than devices, or a setting that this system does not have.
            DeviceNotAvailableError: Accelerators were asked for where there are none.
        """
        kind = _device_kind(options)
        if options.num_processes is not None:
            local_processes = options.num_processes // options.max_machines
        elif options.device_ids is not None:
            local_processes = len(options.device_ids)
        else:
            local_processes = kind.default_processes()
        count = len(options.device_ids) if options.device_ids is not None else kind.count()
        if kind.name != "cpu" and local_processes > count:
            raise ConfigurationError(
                f"{local_processes} processes were asked for on this machine, but it has {count} {kind.name} "
                f"device(s). Ask for at most {count * options.max_machines} over all machines, or run on the "
                "CPU with cpu (`--cpu`).",
                code="DT-030",
            )
        if kind.drives_all and local_processes > 1:
            raise ConfigurationError(
                f"{local_processes} processes were asked for on this machine, but one drives all of its {count} "
                f"{kind.name} device(s). Leave the number out. In a notebook, notebook_launcher can start one for "
                "each.",
                code="DT-030",
            )
        return cls(local_processes, kind.name, _run_variables(options, kind, local_processes))

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Set the variables in this process, whose environment the ranks inherit, and put back what was there."""
        before = {name: os.environ.get(name) for name in self.variables}
        os.environ.update(self.variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _device_kind(options: LaunchOptions) -> DeviceKind:
    kind = detect_device_kind()
    if options.tpu and not kind.drives_all:
        raise DeviceNotAvailableError(
            f"tpu asks for a TPU, but torch_xla finds none on this machine (found: {kind.name}). Leave it out, or "
            'install torch_xla: pip install "drivetrain[xla]".'
        )
    if kind.name == "cpu" and (options.multi_gpu or options.gpu_ids is not None):
        flag = "multi_gpu" if options.multi_gpu else f"gpu_ids={options.gpu_ids}"
        raise DeviceNotAvailableError(
            f"{flag} asks for accelerators, but torch sees none on this machine. Leave it out to run on the "
            "CPU, or install a torch built for your devices and check that their driver works."
        )
    return get_device_kind("cpu") if options.cpu else kind


def _run_variables(options: LaunchOptions, kind: DeviceKind, local_processes: int) -> dict[str, str]:
    """The environment variables through which the options reach the ranks."""
    variables = variables_of_run(options)
    if options.enable_cpu_affinity:
        if not hasattr(os, "sched_setaffinity"):
            raise ConfigurationError("enable_cpu_affinity needs Linux. Leave it out on this system.", code="DT-015")
        variables[AFFINITY_VARIABLE] = "1"
    if options.device_ids is not None:
        name = kind.visible_variable
        if name is None:
            raise ConfigurationError(f"gpu_ids cannot choose among {kind.name} devices. Leave it out.", code="DT-024")
        variables[name] = ",".join(options.device_ids)
    threads = threads_per_process(options, local_processes)
    if threads is not None:
        variables[THREADS_VARIABLE] = str(threads)
    return variables

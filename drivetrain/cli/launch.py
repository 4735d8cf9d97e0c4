"""`drivetrain launch`: the launcher's flags, under Accelerate's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from drivetrain.launch.options import MIXED_PRECISIONS, RENDEZVOUS_BACKENDS, LaunchOptions
from drivetrain.launch.slurm import slurm_options

Command = TypeVar("Command", bound=Callable[..., Any])


def _spelling(token: str) -> str:
    """Let `--num-processes` mean `--num_processes`."""
    return token.replace("-", "_")


class LaunchCommand(click.Command):
    """The command, with its flags in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags by what they are about."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                section = parameter.section if isinstance(parameter, LaunchOption) else "Other"
                sections.setdefault(section, []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)


class LaunchOption(click.Option):
    """A flag; None unless given, so that other sources of options can speak where it is not."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


def _option(*names: str, section: str, **settings: Any) -> Callable[[Command], Command]:
    return click.option(*names, cls=LaunchOption, section=section, default=None, **settings)


def _flag(*names: str, section: str, **settings: Any) -> Callable[[Command], Command]:
    return _option(*names, section=section, is_flag=True, flag_value=True, **settings)


@click.command(
    cls=LaunchCommand,
    context_settings={
        "allow_interspersed_args": False,  # everything after the script belongs to the script
        "token_normalize_func": _spelling,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
    options_metavar="[FLAGS]",
)
@_option(
    "--num_processes",
    type=int,
    section="Processes",
    help="Processes over all machines. Default: one per accelerator, or one on the CPU.",
)
@_flag("--cpu", section="Processes", help="Run on the CPU, also where there are accelerators.")
@_flag("--multi_gpu", section="Processes", help="Insist on accelerators: an error where there are none.")
@_option("--gpu_ids", section="Processes", metavar="IDS", help='Accelerators to use, such as "0,2"; "all" for all.')
@_option(
    "--mixed_precision",
    metavar="NAME",
    section="Processes",
    help=f"Default number format: {', '.join(MIXED_PRECISIONS)}.",
)
@_flag(
    "--downcast_bf16",
    section="Processes",
    help="On XLA devices, let bf16 round 32-bit floats to bfloat16 and compute 64-bit ones in 32 bits.",
)
@_option(
    "--gradient_accumulation_steps",
    type=int,
    section="Processes",
    help="Default number of micro-batches in an optimizer step.",
)
@_option(
    "--num_cpu_threads_per_process",
    type=int,
    section="Processes",
    help="Threads of each process (OMP_NUM_THREADS). Default: an equal share of the cores.",
)
@_flag(
    "--enable_cpu_affinity",
    section="Processes",
    help="Bind each process to its own equal share of the cores.",
)
@_flag("-m", "--module", section="Script", help="SCRIPT is a module's name, as in python -m.")
@_flag("--no_python", section="Script", help="SCRIPT is a program of its own, not Python.")
@_option(
    "--preload",
    metavar="MODULES",
    section="Script",
    help="Import these once, and fork the processes then. Default: torch and the imports at the script's top.",
)
@_flag("--no_preload", section="Script", help="Each process imports everything by itself.")
@_option(
    "--num_machines",
    "--nnodes",
    section="Several machines",
    metavar="N or MIN:MAX",
    help="Machines that take part. Default: 1. With 1:2, the run continues when one of two dies or comes.",
)
@_option("--machine_rank", type=int, section="Several machines", help="Which one this is, from 0.")
@_option("--main_process_ip", section="Several machines", metavar="ADDRESS", help="Address of machine 0.")
@_option(
    "--main_process_port",
    type=int,
    section="Several machines",
    help="Port on machine 0. Default: 29500; a free one where there is one machine.",
)
@_option(
    "--rdzv_backend",
    metavar="NAME",
    section="Several machines",
    help=f"How machines meet: {', '.join(RENDEZVOUS_BACKENDS)}. Default: static, or c10d with MIN:MAX.",
)
@_option(
    "--rdzv_conf",
    metavar="KEY=VALUE,...",
    section="Several machines",
    help="Further settings of that, such as timeout=60.",
)
@_flag("--same_network", section="Several machines", help="Accepted; --rdzv_backend decides how machines meet.")
@_option(
    "--max_restarts",
    type=int,
    section="Failures and output",
    help="Start all again after a failure. Default: 0.",
)
@_option(
    "--preemption_grace_period",
    type=float,
    section="Failures and output",
    metavar="SECONDS",
    help="Time to save and end after SIGTERM, SIGUSR1 or Ctrl-C. Default: 60.",
)
@_option(
    "--hang_timeout",
    type=float,
    section="Failures and output",
    metavar="SECONDS",
    help="End a run in which a rank makes no progress for so long, and report where each waits; 0 never. "
    "Default: just before the collectives' own time-out.",
)
@_option(
    "--monitor_interval",
    type=float,
    section="Failures and output",
    help="Seconds between two checks of the processes. Default: 0.1.",
)
@_option(
    "--log_dir",
    metavar="DIRECTORY",
    section="Failures and output",
    help="Write each rank's output to files there as well.",
)
@_option(
    "--tee",
    metavar="WHICH",
    section="Failures and output",
    help="Which: 1 stdout, 2 stderr, 3 both, or by local rank: 0:3,1:1. Default: 3 with --log_dir.",
)
@_flag(
    "--debug",
    section="Failures and output",
    help="Show what is decided, and compare the calls of all processes before each collective and barrier.",
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(script: str, args: tuple[str, ...], **flags: Any) -> int:
    """Run SCRIPT with ARGS on several processes.

    Flags go before SCRIPT; everything after it belongs to the script, untouched. The first process that
    fails stops the others, its traceback is shown once, and its exit code is this command's.

    \b
    drivetrain launch train.py --lr 0.1
    drivetrain launch --num_processes 2 --cpu train.py --lr 0.1
    drivetrain launch --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 train.py
    """  # noqa: D301
    options = LaunchOptions.from_sources(flags, slurm_options(flags))
    options.check_script(script)  # a mistyped name needs no second of importing torch
    from drivetrain.launch.preload import Preloader

    with Preloader.start(options, script, args) as preloader:  # it imports torch while this process does
        from drivetrain.launch.launcher import launch_script

        return launch_script(options, script, args, preloader)

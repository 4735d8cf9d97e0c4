"""The `drivetrain` command. Commands are imported when they are called, so `--help` answers at once."""

from __future__ import annotations

import importlib
import os
import sys

import click

import drivetrain
from drivetrain.runtime.errors import ConfigurationError, DrivetrainError, nearest
from drivetrain.runtime.terminal import visible

# name -> (module and attribute of the command, what it does)
_COMMANDS = {
    "launch": (
        "drivetrain.cli.launch:launch",
        "Run a script on several processes, here or on several machines.",
    ),
    "config": (
        "drivetrain.cli.config:config",
        "Write the file that launch reads, or show what is in force and from where.",
    ),
    "test": (
        "drivetrain.cli.test:test",
        "Train for a moment on the configured setup, and report what is wrong with it.",
    ),
    "tune": (
        "drivetrain.cli.tune:tune",
        "Try changes of a script that could make its steps faster, and show what each gains.",
    ),
    "runs": (
        "drivetrain.cli.runs:runs",
        "List runs: when, state, metric and command; show one, or resume it.",
    ),
    "report": (
        "drivetrain.cli.report:report",
        "Write a page that shows a run, or that compares several.",
    ),
    "estimate-memory": (
        "drivetrain.inference.estimate_memory:estimate_memory",
        "Estimate the memory that a model takes in training and in inference.",
    ),
    "infer-map": (
        "drivetrain.inference.estimate_memory:infer_map",
        "Place a model's modules on devices with the given memory.",
    ),
    "slurm": (
        "drivetrain.cli.slurm:slurm",
        "Write an sbatch file that launches a script.",
    ),
    "k8s": (
        "drivetrain.cli.k8s:k8s",
        "Write a Kubernetes JobSet that launches a script.",
    ),
    "merge-weights": (
        "drivetrain.cli.merge_weights:merge_weights",
        "Write the weights in a checkpoint as plain safetensors.",
    ),
    "import-checkpoint": (
        "drivetrain.cli.import_checkpoint:import_checkpoint",
        "Convert a checkpoint of another tool into one of drivetrain.",
    ),
    "to-fsdp2": (
        "drivetrain.cli.to_fsdp2:to_fsdp2",
        "Rewrite a configuration for FSDP 1 as one for FSDP 2.",
    ),
    "tpu-config": (
        "drivetrain.cli.tpu_config:tpu_config",
        "Run commands on all workers of a TPU pod.",
    ),
    "env": (
        "drivetrain.cli.env:env",
        "Show versions, devices and settings, and where each setting came from.",
    ),
    "explain": (
        "drivetrain.cli.main:explain",
        "Deprecated: errors have no codes any more, and their messages have what to do.",
    ),
}


class LazyGroup(click.Group):
    """A group that lists its commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which a newcomer needs them."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command that was called."""
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or name the one that is spelled most alike."""
        if args and not args[0].startswith("-") and args[0] not in _COMMANDS:
            hint = nearest(args[0], _COMMANDS)
            ctx.fail(f"There is no command {args[0]!r}.{hint} Commands: {', '.join(_COMMANDS)}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table, not from the commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(drivetrain.__version__, prog_name="drivetrain")
def cli() -> None:
    """Train PyTorch models: one task class, one fit, any hardware."""


@click.command()
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """Deprecated: errors have no codes any more, and their messages have what to do."""
    click.echo("Errors have no codes any more: each message has what was given, what is allowed and what to do.")


def main() -> None:
    """Run the command line and exit; mistakes are reported without a traceback."""
    try:
        code = cli(prog_name="drivetrain", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except DrivetrainError as error:
        if os.environ.get("DRIVETRAIN_DEBUG") == "1":
            raise
        click.echo(visible(f"Error: {error}"), err=True)
        # 2 is what shells and click use for a command line that makes no sense.
        sys.exit(2 if isinstance(error, ConfigurationError) else 1)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()

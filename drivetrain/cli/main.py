"""Entry point of the `drivetrain` command. Commands are imported only when they are called."""

from __future__ import annotations

import importlib
import os
import sys

import click

import drivetrain
from drivetrain.runtime.errors import ConfigurationError, DrivetrainError, nearest
from drivetrain.runtime.terminal import visible

# name -> (module and attribute of the command, summary)
_COMMANDS = {
    "launch": (
        "drivetrain.cli.launch:launch",
        "Run a script on several processes, on one or several machines.",
    ),
    "config": (
        "drivetrain.cli.config:config",
        "Create the configuration file of launch, or show all settings and their sources.",
    ),
    "test": (
        "drivetrain.cli.test:test",
        "Check the configured setup with a short training run.",
    ),
    "verify": (
        "drivetrain.verification.command:verify",
        "Check that a script trains the same on several processes as on one.",
    ),
    "plan": (
        "drivetrain.planning.command:plan",
        "Say which strategy fits a model on given devices, and how fast it trains.",
    ),
    "tune": (
        "drivetrain.cli.tune:tune",
        "Try settings that could make a script's steps faster, and show the gain of each.",
    ),
    "runs": (
        "drivetrain.cli.runs:runs",
        "List the runs of a folder, show one, or resume one.",
    ),
    "report": (
        "drivetrain.cli.report:report",
        "Write an HTML page about one run, or a comparison of several.",
    ),
    "estimate-memory": (
        "drivetrain.planning.estimate_memory:estimate_memory",
        "Estimate the memory that a model needs for training and inference.",
    ),
    "infer-map": (
        "drivetrain.inference.infer_map:infer_map",
        "Compute a device map for a model and the given memory sizes.",
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
        "Export the weights of a checkpoint as safetensors files.",
    ),
    "import-checkpoint": (
        "drivetrain.cli.import_checkpoint:import_checkpoint",
        "Convert a checkpoint of another tool into one of drivetrain.",
    ),
    "to-fsdp2": (
        "drivetrain.cli.to_fsdp2:to_fsdp2",
        "Convert a configuration file from FSDP 1 to FSDP 2.",
    ),
    "tpu-config": (
        "drivetrain.cli.tpu_config:tpu_config",
        "Run commands on all workers of a TPU pod.",
    ),
    "env": (
        "drivetrain.cli.env:env",
        "Show versions, devices and settings, and the source of each setting.",
    ),
    "explain": (
        "drivetrain.cli.main:explain",
        "Deprecated: errors have no codes any more. Their messages explain what to do.",
    ),
}


class LazyGroup(click.Group):
    """Group of commands that imports each command only when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in _COMMANDS:
            hint = nearest(args[0], _COMMANDS)
            ctx.fail(f"There is no command {args[0]!r}.{hint} Commands: {', '.join(_COMMANDS)}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(drivetrain.__version__, prog_name="drivetrain")
def cli() -> None:
    """Command line of drivetrain: launch, configure, check and inspect training runs of PyTorch models."""


@click.command()
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """Print that errors have no codes any more, since each message explains itself. This command is deprecated."""
    click.echo("Errors have no codes any more. Each message explains what was given, what is allowed and what to do.")


def main() -> None:
    """Run drivetrain's command line, printing its own errors without a traceback."""
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
        # Shells and click use exit code 2 for an invalid command line.
        sys.exit(2 if isinstance(error, ConfigurationError) else 1)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()

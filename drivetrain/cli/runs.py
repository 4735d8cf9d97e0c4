"""The `runs` command: list, show and resume the runs of a folder."""

from __future__ import annotations

import click

from drivetrain.runtime.terminal import visible

_DIRECTORY = click.option("--dir", "directory", default=".", show_default=True, help="Folder of the runs.")
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(invoke_without_command=True, context_settings=_SETTINGS)
@_DIRECTORY
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def runs(context: click.Context, directory: str, as_json: bool) -> None:
    """List the runs of a folder, newest first, with start time, state, metric and command.

    The metric is the best value of the metric that selects checkpoints. Runs without one show their last loss, marked
    as the last value.

    \b
    drivetrain runs --dir experiments
    drivetrain runs show version_3
    drivetrain runs resume version_3
    """  # noqa: D301
    context.obj = directory
    if context.invoked_subcommand is not None:
        return
    import shutil
    import sys

    from drivetrain.callbacks.report.page import as_table, list_runs
    from drivetrain.trackers.index import DIRECTORY, NAME

    found = list_runs(directory)
    if as_json:
        import json

        click.echo(json.dumps([{**vars(run), "state": run.state, "metric": run.metric} for run in found], indent=2))
        return
    if not found:
        click.echo(f"No runs are listed in {directory}/{DIRECTORY}/{NAME}. Give their folder with --dir.")
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    click.echo("\n".join(as_table(found, width)))


@runs.command(context_settings=_SETTINGS)
@click.argument("name")
@click.pass_obj
def show(directory: str, name: str) -> None:
    """Print a summary of the run NAME: its state, command, settings, metrics, checkpoints and report page.

    NAME is a run's name in `drivetrain runs`, or its folder.
    """
    from drivetrain.callbacks.report.page import find_run
    from drivetrain.callbacks.report.record import read_record, summary_of

    place = find_run(name, directory)
    click.echo("\n".join(summary_of(place, read_record(place))))


@runs.command(context_settings=_SETTINGS)
@click.argument("name")
@click.option("--dry-run", is_flag=True, help="Show the command without running it.")
@click.pass_obj
def resume(directory: str, name: str, dry_run: bool) -> int:
    """Start the run NAME again with its command and folder, and resume from its newest checkpoint.

    The first `fit` of the script resumes from this checkpoint, unless the script passes a checkpoint itself.
    """
    import shlex
    import subprocess

    from drivetrain.callbacks.report.page import find_run
    from drivetrain.callbacks.report.record import resumption_of

    plan = resumption_of(find_run(name, directory))
    click.echo(visible(f"In {plan.folder}, resuming {plan.checkpoint}: {shlex.join(plan.words)}"))
    if dry_run:
        return 0
    return subprocess.run(plan.words, cwd=plan.folder, env=plan.environment()).returncode

"""The `report` command: an HTML page about one run, or a comparison of several."""

from __future__ import annotations

import click

from drivetrain.runtime.terminal import visible


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("-o", "--output", default=None, metavar="FILE", help="HTML file to write.")
@click.option("--dir", "directory", default=".", show_default=True, help="Folder of the runs that are given by name.")
def report(runs: tuple[str, ...], output: str | None, directory: str) -> None:
    """Write an HTML report about one run, or a comparison of several runs.

    RUN is a run's folder, its name in `drivetrain runs`, a CSV table of metrics or a TensorBoard event file. The page
    is written to RUN/report.html, or to comparison.html for several runs.

    \b
    drivetrain report drivetrain_logs/version_3
    drivetrain report version_3 version_4 -o compared.html
    """  # noqa: D301
    from pathlib import Path

    from drivetrain.callbacks.report.page import RunPage, comparison_of, find_run, page_of
    from drivetrain.callbacks.report.record import PAGE, write_whole

    pages = [RunPage.read(find_run(run, directory)) for run in runs]
    first = pages[0].folder
    if len(pages) > 1:
        target = Path(output or "comparison.html")
    else:
        target = Path(output) if output else (first if first.is_dir() else first.parent) / PAGE
    write_whole(target, comparison_of(pages) if len(pages) > 1 else page_of(pages[0]))
    click.echo(visible(str(target)))

"""`drivetrain explain`: what an error code means, and what to do."""

from __future__ import annotations

import click


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """Explain an error code: when it is raised, an example, the cause and what to do. Without a code, list all.

    \b
    drivetrain explain DT-012
    """  # noqa: D301
    from drivetrain.runtime.error_codes import causes, find_cause

    if code is None:
        click.echo("\n".join(f"{cause.code}  {cause.title}" for cause in causes().values()))
        return
    heading, *paragraphs = find_cause(code).as_text().split("\n\n")
    click.echo(heading)
    for paragraph in paragraphs:
        indent = " " * (len(paragraph) - len(paragraph.lstrip()))
        click.echo("\n" + click.wrap_text(paragraph.strip(), 100, initial_indent=indent, subsequent_indent=indent))

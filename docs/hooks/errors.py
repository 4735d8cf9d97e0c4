"""Write the page of error codes from `drivetrain/runtime/error_codes.yaml`, which `drivetrain explain` reads too."""

from __future__ import annotations

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from drivetrain.runtime.error_codes import REGISTRY, causes

PAGE = "errors.md"

INTRODUCTION = """# Error codes

An error that a wrong argument, flag, file or environment causes is a `ConfigurationError`. Its message ends with the
code of its cause:

```text
drivetrain.runtime.errors.ConfigurationError: precision='64' cannot run under strategy='deepspeed': ZeRO keeps its
master weights in 32 bits. Use '32', or another strategy.
[DT-012: drivetrain explain DT-012]
```

`drivetrain explain DT-012` prints the section below; `error.code` is the code, and `error.message` the message
without that line. Codes keep their meaning from version to version.

Errors of other classes have no code: `CheckpointError` (a checkpoint is missing, damaged or does not fit),
`DataError` (a batch or loader cannot be used), `CollectiveError` (processes disagree), `DeviceNotAvailableError`,
`TrackerError` and `LaunchError`. All are `DrivetrainError`. The launcher shows them without most of drivetrain's
own frames; `DRIVETRAIN_FULL_TRACEBACK=1` or `drivetrain launch --full_traceback` shows all.
"""


def groups() -> dict[str, str]:
    """The headings of the registry's groups, each by its first code."""
    text = REGISTRY.read_text(encoding="utf-8")
    return {code: heading for heading, code in re.findall(r"^# ([^\n]+)\n\n(DT-\d{3}):", text, re.MULTILINE)}


def page() -> str:
    """Compose the page."""
    headings = groups()
    sections: list[str] = [INTRODUCTION]
    for code, cause in causes().items():
        if code == "DT-000":
            sections.append("## General\n")
        elif code in headings:
            sections.append(f"## {headings[code]}\n")
        sections.append(cause.as_markdown())
    return "\n".join(sections)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to what is built."""
    files.append(File.generated(config, PAGE, content=page()))
    return files

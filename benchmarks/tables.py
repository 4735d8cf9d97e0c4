"""Results as a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def as_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out rows under their headings.

    Args:
        columns: The headings. Those that end with a colon are of numbers, which are aligned to the right.
        rows: For each row, one cell a column.
    """
    lines = [
        "| " + " | ".join(column.rstrip(":") for column in columns) + " |",
        "|" + "|".join("---:" if column.endswith(":") else "---" for column in columns) + "|",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)

"""The table that `validate` and `test` print."""

from __future__ import annotations

from drivetrain.runtime.terminal import print_text


def print_results(title: str, results: list[dict[str, float]]) -> None:
    """Print each loader's values, a line a name.

    Args:
        title: What ran.
        results: Each loader's values by name.
    """
    for index, values in enumerate(results):
        if not values:
            continue
        heading = f"{title} results" + (f", loader {index}" if len(results) > 1 else "")
        rows = [(name, f"{value:.6g}") for name, value in values.items()]
        left = max(len(heading), *(len(name) for name, _ in rows))
        right = max(len(value) for _, value in rows)
        print_text(f"{'─' * (left + right + 4)}\n {heading}\n{'─' * (left + right + 4)}")
        for name, value in rows:
            print_text(f" {name:<{left}}  {value:>{right}}")
        print_text("─" * (left + right + 4))

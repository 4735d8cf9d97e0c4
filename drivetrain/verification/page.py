"""HTML page of a comparison, in the design of the run report."""

from __future__ import annotations

import math
from typing import Any

from drivetrain.callbacks.report.charts import Chart, Series
from drivetrain.callbacks.report.page import PageParts, render
from drivetrain.callbacks.report.record import Curve
from drivetrain.verification.compare import QUANTITIES, Comparison
from drivetrain.verification.run import VerificationResult


def page(result: VerificationResult, script: str) -> bytes:
    """Create the HTML report of a `drivetrain verify` result, with the cause and the curves of the differences.

    Args:
        result: The result to show.
        script: Name of the script, for the heading.
    """
    lines = [str(result).splitlines()[0], *result.notes]
    facts: list[tuple[str, list[tuple[str, str]]]] = []
    if (found := result.finding) is not None:
        rows = [("Cause", found.sentence), ("Change", found.remedy)]
        facts.append(("Finding", [*rows, *(("Evidence", each) for each in found.evidence)]))
    parts = PageParts(
        f"drivetrain verify {script}",
        state=result.verdict,
        lines=lines,
        figures=[
            ("steps", str(result.steps)),
            ("processes", str(result.processes)),
            ("strategy", result.strategy),
            ("precision", result.precision),
        ],
        tables=[_table(result)],
        facts=facts,
    )
    return render(parts, _charts(result.comparison) if result.comparison is not None else ())


def _table(result: VerificationResult) -> dict[str, Any]:
    rows = [
        {
            "name": name,
            "cells": [{"text": f"{size:.2g}"}, {"text": f"{allowed:.2g}"}],
            "differs": size > allowed,
        }
        for name, (size, allowed) in result.table.items()
    ]
    return {
        "title": "Largest relative differences",
        "columns": ["quantity", "found", "allowed"],
        "rows": rows,
        "note": "Allowed are four times the rounding that was measured on one process.",
    }


def _charts(compared: Comparison) -> list[Chart]:
    charts = []
    for quantity in QUANTITIES:
        of = [each for each in compared.of(quantity) if math.isfinite(each.size) and math.isfinite(each.allowed)]
        if any(each.size > 0 for each in of):
            steps = [float(each.step) for each in of]
            found = Series("found", Curve(steps, [each.size for each in of]))
            allowed = Series("allowed", Curve(steps, [each.allowed for each in of]), is_dashed=True)
            charts.append(Chart(f"Difference of {quantity}", "Differences", [found, allowed]))
    return charts

"""Check that a script trains the same on several processes as on one. This package can be removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.exports import load_export

# public name -> the module that defines it
_EXPORTS = dict.fromkeys(
    ("ComparisonError", "VerificationResult", "verify", "verify_all"), "drivetrain.verification.run"
)

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    return load_export(name, _EXPORTS, globals())


if TYPE_CHECKING:
    from drivetrain.verification.run import ComparisonError as ComparisonError
    from drivetrain.verification.run import VerificationResult as VerificationResult
    from drivetrain.verification.run import verify as verify
    from drivetrain.verification.run import verify_all as verify_all

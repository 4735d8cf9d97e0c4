"""Other frameworks' module paths and names over drivetrain, so that what was written for them runs unchanged.

`install("accelerate")` lets `import accelerate` give `drivetrain.compat.accelerate`, in scripts and in the libraries
that they import. `drivetrain launch --as accelerate` does the same in every process of a run.
"""

from drivetrain.compat.aliases import install

__all__ = ["install"]

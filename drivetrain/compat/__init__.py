"""Run scripts for Accelerate and Lightning unchanged: their module paths and names, implemented with drivetrain.

After `install("accelerate")`, `import accelerate` gives `drivetrain.compat.accelerate`, in scripts and in their
libraries. `drivetrain launch --as accelerate` does the same in every process of a run.
"""

from drivetrain.compat.aliases import install

__all__ = ["install"]

"""Import one package under the name of another: `accelerate` becomes `drivetrain.compat.accelerate`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import DistributionFinder, PathDistribution
from pathlib import Path
from types import ModuleType

from drivetrain.compat.handed_on import HANDED_ON, PREFIX, HandedOnLoader
from drivetrain.runtime.errors import ConfigurationError, nearest

PACKAGES = {
    "accelerate": "drivetrain.compat.accelerate",
    "lightning": "drivetrain.compat.lightning",
    "pytorch_lightning": "drivetrain.compat.lightning.pytorch",
    "lightning_fabric": "drivetrain.compat.lightning.fabric",
}
"""What can be replaced, and by what."""

STAND_INS = Path(__file__).parent / "stand_ins"
"""For each framework, a directory that replaces its packages in processes that have it on their module path."""


def install(package: str, *others: str) -> ModuleType:
    """Make imports of a package in this process resolve to drivetrain's mirror of it.

    This includes submodules, `importlib.util.find_spec` and `importlib.metadata.version`, by which libraries check for
    the package and its version. The original need not be installed.

    Example:
        ```python
        import drivetrain.compat

        drivetrain.compat.install("accelerate")

        from accelerate import Accelerator  # drivetrain's
        ```
    """
    for other in others:
        install(other)
    if package not in PACKAGES:
        raise ConfigurationError(
            f"install({package!r}): allowed are {', '.join(map(repr, PACKAGES))}.{nearest(package, PACKAGES)}",
        )
    target = PACKAGES[package]
    loaded = sys.modules.get(package)
    if loaded is not None and loaded.__name__ != target and not _is_stand_in(loaded):
        origin = getattr(loaded, "__file__", None) or "an unknown place"
        raise ConfigurationError(
            f"{package} has been imported already, from {origin}, and what holds its names would keep them. Call "
            f"drivetrain.compat.install({package!r}) before anything imports {package}, or start the script with "
            f"`drivetrain launch --as {_framework(package)}`.",
        )
    finder = AliasFinder(package, target)
    if finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)
        importlib.invalidate_caches()
    module = importlib.import_module(target)
    sys.modules[package] = module
    if package == "accelerate":
        _publish_launch_options()
    return module


def _framework(package: str) -> str:
    """Return the framework of a package: the name of its directory in `STAND_INS`."""
    return PACKAGES[package].split(".")[2]


def _publish_launch_options() -> None:
    """Set the environment variables in which Accelerate's launcher passes its options to scripts."""
    for name in ("MIXED_PRECISION", "GRADIENT_ACCUMULATION_STEPS", "USE_CPU"):
        value = os.environ.get(f"DRIVETRAIN_{name}")
        if value is not None:
            os.environ.setdefault(f"ACCELERATE_{name}", value)


def _is_stand_in(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and STAND_INS in Path(file).parents


class AliasFinder(DistributionFinder):
    """Import finder that maps one package's modules, and its version metadata, to another package."""

    def __init__(self, package: str, target: str) -> None:
        self.package, self.target = package, target

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AliasFinder) and other.package == self.package

    def __hash__(self) -> int:
        return hash(self.package)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find `package.some.module` as `target.some.module`. Return None for other packages."""
        if fullname != self.package and not fullname.startswith(f"{self.package}."):
            return None
        own = self.target + fullname[len(self.package) :]
        name = own.removeprefix(PREFIX)
        if name in HANDED_ON:
            is_package = any(each.startswith(f"{name}.") for each in HANDED_ON)
            return ModuleSpec(fullname, HandedOnLoader(own), origin=own, is_package=is_package)
        found = importlib.util.find_spec(own)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, AliasLoader(own, fullname), origin=found.origin, is_package=is_package)

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
    ) -> Iterable[importlib.metadata.Distribution]:
        """Return the version metadata of the mirror before that of an installed original."""
        if context.name is None or context.name.replace("-", "_") == self.package:
            for folder in (STAND_INS / _framework(self.package)).glob(f"{self.package}-*.dist-info"):
                yield PathDistribution(folder)


class AliasLoader(Loader):
    """Import loader that returns an existing module for an aliased name."""

    def __init__(self, name: str, alias: str) -> None:
        self._name, self._alias = name, alias
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module under its original name."""
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import system replaced by the alias's spec."""
        module.__spec__ = self._spec
        # A later import of a submodule would overwrite a function of the same name in the package.
        for name in [each for each in sys.modules if each.startswith(f"{self._name}.")]:
            sys.modules.setdefault(self._alias + name[len(self._name) :], sys.modules[name])

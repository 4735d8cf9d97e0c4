"""`TorchCollective`: a process group of `torch.distributed`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.compat.lightning.fabric.plugins.collectives.collective import Collective
from drivetrain.runtime.errors import CollectiveError
from drivetrain.runtime.groups import TorchGroup

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TorchCollective"]


class TorchCollective(TorchGroup, Collective):
    """Collective operations of `torch.distributed` on this object's group, or on the default group.

    Attributes:
        manages_default_group: True if `setup` created the default group, which the last `teardown` then destroys.
    """

    manages_default_group: ClassVar[bool] = False

    def __init__(self) -> None:
        if not self.is_available():
            raise CollectiveError("TorchCollective needs torch.distributed, without which this torch was built.")
        super().__init__()

    @property
    def group(self) -> Any:
        if self._group is None:
            self._group = self.whole()
        return super().group

    def setup(self, main_address: str | None = None, main_port: str | int | None = None, **kwargs: Any) -> Self:
        """Create the default process group, unless it exists."""
        if not self.is_initialized():
            self.init_group(main_address=main_address, main_port=main_port, **kwargs)
            TorchCollective.manages_default_group = True
        return self

    def teardown(self) -> Self:
        """Destroy this object's group, and after the last one the default group if `setup` created it."""
        is_member = self.is_member(self.group)
        super().teardown()
        if TorchCollective.manages_default_group and is_member:
            whole = self.whole()
            if whole is not None and self.count() == 1:
                self.destroy_group(whole)
            TorchCollective.manages_default_group = self.count() > 0
        return self

"""`TorchCollective`: a group of `torch.distributed`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.compat.lightning.fabric.plugins.collectives.collective import Collective
from drivetrain.runtime.errors import CollectiveError
from drivetrain.runtime.groups import TorchGroup

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TorchCollective"]


class TorchCollective(TorchGroup, Collective):
    """The operations of `torch.distributed` on a group; the group of all processes where none was created.

    Attributes:
        manages_default_group: Whether `setup` has made the group of all processes, which the last `teardown` ends.
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
        """Make the group of all processes, unless it is there."""
        if not self.is_initialized():
            self.init_group(main_address=main_address, main_port=main_port, **kwargs)
            TorchCollective.manages_default_group = True
        return self

    def teardown(self) -> Self:
        """End this object's group, and after the last one that of all processes, where `setup` has made it."""
        is_member = self.is_member(self.group)
        super().teardown()
        if TorchCollective.manages_default_group and is_member:
            whole = self.whole()
            if whole is not None and self.count() == 1:
                self.destroy_group(whole)
            TorchCollective.manages_default_group = self.count() > 0
        return self

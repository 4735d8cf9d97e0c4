"""`LightningDataModule`: a data module with the members that only scripts written for Lightning use."""

from __future__ import annotations

from typing import Any, ClassVar

from drivetrain.trainer import DataModule


class LightningDataModule(DataModule):
    """`drivetrain.DataModule` under Lightning's name.

    Attributes:
        name: A name for the data.
    """

    CHECKPOINT_HYPER_PARAMS_KEY: ClassVar[str] = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME: ClassVar[str] = "datamodule_hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE: ClassVar[str] = "datamodule_hparams_type"

    name: str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def remove_ignored_hparams(self, ignore_list: list[str]) -> None:
        """Forget hyper-parameters.

        Args:
            ignore_list: Their names.
        """
        for name in ignore_list:
            self.hparams.pop(name, None)

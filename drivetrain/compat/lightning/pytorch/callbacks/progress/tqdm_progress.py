"""`TQDMProgressBar`: progress bars of the package tqdm."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from drivetrain.callbacks.progress_bar import TQDMProgressBar as CoreProgressBar
from drivetrain.compat.instances import StandsFor
from drivetrain.compat.lightning.pytorch.callbacks.progress.progress_bar import SwitchedBar
from drivetrain.runtime.terminal import Lenient

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TQDMProgressBar", "Tqdm"]

SECONDS_BETWEEN = 0.1

DIGITS = 5
"""Characters of a number, at least; so the bar keeps its width while values change."""


class Tqdm(tqdm):  # type: ignore[type-arg]
    """`tqdm` whose numbers keep a constant width."""

    @staticmethod
    def format_num(n: float | str) -> str:
        """Format a number. Floats are padded with zeros to five characters."""
        shown = n if isinstance(n, str) else str(tqdm.format_num(n))
        if isinstance(n, float) and "." not in shown and "e" not in shown and math.isfinite(n):
            shown += "."
        return shown if "." not in shown or "e" in shown else shown.ljust(DIGITS, "0")


class TQDMProgressBar(SwitchedBar, metaclass=StandsFor, original=CoreProgressBar):
    """Progress bars of tqdm, one per pass over a data loader.

    Attributes:
        seconds_between: Minimum seconds between two refreshes of a bar, by default 0. The last refresh is never
            skipped.
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(_rate_wanted(refresh_rate))
        self._process_position = process_position
        self._leave = leave
        self._bars: dict[str, Any] = {}  # by what they show
        self.seconds_between = 0.0
        self._drawn_at = 0.0

    @classmethod
    def by_default(cls) -> Self:
        """Return the Trainer's default bar: ten refreshes a second on a terminal, else one per pass."""
        bar = cls()
        bar.seconds_between = SECONDS_BETWEEN if sys.stdout.isatty() else math.inf
        return bar

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_bars": {}}

    @property
    def process_position(self) -> int:
        """Number of terminal lines that are left free above the bar."""
        return self._process_position

    # the bars

    @property
    def train_progress_bar(self) -> Any:
        """Bar of the training epoch."""
        return self._bar("train")

    @property
    def val_progress_bar(self) -> Any:
        """Bar of the validation or the sanity check."""
        return self._bar("val")

    @property
    def test_progress_bar(self) -> Any:
        """Bar of the test."""
        return self._bar("test")

    @property
    def predict_progress_bar(self) -> Any:
        """Bar of the prediction run."""
        return self._bar("predict")

    def _bar(self, name: str) -> Any:
        if name not in self._bars:
            raise TypeError(f"{type(self).__name__} has no {name} bar before that stage has begun.")
        return self._bars[name]

    def init_sanity_tqdm(self) -> Tqdm:
        """Create the bar of the sanity check. Override it to customize the bar."""
        return self._made(self.sanity_check_description, leave=False)

    def init_train_tqdm(self) -> Tqdm:
        """Create the bar of the training epoch. Override it to customize the bar."""
        return self._made(self.train_description, leave=True, smoothing=0)

    def init_validation_tqdm(self) -> Tqdm:
        """Create the bar of a validation, below the training bar if there is one. Override it to customize the bar."""
        within = self.trainer.state.fn != "validate"
        return self._made(self.validation_description, below=within, leave=not within)

    def init_test_tqdm(self) -> Tqdm:
        """Create the bar of a test. Override it to customize the bar."""
        return self._made(self.test_description, leave=True)

    def init_predict_tqdm(self) -> Tqdm:
        """Create the bar of a prediction run. Override it to customize the bar."""
        return self._made(self.predict_description, leave=True, smoothing=0)

    def _made(self, title: str, below: bool = False, **options: Any) -> Tqdm:
        return Tqdm(
            desc=title,
            position=2 * self._process_position + below,
            disable=self.is_disabled,
            dynamic_ncols=True,
            file=Lenient(sys.stdout),
            bar_format=self.BAR_FORMAT,
            **options,
        )

    # shared by all stages

    def _restart(self, name: str, total: float, title: str) -> None:
        bar = self._bar(name)
        bar.reset()
        bar.initial = 0
        bar.total = total if math.isfinite(total) else None
        bar.set_description(title)

    def _begin_loader(self, name: str, dataloader_idx: int, title: str) -> None:
        if self.has_dataloader_changed(dataloader_idx):
            totals = getattr(self, f"total_{name}_batches_current_dataloader")
            self._restart(name, totals, f"{title} DataLoader {dataloader_idx}")

    def _advance(self, name: str, batch_idx: int) -> bool:
        """Advance a bar at every `refresh_rate` batches. Return True if it did."""
        bar, done = self._bar(name), batch_idx + 1
        if not self.is_enabled or (done % self._refresh_rate and done != bar.total):
            return False
        now = time.monotonic()
        is_due = done == bar.total or now - self._drawn_at >= self.seconds_between
        if not bar.disable:
            bar.n = done
        if is_due and not bar.disable:
            self._drawn_at = now
            bar.refresh()
        return is_due

    def _end(self, name: str) -> None:
        self._bar(name).close()
        self.reset_dataloader_idx_tracker()

    def _show_values(self, trainer: Any, pl_module: Any) -> None:
        if not self.is_enabled or "train" not in self._bars:
            return
        shown = self.get_metrics(trainer, pl_module)
        if not self.train_progress_bar.disable:
            self.train_progress_bar.set_postfix(shown)

    # training

    def on_sanity_check_start(self, *_: Any) -> None:
        self._bars["val"] = self.init_sanity_tqdm()
        self._bars["train"] = Tqdm(disable=True)  # no bar exists yet

    def on_sanity_check_end(self, *_: Any) -> None:
        self.train_progress_bar.close()
        self.val_progress_bar.close()

    def on_train_start(self, *_: Any) -> None:
        self._bars["train"] = self.init_train_tqdm()

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        if self._leave:
            self._bars["train"] = self.init_train_tqdm()
        self._restart("train", self.total_train_batches, f"Epoch {trainer.current_epoch}")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._advance("train", batch_idx):
            self._show_values(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._show_values(trainer, pl_module)
        if self._leave:
            self.train_progress_bar.close()

    def on_train_end(self, *_: Any) -> None:
        self.train_progress_bar.close()

    # evaluation

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._bars["val"] = self.init_validation_tqdm()

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        title = self.sanity_check_description if trainer.sanity_checking else self.validation_description
        self._begin_loader("val", dataloader_idx, title)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._advance("val", batch_idx)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit":
            self._show_values(trainer, pl_module)
        self._end("val")

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._bars["test"] = self.init_test_tqdm()

    def on_test_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._begin_loader("test", dataloader_idx, self.test_description)

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._advance("test", batch_idx)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        self._end("test")

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._bars["predict"] = self.init_predict_tqdm()

    def on_predict_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._begin_loader("predict", dataloader_idx, self.predict_description)

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._advance("predict", batch_idx)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        self._end("predict")

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print text above the bars."""
        if any(not bar.disable for bar in self._bars.values()):
            text = sep.join(map(str, args))
            try:
                Tqdm.write(text, **kwargs)
            except (OSError, ValueError, AttributeError):  # closed, without an encoding for the text, or no stdout
                Tqdm.write(text, **{**kwargs, "file": Lenient(kwargs.get("file") or sys.stdout)})
        else:
            super().print(*args, **(kwargs if sep == " " else {**kwargs, "sep": sep}))


def _rate_wanted(given: int) -> int:
    """Return the given refresh rate, or a higher one that the environment asks for."""
    if given == 1 and "COLAB_GPU" in os.environ:
        given = 20
    return max(given, int(os.environ.get("TQDM_MINITERS", 0)))

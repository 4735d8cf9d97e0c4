"""The hooks of a task around the loop, each a documented no-op."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


class TaskHooks(nn.Module):
    """What a task may override to act at a moment of the run, in the order in which the moments come."""

    def on_fit_start(self) -> None:
        """Called at the very beginning of fit, after the optimizers were built."""

    def on_fit_end(self) -> None:
        """Called at the very end of fit."""

    def on_train_start(self) -> None:
        """Called before the first epoch."""

    def on_train_end(self) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Called before an epoch's first batch."""

    def on_train_epoch_end(self) -> None:
        """Called after an epoch's last batch and its validation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called before a batch; returning -1 leaves out the rest of the epoch."""
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a batch; for the last of an optimizer step, after the step."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called before gradients are cleared."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before a backward."""

    def on_after_backward(self) -> None:
        """Called after a backward, before clipping."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before clipping and stepping, with gradients at their true size."""

    def on_validation_model_zero_grad(self) -> None:
        """Free the gradients before a validation in `fit`; a task that optimizes by hand may count on them."""
        if self.automatic_optimization:
            self.zero_grad()

    def on_validation_model_eval(self) -> None:
        """Switch to evaluation for validation."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """Switch back after validation; the default restores each module's own mode."""

    def on_validation_start(self) -> None:
        """Called before validation."""

    def on_validation_end(self) -> None:
        """Called after validation."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation batch."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a validation batch."""

    def on_test_model_eval(self) -> None:
        """Switch to evaluation for testing."""
        self.eval()

    def on_test_model_train(self) -> None:
        """Switch back after testing; the default restores each module's own mode."""

    def on_test_start(self) -> None:
        """Called before testing."""

    def on_test_end(self) -> None:
        """Called after testing."""

    def on_test_epoch_start(self) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a test batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a test batch."""

    def on_predict_model_eval(self) -> None:
        """Switch to evaluation for predicting."""
        self.eval()

    def on_predict_model_train(self) -> None:
        """Switch back after predicting; the default restores each module's own mode."""

    def on_predict_start(self) -> None:
        """Called before predicting."""

    def on_predict_end(self) -> None:
        """Called after predicting."""

    def on_predict_epoch_start(self) -> None:
        """Called before the first batch to predict."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last batch to predict."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a batch to predict."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a batch to predict."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint before it is written."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take back what `on_save_checkpoint` added."""

    def on_exception(self, exception: BaseException) -> None:
        """See an exception that ends the run."""

"""What a task's `training_step` returned: its loss, what that weighs, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from drivetrain.runtime.errors import ConfigurationError


class StepOutput:
    """Reads what one task's `training_step` returns.

    Args:
        task_name: The task's class, for errors.
    """

    def __init__(self, task_name: str) -> None:
        self._step = f"{task_name}.training_step"

    def loss_of(self, output: Any) -> Tensor | None:
        """The loss; None where the batch is left out.

        Raises:
            ConfigurationError: It is something else.
        """
        if isinstance(output, Tensor):
            return output
        if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
            loss: Tensor = output["loss"]
            return loss
        if output is None:
            return None
        is_dict = isinstance(output, Mapping)
        given = f"a dict with the keys {sorted(map(str, output))}" if is_dict else repr(output)[:80]
        rule = (
            "In a dict, the 'loss' key needs to be present" if is_dict else "It must return a Tensor, a dict, or None"
        )
        raise ConfigurationError(
            f"{self._step} returned {given}. {rule}: the loss as a scalar tensor, a dict with it under 'loss', or None "
            "to leave the batch out.",
            code="DT-083",
        )

    def check_of_manual(self, output: Any) -> None:
        """Check what a task that optimizes by hand returned.

        Raises:
            ConfigurationError: It is no tensor, dict or None.
        """
        if output is not None and not isinstance(output, Tensor | Mapping):
            raise ConfigurationError(
                f"{self._step} returned {repr(output)[:80]}. With automatic_optimization = False it must return a "
                "Tensor or have no return: a tensor or a dict, which hooks get, or None.",
                code="DT-083",
            )

    def has_weight(self, output: Any) -> bool:
        """Whether a loss came with a weight."""
        return isinstance(output, Mapping) and "weight" in output

    def weight_of(self, output: Any) -> Tensor | float:
        """What a loss weighs.

        Raises:
            ConfigurationError: There is no weight, but losses before came with one.
        """
        if self.has_weight(output):
            weight: Tensor | float = output["weight"]
            return weight
        raise ConfigurationError(
            f"{self._step} returned a loss without a weight, after one with a weight. Return {{'loss': sum, 'weight': "
            "tokens} for every batch, or None to leave one out.",
            code="DT-084",
        )

    def refuse_weight(self) -> None:
        """Raise for a loss with a weight, after losses without."""
        raise ConfigurationError(
            f"{self._step} returned a loss with a weight, after one without. Return {{'loss': sum, 'weight': tokens}} "
            "for every batch, or for none.",
            code="DT-084",
        )

    def explain(self, loss: Tensor, error: RuntimeError | None = None) -> None:
        """Raise in our words what torch means where it cannot differentiate a loss; return where it can."""
        if error is not None and "static_graph set to True" in str(error):
            raise ConfigurationError(
                f"{self._step} used other parameters than in the first step, for example since it left out a batch by "
                "None, but DDP(static_graph=True) was given. Leave static_graph out, or give "
                "find_unused_parameters=True in its place.",
                code="DT-083",
            ) from error
        if loss.numel() != 1:
            raise ConfigurationError(
                f"{self._step} returned a tensor of shape {tuple(loss.shape)}. Return one number, such as loss.mean().",
                code="DT-083",
            ) from error
        if not loss.requires_grad:
            raise ConfigurationError(
                f"{self._step} returned a loss that depends on no parameter that can be trained, so nothing can be "
                "learned from it. Compute it from the task's modules, without detach(), item() or no_grad(); or return "
                "None to leave the batch out.",
                code="DT-085",
            ) from error


def detached(output: Any) -> Any:
    """What hooks see of a step's output: a dict with the loss, nothing that holds the graph."""
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    if isinstance(output, Mapping):
        return {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
    return output

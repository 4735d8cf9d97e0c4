"""`MegatronTask`: a task with the function signatures of megatron-core."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.megatron.model import MegatronRuntime, shape_of
from drivetrain.trainer.task import Task


class MegatronTask(Task):
    """Task whose model is built from megatron-core's layers and runs with `strategy=Megatron(...)`.

    Override `transformer_config`, `model_provider` and `configure_optimizers`. All methods have the signatures of
    Megatron-LM's `pretrain`, so that code for it can be reused.

    By default, `forward_step` and `loss_func` expect the batches of a language model. These are dicts with `tokens` and
    `labels` of shape (rows, positions), and optionally `loss_mask`, `position_ids` and `attention_mask`.

    Attributes:
        chunks: The parts of the model that this process holds.

    Example:
        ```text
        class GPT(MegatronTask):
            def transformer_config(self):
                return TransformerConfig(num_layers=12, hidden_size=768, num_attention_heads=12)

            def model_provider(self, pre_process=True, post_process=True, vp_stage=None, config=None):
                return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=50304, max_sequence_length=1024,
                                pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)

            def validation_step(self, batch, batch_idx):
                self.log_loss(batch, "val_")

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=3e-4)

        Trainer(strategy=Megatron(tensor_parallel=2, pipeline_parallel=2)).fit(GPT(), loader)
        ```
    """

    def __init__(self) -> None:
        super().__init__()
        # Not registered as submodules: `self.model` has them, and names in the state dict would double.
        self.__dict__["chunks"] = []

    chunks: list[nn.Module]

    # methods to override

    def transformer_config(self) -> Any:
        """Return the `TransformerConfig` of megatron-core that describes the model. Must be overridden.

        The strategy then sets parallel sizes and dtypes.
        """
        raise ConfigurationError(
            f"{type(self).__name__} does not define transformer_config. Override it, for example with `return "
            "TransformerConfig(num_layers=12, hidden_size=768, num_attention_heads=12)`.",
        )

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, config: Any = None
    ) -> nn.Module:
        """Return the part of the model that this process computes, such as a pipeline stage. Each task overrides this.

        Args:
            pre_process: True if this part contains the embeddings.
            post_process: True if this part computes the output.
            vp_stage: The index of the part on this process with interleaved pipeline stages, else None.
            config: The result of `transformer_config`, completed by the strategy.

        Returns:
            A model of megatron-core, such as a `GPTModel`.
        """
        raise ConfigurationError(
            f"{type(self).__name__} does not define model_provider. Override it, for example with `return "
            "GPTModel(config, get_gpt_layer_local_spec(), vocab_size=..., max_sequence_length=..., "
            "pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)`.",
        )

    def forward_step(self, data_iterator: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
        """Run one chunk of the model on the next micro-batch. Return its output and a function that computes the loss.

        Called by megatron-core's pipeline schedule.

        Args:
            data_iterator: Iterator that returns the batch.
            model: The model chunk.

        Returns:
            The chunk's output, and a function that computes the loss from it.
        """
        batch = self._on_this_process(next(data_iterator))
        # With labels, GPTModel returns the loss of each position, else logits.
        labels = batch.get("labels")
        output = model(batch["tokens"], batch["position_ids"], batch.get("attention_mask"), labels=labels)
        return output, partial(self.loss_func, batch.get("loss_mask"))

    def loss_func(self, loss_mask: Tensor | None, output_tensor: Tensor) -> Any:
        """Compute the loss of a batch from the losses of its tokens, weighted by `loss_mask`.

        Args:
            loss_mask: The weight of each position, of shape (rows, positions). None means 1.
            output_tensor: The loss of each position.

        Returns:
            The sum of losses, their total weight, and a dict to log. Or the mean loss and a dict to log. With
                `calculate_per_token_loss=True` in the `TransformerConfig`, sums are averaged over all tokens of a step,
                else each micro-batch separately.
        """
        losses = output_tensor.float()
        mask = torch.ones_like(losses) if loss_mask is None else loss_mask.to(losses.dtype)
        # Sum and weight, so that averages over micro-batches and ranks weigh every token equally.
        total, tokens = (losses * mask).sum(), mask.sum()
        return total, tokens, {"loss": total.detach() / tokens.clamp(min=1)}

    def batch_shape(self, batch: Any) -> tuple[int, int]:
        """Return the number of rows and the sequence length of `batch`. Override it for batches without 2-D tensors.

        Pipeline stages must know both in advance.

        Args:
            batch: A batch of the loader.
        """
        return shape_of(batch)

    # methods that run the model

    def configure_model(self) -> None:
        if self.chunks:
            return
        self.__dict__["chunks"] = chunks = self._megatron().build(self)
        self.model = chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)

    def run_model(self, batch: Any) -> tuple[Tensor, Any]:
        """Run the whole model on a batch. Call this method in `training_step` or in another step of the task.

        Only the process with the last pipeline stage continues after this call. On other processes, the step ends here.

        Args:
            batch: A batch of the loader.

        Returns:
            The full model's output, and the function that computes the loss from it.
        """
        return self._megatron().run(self, batch)

    def log_loss(self, batch: Any, prefix: str = "") -> Any:
        """Run the model on a batch in a step such as `validation_step`, log its loss values, and return the loss.

        Args:
            batch: A batch of the loader.
            prefix: A prefix for the logged names, such as `"val_"`.

        Returns:
            The loss, or a dict with a sum and its weight if losses are averaged per token.
        """
        output, loss_function = self.run_model(batch)
        result, report = self._megatron().loss_of(loss_function(output))
        for name, value in report.items():
            self.log(prefix + name, value)
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Compute and log the loss of a batch."""
        return self.log_loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the language model's logits for a batch, as a tensor of shape (rows, positions, vocabulary)."""
        # Without labels the model returns logits, split over the vocabulary by tensor parallelism.
        logits, _ = self.run_model({key: value for key, value in batch.items() if key != "labels"})
        return self._megatron().whole_vocabulary(logits)

    def _on_this_process(self, batch: dict[str, Any]) -> dict[str, Any]:
        # Positions are numbered before the sequence is split over ranks.
        if "position_ids" not in batch:
            tokens = batch["tokens"]
            batch = {**batch, "position_ids": torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)}
        return self._megatron().own_part(batch)

    def _megatron(self) -> MegatronRuntime:
        strategy = self.trainer.strategy
        # Other strategies have no runtime.
        found: MegatronRuntime | None = getattr(strategy, "runtime", None)
        if found is None:
            raise ConfigurationError(
                f"{type(self).__name__} is a MegatronTask, which only the strategy 'megatron' can run, but the Trainer "
                f"uses {strategy!r}. Use Trainer(strategy=Megatron(...)), even with a single process.",
                see="megatron.md",
            )
        return found

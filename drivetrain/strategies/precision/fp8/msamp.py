"""Float8 backend on Microsoft's MS-AMP, with low-precision weights, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.precision.fp8.base import FP8Backend, check_choice

# The attribute that makes MS-AMP leave a linear layer in float32.
_KEEP = "use_fp32_linear"


class MSAMP(FP8Backend):
    """FP8 backend that uses MS-AMP on one NVIDIA GPU.

    Method: Peng et al., 2023, https://arxiv.org/abs/2310.18313. The package is no longer developed. It replaces an Adam
    or AdamW optimizer, and keeps weights in scaled float16.
    """

    name = "msamp"
    recipes = ("O2", "O1")

    def __init__(self, recipe: str = "O2") -> None:
        self.recipe = check_choice("recipe", recipe, self.recipes)
        self._msamp: Any = None
        self._initialized = False

    def setup(self, kind: DeviceKind) -> None:
        elsewhere = "MS-AMP supports a single NVIDIA GPU. FP8(backend='torchao') supports all devices except mps."
        try:
            import msamp
        except ImportError as error:
            raise ConfigurationError(
                f"FP8(backend='msamp') needs MS-AMP, which could not be imported ({error}). Install it with: pip "
                f'install "git+https://github.com/Azure/MS-AMP". {elsewhere}',
            ) from error
        if kind.name != "cuda":
            raise ConfigurationError(f"FP8(backend='msamp') is not supported on {kind.name} devices. {elsewhere}")
        environment = ProcessEnvironment.detect()
        if environment.is_distributed:
            raise ConfigurationError(
                f"FP8(backend='msamp') is not supported with {environment.world_size} processes, because MS-AMP needs "
                f"its own gradient reduction. {elsewhere}",
            )
        self._msamp = msamp

    def convert(self, model: nn.Module, layers: Sequence[nn.Linear], kept: Sequence[nn.Linear]) -> None:
        # MS-AMP converts every linear layer without this mark, when it takes over the optimizer.
        for layer in kept:
            setattr(layer, _KEEP, True)

    def prepare_optimizer(self, optimizer: Optimizer, models: Iterable[nn.Module]) -> Optimizer:
        known = list(models)
        if len(known) != 1 or self._initialized:
            raise ConfigurationError(
                f"FP8(backend='msamp') supports one model and one optimizer, prepared together. Got {len(known)} "
                f"models{' and a second optimizer' if self._initialized else ''}. Use FP8(backend='torchao').",
            )
        self._initialized = True
        model, cast = self._msamp.initialize(known[0], optimizer, opt_level=self.recipe)
        for module in model.modules():
            if getattr(module, "scaling_metas", None) is not None:
                module.register_state_dict_post_hook(_plain_tensors)
                module.register_load_state_dict_pre_hook(_scaled_tensors)
        replaced: Optimizer = cast
        return replaced


def _plain_tensors(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    # A state dict hook: checkpoints get plain float32 tensors in place of MS-AMP's weights.
    for name in module._parameters:
        value = state.get(prefix + name)
        if value is not None and hasattr(value, "meta"):
            state[prefix + name] = value.float()


def _scaled_tensors(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    # A load hook, since state dicts hold plain tensors in place of MS-AMP's scaled ones.
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and parameter is not None and hasattr(parameter, "meta"):
            state[prefix + name] = value.to(parameter.device).cast(parameter.meta.qtype)  # type: ignore[attr-defined]

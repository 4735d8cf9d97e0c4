"""Callback that prunes a model during training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.utils import prune

from drivetrain.callbacks.base import Callback
from drivetrain.runtime.collectives import broadcast
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)

Target = tuple[nn.Module, str]
ByEpoch = Callable[[int], Any]

_METHODS: dict[str, Any] = {
    "ln_structured": prune.LnStructured,
    "l1_unstructured": prune.L1Unstructured,
    "random_structured": prune.RandomStructured,
    "random_unstructured": prune.RandomUnstructured,
}


class ModelPruning(Callback):
    """Callback that prunes parameters with `torch.nn.utils.prune` after each epoch of training.

    Each time, a share of the remaining elements is set to zero and stays zero. Checkpoints contain the pruned
    parameters under their usual names, and the masks, so a resumed run continues with them. Every process must hold
    the whole model.

    Args:
        pruning_fn: `"l1_unstructured"`, `"random_unstructured"`, `"ln_structured"`, `"random_structured"`, a pruning
            method class of torch, or a function that takes a module, `name` and `amount`.
        parameters_to_prune: The parameters, as pairs (module, name). If empty or None, `parameter_names` of all
            modules.
        parameter_names: The names of the parameters to prune. If None, `weight` and `bias`.
        use_global_unstructured: Compare elements of all parameters together, rather than prune each parameter by the
            same amount.
        amount: The number of elements, or the share of the remaining ones, or a function from the epoch to either.
        apply_pruning: Prune or not, or a function from the epoch to a bool.
        make_pruning_permanent: Remove the masks when training ends, so that only the pruned parameters remain.
        use_lottery_ticket_hypothesis: Reset the remaining elements to their values from before training (Frankle and
            Carbin, 2019, https://arxiv.org/abs/1803.03635), or a function from the epoch to a bool.
        resample_parameters: Draw new random values for the reset instead.
        pruning_dim: The dimension along which structured methods prune slices.
        pruning_norm: The n of the norm in `"ln_structured"`.
        verbose: 1 logs the sparsity of the model, 2 also that of each parameter.
        prune_on_train_epoch_end: Prune after each training epoch if True, after each validation if False.

    Raises:
        ConfigurationError: If the arguments contradict each other, or the strategy shards the model.

    Example:
        ```python
        from drivetrain import ModelPruning, Trainer

        trainer = Trainer(callbacks=[ModelPruning("l1_unstructured", amount=0.2)], logger=False)
        ```
    """

    saves_within_steps = False

    def __init__(
        self,
        pruning_fn: Callable[..., Any] | str,
        parameters_to_prune: Sequence[Target] | None = (),
        parameter_names: list[str] | None = None,
        use_global_unstructured: bool = True,
        amount: int | float | ByEpoch = 0.5,
        apply_pruning: bool | ByEpoch = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | ByEpoch = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        method = _method_of(pruning_fn, use_global_unstructured, pruning_dim, pruning_norm)
        if not callable(amount) and (
            isinstance(amount, bool) or amount < 0 or (isinstance(amount, float) and amount > 1)
        ):
            raise ConfigurationError(
                f"ModelPruning(amount={amount!r}): use a fraction from 0.0 to 1.0, or a number of elements.",
            )
        if verbose not in (0, 1, 2):
            raise ConfigurationError(f"ModelPruning(verbose={verbose!r}): verbose must be any of (0, 1, 2).")
        self._method: Any = method
        self._method_name = getattr(method, "__name__", type(method).__name__)
        self._is_method = isinstance(method, type) and issubclass(method, prune.BasePruningMethod)
        self._given = tuple(parameters_to_prune or ())
        self.parameter_names = ["weight", "bias"] if parameter_names is None else list(parameter_names)
        self._global, self._amount, self._applies = use_global_unstructured, amount, apply_pruning
        self._permanent = make_pruning_permanent
        self._lottery, self._resamples = use_lottery_ticket_hypothesis, resample_parameters
        self._dim, self._norm, self._verbose = pruning_dim, pruning_norm, verbose
        self._at_train_end = prune_on_train_epoch_end
        self._targets: dict[str, Target] = {}  # from the name of a parameter
        self._originals: dict[str, Tensor] = {}  # before training
        self._restored: dict[str, Any] | None = None

    def filter_parameters_to_prune(self, parameters_to_prune: Sequence[Target] = ()) -> Sequence[Target]:
        """Choose which of the selected parameters are pruned, by default all of them.

        Override this method to exclude some of the selected parameters.

        Args:
            parameters_to_prune: The selected parameters, as pairs (module, name).
        """
        return parameters_to_prune

    # state

    @property
    def state_key(self) -> str:
        return self.build_state_key(pruning_fn=self._method_name, parameter_names=self.parameter_names)

    def state_dict(self) -> dict[str, Any]:
        masks = {name: getattr(module, f"{own}_mask") for name, (module, own) in self._pruned().items()}
        return {"masks": masks, "originals": self._originals} if masks else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict

    def on_save_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"] = dict(checkpoint["state_dict"])
        pruned = self._pruned()
        for name in pruned:
            # Without this, a checkpoint could be loaded only into a pruned model.
            state[name] = state.pop(f"{name}_orig") * state.pop(f"{name}_mask")
        # Optimizer states refer to parameters by name, so they need the usual names too.
        own = {f"{name}_orig": name for name in pruned}
        if "optimizer_states" in checkpoint:
            checkpoint["optimizer_states"] = [
                {
                    **saved,
                    "state": {own.get(name, name): value for name, value in saved["state"].items()},
                    "param_groups": [
                        {**group, "params": [own.get(name, name) for name in group["params"]]}
                        for group in saved["param_groups"]
                    ],
                }
                for saved in checkpoint["optimizer_states"]
            ]

    def on_load_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        # A checkpoint names parameters without masks, so a rollback must remove the masks before it loads.
        self.make_pruning_permanent(task)

    # hooks

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        if stage != "fit":
            return
        self._restored = None
        targets = self.filter_parameters_to_prune(
            self.sanitize_parameters_to_prune(task, self._given, self.parameter_names)
        )
        names = {id(module): name for name, module in task.named_modules()}
        self._targets = {f"{names[id(module)]}.{own}".lstrip("."): (module, own) for module, own in targets}
        self._originals = {}
        if self._lottery and not self._resamples:
            self._originals = {name: _parameter(target).detach().clone() for name, target in self._targets.items()}

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        if trainer.strategy.state.held_as != "whole":
            kind = trainer.strategy.__class__.__name__  # type() would return the class of a proxy
            raise ConfigurationError(
                f"ModelPruning replaces parameters, but {kind} shards them. "
                'Use strategy="ddp", in which each process holds the whole model.',
            )

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        restored, self._restored = self._restored, None
        if not restored:
            return
        # Masks can be applied only after the plain parameters of the checkpoint have been loaded.
        self._originals = dict(restored["originals"])
        for name, mask in restored["masks"].items():
            module, own = self._targets[name]
            placed = mask.to(_parameter((module, own)).device)
            prune.custom_from_mask(module, own, placed)  # type: ignore[no-untyped-call]

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        if self._at_train_end:
            self._run(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, task: Task) -> None:
        if not self._at_train_end and not trainer.sanity_checking and self._targets:
            self._run(trainer)

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        if self._permanent:
            self.make_pruning_permanent(task)

    # pruning

    def apply_pruning(self, amount: int | float) -> None:
        """Prune parameters: set a number or a share (`amount`) of the elements of `parameters_to_prune` to zero.

        Args:
            amount: The number of elements to prune, or the share of the remaining ones.
        """
        targets = list(self._targets.values())
        if self._global:
            # A user's pruning method may have no amount.
            takes_amount = "amount" in signature(self._method).parameters
            prune.global_unstructured(targets, self._method, **({"amount": amount} if takes_amount else {}))
            return
        options: dict[str, Any] = {"amount": amount}
        if self._method is prune.LnStructured:
            options |= {"n": self._norm, "dim": self._dim}
        elif self._method is prune.RandomStructured:
            options["dim"] = self._dim
        for module, name in targets:
            if self._is_method:
                self._method.apply(module, name, **options)
            else:
                self._method(module, name=name, **options)

    def apply_lottery_ticket_hypothesis(self) -> None:
        """Reset pruned parameters to their values before training. Elements that pruning has masked stay 0.

        With `resample_parameters=True`, parameters get new random values instead.
        """
        for name, (module, own) in self._pruned().items():
            if self._resamples:
                value = broadcast(_resampled(module, own))
            else:
                value = self._originals[name]
            _parameter((module, own)).data.copy_(value)

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Remove the pruning masks from a model.

        Pruned elements stay zero in the parameters.

        Args:
            module: The model.
        """
        for each in module.modules():
            for name in [key[: -len("_orig")] for key in each._parameters if key.endswith("_orig")]:
                if hasattr(each, f"{name}_mask"):
                    prune.remove(each, name)  # type: ignore[no-untyped-call]

    @staticmethod
    def sanitize_parameters_to_prune(
        task: nn.Module, parameters_to_prune: Sequence[Target] = (), parameter_names: Sequence[str] = ()
    ) -> Sequence[Target]:
        """Return the parameters to prune as (module, name) pairs, after checking that they belong to the model.

        Args:
            task: The model.
            parameters_to_prune: The parameters, as pairs (module, name).
            parameter_names: The names to use if no parameters are given. If empty, `weight` and `bias`.

        Raises:
            ConfigurationError: If a parameter does not belong to the model, or if none is found.
        """
        names = list(parameter_names) or ["weight", "bias"]
        if not parameters_to_prune:
            found = [
                (module, name)
                for module in task.modules()
                for name in names
                if isinstance(module._parameters.get(name), nn.Parameter)
            ]
            if not found:
                raise ConfigurationError(f"ModelPruning: no module has a parameter named {' or '.join(names)}.")
            return found
        modules = {id(module) for module in task.modules()}
        for module, name in parameters_to_prune:
            if id(module) not in modules or not isinstance(module._parameters.get(name), nn.Parameter):
                raise ConfigurationError(
                    f"ModelPruning(parameters_to_prune=...): {type(module).__name__}.{name} is not a parameter of "
                    f"{type(task).__name__}. Pass pairs (module, name) with modules of this task.",
                )
        return list(parameters_to_prune)

    def _run(self, trainer: Trainer) -> None:
        epoch = trainer.current_epoch
        amount = self._amount(epoch) if callable(self._amount) else self._amount
        if not (self._applies(epoch) if callable(self._applies) else self._applies) or not amount:
            return
        before = self._zeros()
        self.apply_pruning(amount)
        masks = [getattr(module, f"{own}_mask") for module, own in self._pruned().values()]
        if trainer.world_size > 1 and masks:
            broadcast(masks)  # random methods draw different masks on each process
        if self._lottery(epoch) if callable(self._lottery) else self._lottery:
            self.apply_lottery_ticket_hypothesis()
        for module, own in self._pruned().values():  # the tensor that the next forward uses
            setattr(module, own, getattr(module, f"{own}_orig").detach() * getattr(module, f"{own}_mask"))
        self._report(before)

    def _report(self, before: dict[str, int]) -> None:
        if not self._verbose:
            return
        after, sizes = self._zeros(), {name: _parameter(target).numel() for name, target in self._targets.items()}
        total, zeros = sum(sizes.values()), sum(after.values())
        applied = f"Applied `{self._method_name}`"
        logger.info(f"{applied}. Pruned: {_share(sum(before.values()), total)} -> {_share(zeros, total)}")
        for name in after if self._verbose == 2 else ():
            size = sizes[name]
            logger.info(f"{applied} to `{name}`. Pruned: {_share(before[name], size)} -> {_share(after[name], size)}")

    def _pruned(self) -> dict[str, Target]:
        return {name: each for name, each in self._targets.items() if hasattr(each[0], f"{each[1]}_mask")}

    def _zeros(self) -> dict[str, int]:
        masks = {name: getattr(module, f"{own}_mask", None) for name, (module, own) in self._targets.items()}
        return {name: 0 if mask is None else int((mask == 0).sum()) for name, mask in masks.items()}


def _method_of(given: Callable[..., Any] | str, is_global: bool, dim: int | None, norm: int | None) -> Any:
    if given not in _METHODS if isinstance(given, str) else not callable(given):
        raise ConfigurationError(
            f"ModelPruning({given!r}): pruning_fn is expected to be a str in {list(_METHODS)}, a torch pruning "
            f"method, or a function.{nearest(str(given), _METHODS)}",
        )
    method = _METHODS[given] if isinstance(given, str) else given
    if is_global and getattr(method, "PRUNING_TYPE", None) != "unstructured":
        raise ConfigurationError(
            f"ModelPruning({given!r}): only an unstructured pruning method, which can choose among all "
            "parameters, is supported with `use_global_unstructured=True`. Set use_global_unstructured=False.",
        )
    if method in (prune.LnStructured, prune.RandomStructured) and dim is None:
        raise ConfigurationError(f"ModelPruning({given!r}): pruning_dim should be provided, such as pruning_dim=0.")
    if method is prune.LnStructured and norm is None:
        raise ConfigurationError(
            "ModelPruning: when requesting `ln_structured` pruning, the `pruning_norm` that ranks the slices "
            "should be provided, such as pruning_norm=2.",
        )
    return method


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole} ({part / whole:.2%})"


def _resampled(module: nn.Module, name: str) -> Tensor:
    # `reset_parameters` draws all parameters of the module anew, so the others are restored below.
    kept = {key: each.detach().clone() for key, each in module._parameters.items() if each is not None}
    value = _parameter((module, name)).detach().clone()
    reset: Any = getattr(module, "reset_parameters", None)
    if reset is not None:
        setattr(module, name, value)  # a pruned module holds a plain tensor under this name
        reset()
    for key, before in kept.items():
        module._parameters[key].data.copy_(before)  # type: ignore[union-attr]
    return value


def _parameter(target: Target) -> nn.Parameter:
    module, name = target
    # Pruning stores the parameter under `<name>_orig`.
    found = module._parameters.get(f"{name}_orig", module._parameters.get(name))
    assert found is not None
    return found

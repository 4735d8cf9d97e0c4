"""Access to the gradients, master weights and optimizer state that a DeepSpeed engine holds for each parameter.

Each layout is for one way in which DeepSpeed stores them. `key` is the name of an optimizer state such as `"exp_avg"`,
or None for the master weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.runtime.collectives import reduce
from drivetrain.runtime.logging import get_logger

_log = get_logger(__name__)

Parameter = nn.Parameter
State = dict[str, Any]
# Optimizers that count steps, but whose update does not depend on the count (Adagrad's does with lr_decay).
_COUNT_WITHOUT_USE = (torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Rprop)


class Layout(ABC):
    """Base class of accessors for gradients, master weights and optimizer state in a DeepSpeed engine.

    Each subclass serves one of the forms in which DeepSpeed's ZeRO stages store them.

    Attributes:
        replicated: True if each process holds full gradients, so that norms are not summed over processes.
        adds_backwards: True if a second backward adds to finished gradients.
        offloads: True if gradients are stored on the CPU.
    """

    replicated = offloads = False
    adds_backwards = True

    def __init__(self, engine: Any, parameters: dict[str, Parameter]) -> None:
        self.engine = engine
        self.parameters = parameters
        self.optimizer = engine.optimizer  # DeepSpeed's, or the user's own at stage 0
        # The optimizer that computes the updates. DeepSpeed's only wraps it.
        self.inner: Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)

    @property
    def loss_scale(self) -> float:
        # The engine's stored gradients are multiplied by this factor, usually 1.0.
        return float(getattr(self.optimizer, "loss_scale", 1.0))

    @abstractmethod
    def gradients(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        # Reduced gradients, or this process's shards of them. Parameters without a part on this process are left out.
        # Call `commit` after changing the tensors in place.
        ...

    def commit(self, parameters: Sequence[Parameter], gradients: Sequence[Tensor]) -> None:
        # Writes changed gradients back to the engine. Needed if `gradients` has returned copies.
        ...

    @abstractmethod
    def discard(self) -> None: ...

    @abstractmethod
    def read(self, parameter: Parameter, key: str | None = None) -> Tensor:
        # A collective call that gathers a full tensor. `key` names the optimizer state. None is the master weight.
        ...

    @abstractmethod
    def write(self, parameter: Parameter, value: Tensor, key: str | None = None) -> None:
        # `value` is the full tensor, of which this process's part is stored. `key` names the optimizer state. None is
        # the master weight.
        ...

    @abstractmethod
    def holders(self) -> Iterator[tuple[Tensor, list[Parameter]]]:
        # Each tensor that DeepSpeed's optimizer steps, and the parameters in it. At ZeRO stages 1 to 3, the tensor is
        # flat and contains parts of many parameters.
        ...

    def parts(self, parameter: Parameter) -> dict[str | None, Tensor]:
        # The keys are `""` for the parameter, None for the master weight, and the names of the state tensors. The dict
        # is empty if no views exist, for example with state on NVMe.
        return {}

    @contextmanager
    def untouched(self, parameters: Sequence[Parameter]) -> Iterator[None]:
        """Context manager that undoes an optimizer step's changes to the given parameters.

        Used for parameters without a gradient. DeepSpeed steps them with a gradient of zero, so that momentum and
        weight decay would change them.
        """
        before = [{key: part.clone() for key, part in self.parts(parameter).items()} for parameter in parameters]
        yield
        for parameter, kept in zip(parameters, before, strict=True):
            for key, part in self.parts(parameter).items():
                if key in kept:
                    part.copy_(kept[key])
                elif not isinstance(self.inner, torch.optim.Rprop):  # whose step sizes do not start at zero
                    part.zero_()  # created by this step

    def finish_window(self) -> None:
        # Before a step, offloaded gradients are passed to DeepSpeed's optimizer.
        ...

    def finish_step(self) -> None:
        # Zeroes the gradient buffers that DeepSpeed keeps after a step.
        ...

    def counts_steps(self, parameter: Parameter) -> bool:
        if isinstance(self.inner, _COUNT_WITHOUT_USE) and not self.inner.defaults.get("lr_decay"):
            return False
        return any(
            "step" in self.inner.state.get(holder, {}) for holder, held in self.holders() if _is_in(parameter, held)
        )

    def is_trained(self, parameter: Parameter) -> bool:
        """Return True if the engine's optimizer updates the parameter."""
        return any(_is_in(parameter, held) for _, held in self.holders())

    def shared_state(self) -> dict[int, tuple[list[str], State]]:
        # By the parameter's `id`: the names of its state tensors, which must be gathered, and a dict of the rest, such
        # as step counts.
        found: dict[int, tuple[list[str], State]] = {}
        for holder, held in self.holders():
            state = self.inner.state.get(holder, {})
            tensors = [key for key, value in state.items() if _is_like(value, holder)]
            for parameter in held:
                # Each gets its own copy of the step count, because torch's optimizers increment the tensor in place.
                rest = {key: _copied(value) for key, value in state.items() if key not in tensors}
                found[id(parameter)] = (tensors, rest)
        return found

    def make_state(self, states: dict[int, State]) -> None:
        # `states` holds the saved state of each parameter by the parameter's `id`. Values that are not tensors are
        # copied.
        for holder, held in self.holders():
            saved = [states[id(parameter)] for parameter in held if id(parameter) in states]
            if not saved:
                self.inner.state.pop(holder, None)
                continue
            # All parameters in `holder` share one state, so that values other than tensors must agree.
            whole = {id(parameter): parameter for parameter in held}
            state: State = {}
            for given in (item for number, item in states.items() if number in whole):
                for key, value in given.items():
                    if isinstance(value, Tensor) and value.dim() > 0:
                        state.setdefault(key, torch.zeros_like(holder, requires_grad=False))
                    else:
                        if key in state and state[key] != value:
                            _log.warning_once(
                                f"The parameters of a group were saved with different values of {key!r}, of which "
                                "DeepSpeed keeps one. Results differ from those of a single process. To avoid this, "
                                'use strategy="ddp" or "fsdp".'
                            )
                        state[key] = _copied(value)
            self.inner.state[holder] = state


class PlainLayout(Layout):
    # ZeRO stage 0 in full precision, with ordinary PyTorch objects.

    replicated = True

    def gradients(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def discard(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def read(self, parameter: Parameter, key: str | None = None) -> Tensor:
        master = self._master(parameter)
        found: Tensor = master if key is None else self.inner.state[master][key]
        return found.detach().clone()

    def write(self, parameter: Parameter, value: Tensor, key: str | None = None) -> None:
        master = self._master(parameter)
        (master.data if key is None else self.inner.state[master][key]).copy_(value)

    def holders(self) -> Iterator[tuple[Tensor, list[Parameter]]]:
        for group in self.inner.param_groups:
            for parameter in group["params"]:
                yield parameter, [parameter]

    @contextmanager
    def untouched(self, parameters: Sequence[Parameter]) -> Iterator[None]:
        for parameter in parameters:
            parameter.grad = None  # DeepSpeed has set it to zeros, by which the optimizer would step
        yield

    def counts_steps(self, parameter: Parameter) -> bool:
        return False

    def _master(self, parameter: Parameter) -> Tensor:
        return parameter


class MasterLayout(PlainLayout):
    # ZeRO stage 0 in low precision, with float32 copies of the full parameters.

    def __init__(self, engine: Any, parameters: dict[str, Parameter]) -> None:
        super().__init__(engine, parameters)
        low, high = self.optimizer.fp16_groups, self.optimizer.fp32_groups
        self._pairs = [(a, b) for each, other in zip(low, high, strict=True) for a, b in zip(each, other, strict=True)]
        self._masters: dict[int, Tensor] = {id(parameter): master for parameter, master in self._pairs}

    def holders(self) -> Iterator[tuple[Tensor, list[Parameter]]]:
        for parameter, master in self._pairs:
            yield master, [parameter]

    untouched = Layout.untouched
    counts_steps = Layout.counts_steps

    def parts(self, parameter: Parameter) -> dict[str | None, Tensor]:
        master = self._master(parameter)
        state = self.inner.state.get(master, {})
        found = {key: value for key, value in state.items() if _is_like(value, master)}
        return {"": parameter.data, None: master.data, **found}

    def _master(self, parameter: Parameter) -> Tensor:
        return self._masters.get(id(parameter), parameter)


class FlatLayout(Layout):
    # ZeRO stages 1 and 2, with one flat tensor for each parameter group.

    def __init__(self, engine: Any, parameters: dict[str, Parameter]) -> None:
        super().__init__(engine, parameters)
        # Stage 1 in bfloat16 with float32 accumulation has a separate class in DeepSpeed, which keeps full gradients.
        self._keeps_whole = hasattr(self.optimizer, "fp32_groups_flat_partition")
        self.replicated = self.adds_backwards = self._keeps_whole
        self.offloads = bool(getattr(self.optimizer, "cpu_offload", False))
        self._flats: list[Tensor] = (
            self.optimizer.fp32_groups_flat_partition
            if self._keeps_whole
            else self.optimizer.single_partition_of_fp32_groups
        )
        self._group_of = {id(p): number for number, group in enumerate(self._groups()) for p in group}

    def _groups(self) -> list[list[Parameter]]:
        groups: list[list[Parameter]] = getattr(self.optimizer, "bf16_groups", None) or self.optimizer.bit16_groups
        return groups

    def gradients(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        if self._keeps_whole:
            return [p._hp_grad for p in parameters if getattr(p, "_hp_grad", None) is not None]  # type: ignore[attr-defined]
        found = []
        for parameter in parameters:
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is not None:
                found.append(mapping.get_lp_grad_fragment(parameter._index_in_param_group))  # type: ignore[attr-defined]
        return found

    def discard(self) -> None:
        self.optimizer.zero_grad()
        if self._keeps_whole:
            return
        # The next backward pass must count as the first of a window again, which overwrites instead of adding.
        self.optimizer.micro_step_id = -1
        for name in ("averaged_gradients", "all_grad_tensors"):
            kept = getattr(self.optimizer, name, {})
            for number in kept:
                kept[number] = None
        if self.offloads:
            self.optimizer.reset_cpu_buffers()
            self.finish_step()

    def finish_window(self) -> None:
        if self.offloads:
            # Copies each parameter's accumulated gradient, also if its last backward pass had none.
            self.optimizer.finalize_gradient_accumulation_boundary()

    def finish_step(self) -> None:
        if self.offloads:
            kept = (*(flat.grad for flat in self._flats), *self.optimizer.accumulated_grads_in_cpu.values())
            for gradient in kept:
                if gradient is not None:
                    gradient.zero_()

    def parts(self, parameter: Parameter) -> dict[str | None, Tensor]:
        found: dict[str | None, Tensor] = {"": parameter.data}
        if self._slice(parameter, None) is not None:
            flat = self._flats[self._group_of[id(parameter)]]
            state = self.inner.state.get(flat, {})
            for key in (None, *(key for key, value in state.items() if _is_like(value, flat))):
                found[key] = self._slice(parameter, key)  # type: ignore[assignment]
        return found

    def read(self, parameter: Parameter, key: str | None = None) -> Tensor:
        # Each process fills in its slice, and the sum over processes joins the slices.
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=self.engine.device)
        mine = self._slice(parameter, key)
        if mine is not None:
            address = parameter._hp_mapping.lp_fragment_address  # type: ignore[attr-defined]
            whole.narrow(0, address.start, address.numel).copy_(mine)
        total: Tensor = reduce(whole, "sum")
        return total.view_as(parameter)

    def write(self, parameter: Parameter, value: Tensor, key: str | None = None) -> None:
        mine = self._slice(parameter, key)
        if mine is not None:
            address = parameter._hp_mapping.lp_fragment_address  # type: ignore[attr-defined]
            mine.copy_(value.reshape(-1).narrow(0, address.start, address.numel))

    def _slice(self, parameter: Parameter, key: str | None) -> Tensor | None:
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        flat = self._flats[self._group_of[id(parameter)]]
        source = flat.data if key is None else self.inner.state[flat][key]
        address = mapping.get_hp_fragment_address()
        return source.narrow(0, address.start, address.numel)

    def holders(self) -> Iterator[tuple[Tensor, list[Parameter]]]:
        yield from zip(self._flats, self._groups(), strict=True)


class PartitionedLayout(Layout):
    # ZeRO stage 3, with parameters split over the processes.

    def __init__(self, engine: Any, parameters: dict[str, Parameter]) -> None:
        super().__init__(engine, parameters)
        # An engine that only evaluates has no such attribute, and no optimizer state.
        self._zero_three = hasattr(self.optimizer, "fp32_partitioned_groups_flat")
        self.offloads = bool(getattr(self.optimizer, "offload_optimizer", False))

    def gradients(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        from deepspeed.utils import safe_get_local_grad

        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return [safe_get_local_grad(parameter) for parameter in trained]

    def commit(self, parameters: Sequence[Parameter], gradients: Sequence[Tensor]) -> None:
        from deepspeed.utils import safe_set_local_grad

        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter, gradient in zip(trained, gradients, strict=True):
            safe_set_local_grad(parameter, gradient)

    def discard(self) -> None:
        self.optimizer.zero_grad()
        self.optimizer.micro_step_id = 0
        self.optimizer.averaged_gradients = {}
        self.finish_step()

    def finish_window(self) -> None:
        if self.offloads:
            self.optimizer.finalize_gradient_accumulation_boundary()

    def finish_step(self) -> None:
        if self._zero_three:
            # Unless it comes in the first backward, a parameter's first gradient of a window is added to this buffer.
            self.optimizer.grad_partitions_flat_buffer.zero_()
            for flat in self.optimizer.fp32_partitioned_groups_flat:
                if flat.grad is not None:
                    flat.grad.zero_()

    def parts(self, parameter: Parameter) -> dict[str | None, Tensor]:
        part, group = self._part(parameter, None)
        if self.optimizer._swappable_optimizer_subgroup(group):
            return {}  # the state is on NVMe
        flat = self.optimizer.fp32_partitioned_groups_flat[group]
        state = self.inner.state.get(flat, {})
        found = {key: self._part(parameter, key)[0] for key, value in state.items() if _is_like(value, flat)}
        return {"": parameter.ds_tensor.data, None: part.data, **found}  # type: ignore[attr-defined]

    @contextmanager
    def untouched(self, parameters: Sequence[Parameter]) -> Iterator[None]:
        with super().untouched(parameters):
            yield
        for parameter in parameters:
            # The step has rebuilt small parameters, which stay gathered, from the parts that were restored after it.
            if parameter.numel():
                parameter.partition()  # type: ignore[attr-defined]
            # The secondary copy for zero_hpz_partition_size is stale, too.
            parameter.ds_secondary_tensor = None  # type: ignore[attr-defined]

    def _part(self, parameter: Parameter, key: str | None) -> tuple[Tensor, int]:
        # The second value is the index of the parameter's sub-group, in which ZeRO-3 swaps state to NVMe.
        found: tuple[Tensor, int] = self.optimizer._get_fp32_opt_state_partition(
            parameter, release_swap_buffers=False, optim_state_key=key
        )
        return found

    def read(self, parameter: Parameter, key: str | None = None) -> Tensor:
        # Not get_full_hp_param, which returns nothing for a parameter that is frozen now.
        part, group = self._part(parameter, key)
        whole: Tensor = self.optimizer._fp32_state_allgather(parameter, part.to(self.engine.device))
        if self.optimizer._swappable_optimizer_subgroup(group):
            self.optimizer._release_swap_buffers(group)
        return whole

    def write(self, parameter: Parameter, value: Tensor, key: str | None = None) -> None:
        optimizer = self.optimizer
        part, group = self._part(parameter, key)
        rank = getattr(parameter, "ds_zero_partition_rank", self.engine.global_rank)
        # Parts have equal sizes, so that a part's offset follows from the rank.
        mine = value.reshape(-1)[part.numel() * rank : part.numel() * (rank + 1)]
        part.data.zero_()  # the last part ends with padding, which a full tensor does not have
        part.data[: mine.numel()].copy_(mine)
        if optimizer._swappable_optimizer_subgroup(group):
            optimizer._optimizer_states_and_gradient_swap_out(group)

    def holders(self) -> Iterator[tuple[Tensor, list[Parameter]]]:
        if self._zero_three:
            yield from zip(self.optimizer.fp32_partitioned_groups_flat, self.optimizer.fp16_groups, strict=True)


def layout_of(engine: Any, parameters: dict[str, Parameter]) -> Layout:
    stage = engine.zero_optimization_stage()
    if stage == 3:
        return PartitionedLayout(engine, parameters)
    if hasattr(engine.optimizer, "bit16_groups") or hasattr(engine.optimizer, "bf16_groups"):
        return FlatLayout(engine, parameters)
    if hasattr(engine.optimizer, "fp32_groups"):
        return MasterLayout(engine, parameters)
    return PlainLayout(engine, parameters)


def _is_in(parameter: Parameter, held: Sequence[Parameter]) -> bool:
    return any(parameter is each for each in held)


def _is_like(value: Any, holder: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == holder.shape and value.dim() > 0


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value

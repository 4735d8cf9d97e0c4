"""Random training runs: how one is described, and the model, the data and the optimizer that the description names."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Subset, TensorDataset

from drivetrain import DDP, DeepSpeed

FEATURES, WIDTH = 4, 6


@dataclass(frozen=True)
class Case:
    """One training run. The defaults are the plainest run, so that a failing case can be reduced to what matters.

    Attributes:
        seed: Of the data, the first weights and the order of shuffled loaders.
        driver: "trainer", "manual" (the Trainer, optimization by hand), "turns" (by hand, an optimizer for each layer)
            or "accelerator" (a raw loop).
        strategy: A name in `STRATEGIES`.
        precision: As the Trainer's.
        data: A name in `LOADERS`.
        samples: Rows of the training set.
        batch_size: Rows of a batch of one process.
        shuffle: Whether the loader shuffles, by torch's global generator.
        drop_last: Whether the loader leaves an incomplete batch out.
        accumulate: Micro-batches of a window.
        loss: "mean", "weighted" (a sum and its weight) or "some" (None for every third batch).
        model: A name in `MODELS`.
        change: What happens to the parameters when epoch 1 begins: see `change_parameters`.
        optimizer: A name in `OPTIMIZERS`.
        scheduler: A name in `SCHEDULERS`.
        clip: "none", "norm" or "value".
        epochs: How many.
        limit: `limit_train_batches`, or None.
        max_steps: Steps after which the run ends, or -1.
        validate: Whether each epoch ends with a validation.
        save: When the run is broken off and resumed, "never" or a name in `SAVES`.
        save_at: The step after which it is, at the soonest.
        then: The strategy that it is resumed under, in processes of its own; "" for the same one in the same processes.
    """

    seed: int = 0
    driver: str = "trainer"
    strategy: str = "single"
    precision: str = "32"
    data: str = "tensors"
    samples: int = 12
    batch_size: int = 2
    shuffle: bool = False
    drop_last: bool = False
    accumulate: int = 1
    loss: str = "mean"
    model: str = "plain"
    change: str = "none"
    optimizer: str = "sgd"
    scheduler: str = "none"
    clip: str = "none"
    epochs: int = 2
    limit: int | None = None
    max_steps: int = -1
    validate: bool = False
    save: str = "never"
    save_at: int = 1
    then: str = ""

    def __str__(self) -> str:
        """The options that are not the default, as one would type them."""
        plain = Case()
        told = (f"{name}={value!r}" for name, value in asdict(self).items() if value != getattr(plain, name))
        return f"Case({', '.join(told)})"


def reduced(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Set option after option to its default for as long as the case still fails."""
    plain = Case()
    for option in fields(Case):
        if option.name not in ("strategy", "seed"):
            simpler = replace(case, **{option.name: getattr(plain, option.name)})
            if simpler != case and fails(simpler):
                case = simpler
    return case


# models


class Net(nn.Module):
    """Two layers, whose first weight may be laid out in an unusual way.

    Args:
        first: Makes the first layer's weight, of shape (WIDTH, FEATURES).
    """

    def __init__(self, first: Callable[[], Tensor] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        if first is not None:
            self.first.weight = nn.Parameter(first())
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, batch_idx: int = 0) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Tied(Net):
    """The same weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(FEATURES, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor, batch_idx: int = 0) -> Tensor:
        return self.last(torch.tanh(self.first(x) + self.second(x * x)))


class Late(Net):
    """A layer that only some batches use, the first time in the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor, batch_idx: int = 0) -> Tensor:
        out = super().forward(x)
        return out + self.branch(x) if batch_idx % 2 else out


class Unused(Net):
    """A layer that no batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(FEATURES, 1)


class Frozen(Net):
    """A first layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class Convolution(nn.Module):
    """A small convolution, its weights in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 2)
        self.last = nn.Linear(3, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, batch_idx: int = 0) -> Tensor:
        images = torch.cat([x, x.flip(1)], 1).unflatten(1, (2, 2, 2))
        return self.last(torch.tanh(self.first(images)).flatten(1))


class Counting(Net):
    """A buffer that counts batches, as running statistics do."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, batch_idx: int = 0) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x) * (1 + 1 / (1 + self.calls.detach().clone()))


class Complex(Net):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(1, dtype=torch.complex64))

    def forward(self, x: Tensor, batch_idx: int = 0) -> Tensor:
        return super().forward(x) * (self.phase * self.phase.conj()).real


def gradients_transposed() -> Net:
    """Return a net whose hook gives the first weight's gradient in another layout."""
    net = Net()
    net.first.weight.register_hook(lambda gradient: gradient.t().contiguous().t())
    return net


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "strided": lambda: Net(lambda: torch.randn(WIDTH, FEATURES + 3)[:, :FEATURES] * 0.5),
    "transposed": lambda: Net(lambda: (torch.randn(FEATURES, WIDTH) * 0.5).t()),
    "channels_last": Convolution,
    "gradients_transposed": gradients_transposed,
    "tied": Tied,
    "late": Late,
    "unused": Unused,
    "frozen": Frozen,
    "counting": Counting,
    "complex": Complex,
}


def make_model(case: Case) -> nn.Module:
    """Build the case's model; it is the same in each process."""
    state = torch.get_rng_state()
    torch.manual_seed(case.seed)
    model = MODELS[case.model]()
    torch.set_rng_state(state)
    if case.change == "unfreeze":
        model.first.requires_grad_(False)
    return model


def change_parameters(case: Case, model: nn.Module, optimizer: Any) -> None:
    """Do when epoch 1 begins what the case says: freeze or unfreeze the first layer, or give it to the optimizer."""
    if case.change in ("unfreeze", "freeze"):
        model.first.requires_grad_(case.change == "unfreeze")
    elif case.change == "add_group":
        for parameter in model.first.parameters():
            parameter.grad = None  # it has a gradient from the steps that did not train it
        optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.02})


# data


class Rows(Dataset[Tensor]):
    """A dataset of one's own, which gives one row."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Named(Rows):
    """Samples that are dicts."""

    def __getitem__(self, index: int) -> Any:
        return {"x": self.rows[index], "index": index}


class Doubled(TensorDataset):
    """A TensorDataset with a `__getitem__` of its own."""

    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * each for each in super().__getitem__(index))


class Stream(IterableDataset[Tensor]):
    """A stream without a length."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows)


class OwnLoader:
    """A loader that is no DataLoader: it wraps one."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def make_rows(case: Case, samples: int, add: int = 0) -> Tensor:
    """Draw rows of numbers, the same in each process."""
    return torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(case.seed + add))


def _loader(dataset: Dataset[Any], case: Case, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, case.batch_size, case.shuffle, drop_last=case.drop_last, **options)


def _in_batches(rows: Tensor, case: Case) -> DataLoader[Any]:
    data = TensorDataset(rows)
    sampler = RandomSampler(data) if case.shuffle else range(len(data))
    return DataLoader(data, batch_sampler=BatchSampler(sampler, case.batch_size, case.drop_last))


LOADERS: dict[str, Callable[[Tensor, Case], Any]] = {
    "tensors": lambda rows, case: _loader(TensorDataset(rows), case),
    "subset": lambda rows, case: _loader(Subset(TensorDataset(rows.flip(0)), range(len(rows) - 1, -1, -1)), case),
    "rows": lambda rows, case: _loader(Rows(rows), case),
    "named": lambda rows, case: _loader(Named(rows), case),
    "doubled": lambda rows, case: _loader(Doubled(rows / 2), case),
    "batch_sampler": _in_batches,
    "stream": lambda rows, case: DataLoader(Stream(rows), case.batch_size, drop_last=case.drop_last),
    "batches": lambda rows, case: DataLoader(list(rows.split(case.batch_size)), batch_size=None, shuffle=case.shuffle),
    "own": lambda rows, case: OwnLoader(_loader(Rows(rows), case)),
    "workers": lambda rows, case: _loader(Rows(rows), case, num_workers=1),
}
UNSHUFFLED = ("stream",)


def make_loader(case: Case) -> Any:
    """Make the loader of the training set."""
    return LOADERS[case.data](make_rows(case, case.samples), case)


def validation_loader(case: Case) -> DataLoader[Any]:
    """Make the loader of the validation set, whose rows divide by neither two processes nor its batches."""
    return DataLoader(TensorDataset(make_rows(case, 7, add=1)), batch_size=2)


def rows_of(batch: Any) -> Tensor:
    """Return the rows of a batch of any of the loaders."""
    if isinstance(batch, dict):
        return batch["x"]
    return batch[0] if isinstance(batch, (list, tuple)) else batch


def losses_of(model: nn.Module, x: Tensor, batch_idx: int = 0) -> Tensor:
    """Return each row's loss."""
    return (model(x, batch_idx).squeeze(1) - x.sum(1)).square()


# optimizers and schedulers

_O = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], _O.Optimizer]] = {
    "sgd": lambda p: _O.SGD(p, lr=0.05),
    "momentum": lambda p: _O.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    "momentum_fused": lambda p: _O.SGD(p, lr=0.02, momentum=0.9, fused=True),
    "adam": lambda p: _O.Adam(p, lr=0.02, eps=1e-3),
    "adam_fused": lambda p: _O.Adam(p, lr=0.02, eps=1e-3, fused=True),
    "adamw": lambda p: _O.AdamW(p, lr=0.02, eps=1e-3, weight_decay=0.1, amsgrad=True),
    "adamw_foreach": lambda p: _O.AdamW(p, lr=0.02, eps=1e-3, foreach=True),
    "rmsprop": lambda p: _O.RMSprop(p, lr=0.005, eps=1e-2, momentum=0.5),
    "adagrad": lambda p: _O.Adagrad(p, lr=0.02, eps=1e-3),
    "nadam": lambda p: _O.NAdam(p, lr=0.01, eps=1e-3),
    "adamax": lambda p: _O.Adamax(p, lr=0.01, eps=1e-3),
    "lbfgs": lambda p: _O.LBFGS([each for group in p for each in group["params"]], lr=0.1, max_iter=3),
}


def make_optimizer(case: Case, model: nn.Module) -> _O.Optimizer:
    """Make the case's optimizer: of the last layer alone where the first is added later, else of two groups."""
    parameters = dict(model.named_parameters())
    last = [value for name, value in parameters.items() if name.startswith("last")]
    first = [value for name, value in parameters.items() if not name.startswith("last")]
    if case.change == "add_group":
        return OPTIMIZERS[case.optimizer](last)
    return OPTIMIZERS[case.optimizer]([{"params": first}, {"params": last, "lr": 0.01}])


def make_optimizers_in_turns(case: Case, model: nn.Module) -> list[_O.Optimizer]:
    """Make one optimizer for the last layer and one for all others."""
    parameters = dict(model.named_parameters())
    first = [value for name, value in parameters.items() if not name.startswith("last")]
    return [OPTIMIZERS[case.optimizer](each) for each in (first, list(model.last.parameters()))]


SCHEDULERS: dict[str, tuple[str, Callable[[_O.Optimizer], Any]]] = {
    "per_epoch": ("epoch", lambda optimizer: _O.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)),
    "per_step": ("step", lambda optimizer: _O.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))),
    "one_cycle": (
        "step",
        lambda optimizer: _O.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=500, cycle_momentum=False),
    ),
}
SAVES = ("batch_end", "train_epoch_end", "validation_start", "validation_batch_end", "validation_end", "exception")
STRATEGIES: dict[str, tuple[int, Callable[[], Any]]] = {
    "single": (1, lambda: "single"),
    "ddp": (2, lambda: "ddp"),
    "ddp_unused": (2, lambda: DDP(find_unused_parameters=True)),
    "ddp_static": (2, lambda: DDP(static_graph=True)),
    "ddp_three": (3, lambda: DDP(find_unused_parameters=True)),
    "fsdp": (2, lambda: "fsdp"),
    "zero_1": (2, lambda: DeepSpeed(stage=1)),
    "zero_2": (2, lambda: DeepSpeed(stage=2)),
    "zero_3": (2, lambda: DeepSpeed(stage=3)),
}


# drawing


def draw(seed: int, strategy: str) -> Case:
    """Draw a case: each option is the plain one as often as not, so that most cases combine few unusual ones."""
    rng = random.Random(f"{strategy} {seed}")

    def pick(plain: Any, others: Any) -> Any:
        return plain if rng.random() < 0.5 else rng.choice(list(others))

    case = Case(
        seed=seed,
        strategy=strategy,
        driver=pick("trainer", ("manual", "turns", "accelerator")),
        precision="64-true" if rng.random() < 0.15 else "32",
        data=pick("tensors", (name for name in LOADERS if name != "workers" or rng.random() < 0.2)),
        samples=rng.randint(3, 23),
        batch_size=rng.randint(1, 4),
        shuffle=rng.random() < 0.5,
        drop_last=rng.random() < 0.25,
        accumulate=pick(1, (1, 2, 3)),
        loss=pick("mean", ("weighted", "some")),
        model=pick("plain", MODELS),
        change=pick("none", ("none", "none", "unfreeze", "freeze", "add_group")),
        optimizer=rng.choice(list(OPTIMIZERS)),
        scheduler=pick("none", SCHEDULERS),
        clip=pick("none", ("norm", "value")),
        epochs=rng.randint(1, 3),
        limit=pick(None, range(1, 5)),
        max_steps=pick(-1, range(1, 7)),
        validate=rng.random() < 0.4,
        save=pick("never", SAVES),
        save_at=rng.randint(1, 5),
        then=pick("", STRATEGIES),
    )
    return possible(case)


def possible(case: Case) -> Case:
    """Replace what no user could ask for, such as a shuffled stream, by the plain option."""
    if case.data in UNSHUFFLED:
        case = replace(case, shuffle=False)
    if case.data == "batches":
        case = replace(case, drop_last=False)
    if case.driver != "trainer":
        case = replace(case, loss="mean", save="never" if case.driver == "manual" else case.save)
    if case.optimizer == "lbfgs" and (case.driver != "trainer" or case.change == "add_group"):
        case = replace(case, optimizer="sgd")
    if case.optimizer == "lbfgs":  # one group, and a closure that computes the whole step
        case = replace(case, accumulate=1, loss="mean", clip="none", model="plain", max_steps=-1)
        case = replace(case, save="batch_end" if case.save == "exception" else case.save)  # within it nothing is saved
    if case.driver == "accelerator":
        case = replace(case, validate=False, limit=None, save="never" if case.save == "never" else "batch_end")
    if case.driver == "turns":
        model = "plain" if case.model == "frozen" else case.model  # the first layer's turn would have no gradient
        case = replace(case, accumulate=1, change="none", scheduler="none", model=model)
    if case.driver in ("manual", "turns"):
        case = replace(case, clip="none", data="tensors" if case.data == "stream" else case.data)
    if case.model == "complex":  # torch neither clips complex gradients by value nor has fused kernels for them
        clip = "norm" if case.clip == "value" else case.clip
        case = replace(case, precision="32", clip=clip, optimizer=case.optimizer.partition("_")[0])
    if case.optimizer == "nadam" and case.precision == "64-true":  # torch loads a part of its state in another dtype
        case = replace(case, save="never")
    if case.driver == "accelerator" and case.change == "add_group":  # a resumed script has to add it before it loads
        case = replace(case, save="never")
    if case.scheduler != "none" and case.change == "add_group":
        case = replace(
            case, scheduler="per_epoch"
        )  # in plain torch the others hold the groups that they were made with
    if any(name.startswith("zero") for name in (case.strategy, case.then)) and case.loss == "some":
        case = replace(case, loss="mean")  # a step that all processes leave out counts there: see docs/deepspeed.md
    is_divided = any(name.startswith("zero") for name in (case.strategy, case.then))
    if is_divided and case.model == "late" and case.optimizer.startswith(("adam", "nadam")):
        case = replace(case, optimizer="rmsprop")  # ZeRO counts Adam's steps once for all parameters, with a warning
    if "ddp_static" in (case.strategy, case.then) and case.model == "late":  # static_graph promises another thing
        case = replace(case, model="plain")
    if case.save.startswith("validation"):
        case = replace(case, validate=True)
    if case.save == "never" or case.driver not in ("trainer", "turns"):
        case = replace(case, then="")
    if case.then:  # what counts batches of a process means something else on another number of them
        model = "plain" if case.model == "late" else case.model
        loss = "mean" if case.loss == "some" else case.loss
        case = replace(case, limit=None, drop_last=False, model=model, loss=loss)
    return case

"""Which weights of a model come and go together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from drivetrain.inference.weight_places import Place, places_in
from drivetrain.runtime.errors import ConfigurationError, nearest

KINDS = ("block", "leaf")


@dataclass(eq=False)
class Group:
    """Weights that are there from when the first of some modules is called until the last of them has returned.

    Attributes:
        name: The name of the first module.
        modules: The modules, in the order of the model.
        places: Where in them the weights are.
        rest: The weights themselves, as they are between calls; one for each place.
    """

    name: str
    modules: list[nn.Module]
    places: list[Place]
    rest: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.rest = [place.tensor for place in self.places]

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, what is shared counted once."""
        each = {id(tensor): tensor for tensor in self.rest}
        return sum(tensor.numel() * tensor.element_size() for tensor in each.values())


def groups_of(
    model: nn.Module,
    wanted: Collection[int],
    kind: str = "block",
    num_blocks_per_group: int = 1,
    preload_module_classes: Collection[str] | None = None,
) -> list[Group]:
    """Cut a model into groups.

    Args:
        model: The model.
        wanted: The ids of the tensors that come and go.
        kind: `"block"`: each block that repeats is a group, and of the rest each module that has weights itself;
            `"leaf"`: each module that has weights itself.
        num_blocks_per_group: How many blocks that follow each other make a group.
        preload_module_classes: Names of classes whose modules are groups with all that is in them.

    Returns:
        The groups, in the order of the model.

    Raises:
        ConfigurationError: There is no such kind of group, or the number is none.
    """
    if kind not in KINDS:
        raise ConfigurationError(
            f"groups={kind!r}: give one of {', '.join(map(repr, KINDS))}.{nearest(str(kind), KINDS)}", code="DT-001"
        )
    if num_blocks_per_group < 1:
        raise ConfigurationError(
            f"num_blocks_per_group={num_blocks_per_group}: a group has at least one block.", code="DT-002"
        )
    preloaded = set(preload_module_classes or ())
    whole = {id(module) for module in model.modules() if type(module).__name__ in preloaded}
    blocks = set() if kind == "leaf" else {id(module) for module in _blocks(model)}
    groups: list[Group] = []
    run: list[tuple[str, nn.Module]] = []
    for name, module, is_whole in _outermost(model, whole | blocks):
        if (
            id(module) in blocks
            and (not run or _parent(run[-1][0]) == _parent(name))
            and len(run) < num_blocks_per_group
        ):
            run.append((name, module))
            continue
        groups.extend(_group(run, wanted, True))
        run = [(name, module)] if id(module) in blocks else []
        if not run:
            groups.extend(_group([(name, module)], wanted, is_whole))
    groups.extend(_group(run, wanted, True))
    return groups


def _blocks(model: nn.Module) -> list[nn.Module]:
    # Importing the strategies takes a second that most of what this package does needs not.
    from drivetrain.strategies.wrapping import units_of

    return units_of(model, "auto")


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _outermost(model: nn.Module, whole: Collection[int]) -> Iterator[tuple[str, nn.Module, bool]]:
    """Modules in order: those taken whole, without what is in them, and those of which the rest consists."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        taken = id(module) in whole
        if taken:
            inside.update(id(each) for each in module.modules())
        yield name, module, taken


def _group(modules: Sequence[tuple[str, nn.Module]], wanted: Collection[int], is_whole: bool) -> Iterator[Group]:
    """The group of modules, unless there is nothing in them that comes and goes."""
    places: list[Place] = []
    for _, module in modules:
        for each in module.modules() if is_whole else (module,):
            places.extend(place for place in places_in(each) if id(place.tensor) in wanted)
    if places:
        yield Group(modules[0][0], [module for _, module in modules], places)

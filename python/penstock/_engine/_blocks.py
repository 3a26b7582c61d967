"""Which modules of a model are fetched, computed and released as one.

A *block* is a set of parameters that is in memory or is not. The elements of the outermost repeated lists are blocks (a
transformer's layers), and so is every other module that owns parameters (an embedding, a last norm, a head). Modules that share
a parameter share a block. Parameters that no call of a module covers are *resident*: one block, in memory for a whole pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

from torch import nn

#: The name of the block of resident parameters.
RESIDENT = "(resident)"


@dataclass
class Block:
    """Parameters that come and go together.

    modules: with their names in the model; a call of any of them uses the block.
    parameters: (name in the model, parameter), each once.
    resident: the parameters are in memory for a whole pass; no module stands for them.
    """

    name: str
    modules: List[Tuple[str, nn.Module]] = field(default_factory=list)
    parameters: List[Tuple[str, nn.Parameter]] = field(default_factory=list)
    resident: bool = False

    def short_name(self, full: str) -> str:
        """A parameter's name within the block."""
        prefix = self.name + "."
        return full[len(prefix) :] if full.startswith(prefix) else full


def _owns_parameters(module: nn.Module, recurse: bool) -> bool:
    return next(module.parameters(recurse=recurse), None) is not None


def _repeats(module: nn.Module) -> bool:
    """Whether its children are worth a block each: a list, or a sequence of two or more of one class."""
    if isinstance(module, nn.ModuleList):
        return _owns_parameters(module, recurse=True)
    if isinstance(module, nn.Sequential):
        classes = [type(child) for child in module if _owns_parameters(child, recurse=True)]
        return len(classes) > len(set(classes))
    return False


def _found(model: nn.Module) -> Iterable[Tuple[str, nn.Module]]:
    """(name, module) of what becomes blocks before sharing is looked at, in the model's order."""
    taken: Set[nn.Module] = set()
    inside: List[str] = []
    chosen: Dict[int, Tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        if _repeats(module):
            for index, element in enumerate(module):
                if _owns_parameters(element, recurse=True) and id(element) not in taken:
                    full = f"{name}.{index}" if name else str(index)
                    chosen[id(element)] = (full, element)
                    inside.append(full + ".")
                    taken.update(id(each) for each in element.modules())
    for name, module in model.named_modules():
        if id(module) in chosen:
            yield chosen[id(module)]
        if id(module) in taken or not _owns_parameters(module, recurse=False):
            continue
        below = list(module.modules())
        if any(id(each) in taken for each in below):
            continue  # around blocks: its own parameters are resident
        taken.update(id(each) for each in below)
        yield name, module


def _given(model: nn.Module, names: Sequence[str]) -> Iterable[Tuple[str, nn.Module]]:
    modules = dict(model.named_modules())
    for name in names:
        inside = next((other for other in names if other != name and name.startswith(other + ".")), None)
        if inside is not None:
            raise ValueError(f"blocks: {name!r} is inside of {inside!r}")
        if name not in modules:
            raise ValueError(f"blocks: the model has no module {name!r}")
        if not _owns_parameters(modules[name], recurse=True):
            raise ValueError(f"blocks: {name!r} has no parameters")
        yield name, modules[name]


def find_blocks(model: nn.Module, names: Optional[Sequence[str]] = None, has_values: bool = True) -> List[Block]:
    """All parameters of the model in blocks, in its own order. Those of no module that is a block are resident.

    names: of the modules that are blocks; None finds them. has_values: False after an engine has had them, and on the meta device.
    Raises ValueError for names that are wrong.
    """
    found = list(_found(model) if names is None else _given(model, names))
    root = list(range(len(found)))

    def root_of(index: int) -> int:
        while root[index] != index:
            index = root[index]
        return index

    owner: Dict[int, int] = {}
    for index, (_, module) in enumerate(found):
        for parameter in module.parameters():
            if id(parameter) in owner:
                first, second = sorted((root_of(owner[id(parameter)]), root_of(index)))
                root[second] = first
            else:
                owner[id(parameter)] = index
    blocks: Dict[int, Block] = {}
    seen = set()
    for index, (name, module) in enumerate(found):
        block = blocks.setdefault(root_of(index), Block(found[root_of(index)][0]))
        block.modules.append((name, module))
        for short, parameter in module.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                block.parameters.append((f"{name}.{short}" if name else short, parameter))
    made = _with_residents(model, list(blocks.values()), lambda parameter: id(parameter) not in owner)
    if has_values:
        for block in made:
            _check(block)
        check_memory([each for block in made for each in block.parameters])
    return made


def with_residents(model: nn.Module, blocks: Sequence[Block], outside: Set[int], called: Set[int]) -> List[Block]:
    """The blocks once a forward has shown what is used where. outside: ids of parameters that are used outside of their block.

    called: blocks that were, by number. Where nothing else is left, the model itself is the block.
    """
    idle = {id(each) for number, block in enumerate(blocks) if number not in called for _, each in block.parameters}
    made = _with_residents(model, blocks, lambda parameter: id(parameter) in outside or id(parameter) in idle)
    if not all(block.resident for block in made):
        return made
    return [Block("", [("", model)], [each for block in made for each in block.parameters])]


# The least that a block has of what is frozen, for each element that trains: what is resident takes memory of the process for a whole pass, a weight
# and a gradient, and each frozen element that has a state with it takes room on the drive, five times what it has alone, and the traffic of that.
_FROZEN_BESIDE = 4


def adapters(model: nn.Module, blocks: Sequence[Block], trains: Callable[[nn.Parameter], bool]) -> List[Tuple[Block, Set[int]]]:
    """Blocks that are frozen but for a small part, each with the ids of what trains of it: adapters."""
    found = []
    for block in blocks:
        if block.resident or any(module is model for _, module in block.modules):
            continue
        trained = [each for _, each in block.parameters if trains(each)]
        elements = sum(each.numel() for each in trained)
        frozen = sum(each.numel() for _, each in block.parameters) - elements
        if trained and frozen >= _FROZEN_BESIDE * elements:
            found.append((block, {id(each) for each in trained}))
    return found


def with_adapters_resident(model: nn.Module, blocks: Sequence[Block], adapters: Sequence[Tuple[Block, Set[int]]]) -> List[Block]:
    """The blocks with these adapters among the residents, so that what is left of their blocks is frozen whole."""
    ids = {each for _, trained in adapters for each in trained}
    return _with_residents(model, blocks, lambda parameter: id(parameter) in ids)


def _with_residents(model: nn.Module, blocks: Sequence[Block], is_resident: Callable[[nn.Parameter], bool]) -> List[Block]:
    known = {id(each) for block in blocks if block.resident for _, each in block.parameters}
    residents = [(name, each) for name, each in model.named_parameters() if id(each) in known or is_resident(each)]
    if not residents:
        return list(blocks)
    taken = {id(each) for _, each in residents}
    others = [
        Block(block.name, block.modules, [(name, each) for name, each in block.parameters if id(each) not in taken])
        for block in blocks
        if not block.resident
    ]
    return [Block(RESIDENT, [], residents, resident=True), *(block for block in others if block.parameters)]


def check_memory(parameters: Sequence[Tuple[str, nn.Parameter]]) -> None:
    """ValueError where two share memory: parameters that are one object are tied, and stay so; others would part."""
    places = []
    for name, parameter in parameters:
        if parameter.numel():
            last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride()))
            begin = parameter.data_ptr()
            places.append((begin, begin + (last + 1) * parameter.element_size(), name))
    places.sort()
    for (_, end, name), (begin, _, other) in zip(places, places[1:]):
        if begin < end:
            raise ValueError(f"{name} and {other} share memory and are two parameters: tie them by making them one")


def _check(block: Block) -> None:
    for name, parameter in block.parameters:
        if parameter.device.type == "meta":
            raise ValueError(f"{name} is on the meta device, where it has no values: load or initialise the model first")
        if parameter.device.type != "cpu":
            raise ValueError(f"{name} is on {parameter.device}: hand the model over in host memory, with model.cpu()")

"""Which modules of a model are fetched, computed and released as one.

A *block* is a set of parameters that is in memory or is not. The elements of the outermost repeated lists are blocks (a
transformer's layers), and so is every other module that owns parameters (an embedding, a last norm, a head). Modules that share
a parameter share a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

from torch import nn


@dataclass
class Block:
    """Parameters that come and go together.

    modules: with their names in the model; whoever of them is called uses the block.
    parameters: (name in the model, parameter), each once.
    """

    name: str
    modules: List[Tuple[str, nn.Module]] = field(default_factory=list)
    parameters: List[Tuple[str, nn.Parameter]] = field(default_factory=list)

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
    taken = set()
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
        around = [each for each in below if id(each) in taken]
        if around:
            own = [parameter for parameter, _ in module.named_parameters(recurse=False)]
            raise TypeError(
                f"{name or type(model).__name__} has parameters of its own ({', '.join(own)}) around blocks, which come and go "
                "apart from it: move them into a module of their own, whose forward uses them, or give blocks=[...] with the "
                "names of modules that hold all parameters"
            )
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
    """All parameters of the model in blocks, in its own order.

    names: of the modules that are blocks; None finds them. has_values: False after an engine has had them.
    Raises TypeError naming parameters that are in none, and ValueError for names that are wrong.
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
    stray = [name for name, parameter in model.named_parameters() if id(parameter) not in owner]
    if stray:
        raise TypeError(f"parameters outside of all blocks: {', '.join(stray[:5])}{', ...' if len(stray) > 5 else ''}")
    for block in blocks.values():
        _check(block)
    if has_values:
        check_memory([each for block in blocks.values() for each in block.parameters])
    return list(blocks.values())


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

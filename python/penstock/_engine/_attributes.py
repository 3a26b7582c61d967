"""What modules keep in Python between calls: plain attributes that a forward changes, and how they were before it."""

from __future__ import annotations

import collections
import contextlib
import types
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from ._tree import map_tensors, tensors_of

# What torch and the engine put into a module's __dict__: parameters, buffers, submodules, hooks, modes.
_OWN = frozenset(vars(nn.Module())) | {"forward", "state_dict", "load_state_dict", "zero_grad", "__deepcopy__", "__reduce_ex__"}
_OPAQUE = (nn.Module, nn.Parameter, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_DEEPEST = 4
_MISSING = object()


def _attributes_of(module: nn.Module) -> Dict[str, Any]:
    # A name with "hook" says that hooks were registered (transformers' _output_capturing_hooks_installed), and these stay.
    return {
        name: value for name, value in vars(module).items() if name not in _OWN and not name.startswith("_penstock") and "hook" not in name.lower()
    }


def _same(now: Any, before: Any) -> bool:
    return now is before or (isinstance(now, _SCALARS) and type(now) is type(before) and now == before)


def version_of(tensor: torch.Tensor) -> int:
    """Rises with each change in place; of one that was made under torch.inference_mode() there is none outside of that mode."""
    return 0 if tensor.is_inference() else tensor._version


class _Content:
    """A mutable thing and what it held: a module's attributes, a container, a tensor, an object's attributes."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self._version = 0
        self.before: Any
        if isinstance(holder, nn.Module):
            self.before = _attributes_of(holder)
        elif isinstance(holder, torch.Tensor):
            self.before, self._version = holder.detach().clone(), version_of(holder)
        elif isinstance(holder, (dict, set)):
            self.before = dict(holder) if isinstance(holder, dict) else set(holder)
        elif isinstance(holder, (list, collections.deque)):
            self.before = list(holder)
        else:
            self.before = dict(vars(holder))

    def values(self) -> Iterable[Any]:
        if isinstance(self.holder, torch.Tensor):
            return ()
        return list(self.before.values()) if isinstance(self.before, dict) else list(self.before)

    def now(self) -> Any:
        """As `before`; a tensor itself."""
        holder = self.holder
        if isinstance(holder, nn.Module):
            return _attributes_of(holder)
        if isinstance(holder, (torch.Tensor, dict, set)):
            return holder
        return list(holder) if isinstance(holder, (list, collections.deque)) else vars(holder)

    def changed(self) -> bool:
        now = self.now()
        if isinstance(now, torch.Tensor):
            return version_of(now) != self._version
        if len(now) != len(self.before):
            return True
        if isinstance(now, set):
            return bool(now != self.before)
        if isinstance(now, dict):
            return any(not _same(now.get(name, _MISSING), value) for name, value in self.before.items())
        return any(not _same(each, value) for each, value in zip(now, self.before))

    def new_places(self) -> List[Any]:
        """Keys, or indices, of what is another now."""
        now = self.now()
        if isinstance(now, (torch.Tensor, set)):
            return []
        if isinstance(now, dict):
            return [name for name, value in now.items() if value is not self.before.get(name, _MISSING)]
        return [at for at, value in enumerate(now) if at >= len(self.before) or value is not self.before[at]]

    def put(self, place: Any, value: Any) -> None:
        if isinstance(self.holder, (dict, list, collections.deque)):
            self.holder[place] = value
        else:
            vars(self.holder)[place] = value

    def restore(self) -> None:
        holder = self.holder
        if isinstance(holder, torch.Tensor):
            with torch.no_grad():
                holder.copy_(self.before)
        elif isinstance(holder, (list, collections.deque)):
            holder.clear()
            holder.extend(self.before)
        elif isinstance(holder, (dict, set)):
            holder.clear()
            holder.update(self.before)
        else:
            held = vars(holder)
            for name in [name for name in self.now() if name not in self.before]:
                del held[name]
            held.update(self.before)


class Attributes:
    """The attributes of these modules as they are when this is made, with what containers and objects among them hold."""

    def __init__(self, modules: Iterable[nn.Module], values: bool = True, given: Iterable[Any] = ()) -> None:
        """values: of tensors too, which are copied; False where none is changed in place meanwhile. given: objects beside them, without values."""
        self._values = values
        self._given = list(given)
        self._of: List[Tuple[nn.Module, List[_Content]]] = []
        self._once: Dict[int, _Content] = {}  # what several modules hold is looked at once, and restored once
        for module in modules:
            contents = [self._content(module)]
            seen: Set[int] = set()
            for value in contents[0].values():
                self._look(value, _DEEPEST, contents, seen)
            self._of.append((module, contents))
        self._values, contents = False, []
        for value in self._given:
            self._look(value, _DEEPEST, contents, set())
        self._values = values

    def _content(self, holder: Any) -> _Content:
        if id(holder) not in self._once:
            self._once[id(holder)] = _Content(holder)
        return self._once[id(holder)]

    def _look(self, value: Any, depth: int, contents: List[_Content], seen: Set[int]) -> None:
        if depth == 0 or isinstance(value, _SCALARS) or isinstance(value, _OPAQUE) or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, tuple):
            for each in value:
                self._look(each, depth, contents, seen)
        elif isinstance(value, torch.Tensor):
            if self._values:
                contents.append(self._content(value))
        elif isinstance(value, (dict, set, list, collections.deque)) or hasattr(value, "__dict__"):
            contents.append(self._content(value))
            for each in contents[-1].values():
                self._look(each, depth - 1, contents, seen)

    def changed(self) -> List[nn.Module]:
        """The modules of which anything is not as it was."""
        changed = {id(content) for content in self._once.values() if content.changed()}
        return [module for module, contents in self._of if any(id(content) in changed for content in contents)]

    def restore(self) -> None:
        for content in self._once.values():
            if content.changed():
                content.restore()

    def new_tensors(self, change: Optional[Callable[[torch.Tensor], torch.Tensor]] = None) -> List[torch.Tensor]:
        """Floating tensors that were put into attributes since, in an order that is the same each time. change: another in its place."""
        found: List[torch.Tensor] = []

        def changed(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point() or isinstance(tensor, nn.Parameter):
                return tensor
            found.append(tensor)
            return tensor if change is None else change(tensor)

        for content in self._once.values():
            for place in content.new_places():
                value = content.now()[place]
                if tensors_of(value):
                    replaced = map_tensors(value, changed)
                    if change is not None:
                        content.put(place, replaced)
        return found

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Within, they are as they were; after it, as they are now."""
        if not self._once:
            yield
            return
        now = Attributes([module for module, _ in self._of], self._values, self._given)
        self.restore()
        try:
            yield
        finally:
            now.restore()


class Hooks:
    """The hooks of these modules as they are when this is made, with the attributes that say which were registered."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._of = [(module, self._named(module)) for module in modules]

    @staticmethod
    def _named(module: nn.Module) -> Dict[str, Any]:
        named = {name: value for name, value in vars(module).items() if "hook" in name.lower()}
        return {name: value.copy() if isinstance(value, dict) else value for name, value in named.items()}

    def restore(self) -> None:
        for module, before in self._of:
            held = vars(module)
            for name in [name for name in held if "hook" in name.lower() and name not in before]:
                del held[name]
            for name, value in before.items():
                now = held.get(name)
                if isinstance(now, dict) and isinstance(value, dict):
                    if list(now) != list(value):
                        now.clear()  # handles of hooks know this dictionary
                        now.update(value)
                else:
                    held[name] = value


def merged(known: Sequence[nn.Module], more: Sequence[nn.Module]) -> List[nn.Module]:
    """Both, each once."""
    return [*known, *(module for module in more if all(module is not each for each in known))]

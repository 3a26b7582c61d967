"""What modules keep in Python between calls: plain attributes that a forward changes, and how they were before it."""

from __future__ import annotations

import collections
import contextlib
import operator
import types
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ._tree import map_tensors, tensors_of

# What torch and the engine put into a module's __dict__: parameters, buffers, submodules, hooks, modes.
_OWN = frozenset(vars(nn.Module())) | {"forward", "state_dict", "load_state_dict", "zero_grad", "__deepcopy__", "__reduce_ex__"}
_OPAQUE = (nn.Module, nn.Parameter, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_FOREIGN = frozenset(("lightning", "lightning_fabric", "pytorch_lightning"))  # packages whose objects have the module, as a Trainer has: their state is theirs
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_DEEPEST = 4
_COPIED = 1 << 12  # elements: tensors of up to as many are always copied
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
            self.before, self._version = None, version_of(holder)
        elif isinstance(holder, (dict, set)):
            self.before = dict(holder) if isinstance(holder, dict) else set(holder)
        elif isinstance(holder, (list, collections.deque)):
            self.before = list(holder)
        else:
            self.before = dict(vars(holder))

    def copy(self) -> None:
        """Of a tensor: what it holds is kept, without which it cannot be restored."""
        if self.before is None:
            self.before = self.holder.detach().clone()

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
        if isinstance(now, dict) and all(map(operator.is_, now.values(), self.before.values())) and all(map(operator.is_, now, self.before)):
            return False
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
            if self.before is None:
                raise RuntimeError(
                    f"a module's forward changes a tensor of {tuple(holder.shape)} in place that no forward before had changed, and has to be made "
                    "again with what it held, which is not known: this step is given up, and from the next one on it is. Or put another tensor in "
                    "its place, in the place of a change"
                )
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

    def __init__(
        self, modules: Iterable[nn.Module], values: bool = True, given: Iterable[Any] = (), copies: Optional[Sequence[nn.Module]] = None
    ) -> None:
        """values: of tensors too; False where none is changed in place meanwhile. given: objects beside them, without values.

        copies: modules of which large tensors are copied, so that they can be restored; None: all.
        """
        self._values = values
        self._given = list(given)
        self._of: List[Tuple[nn.Module, Dict[int, _Content]]] = []
        self._once: Dict[int, _Content] = {}  # what several modules hold is looked at once, and restored once
        self._below: Dict[Tuple[int, int, Optional[bool]], Dict[int, _Content]] = {}  # likewise: of a value, at a depth
        for module in modules:
            copied = copies is None or any(module is each for each in copies)
            content = self._content(module, copied)
            contents = {id(content): content}
            for value in content.values():
                contents.update(self._look(value, _DEEPEST, copied))
            self._of.append((module, contents))
        for value in self._given:
            self._look(value, _DEEPEST, None)
        self._below = {}

    def _content(self, holder: Any, copied: Optional[bool]) -> _Content:
        if id(holder) not in self._once:
            self._once[id(holder)] = _Content(holder)
        content = self._once[id(holder)]
        if isinstance(holder, torch.Tensor) and (copied or holder.numel() <= _COPIED):
            content.copy()
        return content

    # All that this value holds, itself included, by id. copied: large tensors too; None: no tensors.
    def _look(self, value: Any, depth: int, copied: Optional[bool]) -> Dict[int, _Content]:
        if depth == 0 or isinstance(value, _SCALARS) or isinstance(value, _OPAQUE) or type(value).__module__.partition(".")[0] in _FOREIGN:
            return {}
        key = (id(value), depth, copied)
        if key in self._below:
            return self._below[key]
        found: Dict[int, _Content] = {}
        self._below[key] = found
        if isinstance(value, tuple):
            for each in value:
                found.update(self._look(each, depth, copied))
        elif isinstance(value, torch.Tensor):
            if self._values and copied is not None:
                content = self._content(value, copied)
                found[id(content)] = content
        elif isinstance(value, (dict, set, list, collections.deque)) or hasattr(value, "__dict__"):
            content = self._content(value, copied)
            found[id(content)] = content
            for each in content.values():
                found.update(self._look(each, depth - 1, copied))
        return found

    def changed(self) -> List[nn.Module]:
        """The modules of which anything is not as it was."""
        changed = {id(content) for content in self._once.values() if content.changed()}
        return [module for module, contents in self._of if not changed.isdisjoint(contents)] if changed else []

    def any_changed(self) -> bool:
        """Whether anything is not as it was, of what was given too."""
        return any(content.changed() for content in self._once.values())

    def names_changed(self) -> List[str]:
        """The modules' attributes that are others now, or hold something else themselves; one whose holdings' holdings changed is not among them."""
        changed = {id(content.holder) for content in self._once.values() if content.changed()}
        names = []
        for module, _ in self._of:
            before, now = self._once[id(module)].before, _attributes_of(module)
            names += [name for name in {**before, **now} if id(now.get(name)) in changed or not _same(now.get(name, _MISSING), before.get(name, _MISSING))]
        return names

    def changed_in_place(self) -> bool:
        """Whether a tensor is not as it was."""
        return any(isinstance(content.holder, torch.Tensor) and content.changed() for content in self._once.values())

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

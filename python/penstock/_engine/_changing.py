"""Which modules have attributes that a forward changes, as far as the forwards until now have shown it."""

from __future__ import annotations

from typing import Dict, List, Sequence

from torch import nn

from ._accumulation import Forward
from ._attributes import Attributes, merged
from ._open_pass import COMPARED

# Steps after which a module whose attributes no forward changes any more is taken for one that filled a cache.
_IDLE_STEPS = 16


class Changing:
    """These modules, and what is kept of attributes because of them."""

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        self._model = model
        self.modules = list(modules)
        #: Those that the last forward of an accumulation has changed.
        self.last: List[nn.Module] = []
        self._in_place = False  # tensors among these attributes
        self._idle_steps: Dict[int, int] = {}  # of those in ``modules``, by id: steps in which no forward changed them
        self._looks = COMPARED  # with copies of all tensors among the attributes of all modules, still to come

    def add(self, modules: Sequence[nn.Module]) -> None:
        self.modules = merged(self.modules, modules)

    def note(self, forward: Forward) -> List[nn.Module]:
        """The modules whose attributes this forward, which is over, has changed."""
        changed = forward.attributes.changed()
        self.add(changed)
        self._in_place |= bool(changed) and forward.attributes.changed_in_place()
        return changed

    def settle(self, changed: Sequence[nn.Module]) -> None:
        """After the forwards of a step, of which these modules were changed by any: one that was not for many steps was filled once, as a cache."""
        kept = []
        for module in merged(self.modules, changed):
            idle = 0 if any(module is each for each in changed) else self._idle_steps.get(id(module), 0) + 1
            self._idle_steps[id(module)] = idle
            if idle < _IDLE_STEPS:
                kept.append(module)
        self.modules = kept

    def now(self) -> Attributes:
        """Their attributes, for a micro-batch that goes on when others have been computed."""
        return Attributes(self.modules, values=self._in_place)

    def of_all(self) -> Attributes:
        """The attributes of all modules. Large tensors are copied in the first passes, later those of modules that are known to change them."""
        self._looks = max(0, self._looks - 1)
        return Attributes(self._model.modules(), copies=None if self._looks else self.modules)

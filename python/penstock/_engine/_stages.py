"""The order in which a pass comes to the blocks: the same in every pass."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

from ._blocks import Block
from ._open_pass import Driver, PassFailed
from ._trace import Use


class Stages:
    """The blocks of a model and the uses of them in a pass, by number, as the first forward has shown them."""

    def __init__(self, blocks: Sequence[Block], uses: Sequence[Use], trained: Sequence[Sequence[bool]], input_gradients: bool) -> None:
        """trained: of each parameter of each block, whether it is updated. input_gradients: what goes into the model may ask for them."""
        self.blocks = blocks
        self.uses = uses
        self.trained = trained
        #: Whether any parameter is updated; otherwise every forward is an evaluation.
        self.trains = any(any(each) for each in trained)
        self.last = len(uses) - 1
        #: The use where backward ends.
        self.first_trained = 0 if input_gradients else next((number for number, use in enumerate(uses) if any(trained[use.block])), self.last)
        #: Whether the first use is of parameters that stay for the whole pass.
        self.has_residents = blocks[uses[0].block].resident
        self._places: Dict[int, List[int]] = {}  # of each module, by id
        for number, use in enumerate(uses):
            self._places.setdefault(id(use.module), []).append(number)

    def next(self, driver: Driver, module: int) -> Optional[int]:
        """The use that the next call of this module, by id, is. None: the pass has none such."""
        left = self._places.get(module, [])[driver.calls.get(module, 0) :]
        return next((place for place in left if place >= driver.forward_at), None)

    def of(self, driver: Driver, module: int, name: str) -> int:
        """The use that this call of the module is. PassFailed: the pass has none such.

        module: its id. name: of the block that it belongs to.
        """
        place = self.next(driver, module)
        if place is not None:
            driver.calls[module] = self._places[module].index(place) + 1
            return place
        if driver.loss is not None or driver.inside not in (None, self.last):
            raise PassFailed(
                f"{name} is computed once more in backward, by a torch.utils.checkpoint of the model's own around it: the engine computes "
                "blocks again already, so leave it out"
            )
        raise PassFailed(
            f"{name} is called more often, or later, than in the first forward: the order of blocks must be the same in every "
            "pass (blocks may be left out). Give blocks=[...] with a module around those whose order changes"
        )

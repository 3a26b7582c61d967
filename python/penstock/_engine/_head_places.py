"""Where the weights of a model's head are while logits of a pass may be computed."""

from __future__ import annotations

import functools
from typing import Optional

from torch import nn

from ._heads import Place
from ._lazy_logits import Weights
from ._open_pass import Driver, OpenPass
from ._stages import Stages

_OVER = (
    "logits of this forward are asked for when its pass is over and its weights have left memory: they were to be computed in chunks, and were never "
    "computed whole. Read them before backward, or keep them whole: logits_chunk_size=0 (or \"penstock\": {\"logits_chunk_size\": 0})"
)


class HeadPlaces:
    """Of the passes of an engine."""

    def __init__(self, stages: Stages, open_pass: OpenPass) -> None:
        self._last = stages.last
        self._open, self._here = open_pass, open_pass.here
        self._residents = {id(each) for block in stages.blocks if block.resident for _, each in block.parameters}

    def of(self, head: nn.Linear) -> Optional[Place]:
        """None: the weights leave with the call of the module that is computed."""
        driver = self._here.driver
        if driver is None or not self._here.inside_model or driver.goes_on:
            return None
        if driver.trains and driver.at not in (None, self._last):  # backward computes that block again
            return None
        stays = all(id(each) in self._residents for each in head.parameters())
        if not stays and not driver.in_last:
            return None
        return Place(functools.partial(self._weights, driver, head, stays), note=None if driver.trains else driver.note_lazy)

    def _weights(self, driver: Driver, head: nn.Linear, stays: bool) -> Weights:
        is_open = any(driver is each for each in self._open.drivers)
        if not is_open or not (stays or (driver.inside == self._last if driver.trains else self._here.inside_model)):
            raise RuntimeError(_OVER)
        return head.weight, head.bias

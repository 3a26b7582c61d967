"""Builders of operators that are built already."""

from typing import Any

from penstock.ops.adam import CPUAdamBuilder as CPUAdamBuilder
from penstock.ops.aio import AsyncIOBuilder as AsyncIOBuilder
from penstock.ops.aio import PinMemoryBuilder as PinMemoryBuilder

from ..._refused import attributes_of


class GDSBuilder:
    """Of what is not here: a script that asks finds out before it loads it."""

    NAME = "gds"

    def is_compatible(self, verbose: bool = False) -> bool:
        return False

    def load(self, verbose: bool = False) -> Any:
        raise NotImplementedError("GDSBuilder.load is not served: deepspeed.ops.aio reads and writes host memory, AsyncIOBuilder().load() gives it")

__getattr__ = attributes_of(__name__)

"""Builders of operators that are built already."""

from penstock.ops.adam import CPUAdamBuilder as CPUAdamBuilder
from penstock.ops.aio import AsyncIOBuilder as AsyncIOBuilder
from penstock.ops.aio import PinMemoryBuilder as PinMemoryBuilder
from penstock._deepspeed import absent

GDSBuilder = absent("deepspeed.ops.op_builder.GDSBuilder", "deepspeed.ops.aio reads and writes host memory")

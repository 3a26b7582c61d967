"""deepspeed.zero: parameters are whole until the engine has them, so there is little to gather."""

from typing import List

from penstock._deepspeed import GatheredParameters, Init, absent, register_external_parameter, unregister_external_parameter
from penstock._tiled import TiledLinear, TiledLinearReturnBias

from ._refused import attributes_of

__path__: List[str] = []  # so that an import below is answered by _refused.py

MiCS_Init = absent("deepspeed.zero.MiCS_Init", "penstock.init_on_disk builds a model that is larger than memory")

__all__ = ["MiCS_Init", "TiledLinear", "TiledLinearReturnBias", "unregister_external_parameter", "GatheredParameters", "Init", "register_external_parameter"]
__getattr__ = attributes_of(__name__)

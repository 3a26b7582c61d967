from penstock._deepspeed import GatheredParameters as GatheredParameters
from penstock._deepspeed import Init as Init
from penstock._deepspeed import ZeroParamStatus as ZeroParamStatus
from penstock._deepspeed import register_external_parameter as register_external_parameter
from penstock._deepspeed import unregister_external_parameter as unregister_external_parameter

from ..._refused import attributes_of
from ...zero import MiCS_Init as MiCS_Init
from .tiling import TiledLinear as TiledLinear
from .tiling import TiledLinearReturnBias as TiledLinearReturnBias

__getattr__ = attributes_of(__name__)

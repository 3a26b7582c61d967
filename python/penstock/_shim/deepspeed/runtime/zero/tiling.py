from penstock._tiled import TiledLinear as TiledLinear
from penstock._tiled import TiledLinearReturnBias as TiledLinearReturnBias

from ..._refused import attributes_of

__getattr__ = attributes_of(__name__)

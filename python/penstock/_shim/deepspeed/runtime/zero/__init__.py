from penstock._deepspeed import GatheredParameters as GatheredParameters
from penstock._deepspeed import Init as Init
from penstock._deepspeed import ZeroParamStatus as ZeroParamStatus

from ..._refused import attributes_of

__getattr__ = attributes_of(__name__)

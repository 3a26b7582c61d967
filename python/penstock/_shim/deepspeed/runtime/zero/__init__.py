from penstock._deepspeed import GatheredParameters as GatheredParameters
from penstock._deepspeed import Init as Init
from penstock._deepspeed import ZeroParamStatus as ZeroParamStatus

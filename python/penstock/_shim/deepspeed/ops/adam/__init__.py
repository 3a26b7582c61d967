from penstock._deepspeed import FusedAdam as FusedAdam
from penstock.ops.adam import DeepSpeedCPUAdam as DeepSpeedCPUAdam

from ..._refused import attributes_of

__getattr__ = attributes_of(__name__)

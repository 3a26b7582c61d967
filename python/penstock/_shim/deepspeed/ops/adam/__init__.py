from penstock._deepspeed import FusedAdam as FusedAdam
from penstock.ops.adam import DeepSpeedCPUAdam as DeepSpeedCPUAdam

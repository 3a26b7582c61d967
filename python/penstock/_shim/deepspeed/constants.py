"""Values that scripts read by DeepSpeed's names."""

import datetime
import os

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
CROSS_RANK, CROSS_SIZE, LOCAL_RANK = "CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK"
default_pg_timeout = datetime.timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "10")))

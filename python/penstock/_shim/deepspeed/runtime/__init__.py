from . import activation_checkpointing as activation_checkpointing
from . import lr_schedules as lr_schedules
from . import zero as zero

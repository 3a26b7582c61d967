from .._refused import attributes_of
from . import activation_checkpointing as activation_checkpointing
from . import lr_schedules as lr_schedules
from . import zero as zero

__getattr__ = attributes_of(__name__)

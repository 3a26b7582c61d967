from ..._refused import attributes_of
from . import checkpointing as checkpointing

__getattr__ = attributes_of(__name__)

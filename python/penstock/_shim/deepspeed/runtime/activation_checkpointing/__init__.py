from . import checkpointing as checkpointing

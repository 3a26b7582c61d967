from .._refused import attributes_of
from . import utils as utils
from penstock._deepspeed import absent

DeepSpeedCheckpoint = absent("deepspeed.checkpoint.DeepSpeedCheckpoint", "engine.load_checkpoint reads checkpoints of any number of ranks")

__getattr__ = attributes_of(__name__)

from penstock._deepspeed import DeepSpeedEngine as DeepSpeedEngine

from .._refused import attributes_of

__getattr__ = attributes_of(__name__)

"""deepspeed.zero: parameters are whole until the engine has them, so there is little to gather."""

from penstock._deepspeed import GatheredParameters, Init, register_external_parameter

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]

from penstock._deepspeed import absent

_INSTEAD = "the engine scales losses by itself, as the configuration's fp16 says"
LossScaler = absent("deepspeed.runtime.fp16.loss_scaler.LossScaler", _INSTEAD)
DynamicLossScaler = absent("deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler", _INSTEAD)

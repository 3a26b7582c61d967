from penstock._deepspeed import DeepSpeedEngine as DeepSpeedEngine

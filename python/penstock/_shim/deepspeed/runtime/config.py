from penstock._deepspeed import absent

DeepSpeedConfig = absent("deepspeed.runtime.config.DeepSpeedConfig", "give the dictionary, or the file, to deepspeed.initialize(config=...)")

from penstock._deepspeed import absent

MoE = absent("deepspeed.moe.layer.MoE", "there is no expert parallelism: a model that has its experts as modules, as transformers' have, is trained")

"""What `accelerate launch` asks for before it starts torchrun's processes; there is no launcher of several hosts."""

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"

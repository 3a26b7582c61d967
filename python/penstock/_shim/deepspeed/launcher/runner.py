"""What `accelerate launch` asks for before it starts torchrun's processes; there is no launcher of several hosts."""

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"


def main(*_: object, **__: object) -> None:
    raise NotImplementedError("the command deepspeed is not served: torchrun --nproc-per-node N script.py, or python -m penstock.run script.py")

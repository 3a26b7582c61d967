"""The command `deepspeed` on one machine, and what `accelerate launch` asks for before it starts torchrun's processes."""

import sys
from typing import Optional, Sequence

from penstock._launcher import launch

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"


def main(args: Optional[Sequence[str]] = None) -> None:
    """The command deepspeed, on one machine: ends the process with its status. args: of the command [sys.argv's]."""
    sys.exit(launch(sys.argv[1:] if args is None else args))


if __name__ == "__main__":
    main()

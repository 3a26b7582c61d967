"""``python -m penstock.run script.py ...``: a script that imports deepspeed, or a Trainer with ``deepspeed=``, on Penstock's engine.

It runs the script in this process: ``-m MODULE`` runs a module. With several ranks, ``torchrun --nproc-per-node 2 -m penstock.run
script.py ...``, or the command of DeepSpeed's launcher: ``python -m penstock.run deepspeed --num_gpus 2 script.py ...``.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from typing import Any, Dict, List, Tuple


def _free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def _hand_on_accelerates_paths() -> None:
    """`accelerate launch` reads where to offload to from the file of `accelerate config`, and hands that on to no process: each would
    offload to a directory named none, wherever it was started."""
    import accelerate.utils

    prepare = accelerate.utils.prepare_deepspeed_cmd_env

    def prepare_with_paths(given: Any) -> Tuple[List[str], Dict[str, str]]:
        command, environment = prepare(given)
        for name in ("offload_param_nvme_path", "offload_optimizer_nvme_path"):
            if getattr(given, name, None):
                environment.setdefault(f"ACCELERATE_DEEPSPEED_{name.upper()}", getattr(given, name))
        return command, environment

    accelerate.utils.prepare_deepspeed_cmd_env = prepare_with_paths


def _is_there(script: str) -> bool:
    from ._small_files import exists

    try:
        return exists(script)
    except (OSError, ValueError) as error:
        sys.exit(f"penstock.run: {error}")


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        forms = ("SCRIPT [ARGUMENTS]", "-m MODULE [ARGUMENTS]", "deepspeed [OPTIONS] SCRIPT [ARGUMENTS]")
        print("usage: " + "\n       ".join(f"python -m penstock.run {form}" for form in forms) + "\n\n" + (__doc__ or ""))
        sys.exit(0 if arguments else 2)
    if arguments[0] == "deepspeed" and not _is_there(arguments[0]):
        from ._launcher import launch

        sys.exit(launch(arguments[1:]))
    if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" not in os.environ:
        sys.exit("penstock.run: WORLD_SIZE is set and RANK is not: torchrun --nproc-per-node N -m penstock.run SCRIPT sets both")
    from . import deepspeed  # noqa: F401

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", _free_port())
    if arguments[0] == "-m":
        if len(arguments) < 2:
            sys.exit("penstock.run: -m needs a module")
        sys.argv = arguments[1:]
        if arguments[1] == "accelerate.commands.launch":
            _hand_on_accelerates_paths()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    if not _is_there(arguments[0]):
        sys.exit(f"penstock.run: no script {arguments[0]}")
    sys.argv = arguments
    sys.path.insert(1, os.path.dirname(os.path.abspath(arguments[0])))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()

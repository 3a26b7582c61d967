"""The wheel's console scripts: ``penstock``, ``ds_io``, ``ds_nvme_tune``, ``ds_report``, ``deepspeed``, as far as they need no LibTorch."""

from __future__ import annotations

import importlib.metadata
import signal
import sys
from typing import Callable, List, Sequence

from . import _core


def _run(program: Callable[[List[str]], int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # compiled code does not hear Python's
    sys.exit(program(sys.argv[1:]))


def penstock() -> None:
    """generate, serve, pack, plan --generate, report, estimate, inspect, verify, settings, env and zero_to_fp32; what needs LibTorch says so."""
    if sys.argv[1:2] == ["zero_to_fp32"]:
        sys.exit(_zero_to_fp32(sys.argv[2:]))
    if sys.argv[1:2] == ["serve"]:
        from ._serve.program import main

        sys.exit(main(sys.argv[2:]))
    _run(_verbs)


def _verbs(arguments: List[str]) -> int:
    status = int(_core.run_penstock(arguments))
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print("\nWith the extra serve (pip install 'penstock[serve]'):\n  serve         OpenAI's API over HTTP, for a model larger than memory",
              file=sys.stdout if arguments else sys.stderr, flush=True)  # fmt: skip
    return status


def ds_io() -> None:
    _run(_core.run_ds_io)


def ds_nvme_tune() -> None:
    _run(_core.run_ds_nvme_tune)


def deepspeed() -> None:
    """DeepSpeed's launcher where that is installed, whichever of the two was installed last; else the one that stands for it."""
    try:
        importlib.metadata.distribution("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        from ._launcher import launch

        sys.exit(launch(sys.argv[1:]))
    runner = importlib.import_module("deepspeed.launcher.runner")
    sys.exit(runner.main())


def ds_report() -> None:
    """What `penstock env` tells, by the name that users of DeepSpeed look for."""
    _run(report_environment)


def report_environment(arguments: Sequence[str]) -> int:
    """Prints versions and what the machine offers. Returns the exit status."""
    # DeepSpeed's own flags leave out its table of operators, of which there is none here, and the warnings, which have lines of their own.
    kept = [each for each in arguments if each not in ("--hide_operator_status", "--hide_errors_and_warnings")]
    if not {"--json", "--help", "-h"}.intersection(kept):
        try:
            torch = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            torch = "not installed: penstock.initialize, penstock.optim and penstock.save want it"
        print(f"package\n  {'penstock':<34} {_core.__version__}\n  {'python':<34} {sys.version.split()[0]}\n  {'torch':<34} {torch}\n", flush=True)
    return int(_core.run_penstock(["env", *kept]))


def _zero_to_fp32(arguments: List[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser(
        "penstock zero_to_fp32",
        description="Writes the fp32 weights of a checkpoint or state directory, of penstock.initialize's engine or of DeepSpeed's, as safetensors.",
    )
    parser.add_argument("checkpoint_dir", nargs="+", help="what save_checkpoint was given, a checkpoint, or a state directory (all of a striped run)")
    parser.add_argument("output", help="a directory, made where it is missing, or a file .safetensors, .bin or .pt")
    parser.add_argument("-t", "--tag", help="which checkpoint [what `latest` names]")
    parser.add_argument("--max_shard_size", "--max-shard", help="largest size of a file, as 5GB: several files and their index [one file]")
    parser.add_argument("--exclude_frozen_parameters", "--exclude-frozen-parameters", action="store_true", help="leave out what did not train")
    parser.add_argument("--safe_serialization", action="store_true", help="as it is anyway")
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    given = parser.parse_args(arguments)
    try:
        from ._fp32 import write_weights
    except ImportError as error:
        print(f"penstock zero_to_fp32: {error}: it wants torch (pip install torch)", file=sys.stderr)
        return 1
    try:
        source = given.checkpoint_dir if len(given.checkpoint_dir) > 1 else given.checkpoint_dir[0]
        written = write_weights(source, given.output, given.max_shard_size, True, given.tag, given.exclude_frozen_parameters, given.overwrite)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"penstock zero_to_fp32: {error}", file=sys.stderr)
        return 1
    print("\n".join(written))
    return 0

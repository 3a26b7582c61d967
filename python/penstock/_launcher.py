"""The command ``deepspeed`` on one machine: ``python -m penstock.run deepspeed [OPTIONS] SCRIPT [ARGUMENTS]``.

Starts a process of ``penstock.run SCRIPT --local_rank=K ARGUMENTS`` for each rank, with the environment that DeepSpeed's launcher gives
(RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE, CROSS_RANK, CROSS_SIZE, MASTER_ADDR, MASTER_PORT, CUDA_VISIBLE_DEVICES). Its options are
DeepSpeed's; those of several machines are refused. When a rank fails, the others are ended, and its status is the command's.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional, Sequence

#: Seconds that the other ranks have to end by themselves once one has failed or a signal has come.
GRACE = 30.0

_ONE_MACHINE = "{} is of several machines: on each of them start `torchrun --nnodes N --nproc-per-node M --rdzv-endpoint HOST:PORT -m penstock.run SCRIPT`"


class LauncherError(ValueError):
    """Options that cannot be obeyed: one line that says what to do."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m penstock.run deepspeed", description="Starts the ranks of a script for DeepSpeed on this machine.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--num_gpus", "--num_accelerators", type=int, default=-1, metavar="N", help="ranks [one a GPU; 1 where there is none]")
    add("-i", "--include", default="", metavar="localhost:0,1", help="the GPUs to use")
    add("-e", "--exclude", default="", metavar="localhost:0", help="the GPUs not to use")
    add("--master_addr", default="127.0.0.1", help="where rank 0 listens [%(default)s]")
    add("--master_port", type=int, default=29500, help="and the port [%(default)s]")
    add("--module", action="store_true", help="SCRIPT is a module, as after python -m")
    add("--no_python", action="store_true", help="SCRIPT is a program, which is started as it is: without Penstock, unless it starts penstock.run")
    add("--no_local_rank", action="store_true", help="give the script no --local_rank")
    add("--enable_each_rank_log", default="None", metavar="DIR", help="what each rank prints goes to a file in DIR")
    add("-q", "--quiet", action="store_true", help="no effect: the launcher prints nothing")
    add("--log_level", default="info", help="no effect: the launcher prints nothing")
    # Of several machines, and what has no place here.
    add("-H", "--hostfile", default="", help=argparse.SUPPRESS)
    add("--num_nodes", type=int, default=-1, help=argparse.SUPPRESS)
    add("--node_rank", type=int, default=-1, help=argparse.SUPPRESS)
    for name in ("--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid", "--bind_cores_to_rank", "--elastic_training"):
        add(name, action="store_true", help=argparse.SUPPRESS)
    for name in ("--launcher", "--launcher_args", "--autotuning", "--bind_core_list", "--ssh_port", "--venv_script", "--min_elastic_nodes", "--max_elastic_nodes"):
        add(name, default=None, help=argparse.SUPPRESS)
    add("script", metavar="SCRIPT", help="what each rank runs")
    add("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _refuse(given: argparse.Namespace) -> None:
    hosts = [line.split()[0] for line in _lines_of(given.hostfile) if line.strip() and not line.lstrip().startswith("#")]
    if given.num_nodes > 1 or given.node_rank > 0 or given.force_multi or len(set(hosts)) > 1:
        name = "--num_nodes" if given.num_nodes > 1 else "--node_rank" if given.node_rank > 0 else "--force_multi" if given.force_multi else "--hostfile"
        raise LauncherError(_ONE_MACHINE.format(name))
    for name, way in {
        "autotuning": "`penstock plan` says what fits and how long a step takes",
        "elastic_training": "torchrun --max-restarts starts ranks again, and engine.load_checkpoint goes on with another number of them",
        "bind_core_list": "start each rank under taskset or numactl",
        "bind_cores_to_rank": "start each rank under taskset or numactl",
    }.items():
        if getattr(given, name):
            raise LauncherError(f"--{name} is not served: {way}")
    if given.module and given.no_python:
        raise LauncherError("--module and --no_python exclude each other")


def _lines_of(hostfile: str) -> List[str]:
    from ._small_files import read_text

    if not hostfile:
        return []
    try:
        return read_text(hostfile).splitlines()
    except FileNotFoundError:
        return []  # as DeepSpeed, whose default names a file that is rarely there


def _devices(text: str, name: str) -> Optional[List[int]]:
    """The GPUs of "localhost:0,1"; None: none are named."""
    if not text:
        return None
    host, _, slots = text.partition(":")
    if "@" in text or host not in ("localhost", "127.0.0.1", os.uname().nodename):
        raise LauncherError(_ONE_MACHINE.format(f"{name} {text}"))
    try:
        return [int(each) for each in slots.split(",")] if slots else None
    except ValueError:
        raise LauncherError(f"{name} {text}: GPUs are numbers, as localhost:0,1") from None


def _ranks(given: argparse.Namespace) -> List[Optional[int]]:
    """The GPU of each rank; None: it has none of its own."""
    include, exclude = _devices(given.include, "--include"), _devices(given.exclude, "--exclude")
    if given.include and given.exclude:
        raise LauncherError("--include and --exclude exclude each other")
    if (given.include or given.exclude) and given.num_gpus >= 0:
        raise LauncherError("--num_gpus goes with neither --include nor --exclude")
    if given.num_gpus == 0 or given.num_gpus < -1:
        raise LauncherError(f"--num_gpus {given.num_gpus}: at least 1")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        if include is not None or exclude is not None:
            raise LauncherError("--include and --exclude name GPUs, and torch sees none here; --num_gpus N starts N ranks on the processor")
        return [None] * max(1, given.num_gpus)
    chosen = [each for each in (include if include is not None else range(count)) if each not in (exclude or [])]
    if given.num_gpus > 0:
        chosen = chosen[: given.num_gpus]
    wrong = [each for each in chosen if not 0 <= each < count]
    if wrong or not chosen or given.num_gpus > count:
        asked = wrong[0] if wrong else given.num_gpus if given.num_gpus > count else "none"
        raise LauncherError(f"this machine has {count} GPUs, and {asked} of them was asked for")
    return list(chosen)


def _environment(given: argparse.Namespace, gpus: Sequence[Optional[int]], rank: int) -> Dict[str, str]:
    world = str(len(gpus))
    environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_SIZE=world, CROSS_RANK="0", CROSS_SIZE="1")
    environment.update(MASTER_ADDR=given.master_addr or "127.0.0.1", MASTER_PORT=str(given.master_port))
    if gpus[0] is not None:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if os.environ.get("CUDA_VISIBLE_DEVICES") else None
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(seen[each] if seen else str(each) for each in gpus if each is not None)
    return environment


def _command(given: argparse.Namespace, rank: int) -> List[str]:
    begin = [] if given.no_python else [sys.executable, "-u", "-m", "penstock.run", *(["-m"] if given.module else [])]
    return [*begin, given.script, *([] if given.no_local_rank else [f"--local_rank={rank}"]), *given.arguments]


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """All have ended when this returns: by themselves, or killed after GRACE."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def launch(arguments: Sequence[str]) -> int:
    """Runs the command. Returns its exit status: 0, that of the first rank that failed, 128 + N for a signal, 2 for wrong options."""
    from ._small_files import make_directory

    given = _parser().parse_args(list(arguments))
    logs = None if given.enable_each_rank_log == "None" else given.enable_each_rank_log
    try:
        _refuse(given)
        gpus = _ranks(given)
        if logs is not None:
            make_directory(logs, "--enable_each_rank_log")
    except (LauncherError, OSError, ValueError) as error:
        print(f"penstock.run deepspeed: {error}", file=sys.stderr)
        return 2
    heard: List[int] = []

    def hear(number: int, _: Any) -> None:
        heard.append(number)

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    processes: List["subprocess.Popen[bytes]"] = []
    try:
        for rank in range(len(gpus)):
            output = open(os.path.join(logs, f"rank_{rank}.log"), "wb") if logs is not None else None
            try:
                processes.append(subprocess.Popen(_command(given, rank), env=_environment(given, gpus, rank), stdout=output, stderr=output))
            finally:
                if output is not None:
                    output.close()
        status = 0
        while status == 0 and not heard and any(process.poll() is None for process in processes):
            time.sleep(0.05)
            status = next((each.returncode for each in processes if each.poll() not in (None, 0)), 0)
        status = status or next((each.returncode for each in processes if each.poll() not in (None, 0)), 0)
    except OSError as error:
        print(f"penstock.run deepspeed: {error}", file=sys.stderr)
        return 2
    finally:
        _end(processes)
        for number, handler in before.items():
            signal.signal(number, handler)
    if heard:
        return 128 + heard[0]
    return 128 - status if status < 0 else status

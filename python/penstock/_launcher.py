"""The command ``deepspeed`` on one machine: ``python -m penstock.run deepspeed [OPTIONS] SCRIPT [ARGUMENTS]``.

Starts a process of ``penstock.run SCRIPT --local_rank=K ARGUMENTS`` for each rank, with the environment that DeepSpeed's launcher gives
(RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE, CROSS_RANK, CROSS_SIZE, MASTER_ADDR, MASTER_PORT, CUDA_VISIBLE_DEVICES). Its options are
DeepSpeed's; those of several machines are refused, and a line says which have no effect. A hostfile of one machine gives its ranks. When a
rank fails, the others are ended, and its status is the command's.
"""

from __future__ import annotations

import argparse
import os
import re
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
    add("-q", "--quiet", action="store_true", help="do not say which options have no effect")
    add("--log_level", default="info", help="error and critical: as --quiet")
    add("-H", "--hostfile", default="", metavar="FILE", help="a line `HOST slots=N`, of this machine: N ranks")
    # Of several machines, and what has no place here.
    add("--num_nodes", type=int, default=-1, help=argparse.SUPPRESS)
    add("--node_rank", type=int, default=-1, help=argparse.SUPPRESS)
    for name in ("--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid", "--bind_cores_to_rank", "--elastic_training"):
        add(name, action="store_true", help=argparse.SUPPRESS)
    for name in ("--launcher", "--launcher_args", "--autotuning", "--bind_core_list", "--ssh_port", "--venv_script", "--min_elastic_nodes", "--max_elastic_nodes"):
        add(name, default=None, help=argparse.SUPPRESS)
    add("script", metavar="SCRIPT", help="what each rank runs")
    add("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="its arguments")
    return parser


# What an option would do, which one machine has no use for.
_WITHOUT_EFFECT = {
    "launcher": "reaches other machines, and this process starts the ranks of its own by itself",
    "launcher_args": "is for what reaches other machines, and this process starts the ranks of its own by itself",
    "ssh_port": "reaches other machines, and no ssh is used on one",
    "no_ssh": "is of several machines, and no ssh is used on one",
    "no_ssh_check": "is of several machines, and no ssh is used on one",
    "min_elastic_nodes": "counts machines, and there is one",
    "max_elastic_nodes": "counts machines, and there is one",
}
_REFUSED = {
    "autotuning": "`penstock plan` says what fits and how long a step takes",
    "elastic_training": "torchrun --max-restarts starts ranks again, and resume_ranks='any' or engine.load_checkpoint goes on with another number of them",
    "bind_core_list": "start each rank under taskset or numactl",
    "bind_cores_to_rank": "start each rank under taskset or numactl",
    "venv_script": "activate the environment before: the ranks have this command's Python and its environment",
    "save_pid": "the command is the launcher: its process id is `$!` of a shell that starts it with `&`, and SIGTERM to it ends all ranks",
}


def _refuse(given: argparse.Namespace, slots: Dict[str, int]) -> None:
    if given.num_nodes > 1 or given.node_rank > 0 or given.force_multi or len(slots) > 1:
        name = "--num_nodes" if given.num_nodes > 1 else "--node_rank" if given.node_rank > 0 else "--force_multi" if given.force_multi else "--hostfile"
        raise LauncherError(_ONE_MACHINE.format(name))
    for name, way in _REFUSED.items():
        if getattr(given, name):
            raise LauncherError(f"--{name} is not served: {way}")
    if given.module and given.no_python:
        raise LauncherError("--module and --no_python exclude each other")


def _note(given: argparse.Namespace) -> None:
    if given.quiet or given.log_level in ("error", "critical"):
        return
    for name, why in _WITHOUT_EFFECT.items():
        if getattr(given, name):
            print(f"penstock.run deepspeed: --{name} has no effect: it {why}", file=sys.stderr)


def _slots_of(hostfile: str) -> Dict[str, int]:
    """Ranks by host. LauncherError: a line is none of a host's."""
    from ._small_files import read_text

    slots: Dict[str, int] = {}
    if not hostfile:
        return slots
    try:
        lines = read_text(hostfile).splitlines()
    except FileNotFoundError:
        return slots  # as DeepSpeed, whose default names a file that is rarely there
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = re.match(r"\s*(\S+)\s+slots=(\d{1,6})\s*(#.*)?$", line)
        if found is None or found[1] in slots or int(found[2]) == 0:
            raise LauncherError(f"{hostfile}: line {number} is {line.strip()[:100]!r}, and must be `HOST slots=N`, once for each host, N at least 1")
        slots[found[1]] = int(found[2])
    return slots


def _devices(text: str, name: str, hosts: Sequence[str]) -> Optional[List[int]]:
    """The GPUs of "localhost:0,1"; None: none are named. hosts: other names of this machine."""
    if not text:
        return None
    host, _, slots = text.partition(":")
    if "@" in text or host not in ("localhost", "127.0.0.1", os.uname().nodename, *hosts):
        raise LauncherError(_ONE_MACHINE.format(f"{name} {text}"))
    try:
        return [int(each) for each in slots.split(",")] if slots else None
    except ValueError:
        raise LauncherError(f"{name} {text}: GPUs are numbers, as localhost:0,1") from None


def _ranks(given: argparse.Namespace, slots: Dict[str, int]) -> List[Optional[int]]:
    """The GPU of each rank; None: it has none of its own. slots: the hostfile's, of this machine; without any, all GPUs are."""
    include, exclude = (_devices(text, name, list(slots)) for text, name in ((given.include, "--include"), (given.exclude, "--exclude")))
    in_file = next(iter(slots.values()), 0)
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
        return [None] * (given.num_gpus if given.num_gpus > 0 else in_file or 1)
    here = range(in_file if in_file and given.num_gpus < 0 else count)
    outside = [each for each in include or [] if in_file and each >= in_file]
    if outside:
        raise LauncherError(f"--include {given.include}: {given.hostfile} has slots={in_file}, which are the GPUs 0 to {in_file - 1}")
    chosen = [each for each in (include if include is not None else here) if each not in (exclude or [])]
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
    from ._small_files import make_directory, open_regular

    given = _parser().parse_args(list(arguments))
    logs = None if given.enable_each_rank_log == "None" else given.enable_each_rank_log
    try:
        slots = _slots_of(given.hostfile)
        _refuse(given, slots)
        gpus = _ranks(given, slots)
        if logs is not None:
            make_directory(logs, "--enable_each_rank_log")
    except (LauncherError, OSError, ValueError) as error:
        print(f"penstock.run deepspeed: {error}", file=sys.stderr)
        return 2
    _note(given)
    heard: List[int] = []

    def hear(number: int, _: Any) -> None:
        heard.append(number)

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    processes: List["subprocess.Popen[bytes]"] = []
    try:
        for rank in range(len(gpus)):
            log = os.path.join(logs, f"rank_{rank}.log") if logs is not None else None
            output = os.fdopen(open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") if log is not None else None
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

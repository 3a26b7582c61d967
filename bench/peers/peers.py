"""What every comparison with a peer needs: an environment of its own, one memory limit, turns, and a table."""

import datetime
import json
import os
import pathlib
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import venv

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "release" / "bin"
WORK = ROOT / "build" / "peers"
OURS = WORK / "penstock"  # beside the environment, which other comparisons use
# What several comparisons install is one environment, and compiled once.
DEEPSPEED = ["torch", "transformers", "deepspeed", "safetensors", "ninja", "setuptools", "numpy"]
TRANSFORMERS = ["torch", "transformers", "accelerate", "safetensors", "numpy"]


class Environment:
    """A virtual environment with packages from PyPI, made once under build/peers/NAME."""

    def __init__(self, name, packages):
        self.directory = WORK / name
        self.python = self.directory / "bin" / "python"
        done = self.directory / "packages.txt"
        if done.exists() and done.read_text().split() == packages:
            return
        say(f"{name}: installing {' '.join(packages)} (once; torch alone is some 3 GB)")
        shutil.rmtree(self.directory, ignore_errors=True)
        venv.create(self.directory, with_pip=True)
        subprocess.run([self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], check=True)
        done.write_text("\n".join(packages))

    def versions(self, *packages):
        """'torch 2.9, ...' as they are installed."""
        code = "import importlib.metadata as m, sys; print(', '.join(f'{p} {m.version(p)}' for p in sys.argv[1:]))"
        return subprocess.run([self.python, "-c", code, *packages], check=True, capture_output=True, text=True).stdout.strip()


def install_wheel(environment):
    """What is wrong, or nothing. pip takes the wheel that is for its Python."""
    wheels = ROOT / "build" / "wheels"
    if not list(wheels.glob("penstock-*.whl")):
        return "no wheel in build/wheels: run make wheel"
    shutil.rmtree(OURS, ignore_errors=True)
    ran = subprocess.run(
        [environment.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--find-links", wheels, "--target", OURS, "penstock"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return ran.stderr.strip().splitlines()[-1] if ran.returncode else ""


class MemoryLimit:
    """A cgroup (v1 or v2) whose processes have so many bytes together, page cache included; 0: no bound."""

    def __init__(self, limit):
        self.directory = None
        if not limit:
            return
        for parent, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
            group = pathlib.Path(parent, f"penstock-peers-{os.getpid()}")
            if not pathlib.Path(parent, "cgroup.procs").exists():
                continue
            try:
                group.mkdir()
                (group / file).write_text(str(limit))
            except OSError as error:
                raise SystemExit(f"a memory limit needs a cgroup that this user may make: {group}: {error}") from error
            self.directory = group
            return
        raise SystemExit("a memory limit needs the memory cgroup at /sys/fs/cgroup")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.directory is not None:
            self.directory.rmdir()

    def wrap(self, command):
        if self.directory is None:
            return command
        join = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        return ["sh", "-c", join, str(self.directory), *map(str, command)]


def run(command, limit=0, timeout=3600, env=None):
    """Runs it to its end: exit status, last line of its errors, peak RSS and CPU seconds."""
    with MemoryLimit(limit) as group:
        process = subprocess.Popen(
            list(map(str, group.wrap(command))), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **(env or {})},
        )  # fmt: skip
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            errors += f"\nno end after {timeout} s"
    lines = [line for line in errors.splitlines() if line.strip()]
    if process.returncode < 0:  # what it said last is no reason
        lines.append(f"ended by {signal.Signals(-process.returncode).name}")
    return {"status": process.returncode, "output": output, "error": lines[-1] if lines else ""}


def own_usage():
    """Of the calling process so far: bytes that the kernel read and wrote for it, peak RSS, CPU seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "read": usage.ru_inblock * 512, "written": usage.ru_oublock * 512, "rss": usage.ru_maxrss * 1024,
        "cpu": usage.ru_utime + usage.ru_stime,
    }  # fmt: skip


def drop_caches():
    if os.geteuid() == 0:
        os.sync()
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")


def size(text):
    """Bytes of '512M', '4G', '0'; '' is 0."""
    units = {"K": 10, "M": 20, "G": 30}
    return int(float(text[:-1]) * (1 << units[text[-1]])) if text and text[-1] in units else int(text or 0)


def say(text):
    print(text, file=sys.stderr, flush=True)


def median(values):
    return statistics.median(values) if values else float("nan")


def machine():
    """Processor, memory, kernel, file system and date: what stands above every table."""
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{datetime.date.today()}, {os.cpu_count()} cores of {model}, {memory:.0f} GiB, Linux {platform.release().split('-')[0]}"


def table(title, head, rows, notes=()):
    """A Markdown section: title, machine, table, a line for each note."""
    lines = [f"### {title}", "", machine() + ".", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    lines += ["", *notes] if notes else []
    return "\n".join(lines) + "\n"


def write(text, out):
    print(text)
    if out:
        pathlib.Path(out).write_text(text)


def json_lines(text):
    """The lines of a worker's output that are JSON objects."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

"""What every comparison with a peer needs: an environment of its own, one memory limit, turns, and a table."""

import contextlib
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
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "release" / "bin"
WORK = ROOT / "build" / "peers"
RESULTS = ROOT / "bench" / "results" / "peers"
OURS = WORK / "penstock"  # beside the environment, which other comparisons use
# What several comparisons install is one environment, and compiled once.
DEEPSPEED = ["torch", "transformers", "deepspeed", "torchao", "safetensors", "ninja", "setuptools", "numpy"]
TRANSFORMERS = ["torch", "transformers", "accelerate", "safetensors", "numpy"]


class Environment:
    """A virtual environment with packages from PyPI, made once under build/peers/NAME.

    `compiled` are packages that are compiled against the others, which come first; `env` is for their compilers. What does not
    install is no exception: `error` says why, and whoever needs the environment is a row with it.
    """

    def __init__(self, name, packages, compiled=(), env=None):
        self.directory = WORK / name
        self.python = self.directory / "bin" / "python"
        self.error = ""
        wanted = [*packages, *compiled]
        done = self.directory / "packages.txt"
        if done.exists() and done.read_text().split() == wanted:
            return
        say(f"{name}: installing {' '.join(wanted)} (once; torch alone is some 3 GB)")
        shutil.rmtree(self.directory, ignore_errors=True)
        made = run([sys.executable, "-m", "venv", self.directory])
        if made["status"] != 0:
            self.error = f"no virtual environment (Debian: python3-venv): {made['error']}"
            return
        for some, flags in ((packages, []), (compiled, ["--no-build-isolation"])):
            if not some:
                continue
            ran = run([self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *flags, *some], env=env)
            if ran["status"] != 0:
                self.error = f"{' '.join(some)} did not install: {ran['error']}"
                say(f"{name}: {self.error}")
                return
        done.write_text("\n".join(wanted))

    def versions(self, *packages):
        """'torch 2.9, ...' as they are installed."""
        if self.error:
            return ", ".join(f"no {package}" for package in packages)
        code = "import importlib.metadata as m, sys; print(', '.join(f'{p} {m.version(p)}' for p in sys.argv[1:]))"
        return subprocess.run([self.python, "-c", code, *packages], check=True, capture_output=True, text=True).stdout.strip()


def make(target, product):
    """What is wrong, or nothing: builds what is not there, or older than the sources."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "*.cc", "*.h", "*.cu", "python/penstock/*.py", ":!tests", ":!bench", ":!examples"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    newest = max((file.stat().st_mtime for name in listed.stdout.split() if (file := ROOT / name).exists()), default=0)
    made = [file.stat().st_mtime for file in product.parent.glob(product.name)]
    if made and max(made) > newest:
        return ""
    say(f"{product.relative_to(ROOT)} is {'older than the sources' if made else 'not there'}: make {target}")
    if subprocess.run(["make", "-C", ROOT, target], stdout=sys.stderr, check=False).returncode != 0:
        return f"make {target} failed"
    return "" if list(product.parent.glob(product.name)) else f"make {target} left no {product}"


def install_wheel(environment):
    """What is wrong, or nothing. pip takes the wheel that is for its Python."""
    if error := environment.error or make("wheel", ROOT / "build" / "wheels" / "penstock-*.whl"):
        return error
    shutil.rmtree(OURS, ignore_errors=True)
    ran = run([
        environment.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--find-links",
        ROOT / "build" / "wheels", "--target", OURS, "penstock",
    ])  # fmt: skip
    return ran["error"] if ran["status"] else ""


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
    """Runs it to its end: exit status, output, and the last line of its errors.

    After `timeout` seconds it is killed with all processes that it began, and what it wrote until then is the output. It is waited
    for no longer than some seconds more, also where the kernel does not let it go: a device's driver may hold it.
    """
    with MemoryLimit(limit) as group, tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            list(map(str, group.wrap(command))), stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env={**os.environ, **(env or {})},
            start_new_session=True,
        )  # fmt: skip
        late = False
        try:
            process.wait(timeout=timeout)
        except BaseException as error:
            late = isinstance(error, subprocess.TimeoutExpired)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            if not late:
                raise
        said = []
        for file in (output, errors):
            file.seek(0)
            said.append(file.read())
    lines = [line for line in said[1].splitlines() if line.strip()]
    if late:
        lines.append(f"no end after {timeout:.0f} s")
    elif process.returncode < 0:  # what it said last is no reason
        lines.append(f"ended by {signal.Signals(-process.returncode).name}")
    return {"status": -signal.SIGKILL if late else process.returncode, "late": late, "output": said[0], "error": lines[-1] if lines else ""}


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
    """Prints a table, and writes it to a file of bench/results/peers or to another one; "-" only prints."""
    print(text)
    if out == "-":
        return
    path = pathlib.Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    say(f"written to {path}")


def json_lines(text):
    """The whole lines of a worker's output that are JSON objects: the last one of a worker that was killed may be none."""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.startswith("{")]

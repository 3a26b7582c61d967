"""DeepSpeed's launcher on one machine: `python -m penstock.run deepspeed ...`."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")

TELLS = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT")
import deepspeed
told = {"arguments": sys.argv[1:], "environment": {name: os.environ[name] for name in names}, "file": deepspeed.__file__}
with open(os.path.join(os.environ["OUT"], os.environ["RANK"]), "w") as out:
    json.dump(told, out)
"""


def command(*arguments):
    return [sys.executable, "-W", "ignore", "-m", "penstock.run", "deepspeed", *map(str, arguments)]


def run(out, *arguments):
    return subprocess.run(command(*arguments), env=dict(os.environ, OUT=str(out)), capture_output=True, text=True, timeout=300)


def script(tmp_path, text, name="script.py"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_each_rank_is_told_what_deepspeeds_launcher_tells(tmp_path):
    ran = run(tmp_path, "--num_gpus", 2, "--master_port", 29876, script(tmp_path, TELLS), "--deepspeed", "config.json")
    assert ran.returncode == 0, ran.stderr
    for rank in range(2):
        told = json.loads((tmp_path / str(rank)).read_text())
        assert told["arguments"] == [f"--local_rank={rank}", "--deepspeed", "config.json"]
        expected = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
        assert told["environment"] == dict(expected, MASTER_ADDR="127.0.0.1", MASTER_PORT="29876")
        assert "penstock" in told["file"]
    assert not (tmp_path / "2").exists()


def test_a_module_and_a_program_are_started_as_they_are(tmp_path):
    script(tmp_path, TELLS, "told_by_a_module.py")
    ran = subprocess.run(command("--module", "--no_local_rank", "told_by_a_module", "x"), env=dict(os.environ, OUT=str(tmp_path)), cwd=tmp_path,
                         capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert json.loads((tmp_path / "0").read_text())["arguments"] == ["x"]
    logs = tmp_path / "logs"
    ran = run(tmp_path, "--no_python", "--num_gpus", 2, "--enable_each_rank_log", logs, "/bin/echo", "hello")
    assert ran.returncode == 0 and ran.stdout == "", ran.stderr
    assert [(logs / f"rank_{rank}.log").read_text() for rank in range(2)] == [f"--local_rank={rank} hello\n" for rank in range(2)]
    (logs / "rank_1.log").unlink()
    os.mkfifo(logs / "rank_1.log")
    ran = run(tmp_path, "--no_python", "--num_gpus", 2, "--enable_each_rank_log", logs, "/bin/echo", "hello")
    assert ran.returncode == 2 and "not a regular file" in ran.stderr and "rank_1.log" in ran.stderr and len(ran.stderr.splitlines()) == 1


def test_a_rank_that_fails_ends_the_others_and_is_the_commands_status(tmp_path):
    text = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(1000)\n"
    ran = run(tmp_path, "--num_gpus", 3, script(tmp_path, text))
    assert ran.returncode == 7, ran.stderr


def test_a_signal_ends_all_ranks(tmp_path):
    text = "import os, time\nopen(os.path.join(os.environ['OUT'], os.environ['RANK']), 'w').write(str(os.getpid()))\ntime.sleep(1000)\n"
    with subprocess.Popen(command("--num_gpus", 2, script(tmp_path, text)), env=dict(os.environ, OUT=str(tmp_path))) as started:
        files = [tmp_path / "0", tmp_path / "1"]
        while started.poll() is None and not all(file.exists() and file.read_text() for file in files):
            time.sleep(0.05)
        started.send_signal(signal.SIGTERM)
        assert started.wait(timeout=100) == 128 + signal.SIGTERM
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


@pytest.mark.parametrize(
    "options, says",
    [
        (["--num_nodes", "2"], "--num_nodes is of several machines"),
        (["--include", "worker-1:0"], "--include worker-1:0 is of several machines"),
        (["--hostfile", "HOSTS"], "--hostfile is of several machines"),
        (["--num_gpus", "0"], "--num_gpus 0: at least 1"),
        (["--autotuning", "run"], "--autotuning is not served"),
        (["--bind_cores_to_rank"], "taskset"),
        (["--module", "--no_python"], "exclude each other"),
        (["--no_such_option"], "--no_such_option"),
        (["--venv_script", "venv/bin/activate"], "--venv_script is not served: activate the environment before"),
        (["--save_pid"], "--save_pid is not served: the command is the launcher"),
        (["--elastic_training", "--max_elastic_nodes", "2"], "--elastic_training is not served"),
        (["--hostfile", "BAD"], "line 1 is 'localhost slots=many', and must be `HOST slots=N`"),
        (["--hostfile", "TWICE"], "line 2 is 'localhost slots=1', and must be"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_before_anything_is_started(tmp_path, options, says):
    hosts = tmp_path / "hosts"
    hosts.write_text("# both\nworker-0 slots=1\nworker-1 slots=1\n")
    files = {"HOSTS": hosts, "BAD": tmp_path / "bad", "TWICE": tmp_path / "twice"}
    files["BAD"].write_text("localhost slots=many\n")
    files["TWICE"].write_text("localhost slots=1\nlocalhost slots=1\n")
    ran = run(tmp_path, *[str(files.get(each, each)) for each in options], script(tmp_path, TELLS))
    assert ran.returncode == 2
    assert says in ran.stderr
    assert not (tmp_path / "0").exists()


def test_the_hostfile_of_one_machine_and_the_missing_default_are_no_matter(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=1\n")
    for given in (hosts, tmp_path / "none"):
        assert run(tmp_path, "--hostfile", given, "--num_gpus", 1, script(tmp_path, TELLS)).returncode == 0


# In DeepSpeed too they do nothing on one machine.
WITHOUT_EFFECT = {
    "--launcher": ["pdsh"], "--launcher_args": ["x"], "--ssh_port": ["22"], "--no_ssh": [], "--no_ssh_check": [], "--min_elastic_nodes": ["1"],
    "--max_elastic_nodes": ["2"],
}  # fmt: skip


def test_options_without_effect_are_named_one_a_line(tmp_path):
    options = [each for name, values in WITHOUT_EFFECT.items() for each in (name, *values)]
    ran = run(tmp_path, *options, "--no_python", "--no_local_rank", "/bin/echo", "started")
    assert (ran.returncode, ran.stdout) == (0, "started\n"), ran.stderr
    lines = [line for line in ran.stderr.splitlines() if line.startswith("penstock.run deepspeed: ")]
    assert [line.split()[2] for line in lines] == list(WITHOUT_EFFECT) and all("has no effect: it " in line for line in lines)
    for quiet in (["--quiet"], ["--log_level", "error"]):
        assert run(tmp_path, *quiet, *options, "--no_python", "/bin/echo", "started").stderr == ""


def test_slots_of_a_hostfile_of_one_machine_are_ranks(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("# one\n\nworker-0   slots=3  # as many\n")
    start = ["--no_python", "--no_local_rank", "/bin/echo", "started"]
    for options, count in (([], 3), (["--num_gpus", 2], 2)):
        ran = run(tmp_path, "--hostfile", hosts, *options, *start)
        assert (ran.returncode, ran.stdout) == (0, "started\n" * count), ran.stderr


def test_slots_of_a_hostfile_are_gpus_where_there_are(monkeypatch):
    from penstock import _launcher

    def ranks(*options, slots):
        return _launcher._ranks(_launcher._parser().parse_args([*options, "script.py"]), slots)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert ranks(slots={}) == [0, 1, 2, 3] and ranks(slots={"worker-0": 2}) == [0, 1] and ranks("--num_gpus", "3", slots={"worker-0": 2}) == [0, 1, 2]
    assert ranks("--include", "worker-0:1", slots={"worker-0": 2}) == [1] and ranks("--exclude", "localhost:0", slots={"worker-0": 2}) == [1]
    with pytest.raises(_launcher.LauncherError, match="slots=2, which are the GPUs 0 to 1"):
        ranks("--include", "localhost:3", slots={"worker-0": 2})
    with pytest.raises(_launcher.LauncherError, match="this machine has 4 GPUs"):
        ranks(slots={"worker-0": 8})


def test_the_launchers_own_module_is_the_command(tmp_path):
    start = [sys.executable, "-m", "penstock.run", "-m", "deepspeed.launcher.runner", "--num_gpus", "1", str(script(tmp_path, TELLS)), "x"]
    ran = subprocess.run(start, env=dict(os.environ, OUT=str(tmp_path)), capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert json.loads((tmp_path / "0").read_text())["arguments"] == ["--local_rank=0", "x"]


# The second is what is found where DeepSpeed itself is installed.
@pytest.mark.parametrize("installed", [False, True])
def test_the_wheels_command_is_deepspeeds_where_that_is_installed(tmp_path, installed):
    (tmp_path / "deepspeed-0.dist-info").mkdir()
    (tmp_path / "deepspeed-0.dist-info" / "METADATA").write_text("Name: deepspeed\nVersion: 0\n")
    (tmp_path / "deepspeed" / "launcher").mkdir(parents=True)
    (tmp_path / "deepspeed" / "__init__.py").touch()
    (tmp_path / "deepspeed" / "launcher" / "runner.py").write_text("def main(): print('its own')")
    program = (
        "import sys; from penstock import _programs; sys.argv[0] = 'deepspeed'\n"
        f"sys.path[:] = [each for each in sys.path if 'site-packages' not in each]; {installed} and sys.path.insert(0, {str(tmp_path)!r})\n"
        f"import penstock._launcher as launcher; launcher._ranks = lambda *_: [None]; launcher._command = lambda given, rank: ['echo', given.script]\n"
        "_programs.deepspeed()"
    )
    start = [sys.executable, "-c", program, "--num_gpus", "1", "script.py"]
    ran = subprocess.run(start, env=dict(os.environ, OUT=str(tmp_path)), capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout) == (0, "its own\n" if installed else "script.py\n"), ran.stderr


def test_a_script_that_cannot_be_looked_at_is_no_absent_one(tmp_path):
    (tmp_path / "loop.py").symlink_to("loop.py")
    for name, told in (("none.py", "no script none.py"), ("loop.py", "symbolic links: 'loop.py'")):
        ran = subprocess.run([sys.executable, "-m", "penstock.run", name], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 1 and told in ran.stderr and len(ran.stderr.splitlines()) == 1, ran.stderr

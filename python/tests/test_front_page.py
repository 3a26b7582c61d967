"""What the repository's README and quickstart show is what runs."""

import os
import re
import runpy
import shlex
import subprocess
import sys

import pytest

ROOT = os.path.join(os.path.dirname(__file__), "..", "..")
README = os.path.join(ROOT, "README.md")
QUICKSTART = os.path.join(ROOT, "docs", "quickstart.md")
pytestmark = pytest.mark.skipif(not os.path.isfile(README), reason="needs README.md of the repository")


def blocks(language):
    """The blocks of the page that begin with ```language."""
    found, block = [], None
    with open(README) as file:
        for line in file:
            if block is None:
                if line.startswith("```"):
                    block = [line[3:].strip()]
            elif line.startswith("```"):
                if block[0] == language:
                    found.append("".join(block[1:]))
                block = None
            else:
                block.append(line)
    return found


def run(script, directory):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=600, cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("step ")]


def test_the_ten_lines_train_beyond_memory_and_go_on(directory):
    pytest.importorskip("transformers")
    (script,) = blocks("python")
    os.symlink(os.path.abspath(README), os.path.join(directory, "README.md"))
    report = """
plan = engine.plan()
assert plan["state_bytes"] > 4.8 * plan["host_memory_bytes"], plan
"""
    lines = run(script.replace("engine.close()", report + "engine.close()"), directory)
    assert [line.split(":")[0] for line in lines] == [f"step {n}" for n in range(1, 21)]
    losses = [float(line.rsplit(" ", 1)[1]) for line in lines]
    assert sum(losses[-5:]) < sum(losses[:5])
    lines = run(script.replace("< 20", "< 22"), directory)
    assert [line.split(":")[0] for line in lines] == ["step 21", "step 22"]


def commands():
    for block in blocks(""):
        for line in block.splitlines():
            if line.startswith(("penstock ", "torchrun ")):
                words = shlex.split(line, comments=True)
                yield words[words.index("penstock") + 1 :]


def test_every_command_names_a_verb_and_flags_that_exist():
    program = os.environ.get("PENSTOCK_PROGRAM") or os.path.join(ROOT, "build", "release", "bin", "penstock")
    if not os.path.exists(program):
        pytest.skip("needs the programs: make build")
    found = list(commands())
    assert len(found) >= 8
    for verb, *words in found:
        shown = subprocess.run([program, verb, "--help"], capture_output=True, text=True, timeout=60)
        assert shown.returncode == 0, (verb, shown.stderr)
        for word in words:
            if word.startswith("--"):
                assert re.search(rf"(?<![\w-]){word}(?![\w-])", shown.stdout), (verb, word)


@pytest.fixture
def quickstart(directory, monkeypatch):
    """Saves the programs of docs/quickstart.md in an empty directory and goes there; returns a function that runs one in this process."""
    with open(QUICKSTART) as file:
        programs = dict(re.findall(r"[Ss]ave this as `(\w+\.py)`:\n\n```python\n(.*?)```", file.read(), flags=re.DOTALL))
    assert set(programs) == {"first.py", "model.py", "plan.py", "train.py"}
    for name, text in programs.items():
        with open(os.path.join(directory, name), "w") as file:
            file.write(text)
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    yield lambda name: runpy.run_path(os.path.join(directory, name), run_name="__main__")
    sys.modules.pop("model", None)


def steps_of(text):
    return [line for line in text.splitlines() if line.startswith("step ")]


def test_the_quickstart_makes_a_first_step_and_plans_what_does_not_fit(quickstart, capsys):
    pytest.importorskip("torch")
    quickstart("first.py")
    assert re.fullmatch(r"step 1: loss \d+\.\d{3}", capsys.readouterr().out.strip())
    assert os.listdir("first")
    quickstart("plan.py")
    told = capsys.readouterr().out
    assert float(re.search(r"([\d.]+) times the host memory budget", told).group(1)) > 4
    assert int(re.search(r"smallest budget that works: (\d+)", told).group(1)) <= 12 << 20
    assert "the forward was not followed" not in told and not os.path.exists("run")


def test_the_quickstarts_training_has_the_same_losses_when_it_is_killed_and_resumed(quickstart, capsys):
    pytest.importorskip("torch")
    quickstart("train.py")
    whole = steps_of(capsys.readouterr().out)
    assert [line.split(":")[0] for line in whole] == [f"step {n}" for n in range(1, 21)]
    with open("run.html") as file:
        assert file.read().lstrip().lower().startswith("<!doctype html")
    os.rename("run", "unbroken")

    killed = []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    with subprocess.Popen([sys.executable, "-W", "ignore", "train.py"], stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout:
            killed.append(line.rstrip("\n"))
            if len(killed) == 5:
                process.kill()
                break
    assert killed == whole[:5]
    quickstart("train.py")
    resumed = steps_of(capsys.readouterr().out)
    assert 14 <= len(resumed) <= 16  # step 5 may be committed or not, step 6 too
    assert resumed == whole[-len(resumed) :]


@pytest.mark.parametrize("room, but", [("scripts", ()), ("bench", ("CMakeLists.txt",)), ("bench/peers", ()), ("bench/gpu", ()), ("examples/python", ())])
def test_every_script_and_benchmark_is_named_in_its_rooms_page(room, but):
    with open(os.path.join(ROOT, *room.split("/")[:1], "README.md")) as file:
        page = file.read()
    for name in sorted(os.listdir(os.path.join(ROOT, room))):
        base, kind = os.path.splitext(name)
        if name.startswith(".") or name in (*but, "README.md", "__pycache__") or kind == ".h" or os.path.isdir(os.path.join(ROOT, room, name)):
            continue
        named = rf"[`(](\w+/)?{re.escape(name if kind != '.cc' else base)}(\.cc)?( [^`]*)?[`)]"
        assert re.search(named, page), f"{room}/README.md does not name {name}"


def pages():
    """The pages of the repository: their texts without code, by path."""
    found = {}
    for directory, names, files in os.walk(ROOT):
        names[:] = [name for name in names if not name.startswith(".") and name not in ("build", "node_modules", "__pycache__")]
        for name in files:
            if name.endswith(".md"):
                path = os.path.normpath(os.path.join(directory, name))
                with open(path) as file:
                    found[path] = re.sub(r"```.*?```", "", file.read(), flags=re.DOTALL)
    return found


def anchor(heading):
    """What GitHub makes of a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def test_every_link_of_a_page_leads_to_a_file_and_a_heading():
    texts = pages()
    assert len(texts) > 30
    headings = {path: {anchor(each) for each in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)} for path, text in texts.items()}
    astray = []
    for path, text in texts.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if link.startswith(("http:", "https:", "mailto:")):
                continue
            place, _, heading = link.partition("#")
            target = os.path.normpath(os.path.join(os.path.dirname(path), place)) if place else path
            if not os.path.exists(target) or (heading and target in headings and heading not in headings[target]):
                astray.append(f"{os.path.relpath(path, ROOT)}: {link}")
    assert not astray, astray

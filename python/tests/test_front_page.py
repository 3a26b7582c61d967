"""What the repository's README shows is what runs."""

import os
import re
import shlex
import subprocess
import sys

import pytest

ROOT = os.path.join(os.path.dirname(__file__), "..", "..")
README = os.path.join(ROOT, "README.md")
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

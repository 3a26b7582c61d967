"""The programs of examples/python, as a user runs them."""

import os
import subprocess
import sys

import pytest

EXAMPLES = os.path.join(os.path.dirname(__file__), "..", "..", "examples", "python")


@pytest.mark.skipif(not os.path.isdir(EXAMPLES), reason="needs examples/python of the repository")
@pytest.mark.parametrize("name", ["optim.py"])
def test_example(name, directory):
    done = subprocess.run(
        [sys.executable, os.path.join(EXAMPLES, name), str(directory)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.listdir(directory) == []

"""The programs of examples/python, as a user runs them."""

import json
import os
import subprocess
import sys

import pytest

EXAMPLES = os.path.join(os.path.dirname(__file__), "..", "..", "examples", "python")


@pytest.mark.skipif(not os.path.isdir(EXAMPLES), reason="needs examples/python of the repository")
@pytest.mark.parametrize("name", ["optim.py", "offload.py"])
def test_example(name, directory):
    done = subprocess.run(
        [sys.executable, os.path.join(EXAMPLES, name), str(directory)], capture_output=True, text=True, timeout=900,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.listdir(directory) == []


@pytest.mark.skipif(not os.path.isdir(EXAMPLES), reason="needs examples/python of the repository")
def test_the_engine_goes_on(directory):
    pytest.importorskip("transformers")

    def run(steps):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", os.path.join(EXAMPLES, "engine.py"), str(directory), str(steps)], capture_output=True,
            text=True, timeout=900, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return [line for line in done.stdout.splitlines() if line.startswith("step ")]

    assert len(run(3)) == 3
    later = run(5)
    assert [line.split(":")[0] for line in later] == ["step 4", "step 5"]


@pytest.mark.skipif(not os.path.isdir(EXAMPLES), reason="needs examples/python of the repository")
def test_over_and_back(directory):
    """What it exports is the universal format, and it goes on from there with `load_universal`, as DeepSpeed does."""
    pytest.importorskip("transformers")
    back = os.path.join(directory, "back")

    def losses(*arguments):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "penstock.run", os.path.join(EXAMPLES, "over_and_back.py"), *arguments], capture_output=True,
            text=True, timeout=900, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return [line for line in done.stdout.splitlines() if line.startswith("step ")]

    whole = losses("--until", "6")
    assert losses("--until", "4", "--save", back) == whole[:4]
    assert os.path.exists(os.path.join(back, "latest_universal"))
    assert losses("--until", "6", "--load", back) == whole[4:]


NOTEBOOK = os.path.join(EXAMPLES, "first_steps.ipynb")


@pytest.mark.skipif(not os.path.isfile(NOTEBOOK), reason="needs examples/python of the repository")
def test_the_notebook_is_kept_without_outputs():
    with open(NOTEBOOK) as file:
        cells = json.load(file)["cells"]
    assert os.path.getsize(NOTEBOOK) < 100_000
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.skipif(not os.path.isfile(NOTEBOOK), reason="needs examples/python of the repository")
def test_the_notebook_runs_and_shows_plan_and_report(directory, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel: pip install nbclient ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: pip install nbclient ipykernel")
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel: pip install nbclient ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, sys.path)))
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, os.path.join(directory, "jupyter"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(directory)}}
    nbclient.NotebookClient(notebook, timeout=900, startup_timeout=900, kernel_name="python3", resources=place).execute()
    pages = [output["data"]["text/html"] for cell in notebook.cells for output in cell.get("outputs", []) if "text/html" in output.get("data", {})]
    assert len(pages) == 2 and all(page.startswith("<iframe") for page in pages)

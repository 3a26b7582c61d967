"""The wheel's console scripts."""

import json
import subprocess
import sys

import pytest

RUN = "import sys; from penstock import _programs; sys.argv[0] = sys.argv[1]; sys.argv.pop(1); getattr(_programs, sys.argv[0])()"


@pytest.fixture
def program(in_child):
    def run(*arguments):
        return in_child(RUN, *arguments)

    return run


def test_verbs_without_libtorch(program, tmp_path):
    status, out, err = program("penstock", "--help")
    assert status == 0 and "inspect" in out and "train" in out and not err
    assert program("penstock", "--version")[1].startswith("penstock ")
    assert program("penstock", "estimate", "--params", "1000000", "--largest-layer", "1000")[0] == 0
    status, out, err = program("penstock", "env", "--json", "--dir", tmp_path)
    assert status == 0 and json.loads(out)
    status, _, err = program("penstock", "inspect", tmp_path)
    assert status != 0 and len(err.strip().splitlines()) == 1 and str(tmp_path) in err


def test_what_needs_libtorch_says_so(program):
    for verb, words in (("train", "train needs LibTorch"), ("plan", "plan needs LibTorch"), ("export", "export needs LibTorch")):
        status, out, err = program("penstock", verb, "--steps", "3")
        assert status == 2 and not out and len(err.strip().splitlines()) == 1 and words in err
    status, out, err = program("penstock", "generate", "--steps", "3")
    assert status == 2 and not out and len(err.strip().splitlines()) == 1 and "unknown flag --steps" in err
    status, _, err = program("penstock", "inspct")
    assert status == 2 and "inspect" in err
    assert program("penstock")[0] == 2


def test_ds_io(program, tmp_path):
    folder = tmp_path / "drive"
    folder.mkdir()
    for way in ((), ("--read",)):
        status, out, err = program("ds_io", "--folder", folder, "--io_size", "8M", "--loops", "1", *way)
        assert status == 0, err
        assert "E2E" in out
    status, _, err = program("ds_io", "--folder", folder, "--no-such-flag")
    assert status == 2 and err


def test_ds_nvme_tune(program):
    status, out, _ = program("ds_nvme_tune", "--help")
    assert status == 0 and "--nvme_dir" in out


def test_a_run_of_the_engine_is_inspected_and_verified(program, tmp_path):
    torch = pytest.importorskip("torch")
    import penstock
    from engine_models import batches, net

    model = net()
    engine = penstock.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), state_dir=str(tmp_path / "run"))[0]
    with engine:
        for batch in batches(2):
            engine.backward(engine(**batch))
            engine.step()
    status, out, err = program("penstock", "inspect", tmp_path / "run")
    assert status == 0, err
    assert "step" in out
    assert program("penstock", "verify", tmp_path / "run")[0] == 0


def test_scripts_are_declared():
    tomllib = pytest.importorskip("tomllib")
    import pathlib

    declared = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    from penstock import _programs

    for name, where in declared.items():
        module, _, function = where.partition(":")
        assert module == "penstock._programs" and callable(getattr(_programs, function)) and function == name
    assert subprocess.run([sys.executable, "-c", "import penstock._programs, sys; assert 'torch' not in sys.modules"]).returncode == 0

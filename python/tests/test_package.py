"""The wheel: what it links, what it brings, and that importing it costs nobody torch."""

import glob
import os
import re
import shutil
import subprocess

import pytest

import penstock
from penstock import _core


def needed(path):
    out = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.*)\]", out)


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf (binutils)")
def test_the_extension_knows_nothing_of_libtorch():
    for library in needed(_core.__file__):
        assert not re.search(r"torch|c10|gloo|nccl|cuda|uring|libaio|xxhash|deflate", library), library


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm (binutils)")
def test_the_extension_exports_its_entry_alone():
    out = subprocess.run(["nm", "-D", "--defined-only", _core.__file__], capture_output=True, text=True, check=True).stdout
    names = [line.split()[2] for line in out.splitlines() if line.split()[1] not in "A"]
    assert [re.sub("@.*", "", name) for name in names] == ["PyInit__core"]
    undefined = subprocess.run(["nm", "-D", "--undefined-only", _core.__file__], capture_output=True, text=True, check=True)
    assert not re.search(r"torch|c10|at::", undefined.stdout)


def test_importing_needs_no_torch_and_no_numpy(in_child):
    status, out, error = in_child(
        """
        import sys
        import penstock, penstock.ops.aio
        print(sorted(m for m in ("torch", "numpy") if m in sys.modules))
        """
    )
    assert (status, out.strip()) == (0, "[]"), error


def test_it_is_typed_and_has_a_version():
    assert os.path.exists(os.path.join(os.path.dirname(penstock.__file__), "py.typed"))
    assert re.fullmatch(r"\d+\.\d+\.\d+", penstock.__version__)
    assert glob.glob(os.path.join(os.path.dirname(penstock.__file__), "_core.pyi"))

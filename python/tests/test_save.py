"""penstock.save and penstock.load: torch's files, whole or not at all."""

import errno
import fcntl
import io
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import traceback

import pytest
import torch

import penstock
from penstock import _files


def model():
    torch.manual_seed(0)
    big = torch.randn(5_000_000)
    return {
        "big": big, "view": big[10:20], "half": torch.randn(1000, 1001).to(torch.bfloat16), "empty": torch.empty(0, 3),
        "odd": torch.arange(7, dtype=torch.uint8), "step": 3, "nested": [{"name": "x", "t": torch.randn(3, 3).t()}],
    }  # fmt: skip


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return a == b


def test_the_bytes_are_torchs_and_each_reads_the_others(directory):
    given = model()
    penstock.save(given, directory / "ours.pt")
    memory = io.BytesIO()
    torch.save(given, memory)
    assert (directory / "ours.pt").read_bytes() == memory.getvalue()
    assert same(torch.load(directory / "ours.pt"), given)
    penstock.save(given, directory / "ours.pt", crc32=False)
    assert same(torch.load(directory / "ours.pt"), given)
    if hasattr(torch.serialization, "get_crc32_options"):
        assert torch.serialization.get_crc32_options() is True
    torch.save(given, directory / "torch.pt")
    for name in ("ours.pt", "torch.pt"):
        assert same(penstock.load(directory / name), given)
        assert same(penstock.load(str(directory / name), map_location="cpu", weights_only=True), given)
    assert sorted(os.listdir(directory)) == ["ours.pt", "torch.pt"]


@pytest.mark.parametrize("elements", [0, 1, 1000, (4 << 20) // 4 - 300, (4 << 20) // 4, (40 << 20) // 4 + 13])
def test_any_size(elements, directory):
    given = {"t": torch.arange(elements, dtype=torch.int32)}
    penstock.save(given, directory / "file")
    assert same(torch.load(directory / "file"), given) and same(penstock.load(directory / "file"), given)


def test_a_file_keeps_its_mode_and_a_link_its_place(directory):
    penstock.save({"a": 1}, directory / "file")
    plain = directory / "plain"
    plain.touch()
    assert (directory / "file").stat().st_mode == plain.stat().st_mode  # as the umask says
    os.chmod(directory / "file", 0o640)
    os.symlink("file", directory / "link")
    penstock.save({"a": 2}, directory / "link")
    assert os.path.islink(directory / "link") and torch.load(directory / "file") == {"a": 2}
    assert (directory / "file").stat().st_mode & 0o7777 == 0o640


def test_file_systems_without_nameless_files(directory, monkeypatch):
    real = os.open

    def refuse(path, flags, *arguments, **keywords):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
        return real(path, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", refuse)
    penstock.save({"a": torch.ones(10)}, directory / "file")
    with pytest.raises(Exception, match="pickle"):
        penstock.save({"a": lambda: 1}, directory / "file")
    assert same(torch.load(directory / "file"), {"a": torch.ones(10)}) and os.listdir(directory) == ["file"]


def test_what_goes_wrong_leaves_the_old_file(directory, in_child):
    penstock.save({"a": 1}, directory / "file")
    with pytest.raises(Exception, match="pickle"):
        penstock.save({"big": torch.zeros(100_000), "bad": lambda: 1}, directory / "file")
    with pytest.raises(FileNotFoundError):
        penstock.save({}, directory / "none" / "file")
    with pytest.raises(IsADirectoryError):
        penstock.save({}, directory)
    with pytest.raises(TypeError, match="torch.save"):
        penstock.save({}, io.BytesIO())
    with pytest.raises(FileNotFoundError):
        penstock.load(directory / "none")
    with pytest.raises(TypeError, match="torch.load"):
        penstock.load(io.BytesIO())
    status, out, error = in_child(
        """
        import errno, resource, sys, torch, penstock
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
        try:
            penstock.save({"a": torch.zeros(10_000_000)}, sys.argv[1])
        except OSError as failure:
            assert failure.errno == errno.EFBIG, failure
            print("told")
        """,
        directory / "file",
    )
    assert (status, out.strip()) == (0, "told"), error
    assert torch.load(directory / "file") == {"a": 1} and os.listdir(directory) == ["file"]


def test_an_interrupt_leaves_the_old_file(directory, monkeypatch):
    penstock.save({"a": 1}, directory / "file")

    def interrupted(transfer):
        raise KeyboardInterrupt

    monkeypatch.setattr(_files, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        penstock.save({"a": torch.zeros(20_000_000)}, directory / "file")
    monkeypatch.undo()
    assert torch.load(directory / "file") == {"a": 1} and os.listdir(directory) == ["file"]


def test_a_kill_at_any_moment_leaves_a_whole_file(directory):
    """The child saves one after another; whatever stands there when it is killed is one of them, whole."""
    path = directory / "file"
    text = f"""
import torch, penstock
for i in range(10**9):
    penstock.save({{"i": i, "t": torch.full((3_000_000,), float(i))}}, {str(path)!r})
    print(i, flush=True)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    last = -1
    for _ in range(3):
        last = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    child.wait()
    told = [last, *map(int, child.stdout.read().split())]
    child.stdout.close()
    found = torch.load(path)
    assert found["i"] >= told[-1] and (found["t"] == found["i"]).all()
    assert len([name for name in os.listdir(directory) if name != "file"]) <= 1  # killed between link and rename


def test_what_is_no_regular_file_is_not_replaced(directory):
    os.mkfifo(directory / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        penstock.save({"a": 1}, directory / "pipe")
    assert stat.S_ISFIFO(os.stat(directory / "pipe").st_mode) and os.listdir(directory) == ["pipe"]


def test_no_writer_of_whole_files_takes_the_place_of_a_pipe(directory, never_waits):
    os.mkfifo(directory / "pipe")
    (directory / "below").mkdir()
    with pytest.raises(OSError, match="no regular file"):
        with _files.whole_file(str(directory / "pipe")):
            pass
    with pytest.raises(IsADirectoryError):
        with _files.whole_file(str(directory / "below")):
            pass
    assert stat.S_ISFIFO(os.stat(directory / "pipe").st_mode) and sorted(os.listdir(directory)) == ["below", "pipe"]


def test_text_goes_to_a_pipe_that_somebody_reads_and_none_is_waited_for(directory, never_waits):
    pipe = directory / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="a pipe that nothing reads.*: start its reader first") as refused:
        _files.write_text(pipe, "text")
    assert refused.value.filename == str(pipe)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "socket"))
    with pytest.raises(OSError, match="start its reader first"):
        _files.write_text(directory / "socket", "text")
    listener.close()
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    _files.write_text(pipe, "first \u00e9")
    assert os.read(reader, 100).decode() == "first \u00e9"
    os.close(reader)
    long = "x" * (1 << 20)  # more than a pipe holds: its reader is waited for from here on
    with open(directory / "copy", "w") as copied, subprocess.Popen(["cat", str(pipe)], stdout=copied):
        while True:
            try:
                _files.write_text(pipe, long)
                break
            except OSError as error:
                assert error.errno == errno.ENXIO  # cat has not opened it yet
                time.sleep(0.01)
    assert (directory / "copy").read_text() == long
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)


def test_text_for_a_descriptor_of_this_process_goes_there_whatever_it_is_of(directory):
    (directory / "file").write_text("before ")
    one, other = socket.socketpair()
    with open(directory / "file", "a") as file:
        for descriptor in (file.fileno(), one.fileno()):
            for name in (f"/dev/fd/{descriptor}", f"/proc/self/fd/{descriptor}"):
                _files.write_text(name, "text ")
    assert (directory / "file").read_text() == "before text text " and other.recv(100) == b"text text "
    one.close()
    other.close()
    child = "import penstock._files as files; print('a', flush=True); files.write_text('/dev/stdout', 'b')"
    with open(directory / "out", "w") as out:
        subprocess.run([sys.executable, "-c", child], stdout=out, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        out.write("c")
    assert (directory / "out").read_text() == "a\nbc"


def test_a_small_file_needs_no_more_room_than_it_has(directory, in_child):
    text = """
        import resource, sys
        import penstock, torch
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
        penstock.save(torch.ones(1000), sys.argv[1])
    """
    status, _, error = in_child(text, directory / "small.pt")
    assert status == 0, error
    assert torch.equal(torch.load(directory / "small.pt"), torch.ones(1000)) and os.path.getsize(directory / "small.pt") < 10_000


CALLS = ("replace", "rename", "link", "unlink")


def put_state(directory, state, names):
    for name in names:
        (directory / name).write_text(state)


def replace_state(directory, state, names=("config", "part-1", "part-2", "index")):
    files = []
    try:
        for name in names:
            files.append(_files.NewFile(str(directory / name)))
            with _files.open_new(files[-1]) as file:
                file.write(state.encode())
        _files.commit_together(files, [str(directory / "index"), str(directory / "single")])
    finally:
        for file in files:
            file.discard()


def found_state(directory):
    """What a reader finds who begins at the index, or the single file."""
    if (directory / "single").exists():
        return {(directory / "single").read_text()}
    if not (directory / "index").exists():
        return set()
    return {(directory / name).read_text() if (directory / name).exists() else "missing" for name in ("config", "part-1", "part-2", "index")}


@pytest.mark.parametrize("before", [("config", "part-1", "part-2", "index"), ("config", "single")])
@pytest.mark.parametrize("kills", [True, False])
def test_files_that_belong_together_are_never_of_two_states(directory, monkeypatch, before, kills):
    """A process that is killed at any of its calls that change names, and one in which any of them fails."""
    for moment in range(100):
        for name in os.listdir(directory):
            os.unlink(directory / name)
        put_state(directory, "old", before)
        child = os.fork()
        if child == 0:
            left = [moment]

            def tampered(real, left=left):
                def call(*arguments, **keywords):
                    left[0] -= 1
                    if left[0] == -1:
                        if kills:
                            os._exit(9)
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), arguments[0])
                    return real(*arguments, **keywords)

                return call

            for name in CALLS:
                setattr(os, name, tampered(getattr(os, name)))
            try:
                replace_state(directory, "new")
            except OSError:
                os._exit(1)
            except BaseException:
                os._exit(2)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = found_state(directory)
        if status == 0:
            break
        assert status == (9 if kills else 1)
        assert found in ([{"old"}, {"new"}, set()] if kills else [{"old"}, {"new"}]), moment
        if not kills and found == {"old"}:
            assert sorted(os.listdir(directory)) == sorted(before), moment
    assert moment > 8 and found == {"new"} and len(os.listdir(directory)) == 4


def test_names_that_can_be_guessed_are_not_written_and_links_not_followed(directory):
    (directory / "victim").write_text("mine")
    for name in ("f", ".f.partial", f".f.{os.getpid()}.partial", "f.partial"):
        os.symlink("victim", directory / name)
    with _files.whole_file(str(directory / "f")) as file:
        file.write(b"new")
    assert (directory / "victim").read_text() == "mine"
    assert not (directory / "f").is_symlink() and (directory / "f").read_text() == "new"


def test_a_file_that_fails_leaves_the_old_one_and_nothing_beside_it(directory):
    (directory / "f").write_text("old")
    with pytest.raises(RuntimeError), _files.whole_file(str(directory / "f")) as file:
        file.write(b"new")
        raise RuntimeError
    assert (directory / "f").read_text() == "old" and os.listdir(directory) == ["f"]


def replace_shards(directory, state, count):
    """As zero_to_fp32 does: so many parts, an index that names them, and what an older index names goes."""
    files = []
    index = str(directory / "index")
    try:
        for number in range(count):
            files.append(_files.NewFile(str(directory / f"part-{number}-of-{count}")))
            with _files.open_new(files[-1]) as file:
                file.write(state.encode())
        files.append(_files.NewFile(index))
        with _files.open_new(files[-1]) as file:
            file.write(json.dumps({"state": state, "parts": [os.path.basename(each.path) for each in files[:-1]]}).encode())
        _files.commit_together(files, [index], lambda: [str(directory / name) for name in read_index(directory)["parts"]])
    finally:
        for file in files:
            file.discard()


def read_index(directory):
    try:
        return json.loads((directory / "index").read_text())
    except FileNotFoundError:
        return {"state": None, "parts": []}


def test_many_that_replace_the_files_of_one_directory_at_once_never_mix_and_leave_nothing(directory):
    children = []
    for writer in range(4):
        child = os.fork()
        if child == 0:
            try:
                for number in range(25):
                    replace_shards(directory, f"{writer}.{number}", 1 + (writer + number) % 3)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    found = read_index(directory)
    assert sorted(os.listdir(directory)) == sorted(["index", *found["parts"]])
    assert {(directory / name).read_text() for name in found["parts"]} == {found["state"]}


def test_who_replaces_files_together_waits_for_another_and_is_refused_in_one_line(directory, monkeypatch):
    """The lock is that of the C++ library: an exclusive flock of the directory, and of what is being written under a temporary name."""
    put_state(directory, "old", ("config", "part-1", "part-2", "index"))
    (directory / f".index.{'0' * 16}.old").write_text("left by a kill")
    holder = os.open(directory, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    monkeypatch.setattr(_files, "_OTHERS_PATIENCE", 0.05)
    with pytest.raises(OSError, match="another process has been replacing files here for a minute: let it end, or write to another directory") as refused:
        replace_state(directory, "new")
    assert refused.value.errno == errno.EBUSY and "\n" not in str(refused.value)
    assert found_state(directory) == {"old"} and len(os.listdir(directory)) == 5
    writing = _files.NewFile(str(directory / "config"))
    try:
        writing.settle()
        (name,) = (name for name in os.listdir(directory) if name.endswith(".new"))
        other = os.open(directory / name, os.O_RDWR)
        with pytest.raises(BlockingIOError):  # so that nobody takes it for a leftover
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
    finally:
        writing.discard()
    os.close(holder)
    replace_state(directory, "new")
    assert found_state(directory) == {"new"} and sorted(os.listdir(directory)) == ["config", "index", "part-1", "part-2"]


def test_what_killed_writers_left_is_removed_by_the_next_writer_of_that_name(directory):
    """The rule of the C++ library (base/atomic_file.h): what has a temporary name and is not locked is nobody's."""
    for _ in range(3):
        child = os.fork()
        if child == 0:
            _files.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            _files.write_text(directory / "f", "killed")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(os.listdir(directory)) == 3
    others = {f".f.{'0' * 16}.old", ".f.0123.new", f".ff.{'0' * 16}.new"}
    for name in others:
        (directory / name).write_text("not a killed writer's of f")
    writing = _files.NewFile(str(directory / "f"))
    try:
        writing.settle()
        (being_written,) = (name for name in os.listdir(directory) if os.stat(directory / name).st_size == 0)
        _files.write_text(directory / "f", "new")
        assert set(os.listdir(directory)) == {"f", being_written, *others}
    finally:
        writing.discard()
    put_state(directory, "old", ("index",))
    replace_state(directory, "new")
    assert found_state(directory) == {"new"}
    assert f".ff.{'0' * 16}.new" not in os.listdir(directory), "what several files are committed with looks after all names"

"""What users of DeepSpeed's aio_handle rely on, and what hurt them there."""

import errno
import gc
import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest
import torch

import penstock
from penstock import _core
from penstock.ops import aio
from penstock.ops.aio import aio_handle
from penstock.ops.aio import _handle as implementation


def pattern(nbytes, seed=1):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


@pytest.fixture
def handle():
    return aio_handle(block_size=64 * 1024, queue_depth=8)


def write_file(path, tensor):
    path.write_bytes(tensor.numpy().tobytes())
    return str(path)


def test_getters_give_what_the_handle_was_made_with():
    handle = aio_handle(4096 * 3, 7, True, True, 2)
    assert handle.get_block_size() == 4096 * 3
    assert handle.get_queue_depth() == 7
    assert handle.get_single_submit() is True
    assert handle.get_overlap_events() is True
    assert handle.get_intra_op_parallelism() == 2
    assert handle.get_alignment() == 1024
    default = aio_handle()
    assert (default.get_block_size(), default.get_queue_depth(), default.get_intra_op_parallelism()) == (1 << 20, 128, 1)
    assert default.get_single_submit() is False and default.get_overlap_events() is False
    named = aio_handle(block_size=1, queue_depth=1, single_submit=False, overlap_events=True, intra_op_parallelism=1)
    assert named.get_block_size() == 1


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 4095, 4096, 4097, 65536, 65537, 1 << 20, (1 << 20) + 12345])
@pytest.mark.parametrize("offset", [0, 1, 512, 4096, 5000])
def test_any_size_and_offset_comes_back_and_the_file_ends_where_it_should(handle, directory, nbytes, offset):
    path = str(directory / "file")
    data = pattern(nbytes)
    assert handle.sync_pwrite(data, path, offset) == 1
    assert os.path.getsize(path) == offset + nbytes
    with open(path, "rb") as file:
        assert file.read() == bytes(offset) + data.numpy().tobytes()
    back = torch.zeros(nbytes, dtype=torch.uint8)
    assert handle.sync_pread(back, path, offset) == 1
    assert torch.equal(back, data)


def test_a_buffer_at_any_address_works(handle, directory):
    path = str(directory / "file")
    data = pattern(100_001)
    for shift in (0, 1, 8, 64, 511):
        handle.sync_pwrite(data[shift:], path)
        back = torch.zeros(100_001 + 64, dtype=torch.uint8)
        handle.sync_pread(back[shift : shift + 100_001 - shift], path)
        assert torch.equal(back[shift:100_001], data[shift:])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_every_dtype_and_shape(handle, directory, dtype):
    path = str(directory / "file")
    data = torch.arange(3 * 5 * 7).reshape(3, 5, 7).to(dtype)
    handle.sync_pwrite(data, path)
    back = torch.zeros_like(data)
    handle.sync_pread(back, path)
    assert torch.equal(back, data)


def test_numpy_arrays_are_buffers_too(handle, directory):
    path = str(directory / "file")
    data = np.arange(10_000, dtype=np.float32).reshape(100, 100)
    handle.sync_pwrite(data, path)
    back = np.zeros_like(data)
    handle.sync_pread(back, path)
    assert np.array_equal(back, data)


def test_the_forms_of_deepspeed(handle, directory):
    path = str(directory / "file")
    data = pattern(8192)
    assert handle.write(data, path, False) == 0
    assert handle.write(data, path, validate=True) == 0
    assert handle.pwrite(data, path, True, False) == 1
    assert handle.pwrite(data, path, False, True) == 0
    assert handle.pwrite(data, path, False, **{"async": True}) == 0
    assert handle.async_pwrite(data, path) == 0
    assert handle.wait() == 3
    back = torch.zeros_like(data)
    assert handle.read(back, path, False) == 0
    assert handle.pread(back, path, True, False, 0) == 1
    assert handle.pread(buffer=back, filename=path, validate=False, file_offset=0, **{"async": False}) == 1
    assert handle.async_pread(back, path, 0) == 0
    assert handle.async_pread(buffer=back, filename=path, file_offset=0) == 0
    assert handle.sync_pread(back, path) == 3  # with what was pending, as DeepSpeed counts
    assert handle.wait() == 0
    assert aio.aio_write(data, path, 1 << 20, 8, False, True, True) == 0
    assert aio.aio_read(back, path, 1 << 20, 8, False, True, True) == 0
    assert torch.equal(back, data)
    assert aio.AsyncIOBuilder().load().aio_handle is aio_handle
    with pytest.raises(TypeError, match="unexpected keyword"):
        handle.pread(back, path, False, False, wrong=1)


def test_many_operations_at_once_each_in_its_place(handle, directory):
    path = str(directory / "file")
    pieces = [pattern(10_000 + i, seed=i) for i in range(40)]
    offsets = np.concatenate([[0], np.cumsum([piece.numel() for piece in pieces])]).tolist()
    for piece, offset in zip(pieces, offsets):
        handle.async_pwrite(piece, path, offset)
    assert handle.wait() == 40
    assert os.path.getsize(path) == offsets[-1]
    backs = [torch.zeros_like(piece) for piece in pieces]
    for back, offset in zip(backs, offsets):
        handle.async_pread(back, path, offset)
    assert handle.wait() == 40
    assert all(torch.equal(a, b) for a, b in zip(pieces, backs))


def test_a_write_truncates_nothing(handle, directory):
    path = directory / "file"
    write_file(path, pattern(10_000))
    handle.sync_pwrite(torch.zeros(100, dtype=torch.uint8), str(path))
    assert path.stat().st_size == 10_000
    assert path.read_bytes() == bytes(100) + pattern(10_000).numpy().tobytes()[100:]


def test_descriptors_stay_their_owners(handle, directory):
    path = directory / "file"
    data = pattern(5000)
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        assert handle.async_pwrite(data, fd) == 0
        assert handle.async_pwrite(buffer=data, fd=fd, file_offset=5000) == 0
        assert handle.wait() == 2
        assert os.lseek(fd, 0, os.SEEK_CUR) == 0
        back = torch.zeros_like(data)
        handle.sync_pread(back, fd, 5000)
        assert torch.equal(back, data)
        os.unlink(path)  # its name is not needed
        handle.sync_pread(back, fd)
        assert torch.equal(back, data)
    finally:
        os.close(fd)
    with pytest.raises(OSError) as caught:
        handle.async_pwrite(data, fd)
    assert caught.value.errno == errno.EBADF
    write_file(path, data)
    with open(path, "rb") as reader, pytest.raises(OSError) as caught:
        handle.async_pwrite(data, reader.fileno())
    assert caught.value.errno == errno.EBADF
    with pytest.raises(TypeError):
        handle.async_pwrite(data)


def test_links_pathlike_and_bytes_name_files(handle, directory):
    data = pattern(4096)
    write_file(directory / "file", data)
    (directory / "link").symlink_to(directory / "file")
    for name in (directory / "link", os.fsencode(directory / "link"), str(directory / "file")):
        back = torch.zeros_like(data)
        handle.sync_pread(back, name)
        assert torch.equal(back, data)


def test_a_file_system_in_memory_works(handle):
    path = f"/dev/shm/penstock-test-{os.getpid()}"
    try:
        data = pattern(5001)
        handle.sync_pwrite(data, path, 3)
        back = torch.zeros_like(data)
        handle.sync_pread(back, path, 3)
        assert torch.equal(back, data) and os.path.getsize(path) == 5004
    finally:
        os.unlink(path)


def test_a_short_file_is_an_error(handle, directory):
    path = write_file(directory / "file", pattern(1000))
    back = torch.zeros(1001, dtype=torch.uint8)
    with pytest.raises(penstock.ShortFileError) as caught:
        handle.sync_pread(back, path)
    assert isinstance(caught.value, OSError) and isinstance(caught.value, EOFError)
    assert caught.value.filename == path
    assert (caught.value.offset, caught.value.length) == (0, 1001)
    with pytest.raises(OSError):
        handle.sync_pread(back[:10], path, 995)
    handle.async_pread(back, path)  # and where nobody looks before wait()
    with pytest.raises(penstock.ShortFileError):
        handle.wait()
    assert handle.sync_pread(back[:1000], path) == 1  # the handle lives on


def test_what_cannot_be_opened_is_an_oserror_at_once(handle, directory):
    data = pattern(10)
    with pytest.raises(FileNotFoundError):
        handle.async_pread(data, str(directory / "none"))
    with pytest.raises(FileNotFoundError):
        handle.sync_pwrite(data, str(directory / "none" / "file"))
    with pytest.raises(IsADirectoryError):
        handle.sync_pread(data, str(directory))
    os.mkfifo(directory / "fifo")
    with pytest.raises(OSError, match="FIFO"):
        handle.sync_pread(data, str(directory / "fifo"))
    with pytest.raises(ValueError):
        handle.sync_pread(data, "")
    with pytest.raises(ValueError):
        handle.sync_pread(data, "a\0b")
    with pytest.raises(TypeError):
        handle.sync_pread(data, 1.5)
    assert handle.wait() == 0


def test_a_failed_write_is_told_with_errno_and_place(in_child, directory):
    status, out, error = in_child(
        """
        import resource, sys, errno, torch
        from penstock.ops.aio import aio_handle
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        handle = aio_handle(4096, 2)
        handle.async_pwrite(torch.zeros(1 << 20, dtype=torch.uint8), sys.argv[1])
        try:
            handle.wait()
        except OSError as failure:
            assert failure.errno == errno.EFBIG, failure
            assert failure.filename == sys.argv[1] and failure.length == 1 << 20 and failure.offset == 0
            print("told")
        """,
        directory / "file",
    )
    assert (status, out.strip()) == (0, "told"), error


def test_wrong_buffers_raise(handle, directory):
    path = write_file(directory / "file", pattern(4096))
    with pytest.raises(ValueError, match="contiguous"):
        handle.async_pread(torch.zeros(8, 8).t()[1:], path)
    with pytest.raises(ValueError, match="contiguous"):
        handle.async_pread(np.zeros((8, 8))[:, 1], path)
    with pytest.raises(ValueError, match="meta"):
        handle.async_pread(torch.zeros(8, device="meta"), path)
    with pytest.raises(ValueError, match="dense"):
        handle.async_pread(torch.zeros(4, 4).to_sparse(), path)
    read_only = np.zeros(8)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        handle.async_pread(read_only, path)
    for wrong in (b"bytes", [1, 2], None, 5):
        with pytest.raises(TypeError):
            handle.async_pwrite(wrong, path)
    with pytest.raises(TypeError):
        handle.async_pwrite(np.array([object()]), path)
    assert handle.wait() == 0


def test_a_tensor_on_a_device_is_refused_with_the_way_out(handle, directory, monkeypatch):
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 0)

    tensor = torch.zeros(8).as_subclass(Elsewhere)
    with pytest.raises(ValueError, match=r"cuda:0.*\.cpu\(\)"):
        handle.async_pwrite(tensor, str(directory / "file"))


def test_wrong_numbers_raise(handle, directory):
    path = write_file(directory / "file", pattern(4096))
    data = pattern(10)
    for wrong in (-1, 2**63):
        with pytest.raises(ValueError):
            handle.sync_pread(data, path, wrong)
    with pytest.raises(ValueError):
        handle.sync_pread(data, path, 2**63 - 5)
    for wrong in ("0", 1.0, None):
        with pytest.raises(TypeError):
            handle.sync_pread(data, path, wrong)
    for arguments in ((0,), (-1,), (4096, 0), (4096, 1, False, False, 0)):
        with pytest.raises(ValueError):
            aio_handle(*arguments)
    for arguments in (("1M",), (4096, 1.5), (4096, 1, "false"), (4096, 1, False, 1)):
        with pytest.raises(TypeError):
            aio_handle(*arguments)
    with pytest.raises(TypeError):
        handle.read(data, path, "yes")


def test_an_empty_buffer_moves_nothing_and_is_no_error(handle, directory):
    path = str(directory / "file")
    assert handle.sync_pwrite(torch.empty(0), path) == 1
    assert os.path.getsize(path) == 0
    assert handle.sync_pread(torch.empty(0), path) == 1
    with pytest.raises(FileNotFoundError):
        handle.sync_pread(torch.empty(0), str(directory / "none"))


def test_validate_finds_a_difference(handle, directory, monkeypatch):
    path = write_file(directory / "file", pattern(5000))
    back = torch.zeros(5000, dtype=torch.uint8)
    handle.pread(back, path, True, True)
    pending = handle._pending[0]
    pending.wait()
    back[4321] ^= 1
    with pytest.raises(OSError, match="from 4321 on"):
        handle.wait()


def test_a_buffer_lives_until_wait(handle, directory):
    path = str(directory / "file")
    for i in range(20):
        handle.async_pwrite(pattern(200_000, seed=i), path, i * 200_000)  # nobody else holds it
    gc.collect()
    filler = [torch.full((200_000,), 7, dtype=torch.uint8) for _ in range(20)]
    assert handle.wait() == 20
    del filler
    with open(path, "rb") as file:
        for i in range(20):
            assert file.read(200_000) == pattern(200_000, seed=i).numpy().tobytes()


def test_a_handle_that_is_dropped_loses_nothing(directory):
    path = str(directory / "file")
    handle = aio_handle(4096, 1)
    data = pattern(3_000_000)
    handle.async_pwrite(data, path)
    del handle
    gc.collect()
    with open(path, "rb") as file:
        assert file.read() == data.numpy().tobytes()


def test_the_end_of_the_process_loses_nothing(in_child, directory):
    status, _, error = in_child(
        """
        import sys, torch
        from penstock.ops.aio import aio_handle
        handle = aio_handle(4096, 1)
        handle.async_pwrite(torch.ones(5_000_000, dtype=torch.uint8), sys.argv[1])
        """,
        directory / "file",
    )
    assert status == 0, error
    assert (directory / "file").read_bytes() == b"\1" * 5_000_000


def test_an_error_that_nobody_waited_for_is_a_warning(directory):
    path = write_file(directory / "file", pattern(10))
    handle = aio_handle()
    handle.async_pread(torch.zeros(20, dtype=torch.uint8), path)
    with pytest.warns(RuntimeWarning, match="nobody waited"):
        handle.close()


def test_threads_share_a_handle(handle, directory):
    failures = []

    def work(i):
        try:
            path = str(directory / f"file{i}")
            for round in range(20):
                data = pattern(20_000 + i, seed=100 * i + round)
                handle.sync_pwrite(data, path)
                back = torch.zeros_like(data)
                handle.sync_pread(back, path)
                assert torch.equal(back, data)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_wait_lets_other_threads_run(handle, directory):
    class Slow:
        def wait(self, timeout_ms):
            return self.ended.wait(timeout_ms / 1000)

        def check(self):
            pass

    slow = Slow()
    slow.ended = threading.Event()
    handle._pending.append(implementation._Operation(slow, None, "", 0, False))
    threading.Thread(target=slow.ended.set).start()
    assert handle.wait() == 1


def test_ctrl_c_ends_a_wait_and_the_operation_stays(handle, directory):
    class Endless:
        ended = False

        def wait(self, timeout_ms):
            time.sleep(0.001)
            return self.ended

        def check(self):
            pass

    endless = Endless()
    handle._pending.append(implementation._Operation(endless, None, "", 0, False))
    timer = threading.Timer(0.05, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
        pytest.fail("waited to the end")
    timer.join()
    endless.ended = True
    assert handle.wait() == 1


def test_ctrl_c_during_a_synchronous_call_leaves_nothing_moving(handle, directory, monkeypatch):
    path = str(directory / "file")
    monkeypatch.setattr(implementation._Operation, "wait", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        handle.sync_pwrite(pattern(1 << 20), path)
    monkeypatch.undo()
    assert handle._pending == []


def test_a_forked_child_is_told_and_the_parent_goes_on(handle, directory):
    path = str(directory / "file")
    data = pattern(1_000_000)
    handle.async_pwrite(data, path)
    pid = os.fork()
    if pid == 0:
        told = 0
        for call in (handle.wait, lambda: handle.sync_pread(data, path), lambda: handle.new_cpu_locked_tensor(4, data)):
            try:
                call()
            except RuntimeError as error:
                told += "forked child" in str(error)
        own = aio_handle()  # its own works
        own.sync_pwrite(data, path + ".child")
        del handle
        gc.collect()
        os._exit(0 if told == 3 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert handle.wait() == 1
    with open(path, "rb") as file:
        assert file.read() == data.numpy().tobytes()
    assert os.path.getsize(path + ".child") == 1_000_000


def test_locked_tensors(handle, directory):
    example = torch.empty(3, dtype=torch.bfloat16)
    tensor = handle.new_cpu_locked_tensor(1000, example)
    assert tensor.dtype == torch.bfloat16 and tensor.shape == (1000,) and tensor.data_ptr() % 4096 == 0
    assert handle.is_pinned(tensor) and handle.is_pinned(tensor[10:20])
    assert aio_handle().is_pinned(tensor)  # every handle knows it
    assert not handle.is_pinned(torch.zeros(4))
    tensor.fill_(3)
    handle.sync_pwrite(tensor, str(directory / "file"))
    other = handle.new_cpu_locked_tensor(num_elem=1000, example_tenosr=example)
    handle.sync_pread(other, str(directory / "file"))
    assert torch.equal(tensor, other)
    assert handle.free_cpu_locked_tensor(tensor) is True
    assert handle.free_cpu_locked_tensor(tensor) is False
    assert handle.free_cpu_locked_tensor(torch.zeros(4)) is False
    assert not handle.is_pinned(tensor)
    assert torch.all(tensor == 3)  # it never dangles
    array = handle.new_cpu_locked_tensor(10, np.zeros(1, dtype=np.int32))
    assert isinstance(array, np.ndarray) and array.dtype == np.int32 and array.shape == (10,)
    with pytest.raises(TypeError):
        handle.new_cpu_locked_tensor(10, "float32")
    with pytest.raises(ValueError):
        handle.new_cpu_locked_tensor(-1, example)
    assert handle.new_cpu_locked_tensor(0, example).shape == (0,)


def test_a_dropped_locked_tensor_gives_its_memory_back(handle):
    before = len(implementation._locked)
    for _ in range(50):
        handle.new_cpu_locked_tensor(1 << 20, torch.empty(1))
    gc.collect()
    assert len(implementation._locked) == before


def test_descriptors_do_not_leak(handle, directory):
    path = str(directory / "file")
    data = pattern(4096)
    handle.sync_pwrite(data, path)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        handle.sync_pread(data, path)
        with pytest.raises(OSError):
            handle.sync_pread(data, path, 1 << 20)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_deepspeed_memcpy():
    source, to = torch.arange(10.0), torch.zeros(10)
    assert aio.deepspeed_memcpy(to, source) == 0
    assert torch.equal(to, source)
    with pytest.raises(ValueError):
        aio.deepspeed_memcpy(torch.zeros(9), source)


def test_the_engine_names_what_it_uses():
    assert _core.Engine().backend in ("io_uring", "libaio", "threads")
    with pytest.raises(ValueError):
        _core.Engine(backend="nonsense")


def test_a_tensor_that_is_given_other_memory_meanwhile_keeps_the_old_one(directory):
    handle = aio_handle()
    handle.sync_pwrite(torch.ones(1 << 20), directory / "file")
    tensor = torch.zeros(1 << 20)
    memory = weakref.ref(tensor.untyped_storage())
    handle.async_pread(tensor, directory / "file")
    tensor.data = torch.empty(0)
    gc.collect()
    assert memory() is not None
    handle.wait()
    gc.collect()
    assert memory() is None


def test_locked_memory_by_itself():
    from penstock.ops.aio import PinMemoryBuilder

    handle = PinMemoryBuilder().load().pin_handle()
    locked = handle.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.float16))
    assert locked.dtype == torch.float16 and locked.numel() == 1000 and locked.data_ptr() % 4096 == 0
    locked.fill_(3)
    assert handle.is_pinned(locked) and handle.is_pinned(locked[10:20]) and aio_handle().is_pinned(locked)
    assert not handle.is_pinned(torch.empty(10))
    assert handle.free_cpu_locked_tensor_by_ptr(locked.data_ptr()) and not handle.free_cpu_locked_tensor_by_ptr(locked.data_ptr())
    assert not handle.is_pinned(locked) and bool((locked == 3).all())
    again = handle.new_cpu_locked_tensor(10, torch.empty(0))
    assert handle.free_cpu_locked_tensor(again) and not handle.free_cpu_locked_tensor(again)
    with pytest.raises(TypeError, match="example_tensor"):
        handle.new_cpu_locked_tensor(10, 3)

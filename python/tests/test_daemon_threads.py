"""A program ends as it should while a daemon thread is in a call that takes long: never by std::terminate."""

import json

import pytest

torch = pytest.importorskip("torch")

# Children of one program, which has imported all that takes time, end as any program does.
PROGRAM = """
    import atexit, os, sys, threading, time
    import torch
    {before}
    import penstock
    {imports}

    where, ended = sys.argv[1], []
    for number in range(5):
        child = os.fork()
        if child == 0:
            break
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    else:
        print(ended)
        sys.exit(0)
    begun = threading.Event()

    def call():
        {made}
        while True:
            {call}
            begun.set()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert begun.wait(300)
    time.sleep(number * 0.001)
"""

# Torch's own operations abort the process when the interpreter ends within one. A step is made of them, so the program waits for the
# thread: the engine has been closed by then, since functions of atexit run in the reverse order, and the thread's step ends with an error.
WAITS = "thread = None; atexit.register(lambda: thread and thread.join(300))"

CALLS = {
    "a read": (
        "from penstock.ops.aio import aio_handle",
        "handle, buffer = aio_handle(), torch.empty(1 << 20, dtype=torch.uint8)",
        "handle.sync_pread(buffer, where + '/file')",
    ),
    "a text": (
        "",
        "llm = penstock.LLM(where + '/model', host_memory='256MiB', threads=1)",
        "llm.generate([[1, 2, 3]], max_tokens=4)",
    ),
    "a step": (
        "sys.path.insert(0, sys.argv[2]); from engine_models import batches, make, net, step",
        "engine, batch = make(net(), where + f'/run-{number}'), batches(1)[0]",
        "step(engine, batch)",
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_program_ends_while_a_daemon_thread_is_in_a_long_call(directory, in_child, what):
    imports, made, call = CALLS[what]
    (directory / "file").write_bytes(bytes(1 << 20))
    if what == "a text":
        pytest.importorskip("transformers")
        from test_llm import written

        written(directory / "model")
    import os

    status, out, error = in_child(PROGRAM.format(before=WAITS if what == "a step" else "", imports=imports, made=made, call=call), directory, os.path.dirname(__file__))
    assert status == 0 and "terminate" not in error, error[-3000:]
    # 1: the engine was closed within a step, which is lost.
    codes = json.loads(out)
    assert len(codes) == 5 and all(code in ((0, 1) if what == "a step" else (0,)) for code in codes), error[-3000:]

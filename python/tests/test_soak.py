"""A Trainer run that is killed over and over: three times, or PENSTOCK_SOAK=N times."""

import json
import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

# Each run is forked from a process that has imported everything: a kill costs seconds, not a start of an interpreter. It is killed at a
# random moment between its first checkpoint and its end, also within a checkpoint, and goes on from the newest one that is whole.
KILLS = """
    import contextlib, glob, io, json, os, random, signal, sys, time, warnings
    sys.path.insert(0, sys.argv[2])
    warnings.simplefilter("ignore")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    import penstock.deepspeed
    import torch, transformers, accelerate
    import trainer
    where, kills, seconds = sys.argv[1], int(sys.argv[3]), float(sys.argv[4])
    chance = random.Random(int(os.environ.get("PENSTOCK_SEED", "1")))
    torch.set_num_threads(1)
    torch.optim.AdamW(trainer.model_of(transformers, "gpt2").parameters())
    STEPS = 12
    common = {**trainer.DEFAULTS, "family": "gpt2", "max_steps": STEPS, "save_steps": 1, "evaluates": False}

    def begin(out, resume):
        process = os.fork()
        if process == 0:
            os.environ["MASTER_PORT"] = str(20000 + os.getpid() % 20000)
            log = open(out + ".log", "a")
            os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
            sys.stdout = sys.stderr = log
            try:
                trainer.main({**common, "deepspeed": trainer.config(out + "-nvme"), "out": out, "resume": resume})
                log.flush()
                os._exit(0)
            except BaseException:
                import traceback
                traceback.print_exc()
                log.flush()
                os._exit(1)
        return process

    def newest(out):
        # The last thing that Trainer writes of one.
        whole = [os.path.dirname(each) for each in glob.glob(out + "/checkpoint-*/trainer_state.json") if os.path.getsize(each)]
        whole = [each for each in whole if valid(each)]
        return max(whole, key=lambda each: int(each.rsplit("-", 1)[1]), default=None)

    def valid(directory):
        try:
            json.load(open(directory + "/trainer_state.json"))
            return True
        except ValueError:
            return False

    begun = time.monotonic()
    out = where + "/whole"
    process = begin(out, None)
    assert os.waitpid(process, 0)[1] == 0, open(out + ".log").read()[-3000:]
    takes = time.monotonic() - begun
    expected = {step: values for step, values in trainer.told(open(out + ".log").read()).items()}

    killed = ended = run = 0
    while killed < kills and time.monotonic() - begun < seconds:
        out, run = where + f"/run-{run}", run + 1
        while True:
            process = begin(out, newest(out))
            time.sleep(chance.random() * takes)
            done, status = os.waitpid(process, os.WNOHANG)
            if not done and killed < kills:
                os.kill(process, signal.SIGKILL)
                _, status = os.waitpid(process, 0)
            elif not done:
                _, status = os.waitpid(process, 0)
            text = open(out + ".log").read()
            assert os.WIFSIGNALED(status) or status == 0, text[-3000:]
            for line in text.splitlines():
                if line.startswith("TOLD ") and line.endswith("]"):
                    step, *values = json.loads(line[5:])
                    assert values == expected[step], (step, values, expected[step])
            killed += os.WIFSIGNALED(status)
            if status == 0:
                ended += 1
                break
            if killed >= kills or time.monotonic() - begun > seconds:
                break
    print("TOLD", json.dumps(["kills", killed, ended, round(time.monotonic() - begun)]))
"""


def test_a_trainer_run_that_is_killed_goes_on_bit_for_bit(tmp_path, in_child):
    kills, seconds = int(os.environ.get("PENSTOCK_SOAK", "3")), float(os.environ.get("PENSTOCK_SOAK_SECONDS", "3600"))
    status, out, error = in_child(KILLS, tmp_path, os.path.dirname(__file__), kills, seconds, timeout=seconds + 600)
    assert status == 0, error[-4000:]
    _, killed, ended, took = json.loads(out.splitlines()[-1][len("TOLD ") :])
    print(f"{killed} kills, {ended} runs to their end, {took} s")
    assert killed > 0

"""kill -9 while values are loaded, or a checkpoint is copied: what lies there then is whole, or says that it is not."""

import json
import os

import pytest

torch = pytest.importorskip("torch")

# Children are forked from a process that has torch and no engine, so that a kill costs no start of an interpreter.
FORKS = """
    import json, os, random, shutil, signal, sys, time, warnings
    sys.path.insert(0, sys.argv[2])
    warnings.simplefilter("ignore")
    import penstock, torch
    from engine_models import batches, make, net

    torch.set_num_threads(1)
    where, seed, kills = sys.argv[1], int(sys.argv[3]), int(sys.argv[4])
    chance = random.Random(seed)
    batch = batches(1)[0]
    model = net(layers=6, width=64)
    torch.optim.AdamW(model.parameters()).zero_grad()  # what torch imports with the first one is there, then

    def in_fork(call):
        process = os.fork()
        if process == 0:
            try:
                call()
                os._exit(0)
            except BaseException as error:
                print("TOLD", json.dumps(["failed", type(error).__name__, str(error)]), flush=True)
                os._exit(1)
        return process

    def killed(call, longest):
        ready, says = os.pipe()
        process = in_fork(lambda: call(lambda: os.write(says, b".")))
        os.read(ready, 1)
        time.sleep(chance.random() * longest)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(ready), os.close(says)
"""

KILLS = FORKS + """
    def filled(value):
        return {name: torch.full_like(each, value) for name, each in model.state_dict().items()}

    def look(engine):
        engine.eval()
        with torch.no_grad():
            engine(**batch)

    def found(state):
        # A run's weights; what it says where it has none.
        def call():
            try:
                engine = make(net(layers=6, width=64), state, resume=True)
                look(engine)
                values = sorted({value for each in engine.state_dict().values() for value in each.unique().tolist()})
            except (OSError, RuntimeError, ValueError) as error:
                print("TOLD", json.dumps(["refused", type(error).__name__, str(error)]), flush=True)
                return
            print("TOLD", json.dumps(["found", values[:3], len(values)]), flush=True)
            engine.close()
        assert os.waitpid(in_fork(call), 0)[1] == 0

    def loads(ready):
        engine = make(net(layers=6, width=64), where + "/run", overwrite=True)
        engine.module.load_state_dict(filled(1.0))
        look(engine)
        ready()
        for number in range(10**6):
            engine.module.load_state_dict(filled(float(number % 2 + 2)))

    def keeps():
        engine = make(net(layers=6, width=64), where + "/first", overwrite=True)
        look(engine)
        engine.module.load_state_dict(filled(5.0))
        engine.save_checkpoint(where + "/kept")
        engine.close()

    def takes(ready):
        engine = make(net(layers=6, width=64), where + "/other", overwrite=True)
        engine.load_checkpoint(where + "/kept")
        ready()
        look(engine)
        time.sleep(10)

    assert os.waitpid(in_fork(keeps), 0)[1] == 0
    for number in range(kills):
        killed(loads, 0.4)
        found(where + "/run")
        killed(takes, 0.5)
        found(where + "/other")
"""


@pytest.mark.parametrize("seed", [int(os.environ.get("PENSTOCK_SEED", "1"))])
def test_what_a_kill_within_a_load_leaves(tmp_path, in_child, seed):
    """PENSTOCK_SOAK: so many kills, of each kind."""
    kills = int(os.environ.get("PENSTOCK_SOAK", "5"))
    status, out, error = in_child(KILLS, tmp_path, os.path.dirname(__file__), seed, kills, timeout=120 + 20 * kills)
    assert status == 0, error[-3000:]
    told = [json.loads(line[len("TOLD ") :]) for line in out.splitlines() if line.startswith("TOLD ")]
    assert len(told) == 2 * kills, told
    of_values, of_checkpoints = told[0::2], told[1::2]
    for what, first, second in of_values:
        if what == "found":
            assert second == 1 and first[0] in (1.0, 2.0, 3.0), (first, second)  # of one load, whole
        else:
            assert "load_state_dict" in second and "overwrite=True" in second and "\n" not in second, second
    for what, first, second in of_checkpoints:
        if what == "found":
            assert (first, second) == ([5.0], 1)
        else:
            assert "\n" not in second and second, second
    print({"whole": sum(each[0] == "found" for each in told), "refused": sorted({each[2] for each in told if each[0] == "refused"})})


SAVES = FORKS + """
    from engine_models import step
    data = batches(200)

    # Losses of the whole training, and which checkpoints it would leave.
    def train(directory, ready=None):
        engine = make(net(layers=6, width=64), where + "/" + directory, overwrite=True)
        losses = []
        for number, each in enumerate(data):
            losses.append(step(engine, each))
            if ready is None and number == 60:
                break
            if ready is not None:
                engine.save_checkpoint(where + "/kept", f"tag-{number + 1}", {"step": number + 1})
                if number == 1:
                    ready()
        engine.close()
        return losses

    def expects():
        with open(where + "/losses", "w") as file:
            json.dump(train("expected"), file)

    # Goes on from the checkpoint that `tag` names, in a run of its own; None: from the latest.
    def goes_on(tag):
        def call():
            shutil.rmtree(where + "/again", ignore_errors=True)
            engine = make(net(seed=3, layers=6, width=64), where + "/again")
            path, client = engine.load_checkpoint(where + "/kept", tag)
            at = client["step"]
            if at >= 60:
                print("TOLD", json.dumps(["far", at]), flush=True)
                os._exit(0)
            loss = step(engine, data[at])
            assert engine.global_steps == at + 1
            print("TOLD", json.dumps(["went on", at, path, loss == expected[at]]), flush=True)
            engine.close()
        assert os.waitpid(in_fork(call), 0)[1] == 0

    assert os.waitpid(in_fork(expects), 0)[1] == 0
    expected = json.load(open(where + "/losses"))
    for number in range(kills):
        shutil.rmtree(where + "/kept", ignore_errors=True)
        killed(lambda ready: train("run", ready), 0.3)
        kept = sorted(os.listdir(where + "/kept"))
        goes_on(None)
        others = [each for each in kept if each.startswith(("step-", "tag-"))]
        goes_on(chance.choice(others))
        # What a kill leaves is no trouble for the next.
        latest = open(where + "/kept/latest").read()
        assert latest in kept, (latest, kept)
        print("TOLD", json.dumps(["left", [each for each in kept if each.startswith(".")]]), flush=True)
"""


@pytest.mark.parametrize("seed", [int(os.environ.get("PENSTOCK_SEED", "1"))])
def test_a_kill_while_a_checkpoint_is_copied_leaves_whole_ones(tmp_path, in_child, seed):
    """PENSTOCK_SOAK: so many kills."""
    kills = int(os.environ.get("PENSTOCK_SOAK", "5"))
    status, out, error = in_child(SAVES, tmp_path, os.path.dirname(__file__), seed, kills, timeout=120 + 30 * kills)
    assert status == 0, error[-3000:]
    told = [json.loads(line[len("TOLD ") :]) for line in out.splitlines() if line.startswith("TOLD ")]
    assert len(told) == 3 * kills, told
    assert all(each[0] in ("far", "left") or each[3] for each in told), told

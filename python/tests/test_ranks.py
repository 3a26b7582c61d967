"""Several processes that train one model: as one process with the whole batch, and nobody waits for ever for another."""

import json
import os
import shutil
import signal

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

import penstock  # noqa: E402
import trainer  # noqa: E402
from engine_models import all_names, batches, make, net, plain_losses, step  # noqa: E402
from penstock._engine import _identity  # noqa: E402
from torch import nn  # noqa: E402

COMMON = """
import json, os, signal, sys, warnings
import torch, penstock
from torch import nn
from engine_models import Net, batches, make, step
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
directory = sys.argv[1]

def build(seed=0, **options):
    torch.manual_seed(seed)
    return Net(**options)

def own(batch):
    size = len(batch["x"]) // world
    return {name: value[rank * size : (rank + 1) * size] for name, value in batch.items()}

def tell(name, value):
    print("TOLD", json.dumps([name, value]), flush=True)

def of_all(engine, batch):
    step(engine, own(batch))
    return engine.last_step["loss"], engine.get_global_grad_norm()
"""


def told(outcomes, statuses=None):
    """What each rank told, by name."""
    found = []
    for rank, (status, out, error) in enumerate(outcomes):
        assert status == (statuses or {}).get(rank, 0), f"rank {rank} ended with {status}: {error[-3000:]}"
        found.append(dict(json.loads(line[len("TOLD ") :]) for line in out.splitlines() if line.startswith("TOLD ")))
    return found


TRAIN = COMMON + """
model = build(seed=rank)  # rank 0's values count
engine = make(model, directory + "/state")
steps = batches(9, size=12)
tell("losses", [of_all(engine, batch) for batch in steps[:4]])
model.eval()
with torch.no_grad():
    tell("evaluated", model(**steps[0]).item())
model.train()
tell("path", engine.save_checkpoint(directory + "/kept", tag="kept", client_state={"rank": rank}))
tell("again", engine.save_checkpoint(directory + "/kept", tag="kept", client_state={"rank": rank}))
tell("latest", open(directory + "/kept/latest").read())
state = model.state_dict()
tell("state", {name: value.double().sum().item() for name, value in state.items()})
if rank == 0:
    torch.save(state, directory + "/state.pt")
after = [of_all(engine, batch) for batch in steps[4:6]]
tell("after", after)
tell("samples", engine.last_step["samples"])
tell("report", [engine.report()["world_size"], len(engine.report()["steps"])])
parameter = model.norm.weight
tell("moment", engine.read_state(parameter, "second moment").sum().item())
engine.close()
tell("parts", sorted(os.listdir(directory + "/state")))

resumed = make(build(), directory + "/state", resume="auto")
tell("resumed", [of_all(resumed, batch) for batch in steps[6:8]])
with resumed.gathered(write_back=True):
    if rank == 0:
        resumed.module.norm.weight.data.add_(1.0)
tell("written", resumed.read_state(resumed.module.norm.weight).sum().item())
resumed.close()

loaded = make(build(), directory + "/loaded")
loaded.load_checkpoint(directory + "/kept", "kept")
tell("loaded", [of_all(loaded, batch) for batch in steps[4:6]])
tell("client", loaded.client_state["rank"])
loaded.close()

# Parts of a block are frozen, and one rank leaves a layer out.
model = build()
for parameter in (model.embed.weight, model.layers[1].up.weight):
    parameter.requires_grad_(False)
engine = make(model, directory + "/frozen", optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
of_all(engine, steps[0])
model.left_out = 2 if rank == 1 else None
tell("frozen", [of_all(engine, batch) for batch in steps[1:4]])
engine.close()

for name, by_batch in {"train_batch": True, "one by one": False}.items():
    engine = make(build(), directory + "/" + name, gradient_accumulation_steps=2)
    losses = []
    for batch in steps[:3]:
        mine = own(batch)
        halves = [{key: value[:3] for key, value in mine.items()}, {key: value[3:] for key, value in mine.items()}]
        if by_batch:
            losses.append(engine.train_batch(halves).item())
        else:
            for half in halves:
                step(engine, half)
            losses.append(engine.last_step["loss"])
    tell(name, losses)
    engine.close()
"""

FROM_TWO = COMMON + """
engine = make(build(), directory + "/three", rank_timeout=20)
engine.load_checkpoint(directory + "/kept", "kept")
steps = batches(9, size=12)
tell("loaded", [of_all(engine, batch) for batch in steps[4:6]])
if rank == 2:
    model = engine.module
    model.layers[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
try:
    for batch in steps[6:]:
        step(engine, own(batch))
    engine.flush()
except ConnectionAbortedError as error:
    tell("error", str(error))
"""


def with_frozen_parts_and_a_layer_left_out(steps):
    """Losses in plain torch: the second half of each batch but the first goes without layer 2."""
    model = net()
    for parameter in (model.embed.weight, model.layers[1].up.weight):
        parameter.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for number, batch in enumerate(steps):
        loss = 0
        for rank in (0, 1):
            model.left_out = 2 if rank == 1 and number > 0 else None
            half = {name: value[rank * 6 : rank * 6 + 6] for name, value in batch.items()}
            loss = loss + model(**half) / 2
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_ranks_train_as_one_process_does(directory, on_ranks):
    first, second = told(on_ranks(TRAIN, 2, directory))
    assert {**first, "client": 0} == {**second, "client": 0}
    assert (first["client"], second["client"]) == (0, 1)

    steps = batches(9, size=12)
    model = net()
    plain, trained = plain_losses(model, all_names(model), [[batch] for batch in steps[:8]])
    assert [loss for loss, _ in first["losses"] + first["after"] + first["resumed"]] == pytest.approx(plain, rel=2e-6)
    assert first["loaded"] == first["after"]
    assert first["train_batch"] == pytest.approx(first["one by one"], rel=1e-6)
    assert first["train_batch"] == pytest.approx(plain[:3], rel=2e-6)
    assert first["samples"] == 12
    assert first["report"] == [2, 6]
    assert first["parts"] == ["rank-0", "rank-1"]
    assert first["again"] == first["path"]
    assert first["latest"].strip() == os.path.basename(first["path"])
    assert sorted(os.listdir(directory / "kept" / "kept")) == ["rank-0", "rank-1"]
    assert first["written"] == pytest.approx(trained.norm.weight.sum().item() + trained.norm.weight.numel(), abs=1e-3)
    _, after_four = plain_losses(model, all_names(model), [[batch] for batch in steps[:4]])
    state = torch.load(directory / "state.pt")
    for name, value in after_four.state_dict().items():
        assert torch.allclose(state[name], value, atol=2e-5), name
    assert first["evaluated"] == pytest.approx(after_four(**steps[0]).item(), rel=2e-6)

    assert [loss for loss, _ in first["frozen"]] == pytest.approx(with_frozen_parts_and_a_layer_left_out(steps[:4])[1:], rel=2e-6)

    # One process, and three, go on from what two have kept; the third is killed then.
    alone = make(net(), directory / "alone")
    alone.load_checkpoint(directory / "kept", "kept")
    assert [step(alone, batch) for batch in steps[4:6]] == pytest.approx(plain[4:6], rel=2e-6)
    alone.close()
    three = told(on_ranks(FROM_TWO, 3, directory), {2: -signal.SIGKILL})
    for rank in three[:2]:
        assert [loss for loss, _ in rank["loaded"]] == pytest.approx(plain[4:6], rel=2e-6)
        assert rank["loaded"] == three[2]["loaded"]
        assert "rank 2 of 3 has gone" in rank["error"] and "resume=True" in rank["error"]

    with pytest.raises(ValueError, match="holds a run of 2 ranks, and there is one.*resume_ranks='any'.*load_checkpoint"):
        step(make(net(), directory / "state", resume=True), steps[0])


KILLED = COMMON + """
engine = make(build(), directory + "/state", rank_timeout=20)
steps = batches(9, size=12)
for number, batch in enumerate(steps[:4]):
    of_all(engine, batch)
    if number == 1:
        engine.save_checkpoint(directory + "/checkpoints", wait=True)
if rank == 1:
    engine.module.layers[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
try:
    for batch in steps[4:]:
        of_all(engine, batch)
except ConnectionAbortedError as error:
    tell("error", str(error))
"""

GO_ON = COMMON + """
steps = batches(9, size=12)
place = directory + "/" + sys.argv[2]
try:
    step(make(build(), place, resume=True), own(steps[0]))
except ValueError as error:
    tell("refused", str(error))
parts = sorted(os.listdir(place))
engine = make(build(seed=3), place, resume="auto", config={"penstock": {"resume_ranks": "any"}})
at = engine.global_steps
tell("parts", [parts, at])
tell("losses", [of_all(engine, batch) for batch in steps[at:8]])
tell("log", [line for line in engine.log() if "cut anew" in line])
tell("after", [sorted(os.listdir(place)), len(engine.report()["steps"])])
engine.close()
again = make(build(seed=3), place, resume=True)
tell("steps", again.global_steps)
again.close()
"""


MADE_UP_FOR = COMMON + """
steps = batches(9, size=12)
engine = make(build(seed=3), directory + "/" + sys.argv[2], resume="auto", resume_ranks="any")
tell("losses", [of_all(engine, batch) for batch in steps[engine.global_steps : 8]])
tell("log", [line for line in engine.log() if "made anew" in line])
engine.close()
"""


def test_ranks_that_are_killed_go_on_with_another_number_where_that_is_said(directory, on_ranks):
    """In the place of their state, one process and three: as near to two that were left alone as sums in another order are."""
    steps = batches(9, size=12)
    unbroken = told(on_ranks(TRAIN, 2, directory / "unbroken"))[0]
    losses = [*unbroken["losses"], *unbroken["after"], *unbroken["resumed"]]
    killed = told(on_ranks(KILLED, 2, directory), {1: -signal.SIGKILL})
    assert "rank 1 of 2 has gone" in killed[0]["error"]
    for name in ("one", "three"):
        shutil.copytree(directory / "state", directory / name)

    three = told(on_ranks(GO_ON, 3, directory, "three"))
    parts, at = three[0]["parts"]
    assert (parts, at in (3, 4)) == (["rank-0", "rank-1"], True)
    for rank in three:
        assert "holds a run of 2 ranks, and there are 3" in rank["refused"] and "resume_ranks='any'" in rank["refused"]
        assert rank["losses"] == [pytest.approx(each, rel=2e-6) for each in losses[at:8]]
        assert rank["steps"] == 8
    assert three[0]["after"] == [["rank-0", "rank-1", "rank-2"], 8 - at]
    assert ["a run of 2 ranks, and goes on with 3" in line for line in three[0]["log"]] == [True]

    with pytest.raises(ValueError, match="holds a run of 2 ranks, and there is one.*resume_ranks='any'"):
        step(make(net(), directory / "one", resume=True), steps[0])
    with pytest.raises(ValueError, match="resume_ranks.*same, any.*some"):
        make(net(), directory / "one", resume=True, resume_ranks="some")
    engine = make(net(seed=3), directory / "one", resume=True, resume_ranks="any", gradient_accumulation_steps=2)
    found = []
    for batch in steps[at:8]:
        engine.train_batch([{name: value[:6] for name, value in batch.items()}, {name: value[6:] for name, value in batch.items()}])
        found.append([engine.last_step["loss"], engine.get_global_grad_norm()])
    assert found == [pytest.approx(each, rel=2e-6) for each in losses[at:8]]
    engine.close()
    assert sorted(os.listdir(directory / "one")) == ["parameters.json", "penstock.store"]

    # Where a part is gone, the state is made of the newest checkpoint; for as many ranks, too.
    for lost, ranks in (("lost-one", 1), ("lost-two", 2)):
        shutil.copytree(directory / "state", directory / lost)
        shutil.rmtree(directory / lost / "rank-0")
        for rank in told(on_ranks(MADE_UP_FOR, ranks, directory, lost)):
            made = f"{lost} is made anew of {directory / 'checkpoints' / 'step-00000002'}, for {ranks}: parts of this run of 2 ranks are gone"
            assert [made in line for line in rank["log"]] == [True]
            assert rank["losses"] == [pytest.approx(each, rel=2e-6) for each in losses[2:8]]

    # Another run's, newer and in the same directory, is not taken for it.
    shutil.copytree(directory / "checkpoints", directory / "kept", symlinks=True)
    other = make(net(seed=4), directory / "other")
    for batch in steps[:3]:
        step(other, batch)
    other.save_checkpoint(directory / "checkpoints", wait=True)
    other.close()
    assert (directory / "checkpoints" / "latest").read_text().strip() == "step-00000003"
    shutil.copytree(directory / "state", directory / "mixed")
    shutil.rmtree(directory / "mixed" / "rank-0")
    engine = make(net(seed=3), directory / "mixed", resume="auto", resume_ranks="any")
    step(engine, steps[2])
    assert engine.global_steps == 3
    assert [str(directory / "checkpoints" / "step-00000002") in line for line in engine.log() if "made anew" in line] == [True]
    assert engine.last_step["loss"] == pytest.approx(losses[2][0], rel=2e-6)
    engine.close()

    # Without one nothing takes its place.
    shutil.rmtree(directory / "checkpoints")
    shutil.copytree(directory / "state", directory / "lost")
    shutil.rmtree(directory / "lost" / "rank-0")
    with pytest.raises(OSError, match="of which not all is there.*the part of rank 0 of the run's 2 is missing"):
        step(make(net(), directory / "lost", resume="auto", resume_ranks="any"), steps[0])
    with pytest.raises(ValueError, match="holds a run of 2 ranks"):
        step(make(net(), directory / "lost", resume="auto"), steps[0])
    assert os.path.exists(directory / "lost" / "rank-1" / "penstock.store")


UNLIKE = COMMON + """
steps = batches(4, size=4)
by_itself = make(build(), f"{directory}/by-itself-{rank}", ranks=False)
tell("by itself", [step(by_itself, steps[0]), by_itself.world_size, torch.distributed.is_initialized()])
by_itself.close()

def refused(name, model, kind, train=lambda engine: step(engine, own(steps[0])), place=None, **options):
    try:
        engine = make(model, directory + "/" + (place or name), rank_timeout=20, **options)
        train(engine)
        tell(name, "not refused")
    except kind as error:
        tell(name, f"{type(error).__name__}: {error}")
    else:
        return
    engine.module.zero_grad()
    try:
        engine.close()
    except (OSError, RuntimeError):
        pass

refused("another model", build(width=32 if rank == 0 else 16), ValueError)
frozen = build()
frozen.norm.weight.requires_grad_(rank == 0)
refused("another frozen", frozen, ValueError)
refused("another clip", build(), ValueError, gradient_clipping=1.0 + rank)
grouped = build()
parameters = list(grouped.parameters())
groups = [{"params": parameters}] if rank == 0 else [{"params": parameters[:3]}, {"params": parameters[3:]}]
refused("another groups", grouped, ValueError, optimizer=torch.optim.AdamW(groups, lr=1e-2))
refused("of one", build(), ValueError, place="of-one")

def at_another_rate(engine):
    for number, batch in enumerate(steps):
        if number == 2:
            engine.optimizer.param_groups[0]["lr"] = 0.25 + rank
        step(engine, own(batch))
refused("another rate", build(), ConnectionAbortedError, at_another_rate)

def alone(engine):
    step(engine, own(steps[0]))
    if rank == 0:
        engine.state_dict()
    step(engine, own(steps[1]))
refused("a call of one", build(), (ConnectionAbortedError, RuntimeError), alone)

raises = build()
def hook(*_):
    hook.calls += 1
    if rank == 1 and hook.calls == 4:
        raise KeyError("a bad batch")
hook.calls = 0
raises.layers[2].register_forward_pre_hook(hook)
def several(engine):
    for batch in steps:
        step(engine, own(batch))
refused("a forward that raises", raises, (ConnectionAbortedError, KeyError), several)

engine = make(build(), directory + "/ends")
step(engine, own(steps[0]))
if rank == 1:
    raise ValueError("the data ends early")
try:
    step(engine, own(steps[1]))
    step(engine, own(steps[2]))
except ConnectionAbortedError as error:
    tell("a program that ends", str(error))
"""


def test_what_differs_between_ranks_is_refused_on_all_and_errors_of_one_are_told_to_all(directory, on_ranks):
    alone = make(net(), directory / "of-one")
    step(alone, batches(1)[0])
    alone.close()
    first, second = told(on_ranks(UNLIKE, 2, directory), {1: 1})
    assert first["by itself"] == second["by itself"]
    assert first["by itself"][1:] == [1, False]
    for rank in (first, second):
        assert "rank 1 of 2 has another model than rank 0: parameter embed.weight: (50, 16)" in rank["another model"]
        assert "norm.weight: (32,) torch.float32, frozen there" in rank["another frozen"]
        assert "gradient_clipping is 2" in rank["another clip"] and "on rank 1" in rank["another clip"]
        assert "groups.layers.0 " in rank["another groups"] and " is 1 on rank 1 and 0 on rank 0" in rank["another groups"]
        assert "holds a run of one rank, and there are 2" in rank["of one"]
        assert "learning rate 1.25" in rank["another rate"] and "learning rate 0.25" in rank["another rate"]
        # Told by the exchange, or by the block that had weights that were not whole.
        of_exchange = "rank 0 at reading" in rank["a call of one"] and "rank 1 of 2 is at step 2" in rank["a call of one"]
        assert of_exchange or "a rank has made another call meanwhile" in rank["a call of one"]
    assert "rank 1 of 2 failed: KeyError" in first["a forward that raises"]
    assert second["a forward that raises"] == "KeyError: 'a bad batch'"
    assert "rank 1 of 2 failed: its program ended with ValueError: the data ends early" in first["a program that ends"]


EXCHANGES = COMMON + """
steps = batches(6, size=12)
CODED = dict(zero_quantized_weights=True, zero_quantized_gradients=True)

def train(name, count=4, dtype=torch.bfloat16, place=None, **options):
    engine = make(build(), directory + "/" + (place or name), dtype=dtype, **options)
    tell(name, [of_all(engine, batch) for batch in steps[:count]])
    tell(name + " plan", engine.plan()["exchange"])
    tell(name + " report", engine.report()["exchange"])
    engine.close()

train("whole")
train("gradients", zero_quantized_gradients=True)
train("weights", zero_quantized_weights=True)
train("coded", **CODED)
train("by key", config={"zero_optimization": {"stage": 3, **CODED, "offload_optimizer": {"device": "nvme"}}, "bf16": {"enabled": True}}, dtype=None)
train("begun", count=2, place="resumed", **CODED)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    resumed = make(build(), directory + "/resumed", dtype=torch.bfloat16, resume=True, **CODED)
tell("resumed", [of_all(resumed, batch) for batch in steps[2:4]])
resumed.close()
try:
    engine = make(build(), directory + "/unlike", zero_quantized_gradients=rank == 1, rank_timeout=20)
    of_all(engine, steps[0])
except ValueError as error:
    tell("unlike", str(error))
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_exchanges_in_fewer_bits(directory, on_ranks, ranks):
    found = told(on_ranks(EXCHANGES, ranks, directory))
    first = found[0]
    for other in found[1:]:
        assert {name: value for name, value in other.items() if "report" not in name} == {
            name: value for name, value in first.items() if "report" not in name
        }
    whole, gradients, coded = first["whole"], first["gradients"], first["coded"]
    assert gradients[0][0] == whole[0][0], "nothing has been summed yet"
    assert gradients[0][1] != whole[0][1] and gradients[1] != whole[1] and first["weights"][0] != whole[0]
    # A gradient of W ranks is off by (W - 1) / 14 of the largest addend of 128, and each weight of another rank by 1/254 of the largest.
    # These are the largest errors there can be; of many elements, which are off this way and that, norms and losses are far less so.
    assert coded[0][1] == pytest.approx(whole[0][1], rel=0.05)
    assert [loss for loss, _ in coded] == pytest.approx([loss for loss, _ in whole], rel=0.02)
    assert first["by key"] == coded
    assert first["begun"] + first["resumed"] == coded

    # zero_quantized_weights and zero_quantized_gradients, as keywords and as keys.
    plain, few = first["whole plan"], first["coded plan"]
    assert plain["saved_bytes_per_step"] == 0 and not plain["quantized_weights"] and not plain["quantized_gradients"]
    assert few["quantized_weights"] and few["quantized_gradients"]
    # Of bf16: 8 bits and a 16-bit scale for 128 elements are 0.508; 4 bits are 0.258 of what is one addend, and 0.129 of fp32 sums.
    assert few["weights_bytes_per_step"] * 256 == plain["weights_bytes_per_step"] * 130
    assert few["gradients_bytes_per_step"] <= 0.26 * plain["gradients_bytes_per_step"]
    before, after = (plan["weights_bytes_per_step"] + plan["gradients_bytes_per_step"] for plan in (plain, few))
    assert few["saved_bytes_per_step"] == before - after
    for told_of in found:
        report = told_of["coded report"]
        assert 3 * after <= report["weights_bytes"] + report["gradients_bytes"] <= 5 * after
        assert report["saved_bytes"] > 3 * few["saved_bytes_per_step"]
        assert told_of["whole report"]["saved_bytes"] == 0
    assert "zero_quantized_gradients is true on rank 1" in first["unlike"] and "false on rank 0" in first["unlike"]


def test_a_run_of_a_version_without_them_has_exchanged_all_bits():
    before = {"optimizer": {}, "groups": [], "schedule": None, "scheduler": None, "gradient_clipping": 0}
    name = "zero_optimization.zero_quantized_weights"
    assert _identity.changes(before, {**before, name: False}) == []
    assert _identity.changes(before, {**before, name: True}) == [f"{name} is True and was False"]
    assert _identity.changes({**before, name: True}, {**before, name: False}) == [f"{name} is False and was True"]


def test_one_process_says_that_it_has_nobody_to_exchange_with(directory):
    given = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    batch = batches(1)[0]
    with pytest.warns(UserWarning) as warned:
        engine = make(net(), directory / "state", **given)
    lines = [str(warning.message) for warning in warned]
    for name in given:
        assert f"zero_optimization.{name}: accepted and ignored: with one rank there is nobody to exchange with" in lines
    step(engine, batch)
    assert engine.plan()["exchange"] is None and engine.report()["exchange"] is None
    engine.close()
    plan = penstock.plan(net(), example=batch, host_memory="64MiB", **given)
    assert plan["exchange"] is None and any("zero_quantized_weights" in note for note in plan.notes)


class Counted(nn.Module):
    """Two layers with running statistics, without biases, whose gradients would be rounding errors."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)) for _ in range(2)])
        self.out = nn.Linear(8, 1)

    def forward(self, x, targets):
        x = nn.functional.one_hot(x % 8, 8).float().flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.out(x).square().mean()


# Not Adam, which makes steps of one size of gradients that are rounding alone.
def by_sgd(model, directory, **options):
    return make(model, directory, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), **options)


BUFFERS = COMMON + "from test_ranks import Counted, by_sgd\n" + """
def counted():
    torch.manual_seed(3 + rank)  # rank 0's values count
    return Counted()

def statistics(model):
    return {name: each.double().tolist() for name, each in model.named_buffers()}

steps = batches(5, size=12)
engine = by_sgd(counted(), directory + "/counted")
losses = []
seen = []
for batch in steps[:3]:
    losses.append(of_all(engine, batch)[0])
    seen.append(statistics(engine.module))
tell("losses", losses)
tell("seen", seen)
engine.save_checkpoint(directory + "/kept", tag="kept", wait=True)
engine.close()
resumed = by_sgd(counted(), directory + "/counted", resume=True)
tell("resumed", [of_all(resumed, batch)[0] for batch in steps[3:]])
tell("last", statistics(resumed.module))
resumed.module.eval()
with torch.no_grad():
    tell("evaluated", resumed.module(**steps[0]).item())
resumed.close()

summed = by_sgd(counted(), directory + "/summed", gradient_accumulation_steps=2)
for batch in steps[:2]:
    mine = own(batch)
    for part in (slice(0, 3), slice(3, 6)):
        step(summed, {name: value[part] for name, value in mine.items()})
tell("summed", statistics(summed.module))
summed.close()
"""


def with_statistics_of_rank_0(steps):
    """Losses, buffers after each step and what evaluation gives: each half has statistics of its own, and the first half's go on."""
    torch.manual_seed(3)
    model = Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, seen = [], []
    for batch in steps:
        before = {name: each.clone() for name, each in model.named_buffers()}
        first, second = ({name: value[at : at + 6] for name, value in batch.items()} for at in (0, 6))
        optimizer.zero_grad()
        loss = model(**first) / 2
        loss.backward()
        after = {name: each.clone() for name, each in model.named_buffers()}
        for name, each in model.named_buffers():
            each.copy_(before[name])
        other = model(**second) / 2
        other.backward()
        for name, each in model.named_buffers():
            each.copy_(after[name])
        loss = loss + other
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        seen.append(after)
    model.eval()
    with torch.no_grad():
        return losses, seen, model(**steps[0]).item()


def test_buffers_that_change_are_those_of_rank_0_on_all(directory, on_ranks):
    first, second = told(on_ranks(BUFFERS, 2, directory))
    assert first == second
    losses, seen, evaluated = with_statistics_of_rank_0(batches(5, size=12))
    assert first["losses"] + first["resumed"] == pytest.approx(losses, rel=2e-5)
    for found, expected in zip(first["seen"] + [first["last"]], seen[:3] + seen[-1:]):
        for name, value in expected.items():
            assert torch.allclose(torch.tensor(found[name], dtype=torch.float64), value.double(), rtol=1e-3, atol=2e-4), name
    assert first["evaluated"] == pytest.approx(evaluated, rel=1e-2)
    assert first["summed"]["layers.0.1.num_batches_tracked"] == 4
    # One process goes on with them.
    alone = by_sgd(Counted(), directory / "alone")
    alone.load_checkpoint(directory / "kept", "kept")
    alone.module(**{name: value[:6] for name, value in batches(5, size=12)[3].items()})
    buffers = dict(alone.module.named_buffers())
    assert torch.allclose(buffers["layers.0.1.running_mean"], seen[3]["layers.0.1.running_mean"], rtol=1e-3, atol=2e-4)
    alone.close()


EVALUATES = COMMON + """
model = build(seed=7 + rank)
for parameter in model.parameters():
    parameter.requires_grad_(False)
engine = penstock.initialize(model=model, state_dir=directory + "/weights")[0]
model.eval()
steps = batches(4, size=4)
with torch.no_grad():
    tell("losses", [model(**batch).item() for batch in steps[2 * rank : 2 * rank + 2]])
tell("state", {name: value.double().sum().item() for name, value in model.state_dict().items()})
engine.close()
again = build(seed=9)
for parameter in again.parameters():
    parameter.requires_grad_(False)
engine = penstock.initialize(model=again, state_dir=directory + "/weights", resume=True)[0]
again.eval()
with torch.no_grad():
    tell("again", again(**steps[2 * rank]).item())
engine.close()
"""


def test_ranks_that_only_evaluate_have_the_values_of_rank_0_and_batches_of_their_own(directory, on_ranks):
    found = told(on_ranks(EVALUATES, 2, directory))
    model = net(seed=7).eval()
    steps = batches(4, size=4)
    with torch.no_grad():
        expected = [model(**batch).item() for batch in steps]
    for rank, of_rank in enumerate(found):
        assert of_rank["losses"] == pytest.approx(expected[2 * rank : 2 * rank + 2], rel=1e-6)
        assert of_rank["again"] == pytest.approx(expected[2 * rank], rel=1e-6)
        assert of_rank["state"] == found[0]["state"]


ADAPTERS = COMMON + """
import peft
def adapted():
    torch.manual_seed(5 + rank)
    model = peft.get_peft_model(Net(), peft.LoraConfig(r=4, lora_alpha=8, target_modules=["up"], init_lora_weights=False))
    return model
model = adapted()
trained = [each for each in model.parameters() if each.requires_grad]
engine = penstock.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=1e-2), gradient_clipping=1.0, state_dir=directory + "/lora")[0]
steps = batches(5, size=12)
tell("losses", [of_all(engine, batch)[0] for batch in steps[:3]])
state = peft.get_peft_model_state_dict(model)
tell("adapters", {name: value.double().sum().item() for name, value in state.items()})
engine.save_checkpoint(directory + "/kept", tag="kept", wait=True)
tell("after", [of_all(engine, batch)[0] for batch in steps[3:]])
engine.close()
loaded_model = adapted()
trained = [each for each in loaded_model.parameters() if each.requires_grad]
loaded = penstock.initialize(
    model=loaded_model, optimizer=torch.optim.AdamW(trained, lr=1e-2), gradient_clipping=1.0, state_dir=directory + "/loaded"
)[0]
loaded.load_checkpoint(directory + "/kept", "kept")
tell("loaded", [of_all(loaded, batch)[0] for batch in steps[3:]])
loaded.close()
"""


def test_adapters_train_over_several_ranks_as_in_one_process(directory, on_ranks):
    peft = pytest.importorskip("peft")
    first, second = told(on_ranks(ADAPTERS, 2, directory))
    assert first == second
    torch.manual_seed(5)
    from engine_models import Net

    model = peft.get_peft_model(Net(), peft.LoraConfig(r=4, lora_alpha=8, target_modules=["up"], init_lora_weights=False))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    expected, sums = [], {}
    for number, batch in enumerate(batches(5, size=12)):
        if number == 3:
            sums = {name: value.double().sum().item() for name, value in peft.get_peft_model_state_dict(model).items()}
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        expected.append(loss.item())
    assert first["losses"] + first["after"] == pytest.approx(expected, rel=5e-6)
    assert first["loaded"] == first["after"]
    assert first["adapters"] == pytest.approx(sums, abs=1e-4)


APART = COMMON + """
import peft
def adapted(seed=5):
    torch.manual_seed(seed)
    targets = ["up", "down"]
    return peft.get_peft_model(Net(layers=8, width=256), peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets, init_lora_weights=False))
def engine_of(model, place, **options):
    trained = [each for each in model.parameters() if each.requires_grad]
    return make(model, directory + "/" + place, optimizer=torch.optim.AdamW(trained, lr=1e-3), **options)
model = adapted(5 + rank)
counts = {trains: sum(each.numel() for each in model.parameters() if each.requires_grad == trains) for trains in (True, False)}
tell("counts", [counts[True], counts[False]])
engine = engine_of(model, "lora", host_memory=sys.argv[2])
steps = batches(7, size=12)
losses = [of_all(engine, batch) for batch in steps[:3]]
tell("plan", engine.plan())
tell("steps", engine.report()["steps"])
engine.save_checkpoint(directory + "/kept", tag="kept", wait=True)
tell("losses", losses + [of_all(engine, batch) for batch in steps[3:]])
engine.close()
resumed = engine_of(adapted(), "lora", resume=True)
tell("resumed", of_all(resumed, steps[0]))
resumed.close()
loaded = engine_of(adapted(), "loaded")
loaded.load_checkpoint(directory + "/alone", "alone")
tell("loaded", [of_all(loaded, batch) for batch in steps[3:]])
loaded.close()
begun = engine_of(adapted(), "begun", overwrite=True)
of_all(begun, steps[0])
begun.load_checkpoint(directory + "/alone", "alone")
tell("begun", [of_all(begun, batch) for batch in steps[3:]])
begun.close()
"""


def test_over_several_ranks_state_writes_and_exchange_of_adapters_are_the_adapters(directory, on_ranks):
    peft = pytest.importorskip("peft")
    from engine_models import Net

    def adapted():
        torch.manual_seed(5)
        targets = ["up", "down"]
        return peft.get_peft_model(Net(layers=8, width=256), peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets, init_lora_weights=False))

    def alone(place, **options):
        model = adapted()
        trained = [each for each in model.parameters() if each.requires_grad]
        return make(model, directory / place, optimizer=torch.optim.AdamW(trained, lr=1e-3), **options)

    def train(engine, data):
        return [(step(engine, batch), engine.get_global_grad_norm()) for batch in data]

    def same(found, expected):
        assert [each[0] for each in found] == pytest.approx([each[0] for each in expected], rel=1e-5)
        assert [each[1] for each in found] == pytest.approx([each[1] for each in expected], rel=1e-4)

    data = batches(7, size=12)
    with alone("one") as engine:
        expected = train(engine, data[:3])
        engine.save_checkpoint(directory / "alone", tag="alone", wait=True)
        expected += train(engine, data[3:])
    first, second = told(on_ranks(APART, 2, directory, "64MiB"))
    for of_rank in (first, second):
        same(of_rank["losses"], expected)
        assert of_rank["losses"] == first["losses"] and of_rank["resumed"] == first["resumed"]
        # A run that one process began has the blocks that it began with, also where it is loaded once a forward has shown others.
        same(of_rank["loaded"], expected[3:])
        assert of_rank["begun"] == of_rank["loaded"]
        adapters, frozen = of_rank["counts"]
        assert frozen > 10 * adapters
        # fp32: weights, and of what trains two moments, of which each rank has and writes its half.
        assert of_rank["plan"]["state_bytes"] - 4 * frozen <= 1.05 * 12 * adapters
        assert all(each["nvme_write_bytes"] <= 1.05 * 12 * adapters / 2 for each in of_rank["steps"])
        on_disk = sum(each.stat().st_blocks * 512 for each in (directory / "lora").rglob("penstock.store"))
        assert on_disk <= 1.05 * (2 * 12 * adapters + 2 * 4 * frozen) + (8 << 20)
    # The same from the checkpoint of both, in one process, whose blocks are others unless it goes on from there.
    with alone("from both") as engine:
        engine.load_checkpoint(directory / "kept", "kept")
        same(train(engine, data[3:]), expected[3:])
    with alone("begun as one", overwrite=True) as engine:
        train(engine, data[:1])
        engine.load_checkpoint(directory / "kept", "kept")
        same(train(engine, data[3:]), expected[3:])
    with alone("from the state") as engine:
        assert engine.load_checkpoint(directory, "lora")[0]
        train(engine, data[:1])


EXPORTS = COMMON + """
engine = make(build(), directory + "/state")
steps = batches(4, size=12)
for batch in steps[:2]:
    of_all(engine, batch)
engine.save_checkpoint(directory + "/kept", tag="kept", wait=True)
tell("path", engine.export_checkpoint(directory + "/universal"))
try:
    engine.export_checkpoint(directory + "/universal")
except FileExistsError as error:
    tell("again", str(error))
try:
    engine.export_checkpoint(directory + "/refuses/a-file/below")
except (OSError, RuntimeError) as error:
    tell("refused", str(error))
tell("goes on", [of_all(engine, batch)[0] for batch in steps[2:]])
engine.close()
"""


def test_several_ranks_export_what_one_process_does(directory, on_ranks):
    (directory / "refuses").mkdir()
    (directory / "refuses" / "a-file").write_text("")
    first, second = told(on_ranks(EXPORTS, 2, directory))
    assert first == second
    assert "overwrite=True" in first["again"] and "cannot be made: Not a directory" in first["refused"]
    alone = make(net(), directory / "alone")
    alone.load_checkpoint(directory / "kept", "kept")
    alone.module.eval()
    with torch.no_grad():
        alone.module(**batches(1, size=12)[0])
    expected = alone.export_checkpoint(directory / "expected")
    alone.close()
    files = sorted(os.path.relpath(os.path.join(at, name), expected) for at, _, names in os.walk(expected) for name in names)
    assert files == sorted(os.path.relpath(os.path.join(at, name), first["path"]) for at, _, names in os.walk(first["path"]) for name in names)
    compared = 0
    for name in files:
        if os.path.basename(name) not in ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"):
            continue
        one, two = (torch.load(os.path.join(path, name), weights_only=False) for path in (expected, first["path"]))
        one, two = (each["param"] if isinstance(each, dict) else each for each in (one, two))
        assert torch.equal(one, two), name
        compared += 1
    assert compared == 3 * len(list(net().parameters()))
    plain, _ = plain_losses(net(), all_names(net()), [[batch] for batch in batches(4, size=12)])
    assert first["goes on"] == pytest.approx(plain[2:], rel=5e-6)


def test_trainer_under_torchrun(directory):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    settings = trainer.config(directory / "nvme")

    def run(*launcher, **options):
        return trainer.run(*launcher, threads=1, max_steps=4, save_steps=2, evaluates=False, **options)

    plain = run(out=directory / "plain", size=8)
    ranks = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "penstock.run",
                deepspeed=settings, out=directory / "ranks", size=4)
    assert ranks["ranks"] == [2]
    for number in (1, 2, 3, 4):
        assert ranks[number] == pytest.approx(plain[number], abs=1e-4), number
    assert ranks["loaded"] == pytest.approx(plain["loaded"], abs=1e-4)
    assert (directory / "ranks" / "checkpoint-4" / "global_step4" / "rank-1").is_dir()
    assert os.listdir(directory / "nvme") == []


def test_an_engine_that_has_begun_loads_on_deepspeeds_scratch(directory, on_ranks):
    """nvme_path is scratch of each process: no rank sees the parts of the others there."""
    told = on_ranks(
        """
        import sys
        import penstock.deepspeed as deepspeed
        import torch
        sys.path.insert(0, sys.argv[2])
        from engine_models import batches, net, step
        deepspeed.init_distributed()
        nvme = {"device": "nvme", "nvme_path": sys.argv[1] + "/nvme"}
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
        engine, *_ = deepspeed.initialize(model=net(), config=config)
        steps = batches(6, seed=1 + engine.local_rank)
        losses = [step(engine, batch) for batch in steps[:3]]
        engine.save_checkpoint(sys.argv[1] + "/kept")
        after = [step(engine, batch) for batch in steps[3:]]
        engine.load_checkpoint(sys.argv[1] + "/kept")
        again = [step(engine, batch) for batch in steps[3:]]
        engine.destroy()
        print(after == again, engine.world_size, len(set(after)))
        """,
        2,
        directory,
        os.path.dirname(__file__),
    )
    assert [(status, out.splitlines()[-1:]) for status, out, _ in told] == [(0, ["True 2 3"])] * 2, told

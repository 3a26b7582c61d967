"""Several processes that train one model: as one process with the whole batch, and nobody waits for ever for another."""

import json
import os
import signal

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

import trainer  # noqa: E402
from engine_models import all_names, batches, make, net, plain_losses, step  # noqa: E402

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

    with pytest.raises(ValueError, match="holds a run of 2 ranks, and there is one.*load_checkpoint"):
        step(make(net(), directory / "state", resume=True), steps[0])


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

class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)])
        self.out = nn.Linear(8, 1)
    def forward(self, x, targets):
        x = nn.functional.one_hot(x % 8, 8).float().flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.out(x).square().mean()
torch.manual_seed(0)
refused("BatchNorm", Counted(), RuntimeError)

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
        assert "clip is 2" in rank["another clip"] and "on rank 1" in rank["another clip"]
        assert "groups.layers.0 " in rank["another groups"] and " is 1 on rank 1 and 0 on rank 0" in rank["another groups"]
        assert "holds a run of one rank, and there are 2" in rank["of one"]
        assert "running_mean is changed by training" in rank["BatchNorm"]
        assert "learning rate 1.25" in rank["another rate"] and "learning rate 0.25" in rank["another rate"]
        # Told by the exchange, or by the block that had weights that were not whole.
        of_exchange = "rank 0 at reading" in rank["a call of one"] and "rank 1 of 2 is at step 2" in rank["a call of one"]
        assert of_exchange or "a rank has made another call meanwhile" in rank["a call of one"]
    assert "rank 1 of 2 failed: KeyError" in first["a forward that raises"]
    assert second["a forward that raises"] == "KeyError: 'a bad batch'"
    assert "rank 1 of 2 failed: its program ended with ValueError: the data ends early" in first["a program that ends"]


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

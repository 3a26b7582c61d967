"""Where checkpoints go: none takes the place of another run's, of one with another tag, or of what is no checkpoint."""

import argparse
import os

import pytest

torch = pytest.importorskip("torch")

import penstock.deepspeed as deepspeed  # noqa: E402
from engine_models import batches, make, net, step  # noqa: E402
from penstock import _core  # noqa: E402
from penstock._fp32 import SCRIPT, get_fp32_state_dict_from_zero_checkpoint  # noqa: E402


def engine_in(tmp_path, seed=0, **more):
    config = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **more,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}},
    }  # fmt: skip
    return deepspeed.initialize(model=net(seed), config=config)[0]


def weights(engine):
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def same(one, other):
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def places(kept):
    return sorted(each.name for each in kept.iterdir() if each.is_dir() and not each.is_symlink())


@pytest.mark.parametrize("decoupled", [False, True])
def test_two_models_saved_at_one_step_are_both_there(tmp_path, decoupled):
    """As accelerate's save_state has them."""
    kept, tags, had = tmp_path / "kept", ("pytorch_model", "pytorch_model_1"), {}
    engines = [engine_in(tmp_path, seed, checkpoint={"writer": {"decoupled": decoupled}}) for seed in (1, 2)]
    for again in range(2):
        for engine, tag in zip(engines, tags):
            if not again:
                step(engine, batches(1)[0])
            had[tag] = weights(engine)
            assert engine.save_checkpoint(str(kept), tag=tag, client_state={"who": tag, "args": argparse.Namespace(who=tag, again=again)})
    for engine in engines:
        engine.wait_for_checkpoint()
        engine.destroy()
    assert places(kept) == ["step-00000001", "step-00000001.2"]
    assert _core.checkpoints_in(str(kept)) == places(kept) and (kept / "latest").read_text() == "step-00000001.2"
    assert not same(had[tags[0]], had[tags[1]])
    for tag in (*tags, None):
        engine, of = engine_in(tmp_path, 3), tag or tags[1]
        path, client = engine.load_checkpoint(str(kept), tag=tag)
        assert client == {"who": of, "args": argparse.Namespace(who=of, again=1)} and os.path.basename(path) == places(kept)[tags.index(of)]
        with torch.no_grad():
            engine.eval()(**batches(1)[0])
        assert same(weights(engine), had[of])
        engine.destroy()
        assert same(get_fp32_state_dict_from_zero_checkpoint(str(kept), tag), had[of])


def test_another_run_takes_no_place_of_one_that_is_there_and_its_tag_is_its_own(tmp_path):
    kept = tmp_path / "kept"

    def run(seed, tag):
        engine = engine_in(tmp_path, seed)
        step(engine, batches(1)[0])
        engine.save_checkpoint(kept, tag)
        engine.save_checkpoint(kept, tag)
        had = weights(engine)
        log = [line for line in engine.engine.log() if "keeps its place" in line]
        engine.destroy()
        return had, log

    first, said = run(1, "run1-final")
    assert said == []
    second, said = run(2, "run2-final")
    assert len(said) == 1 and "step-00000001.2: step-00000001 there is another run's" in said[0]
    assert same(get_fp32_state_dict_from_zero_checkpoint(str(kept), "run1-final"), first)
    assert same(get_fp32_state_dict_from_zero_checkpoint(str(kept), "run2-final"), second)
    # The tag is the last one's, and what had it is still there.
    third, _ = run(3, "run1-final")
    assert same(get_fp32_state_dict_from_zero_checkpoint(str(kept), "run1-final"), third)
    assert same(get_fp32_state_dict_from_zero_checkpoint(str(kept), "step-00000001"), first) and places(kept)[2:] == ["step-00000001.3"]
    # What goes on from a checkpoint is its run.
    engine = engine_in(tmp_path, 4)
    engine.load_checkpoint(kept, "run2-final")
    step(engine, batches(1)[0])
    engine.load_checkpoint(kept, "run2-final")
    with torch.no_grad():
        engine(**batches(1)[0])
    engine.save_checkpoint(kept, "run2-final")
    engine.destroy()
    assert places(kept) == ["step-00000001", "step-00000001.2", "step-00000001.3"]


def test_penstocks_own_engine_keeps_what_another_tag_names(tmp_path):
    kept = tmp_path / "kept"
    with make(net(), tmp_path / "run", overwrite=True) as engine:
        step(engine, batches(1)[0])
        first = engine.save_checkpoint(kept, "best", {"which": "best"})
        second = engine.save_checkpoint(kept, "last", {"which": "last"})
        third = engine.save_checkpoint(kept, None, {"which": "none"})
        assert [os.path.basename(each) for each in (first, second, third)] == [f"step-00000001{each}" for each in ("", ".2", ".3")]
        assert engine.save_checkpoint(kept, "last", {"which": "again"}) == second and engine.save_checkpoint(kept, client_state={"which": "none"}) == third
        before = sorted(os.listdir(kept))
        with pytest.raises(FileExistsError, match="tag is the name of something that is no checkpoint of this run without other tags"):
            engine.save_checkpoint(kept, "step-00000001")
        with pytest.raises(ValueError, match="no other checkpoint has or will have"):
            engine.save_checkpoint(kept, "step-00000001.2")
        assert sorted(os.listdir(kept)) == before
        for tag, which in (("best", "best"), ("last", "again"), (None, "none")):
            assert engine.load_checkpoint(kept, tag)[1] == {"which": which}


def test_what_is_no_checkpoint_stays_whatever_its_name(tmp_path):
    kept = tmp_path / "kept"
    mine = [kept / SCRIPT, kept / "step-00000001" / "thesis.txt", kept / ".step-00000002.replaced" / "thesis.txt", kept / ".step-00000002.2.replaced"]
    for each in mine:
        each.parent.mkdir(parents=True, exist_ok=True)
        each.write_text("mine")
    engine = engine_in(tmp_path)
    for expected in (["step-00000001", "step-00000001.2"], ["step-00000001", "step-00000001.2", "step-00000002.3"]):
        step(engine, batches(1)[0])
        for _ in range(2):
            assert engine.save_checkpoint(kept)
            assert places(kept) == [".step-00000002.replaced", *expected]
    # Nor does what lies in a checkpoint go with it.
    (kept / "global_step2" / "tokenizer.json").write_text("mine")
    engine.save_checkpoint(kept)
    assert (kept / "step-00000002.3" / "tokenizer.json").read_text() == "mine" and os.readlink(kept / "global_step2") == "step-00000002.4"
    assert all(each.read_text() == "mine" for each in mine)
    engine.load_checkpoint(kept)
    engine.destroy()


def test_a_checkpoint_that_a_kill_has_left_superseded_goes_with_the_next_save(tmp_path):
    kept = tmp_path / "kept"
    with make(net(1), tmp_path / "run") as engine, make(net(2), tmp_path / "other") as other:
        for each, tag in ((engine, "mine"), (other, None)):
            step(each, batches(1)[0])
            each.save_checkpoint(tmp_path / f"kept-{tag}", tag, wait=True)
        engine.save_checkpoint(kept, "mine", wait=True)
        (tmp_path / "kept-mine" / "step-00000001").rename(kept / ".step-00000001.replaced")
        (tmp_path / "kept-None" / "step-00000001").rename(kept / ".step-00000009.replaced")  # nothing has taken its place
        step(engine, batches(1)[0])
        engine.save_checkpoint(kept, wait=True)
        assert places(kept) == [".step-00000009.replaced", "step-00000001", "step-00000002"]
        # Another run's is none that this one has superseded.
        (kept / ".step-00000009.replaced").rename(kept / ".step-00000002.replaced")
        step(engine, batches(1)[0])
        engine.save_checkpoint(kept, wait=True)
        assert ".step-00000002.replaced" in places(kept)


KILLED = """
    import os, shutil, sys
    sys.path.insert(0, sys.argv[2])
    import penstock, torch
    from engine_models import batches, make, net, step

    where, when = sys.argv[1], sys.argv[3]
    engine = make(net(), where + "/run")
    step(engine, batches(1)[0])
    engine.save_checkpoint(where + "/kept", "best", {"which": "best"}, wait=True)
    engine.save_checkpoint(where + "/kept", "last", {"which": 1}, wait=True)
    end = lambda *_, **__: os._exit(3)
    if when == "aside":
        engine._copy.begin = end
    elif when == "begun":
        engine._copy.wait_for_checkpoint = lambda own=engine._copy.wait_for_checkpoint: own() if engine._copy._path is None else end()
    else:
        shutil.rmtree = end
    engine.save_checkpoint(where + "/kept", "last", {"which": 2})
"""


@pytest.mark.parametrize("when", ["aside", "begun", "whole"])
def test_a_kill_at_any_moment_leaves_every_tag_whole(tmp_path, in_child, when):
    kept = tmp_path / "kept"
    code, _, error = in_child(KILLED, tmp_path, os.path.dirname(os.path.abspath(__file__)), when)
    assert code == 3, error
    with make(net(3), tmp_path / "again", overwrite=True) as engine:
        assert engine.load_checkpoint(kept, "best")[1] == {"which": "best"}
        assert engine.load_checkpoint(kept, "last")[1] in ([{"which": 2}] if when == "whole" else [{"which": 1}, {"which": 2}])
        with torch.no_grad():
            engine(**batches(1)[0])
        engine.save_checkpoint(kept, "last", {"which": 3}, replaces_others=True)
        assert places(kept) == ["step-00000001", "step-00000001.2"]
        assert engine.load_checkpoint(kept, "best")[1] == {"which": "best"} and engine.load_checkpoint(kept, "last")[1] == {"which": 3}


RANKS = """
    import argparse, os, sys
    sys.path.insert(0, sys.argv[2])
    import penstock.deepspeed as deepspeed
    import torch
    from engine_models import batches, net, step

    torch.set_num_threads(1)
    where, rank = sys.argv[1], int(os.environ["RANK"])
    offload = {"device": "nvme", "nvme_path": where + "/nvme"}
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3, "offload_optimizer": offload}}
    engine = deepspeed.initialize(model=net(), config=config)[0]
    step(engine, batches(1)[0])
    for tag in ("a", "b", "a"):
        engine.save_checkpoint(where + "/kept", tag, client_state={"args": argparse.Namespace(tag=tag, rank=rank)})
    for tag in ("a", "b"):
        path, found = engine.load_checkpoint(where + "/kept", tag)
        assert found["args"].tag == tag and path.endswith({"a": "step-00000001", "b": "step-00000001.2"}[tag]), (path, found)
    engine.destroy()
    there = sorted(os.path.relpath(os.path.join(place, name), where + "/kept") for place, _, names in os.walk(where + "/kept") for name in names)
    assert [each.split("/")[:2] for each in there if "client_state" in each] == [[f"step-00000001{n}", f"rank-{r}"] for n in (".2", "") for r in (0, 1)], there
    assert not any(each.startswith(".client") for each in there), there
    print("DONE")
"""


def test_over_ranks_all_take_the_same_place(tmp_path, on_ranks):
    told = on_ranks(RANKS, 2, tmp_path, os.path.dirname(os.path.abspath(__file__)))
    assert [(code, "DONE" in out) for code, out, _ in told] == [(0, True)] * 2, told

"""What scripts do by mistake is refused in a line that says what to do, before it costs anything."""

import copy
import errno
import itertools
import os
import random
import signal
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
import penstock._fp32  # noqa: E402
from engine_models import all_names, batches, make, net, plain_losses, step  # noqa: E402
from torch import nn  # noqa: E402


class Clamped(nn.Module):
    """A layer that changes its weight in forward, in training alone where `careful`."""

    def __init__(self, careful=False):
        super().__init__()
        self.careful = careful
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        if self.training or not self.careful:
            with torch.no_grad():
                self.weight.clamp_(-0.5, 0.5)
        return x @ self.weight


@pytest.mark.parametrize("layer", [Clamped, lambda: nn.Embedding(8, 8, max_norm=0.1)])
def test_a_forward_that_changes_a_weight_is_refused_before_anything_is_made(tmp_path, layer):
    torch.manual_seed(0)
    model = nn.Sequential(layer(), nn.Linear(8, 8))
    x = torch.ones(2, 8) if isinstance(model[0], Clamped) else torch.arange(8)
    engine = make(model, tmp_path / "run")
    with pytest.raises(TypeError, match=r"0\.weight is changed in place"):
        engine(x)
    assert not (tmp_path / "run").exists() and model[0].weight.isfinite().all()


def test_a_weight_that_is_changed_in_a_later_forward_ends_the_engine_and_no_commit(tmp_path):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), Clamped(careful=True), nn.Linear(8, 8))

    engine = make(model().eval(), tmp_path)
    x = torch.ones(2, 8)
    before = engine(x)
    engine.train()
    with pytest.raises(RuntimeError, match=r"1\.weight is changed in place"):
        engine(x)
    engine.eval()
    with pytest.raises(RuntimeError, match="This engine ends here"):
        engine.flush()
    engine.close()
    with make(model().eval(), tmp_path, resume=True) as engine:
        assert torch.equal(engine(x), before)


def test_backwards_without_a_step_are_not_lost_in_silence(tmp_path):
    """What a script adds up without a word of it to initialize is served (test_forwards.py); what an exception leaves is not added."""
    data = batches(4)
    expected = plain_losses(net(), all_names(net()), [[batch] for batch in data])[0]
    with make(net(), tmp_path) as engine:
        with pytest.raises(RuntimeError, match="no step is open|not seen the model"):
            engine.step()
        losses = [step(engine, data[0])]
        for zero_grad in (engine.zero_grad, engine.optimizer.zero_grad):
            engine.backward(engine(**data[3]))
            zero_grad()
        out = engine(**data[1])
        engine.zero_grad()  # before backward, as many scripts have it
        engine.backward(out)
        engine.step()
        losses.append(out.item())
        engine.backward(engine(**data[3]))  # an exception comes before the step
        with pytest.warns(UserWarning, match=r"had no engine\.step\(\)"):
            losses.append(step(engine, data[2]))
        losses.append(step(engine, data[3]))
    assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("offload", ["nvme", "none"])
def test_the_optimizer_that_was_handed_over_makes_no_step_of_its_own(tmp_path, offload):
    data = batches(3)
    expected = plain_losses(net(), all_names(net()), [[batch] for batch in data])[0]
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    where = {"offload": offload, **({"state_dir": str(tmp_path)} if offload == "nvme" else {})}
    engine = penstock.initialize(model=model, optimizer=optimizer, gradient_clipping=1.0, **where)[0]
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)  # which puts a step of its own there
    losses = []
    for batch in data:
        loss = engine(**batch)
        engine.backward(loss)
        with pytest.raises(RuntimeError, match=r"engine\.step\(\)"):
            optimizer.step()
        engine.step()
        scheduler.step()
        losses.append(loss.item())
    engine.close()
    optimizer.step()  # nothing has a gradient
    assert losses == pytest.approx(expected, abs=1e-5)


def test_an_optimizer_that_was_refused_is_as_it_was(tmp_path):
    model, stray = net(), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*model.parameters(), stray], lr=1.0)
    with pytest.raises(ValueError, match="none of the model's"):
        make(model, tmp_path, optimizer=optimizer)
    stray.grad = torch.ones(2)
    optimizer.step()
    assert stray.tolist() == [-1, -1]


def test_a_step_without_a_gradient_is_refused(tmp_path):
    data = batches(2)
    model = net()
    with make(model, tmp_path) as engine:
        loss = engine(**data[0])
        torch.autograd.grad(loss, list(model.parameters()))
        with pytest.raises(RuntimeError, match=r"engine\.backward\(loss\)"):
            engine.step()
        assert engine.global_steps == 0
        step(engine, data[0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"overwrite": "false"}, {"overwrite": 1}, {"resume": "false"}, {"resume": "Auto"}, {"progress": "no"}, {"seed": 1.5}, {"seed": -1},
        {"seed": 2**70}, {"gradient_clipping": "1.0"}, {"host_memory": float("inf")}, {"host_memory": float("nan")},
        {"config": {"gradient_clipping": float("inf")}}, {"config": {"train_batch_size": float("inf")}},
        {"config": {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, float("nan")]}}}},
        {"config": {"wandb": {"enabled": "false"}}},
    ],
    ids=str,
)  # fmt: skip
def test_an_argument_of_another_kind_is_refused_by_name(tmp_path, wrong):
    with make(net(), tmp_path) as engine:
        step(engine, batches(1)[0])
    name = next(iter(wrong))
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong[name])) if name == "config" else name):
        make(net(), tmp_path, **wrong)
    with make(net(), tmp_path, resume=True) as engine:
        step(engine, batches(1)[0])
        assert engine.global_steps == 2  # nothing was replaced


def test_clipping_at_infinity_is_none(tmp_path):
    data = batches(2)
    expected = plain_losses(net(), all_names(net()), [[batch] for batch in data], clip=None)[0]
    with make(net(), tmp_path, gradient_clipping=float("inf")) as engine:
        assert [step(engine, batch) for batch in data] == pytest.approx(expected, abs=1e-5)
        assert 0 < engine.get_global_grad_norm() < 1e3


@pytest.mark.parametrize("config", [None, {"penstock": {"sync": "process"}}])
def test_a_loop_that_does_not_clip_is_not_clipped_unasked(tmp_path, config):
    data = batches(4)
    expected = plain_losses(net(), all_names(net()), [[batch] for batch in data], clip=None)[0]
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with penstock.initialize(model=model, optimizer=optimizer, config=config, state_dir=str(tmp_path))[0] as engine:
        assert [step(engine, batch) for batch in data] == pytest.approx(expected, abs=1e-5)
        assert engine.get_global_grad_norm() > 1.0  # clipping would show


@pytest.mark.parametrize("resume", [False, True, "auto"])
def test_a_checkpoint_takes_the_place_of_a_run_where_that_is_said_alone(tmp_path, resume):
    data = batches(4)
    with make(net(), tmp_path / "run") as engine:
        step(engine, data[0])
        engine.save_checkpoint(tmp_path / "checkpoints")
        step(engine, data[1])
        step(engine, data[2])
    engine = make(net(), tmp_path / "run", resume=resume)
    engine.load_checkpoint(tmp_path / "checkpoints")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        step(engine, data[1])
    engine.close()
    with make(net(), tmp_path / "run", resume=True) as engine:
        step(engine, data[3])
        assert engine.global_steps == 4
    with make(net(), tmp_path / "run", resume=resume, overwrite=True) as engine:
        engine.load_checkpoint(tmp_path / "checkpoints")
        step(engine, data[1])
        assert engine.global_steps == 2


def damage_tiles(checkpoint):
    """Every 512th byte of the second half of its store's file, where tiles lie."""
    with open(os.path.join(checkpoint, "penstock.store"), "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for at in range(size // 2, size, 512):
            file.seek(at)
            file.write(b"Z")


@pytest.mark.parametrize("on_drive", [True, False])
@pytest.mark.parametrize("only_weights", [False, True])
def test_a_damaged_checkpoint_leaves_the_run_that_has_begun_as_it_was(tmp_path, on_drive, only_weights):
    data = batches(6)
    where = {"state_dir": str(tmp_path / "run")} if on_drive else {"offload": "none"}

    def begin(**options):
        model = net()
        return penstock.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), **where, **options)[0]

    with begin() as engine:
        expected = [step(engine, batch) for batch in data]
    with begin(overwrite=True) as engine:
        losses = [step(engine, batch) for batch in data[:2]]
        path = engine.save_checkpoint(tmp_path / "kept", wait=True)
        losses.append(step(engine, data[2]))
        damage_tiles(path)
        with pytest.raises(OSError, match="penstock.store") as refused:
            engine.load_checkpoint(tmp_path / "kept", load_module_only=only_weights)
        assert refused.value.errno == errno.EIO
        losses += [step(engine, batch) for batch in data[3:5]]
    if on_drive:
        with begin(resume=True) as engine:
            losses.append(step(engine, data[5]))
    assert losses == expected[: len(losses)]


@pytest.mark.parametrize("only_weights", [False, True])
def test_a_damaged_checkpoint_leaves_the_run_that_a_first_forward_would_replace(tmp_path, only_weights):
    data = batches(4)
    with make(net(), tmp_path / "run") as engine:
        expected = [step(engine, batch) for batch in data]
    with make(net(), tmp_path / "run", overwrite=True) as engine:
        for batch in data[:2]:
            step(engine, batch)
        damage_tiles(engine.save_checkpoint(tmp_path / "kept", wait=True))
        step(engine, data[2])
    model = net(seed=5)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with make(model, tmp_path / "run", overwrite=True) as engine:
        with pytest.raises(OSError, match="penstock.store"):
            engine.load_checkpoint(tmp_path / "kept", load_module_only=only_weights)
            step(engine, data[2])
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    with make(net(), tmp_path / "run", resume=True) as engine:
        assert step(engine, data[3]) == expected[3]


def test_what_is_given_otherwise_on_a_resume_is_told(tmp_path):
    def adam(kind=torch.optim.AdamW, **options):
        return lambda parameters: kind(parameters, **{"lr": 1e-2, **options})

    def cosine(steps):
        return lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    data = batches(12)
    with make(net(), tmp_path, optimizer=adam(), lr_scheduler=cosine(50)) as engine:
        step(engine, data[0])
    same = {"optimizer": adam(), "lr_scheduler": cosine(50), "gradient_clipping": 1.0}
    for number, (given, told) in enumerate(
        [
            ({}, None),
            ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5 and was 1.0"),
            ({}, "gradient_clipping is 1.0 and was 0.5"),
            ({"optimizer": adam(weight_decay=0.5)}, "weight_decay of group 0 is 0.5 and was 0.01"),
            ({}, "weight_decay of group 0 is 0.01"),
            ({"optimizer": adam(lr=0.5)}, "lr of group 0 is 0.5 and was 0.01: the run's own goes on"),
            ({}, "lr of group 0 is 0.01 and was 0.5"),
            ({"optimizer": adam(kind=torch.optim.Adam, weight_decay=0.01)}, "the optimizer's type is Adam and was AdamW"),
            ({"optimizer": adam(eps=1e-4)}, "eps is 0.0001 and was 1e-08"),
            ({"lr_scheduler": cosine(9)}, "T_max of the scheduler"),
            ({"lr_scheduler": None}, "the scheduler is None and was CosineAnnealingLR"),
        ]
    ):
        engine = make(net(), tmp_path, resume=True, **{**same, **given})
        with engine, warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            step(engine, data[number + 1])
        assert engine.global_steps == number + 2
        lines = [str(each.message) for each in heard if "resume" in str(each.message)]
        assert lines == [] if told is None else told in lines[0], (given, lines)


def test_what_a_program_sets_in_its_groups_goes_on_with_the_run(tmp_path):
    data = batches(6)

    def train(directory, parts):
        losses = []
        for number, part in enumerate(parts):
            model = net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-2, total_steps=10)  # of the betas, too
            with make(model, directory, optimizer=optimizer, lr_scheduler=schedule, resume=number > 0) as engine:
                for batch in part:
                    losses.append(step(engine, batch))
                    engine.optimizer.param_groups[0]["weight_decay"] = 0.5
        return losses

    assert train(tmp_path / "cut", [data[:2], data[2:5], data[5:]]) == train(tmp_path / "whole", [data])


def test_what_a_commit_has_no_room_for_is_refused_and_costs_no_step(tmp_path):
    data = batches(3)
    with make(net(), tmp_path) as engine:
        step(engine, data[0])
        for what, why in (("x" * 100_000, "has room for"), (object(), "cannot be kept")):
            loss = engine(**data[1])
            engine.backward(loss)
            engine.client_state["what"] = what
            with pytest.raises((TypeError, ValueError), match=why):
                engine.step()
            engine.zero_grad()
            with pytest.raises((TypeError, ValueError), match=why):
                engine.flush()
            engine.client_state = {"what": 1}
            with pytest.raises((TypeError, ValueError), match=why):
                engine.save_checkpoint(tmp_path / "checkpoints", client_state={"what": what})
            assert engine.client_state == {"what": 1} and engine.global_steps == 1
        step(engine, data[1])
    with make(net(), tmp_path, resume=True) as engine:
        step(engine, data[2])
        assert engine.client_state == {"what": 1} and engine.global_steps == 3


def test_what_is_tied_or_replaced_before_the_first_forward_is_trained(tmp_path):
    data = batches(3)
    model, plain = net(tied=False), net(tied=False)
    plain.head.weight = plain.embed.weight
    expected = plain_losses(plain, all_names(plain), [[batch] for batch in data])[0]
    with make(model, tmp_path) as engine:
        model.head.weight = model.embed.weight
        losses = [step(engine, batch) for batch in data]
    assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.head, "weight", model.embed.weight),
        lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(50, 32))),
        lambda model: setattr(model, "head", nn.Linear(32, 50, bias=False)),
        lambda model: model.layers.__delitem__(3),
        lambda model: model.layers[0].load_state_dict(net(seed=5).layers[0].state_dict(), assign=True),
    ],
    ids=["tied", "parameter", "module", "gone", "assigned"],
)
def test_a_model_that_is_another_later_on_is_refused_by_name(tmp_path, change):
    model, data = net(tied=False), batches(2)
    with make(model, tmp_path) as engine:
        step(engine, data[0])
        change(model)
        with pytest.raises(RuntimeError, match="is not what it was in the first forward"):
            step(engine, data[1])
        assert engine.global_steps == 1


@pytest.mark.parametrize("kept", [False, True], ids=["made", "resumed"])
@pytest.mark.filterwarnings("ignore")
def test_a_monitor_that_cannot_be_opened_leaves_the_model_its_values(tmp_path, kept):
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "file"), "job_name": "job"}, "gradient_clipping": 1.0}
    model, data = net(), batches(2)
    if kept:
        with make(net(), tmp_path / "run") as engine:
            step(engine, data[0])
    engine = make(model, tmp_path / "run", config={"train_micro_batch_size_per_gpu": 1, **monitor}, resume=kept)
    (tmp_path / "file").write_text("")  # after initialize, which would refuse it
    for _ in range(2):
        with pytest.raises((OSError, ValueError), match="csv_monitor"):
            step(engine, data[1])
        assert model.norm.weight.isfinite().all() and not engine.started
    (tmp_path / "file").unlink()
    step(engine, data[1])
    assert engine.global_steps == 1 + kept
    engine.close()


def test_ctrl_c_while_the_state_is_made_comes_when_it_is(tmp_path, monkeypatch):
    from penstock._engine import _preparation

    real = _preparation.Weights

    def interrupted(*arguments, **keywords):
        signal.raise_signal(signal.SIGINT)
        return real(*arguments, **keywords)

    data = batches(2)
    expected = plain_losses(net(), all_names(net()), [[batch] for batch in data])[0]
    with make(net(), tmp_path) as engine:
        monkeypatch.setattr(_preparation, "Weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(engine, data[0])
        monkeypatch.undo()
        assert [step(engine, batch) for batch in data] == pytest.approx(expected, abs=1e-5)


def test_groups_of_the_engines_optimizer_are_settled(tmp_path):
    from penstock.ops.adam import DeepSpeedCPUAdam

    data = batches(2)
    with make(net(), tmp_path / "run") as engine:
        step(engine, data[0])
        group = engine.optimizer.param_groups[0]
        with pytest.raises(ValueError, match="groups are settled"):
            engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        for name, value in (("amsgrad", True), ("maximize", True), ("eps", 1.0), ("betas", (2.0, 0.9)), ("lr", "1e-3")):
            before, group[name] = group[name], value
            with pytest.raises((RuntimeError, TypeError, ValueError), match=name if name != "betas" else "beta"):
                step(engine, data[1])
            group[name] = before
        step(engine, data[1])
        assert engine.global_steps == 2
    model = net()
    with pytest.raises(ValueError, match="bias_correction=False is not served"):
        make(model, tmp_path / "other", optimizer=DeepSpeedCPUAdam(model.parameters(), bias_correction=False))
    # As accelerate makes it of an optimizer of another kind.
    of_another = DeepSpeedCPUAdam(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).param_groups)
    with pytest.raises(ValueError, match="DeepSpeedCPUAdam has momentum, .*zero_force_ds_cpu_optimizer"):
        make(model, tmp_path / "other", optimizer=of_another)
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        make(model, tmp_path / "other", lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    one_cycle = torch.optim.lr_scheduler.OneCycleLR
    with make(model, tmp_path / "other", lr_scheduler=lambda optimizer: one_cycle(optimizer, max_lr=1e-2, total_steps=9)) as engine:
        step(engine, data[0])


def test_a_model_that_was_cast_goes_on_with_the_engines_values(tmp_path):
    data = batches(4)
    expected = plain_losses(net(), all_names(net()), [[batch] for batch in data])[0]
    model, losses = net(), []
    with make(model, tmp_path) as engine:
        for batch, cast in zip(data, (model.half, model.double, model.bfloat16, None)):
            losses.append(step(engine, batch))
            if cast is not None:
                cast()
                with pytest.raises(RuntimeError, match="or another type or device"):
                    engine(**batch)
    assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("first", [False, True])
def test_inference_mode_leaves_a_model_that_trains(tmp_path, first):
    data = batches(3)
    expected = plain_losses(net(), all_names(net()), [[batch] for batch in data])[0]
    with make(net(), tmp_path) as engine:
        losses = [] if first else [step(engine, data[0])]
        with torch.inference_mode():
            engine.eval()(**data[2])
        engine.train()
        losses += [step(engine, batch) for batch in data[len(losses) :]]
    assert losses == pytest.approx(expected, abs=1e-5)


def test_a_tag_is_a_name_of_its_own(tmp_path):
    data, where = batches(2), tmp_path / "checkpoints"
    with make(net(), tmp_path / "run") as engine:
        step(engine, data[0])
        where.mkdir()
        (where / "taken").mkdir()
        for tag in ("", ".", "..", "../up", "a/b", "latest", "step-00000002", ".hidden", "two\nlines", "a\tb", "\x7f", "a ", "\u00a0a", 5):
            with pytest.raises(ValueError, match="tag is"):
                engine.save_checkpoint(where, tag=tag)
        with pytest.raises(FileExistsError, match="this name"):
            engine.save_checkpoint(where, tag="taken")
        assert sorted(each.name for each in where.iterdir()) == ["taken"]
        for _ in range(2):
            engine.save_checkpoint(where, tag="best")
        step(engine, data[1])
        engine.save_checkpoint(where, tag="step-00000002")
    assert {each.name for each in where.iterdir()} == {"taken", "best", "latest", "step-00000001", "step-00000002"}
    for tag, number in (("best", 1), (None, 2)):
        engine = make(net(), tmp_path / f"other{number}")
        assert engine.load_checkpoint(where, tag)[0] == str(where / f"step-0000000{number}")
        engine.close()
    with make(net(), tmp_path / "other") as engine:
        for tag, why in (("best\0", "a zero byte"), ("best\nstep-00000001", "a line end"), ("../kept/best", "a slash"), ("..", "no checkpoint of that")):
            (where / "latest").write_bytes(tag.encode())
            with pytest.raises(ValueError, match=why) as refused:
                engine.load_checkpoint(where)
            assert str(where / "latest") in str(refused.value) and "\n" not in str(refused.value) and "\0" not in str(refused.value)
            with pytest.raises(ValueError, match=why):
                penstock._fp32.get_fp32_state_dict_from_zero_checkpoint(where)
        with pytest.raises(ValueError, match="zero byte"):
            engine.load_checkpoint(where, tag="best\0")
    (where / "latest").write_text("")
    with make(net(), tmp_path / "other") as engine:
        with pytest.raises(ValueError, match="latest is empty"):
            engine.load_checkpoint(where)
        with pytest.warns(UserWarning, match="holds no checkpoint"):
            assert engine.load_checkpoint(tmp_path) == (None, {})


def test_an_engine_that_nobody_closed_is_named_and_loses_no_step(tmp_path, in_child):
    text = """
        import gc, sys
        sys.path.insert(0, sys.argv[2])
        from engine_models import batches, make, net, step

        def train():
            engine = make(net(), sys.argv[1])
            for batch in batches(3):
                step(engine, batch)

        train()
        gc.collect()
        try:
            step(make(net(), sys.argv[1], resume=True), batches(1)[0])
        except RuntimeError as error:
            print(error)
    """
    status, out, error = in_child(text, tmp_path, os.path.dirname(__file__))
    assert status == 0 and "an engine of this process has" in out and "close() that one first" in out, error
    with make(net(), tmp_path, resume=True) as engine:
        engine(**batches(1)[0])
        assert engine.global_steps == 3


@pytest.mark.parametrize("steps", [0, 1])
def test_a_client_state_is_kept_where_no_step_was_made_since(tmp_path, steps):
    """Before the first step, and after a resume."""
    data = batches(2)
    if steps:
        with make(net(), tmp_path / "run") as engine:
            step(engine, data[0])
            engine.client_state["old"] = True
    with make(net(), tmp_path / "run", resume=steps > 0) as engine:
        with torch.no_grad():
            engine(**data[0])
        engine.save_checkpoint(tmp_path / "checkpoints", client_state={"epoch": 7})
        engine.client_state["more"] = (1, 2)
        engine.optimizer.param_groups[0]["lr"] = 0.5
    with make(net(), tmp_path / "run", resume=True) as engine:
        with torch.no_grad():
            engine(**data[0])
        assert engine.client_state == {"epoch": 7, "more": (1, 2)} and engine.get_lr() == [0.5]
    with make(net(), tmp_path / "other") as engine:
        assert engine.load_checkpoint(tmp_path / "checkpoints")[1] == {"epoch": 7}
        with torch.no_grad():
            engine(**data[0])
        assert engine.client_state == {"epoch": 7} and engine.global_steps == steps


counter = itertools.count()  # where nobody sees it


class Fickle(nn.Module):
    """A layer that may be another when it is computed again for backward."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how, self.calls, self.on = nn.Linear(8, 8), how, 0, True

    def forward(self, x):
        y = self.linear(x)
        self.calls += 1
        other = {
            "python": lambda: random.random() < 0.5,
            "numpy": lambda: sys.modules["numpy"].random.rand() < 0.5,
            "mode": lambda: self.training,
            "counts": lambda: self.calls % 2 == 0,
            "elsewhere": lambda: next(counter) % 2 == 0,
            "switched": lambda: self.on,
        }
        return torch.tanh(2 * y if other[self.how]() else y)


def fickle(how):
    torch.manual_seed(0)
    return nn.Sequential(*(Fickle(how) for _ in range(3)), nn.Linear(8, 1))


@pytest.mark.parametrize("how", ["python", "numpy", "mode", "counts"])
def test_a_block_is_computed_again_as_it_was(tmp_path, how):
    if how == "numpy":
        pytest.importorskip("numpy")
    engine, plain = make(fickle(how), tmp_path, gradient_clipping=0.0), fickle(how)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    x = torch.ones(4, 8)
    for number in range(4):
        losses = []
        for model in (engine, plain):
            random.seed(number)
            if how == "numpy":
                sys.modules["numpy"].random.seed(number)
            model.train()
            loss = model(x).square().mean()
            model.eval()
            if model is plain:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            else:
                engine.backward(loss)
                engine.step()
            losses.append((loss.item(), random.random()))
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    engine.close()


def test_a_block_that_is_another_when_it_is_computed_again_is_refused_by_name(tmp_path):
    with make(fickle("elsewhere"), tmp_path) as engine:
        loss = engine(torch.ones(4, 8)).square().mean()
        with pytest.raises(RuntimeError, match="2 gave something else when it was computed again"):
            engine.backward(loss)
        assert engine.global_steps == 0


def test_a_switch_between_forward_and_backward_changes_nothing(tmp_path):
    engine, plain = make(fickle("switched"), tmp_path, gradient_clipping=0.0), fickle("switched")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(3):
        losses = []
        for call, module in ((engine, engine.module), (plain, plain)):
            loss = call(torch.ones(4, 8)).square().mean()
            for layer in module[:3]:
                layer.on = not layer.on
            if call is plain:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            else:
                engine.backward(loss)
                engine.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    engine.close()


def test_a_model_that_is_pickled_says_what_to_save(tmp_path):
    model = net()
    with make(model, tmp_path) as engine:
        step(engine, batches(1)[0])
        for part in (model, model.layers[0], model.layers[0].up.weight, list(model.parameters())):
            with pytest.raises(TypeError, match="state_dict"):
                torch.save(part, tmp_path / "model.pt")
        torch.save(model.state_dict(), tmp_path / "model.pt")
        assert copy.deepcopy(model).norm.weight.equal(torch.load(tmp_path / "model.pt")["norm.weight"])
        torch.save(copy.deepcopy(model.norm), tmp_path / "norm.pt")


@pytest.mark.parametrize("whose", ["engine", "given"])
def test_groups_that_are_loaded_are_those_that_schedulers_know(tmp_path, whose):
    model, data = net(), batches(2)
    given = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(given, 1, gamma=0.1)
    with make(model, tmp_path, optimizer=given) as engine:
        saved = torch.optim.AdamW(net().parameters(), lr=0.5, weight_decay=0.3).state_dict()
        (engine.optimizer if whose == "engine" else given).load_state_dict(saved)
        assert engine.get_lr() == [0.5] and given.param_groups[0]["weight_decay"] == 0.3
        step(engine, data[0])
        schedule.step()
        assert engine.get_lr() == pytest.approx([0.05])
        step(engine, data[1])
        assert engine.last_step["lr"] == pytest.approx(0.05)


def test_a_weight_of_one_element_is_changed_in_place_or_the_change_is_refused(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return self.scale * self.inner(x)

    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), Scaled())
    x = torch.randn(4, 8)
    with make(model, tmp_path) as engine:
        engine.backward(engine(x).square().mean())
        engine.step()
        for change in (lambda: model[1].scale.mul_(2), lambda: model[1].scale.clamp_(0, 1), lambda: model[1].inner.weight.view(-1).mul_(2)):
            copied = copy.deepcopy(model)
            with torch.no_grad():
                change()
            changed = {name for name, value in engine.state_dict().items() if not torch.equal(value, dict(copied.named_parameters())[name])}
            assert len(changed) == 1
        # What no class is asked of is told by the next forward.
        for change, told in (
            (lambda: model[1].scale.mul_(2), "1.scale was changed in place"),
            (lambda: model[1].inner.weight.fill_(1), "written to outside"),
        ):
            with torch._C.DisableTorchFunction(), torch.no_grad():
                change()
            with pytest.raises(RuntimeError, match=told):
                engine(x)
        with engine.gathered(), torch.no_grad():
            model[1].scale.mul_(2)  # for looking at
        with engine.gathered(write_back=True), torch.no_grad():
            before = model[1].scale.clone()
            model[1].scale.mul_(2)
        assert torch.equal(model[1].scale.detach(), 2 * before)
        engine.backward(engine(x).square().mean())
        engine.step()
        assert before.item() == pytest.approx(1, abs=0.1)


def _is_mapped(address):
    with open("/proc/self/maps") as maps:
        return any(int(begin, 16) <= address < int(end, 16) for begin, end in (line.split()[0].split("-") for line in maps))


counts_users = pytest.mark.skipif(not hasattr(torch._C, "_storage_Use_Count"), reason="this torch does not say how many tensors share a storage")


@counts_users
@pytest.mark.parametrize("replan", ["off", "auto"])
def test_a_kept_tensor_of_a_weight_is_told_and_stays_readable(tmp_path, replan):
    """Its memory is the engine's, so its values become others'; it is mapped until the tensor goes, after close too."""
    model, kept = net(), []
    model.layers[1].up.register_forward_hook(lambda module, args, out: kept.append(module.weight.detach()))
    engine = make(model, tmp_path / "run", replan=replan)
    with pytest.warns(UserWarning, match=r"memory with layers\.1\.up\.weight was kept .* \.detach\(\)\.clone\(\)") as told:
        for batch in batches(6):
            step(engine, batch)
    assert sum("was kept after its block" in str(each.message) for each in told) == 1
    engine.close()
    assert all(_is_mapped(each.data_ptr()) and each.sum() is not None for each in kept)
    where = kept[-1].data_ptr()
    kept.clear()
    assert not _is_mapped(where)


def test_what_no_script_keeps_is_not_told_of(tmp_path):
    model = net()
    with make(model, tmp_path / "run") as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches(4):
            step(engine, batch)
            engine.eval()
            outputs = engine(**batch)
            engine.train()
        assert outputs.isfinite()


def _two_losses(engine, batch):
    engine.backward(engine(**batch) + engine(**batch))


def _looks_between(engine, batch):
    loss = engine(**batch)
    with torch.no_grad():
        engine(**batch)
    engine.backward(loss)


def _looks_before(engine, batch):
    engine.looked = engine(**batch)
    engine.backward(engine(**batch))


def _retains(engine, batch):
    engine.retained = engine(**batch)
    engine.backward(engine.retained, retain_graph=True)


def _retains_by_torch(engine, batch):
    engine.retained = engine(**batch)
    engine.retained.backward(retain_graph=True)


@counts_users
@pytest.mark.parametrize("way", [_two_losses, _looks_between, _looks_before, _retains, _retains_by_torch])
def test_what_a_graph_keeps_is_not_told_of(tmp_path, way):
    """What autograd has saved shares the weights as long as the script has the loss; the script has no tensor of a weight."""
    with make(net(tied=False), tmp_path / "run") as engine, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* was kept after its block")
        for batch in batches(3):
            way(engine, batch)
            engine.step()


def test_a_state_of_another_number_of_versions_is_refused(tmp_path):
    with make(net(), tmp_path, config={"penstock": {"versions": 1}}) as engine:
        step(engine, batches(1)[0])
    for own, why in (({"versions": 2}, "penstock.versions 2: .* was made for 1 version"), ({"durability": "step"}, "one version of everything")):
        engine = make(net(), tmp_path, resume=True, config={"penstock": own})
        with pytest.raises(RuntimeError, match=why):
            step(engine, batches(1)[0])
        engine.close()
    with make(net(), tmp_path, resume=True, config={"penstock": {"versions": 1}}) as engine:
        step(engine, batches(2)[1])
        assert engine.global_steps == 2


@pytest.mark.parametrize("own", [{"durability": "step"}, {"sync": "power"}, {"versions": 2}, {"prefer": "time"}])
def test_what_is_of_a_drive_says_that_it_has_no_effect_in_memory(own):
    (name,) = own
    with pytest.warns(UserWarning, match=f"penstock.{name}: accepted and ignored: without offload to nvme"):
        penstock.initialize(model=net(), config={"penstock": own, "train_batch_size": 1}, offload="cpu")[0].close()

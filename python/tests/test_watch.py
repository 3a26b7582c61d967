"""What an engine tells: report, progress line, DeepSpeed's monitors, FLOPs."""

import csv
import importlib.machinery
import io
import json
import os
import sys
import types
import warnings

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
from engine_models import batches, net, step  # noqa: E402
from penstock._engine import _progress, _watch  # noqa: E402
from penstock._engine._report import Report  # noqa: E402


def make(model, directory, **options):
    options.setdefault("optimizer", torch.optim.AdamW(model.parameters(), lr=1e-2))
    return penstock.initialize(model=model, state_dir=str(directory), **options)[0]


def run(engine, data):
    return [step(engine, batch) for batch in data]


def test_the_report_has_what_the_programs_has(tmp_path):
    data = batches(8)
    with make(net(), tmp_path) as engine:
        with pytest.raises(RuntimeError, match="has not seen the model"):
            engine.report()
        losses = run(engine, data[:1])
        first = engine.report()
        assert first["predicted_step_seconds"] > 0 and first["prediction_from"] == "start"  # what is assumed of the drive
        losses += run(engine, data[1:])
        report = engine.report()
        assert [step["loss"] for step in report["steps"]] == losses  # to the bit
        assert [step["step"] for step in report["steps"]] == list(range(1, 9))
        assert all(step["tokens"] == 4 * 8 for step in report["steps"]) and report["totals"]["tokens"] == 8 * 32
        plan = engine.plan()
        assert report["params"] == plan["parameters"] and report["state_bytes_total"] == plan["state_bytes"]
        assert report["peak_managed_bytes"] == plan["peak_managed_bytes"] and report["peak_rss_bytes"] > 0
        assert report["totals"]["nvme_read_bytes"] > 0 and report["nvme_bytes_per_param_per_step"] > 0
        assert report["predicted_step_seconds"] > 0 and report["prediction_from"] == "steps"
        assert report["bound_by"] in ("read", "write", "copy", "compute", "optimizer", "network")
        assert report["run_id"].startswith("python-") and report["status"] == "ok" and report["dtype"] == "fp32"
        assert "io_read_bandwidth_bytes_per_s" not in report
        loss = engine(**data[0])
        with pytest.raises(RuntimeError, match="a step is open"):
            engine.report()
        engine.backward(loss)
        engine.step()
    closed = engine.report()
    assert len(closed["steps"]) == 9 and json.loads(json.dumps(closed)) == closed


@pytest.mark.parametrize("together", [True, False])
def test_tokens_of_all_micro_batches_count(tmp_path, together):
    data = batches(6)
    with make(net(), tmp_path, gradient_accumulation_steps=3) as engine:
        if together:
            for at in (0, 3):
                engine.train_batch(data[at : at + 3])
        else:
            run(engine, data)
        with torch.no_grad():
            engine(**data[0])
        assert [step["tokens"] for step in engine.report()["steps"]] == [3 * 32] * 2


def test_a_model_without_tokens(tmp_path):
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
    with make(model, tmp_path) as engine:
        for _ in range(3):
            engine.backward(engine(torch.randn(5, 16)).pow(2).mean())
            engine.step()
        assert [step["tokens"] for step in engine.report()["steps"]] == [0] * 3
        assert "<svg" in engine.report().html()


def test_the_report_is_a_page(tmp_path):
    with make(net(), tmp_path / "run") as engine:
        run(engine, batches(5))
        report = engine.report()
    page = report.html(tmp_path / "run.html")
    assert page.lstrip().lower().startswith("<!doctype html") and "<svg" in page and report["run_id"] in page
    assert (tmp_path / "run.html").read_text() == page
    shown = report._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "<svg" not in shown  # quoted, in a page of its own


def test_a_resumed_run_has_the_same_id(tmp_path):
    with make(net(), tmp_path) as engine:
        run(engine, batches(2))
        first = engine.report()
    with make(net(), tmp_path, resume=True) as engine:
        run(engine, batches(2))
        second = engine.report()
    assert second["run_id"] == first["run_id"] and second["resumed_from_step"] == 2
    with make(net(), tmp_path, overwrite=True) as engine:
        run(engine, batches(1))
        assert engine.report()["run_id"] != first["run_id"]


def configuration(tmp_path, **keys):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"},
        "tensorboard": {"enabled": True, "output_path": str(tmp_path / "events"), "job_name": "job"},
        **keys,
    }


def lines(tmp_path, tag="train_loss"):
    with open(tmp_path / "csv" / "job" / f"Train_Samples_{tag}.csv", newline="") as file:
        return list(csv.reader(file))


def test_monitors_have_deepspeeds_files(tmp_path):
    data = batches(6)
    config = configuration(tmp_path)
    with make(net(), tmp_path / "run", config=config) as engine:
        losses = run(engine, data[:3])
        assert len(lines(tmp_path)) - 1 in (1, 2, 3)  # the last ones are not committed yet, or just
    rows = lines(tmp_path)
    assert rows[0] == ["step", "train_loss"]
    assert [(int(samples), float(loss)) for samples, loss in rows[1:]] == [(4 * (n + 1), losses[n]) for n in range(3)]
    assert [float(rate) for _, rate in lines(tmp_path, "lr")[1:]] == [1e-2] * 3
    with make(net(), tmp_path / "run", config=config, resume=True) as engine:
        losses += run(engine, data[3:])
    assert [(int(samples), float(loss)) for samples, loss in lines(tmp_path)[1:]] == [(4 * (n + 1), losses[n]) for n in range(6)]
    events = list((tmp_path / "events" / "job").iterdir())
    assert len(events) == 1 and events[0].stat().st_size > 0
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    told = reader.EventAccumulator(str(tmp_path / "events" / "job")).Reload().Scalars("Train/Samples/train_loss")
    assert [event.step for event in told] == [4 * (n + 1) for n in range(6)]


def test_a_run_that_is_killed_has_every_committed_step_once(tmp_path, in_child):
    script = """
        import os, sys
        import torch
        import penstock
        sys.path.insert(0, sys.argv[2])
        from engine_models import batches, net
        from test_watch import configuration, make, run
        import pathlib
        place = pathlib.Path(sys.argv[1])
        engine = make(net(), place / "run", config=configuration(place), resume="auto")
        run(engine, batches(5))
        os._exit(9)
    """
    for _ in range(2):
        status, _, err = in_child(script, tmp_path, os.path.dirname(__file__))
        assert status == 9, err
    with make(net(), tmp_path / "run", config=configuration(tmp_path), resume=True) as engine:
        run(engine, batches(2))
        steps = engine.global_steps
    assert [int(samples) for samples, _ in lines(tmp_path)[1:]] == [4 * (n + 1) for n in range(steps)]


def test_an_earlier_checkpoint_that_is_evaluated_leaves_the_monitors_as_they_are(tmp_path):
    config = configuration(tmp_path)
    data = batches(6)

    def contents():
        return {path: path.read_bytes() for kind in ("csv", "events") for path in (tmp_path / kind / "job").iterdir()}

    with make(net(), tmp_path / "run", config=config) as engine:
        run(engine, data[:3])
        engine.save_checkpoint(str(tmp_path / "kept"), wait=True)
        run(engine, data[3:])
    before = contents()
    assert len(lines(tmp_path)) == 7
    with make(net(), tmp_path / "other", config=config) as engine:
        engine.load_checkpoint(str(tmp_path / "kept"))
        engine.eval()
        with torch.no_grad():
            engine(**data[0])
    assert contents() == before
    with make(net(), tmp_path / "third", config=config) as engine:
        engine.load_checkpoint(str(tmp_path / "kept"))
        engine.train()
        run(engine, data[3:4])
    assert [int(samples) for samples, _ in lines(tmp_path)[1:]] == [4, 8, 12, 16]  # it trains on from there


def test_an_engine_that_is_over_leaves_the_monitors_to_the_next(tmp_path):
    config = configuration(tmp_path)
    data = batches(8)
    first = make(net(), tmp_path / "run", config=config, overwrite=True)
    run(first, data[:2])
    first.save_checkpoint(str(tmp_path / "kept"), wait=True)
    run(first, data[2:4])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first.load_checkpoint(str(tmp_path / "kept"))
        run(first, data[2:5])
        assert [int(samples) for samples, _ in lines(tmp_path)[1:]][:2] == [4, 8]
        first.close()  # and is referenced still
        second = make(net(), tmp_path / "run", config=config, resume=True)
        run(second, data[5:])
        second.close()
    assert [int(samples) for samples, _ in lines(tmp_path)[1:]] == [4 * (n + 1) for n in range(8)]
    assert first is not second and not [each for each in told if "monitor" in str(each.message)]


def test_a_directory_of_another_run_is_refused_in_a_line(tmp_path):
    with make(net(), tmp_path / "run", config=configuration(tmp_path)) as engine:
        run(engine, batches(2))
    other = make(net(), tmp_path / "other", config=configuration(tmp_path))
    with pytest.raises((OSError, RuntimeError, ValueError), match="csv_monitor"):
        run(other, batches(1))
    with make(net(), tmp_path / "run", config=configuration(tmp_path), overwrite=True) as engine:
        run(engine, batches(1))
    assert len(lines(tmp_path)) == 2


def test_what_cannot_be_written_is_told_once_and_made_up_for(tmp_path):
    with make(net(), tmp_path / "run", config=configuration(tmp_path)) as engine:
        run(engine, batches(1))
        real = engine._run.watch._monitors

        class Full:
            def begin(self, samples):
                raise OSError(28, "No space left on device")

            def append(self, entry):
                raise OSError(28, "No space left on device")

        engine._run.watch._monitors = Full()
        with pytest.warns(UserWarning, match="No space") as told:
            run(engine, batches(4))
        assert len(told) == 1 and engine.global_steps == 5
        engine._run.watch._monitors = real
        run(engine, batches(1))
    assert len(lines(tmp_path)) - 1 == 6


def test_wandb(tmp_path, monkeypatch):
    config = {"train_micro_batch_size_per_gpu": 4, "wandb": {"enabled": True, "project": "mine", "group": "g"}}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="wandb.enabled.*pip install wandb"):
        make(net(), tmp_path / "none", config=config)
    logged, ended = [], []

    class Run:
        def log(self, values, step):
            logged.append((step, values))

        def finish(self):
            ended.append(True)

    fake = types.ModuleType("wandb")
    fake.run, fake.init = None, lambda **given: logged.append(given) or Run()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(ValueError, match="wandb.projet"):
        make(net(), tmp_path / "none", config={"wandb": {"enabled": True, "projet": "mine"}})
    with make(net(), tmp_path / "run", config=config) as engine:
        losses = run(engine, batches(3))
    assert logged[0] == {"project": "mine", "group": "g", "entity": None} and ended == [True]
    assert [(step, values["Train/Samples/train_loss"]) for step, values in logged[1:]] == [(4 * (n + 1), losses[n]) for n in range(3)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_one_line(tmp_path, monkeypatch):
    for wanted in (None, False):
        screen = Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        with make(net(), tmp_path / f"run-{wanted}", progress=wanted) as engine:
            losses = run(engine, batches(4))
        if wanted is False:
            assert screen.getvalue() == ""
            continue
        assert screen.getvalue().count("\n") == 1 and screen.getvalue().endswith("\n")
        last = screen.getvalue().split("\r")[-1]
        assert "step 4" in last and f"loss {losses[-1]:.4f}" in last and "tok/s" in last


def test_no_terminal_no_line_and_no_second_rank(tmp_path, monkeypatch):
    quiet = io.StringIO()
    monkeypatch.setattr(sys, "stderr", quiet)
    with make(net(), tmp_path / "quiet") as engine:
        run(engine, batches(2))
    assert quiet.getvalue() == ""
    with make(net(), tmp_path / "asked", progress=True) as engine:
        run(engine, batches(2))
    assert quiet.getvalue().startswith("step 1") and quiet.getvalue().endswith("\n") and "\r" not in quiet.getvalue()
    monkeypatch.setenv("RANK", "1")
    assert not _progress.Progress(True).on


def test_the_line_fits_and_lets_tqdm_be(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "20")
    bar = _progress.Progress(None)
    bar.show([(0, "step 12"), (1, "loss 1.0000"), (2, "a very long text")])
    assert screen.getvalue() == "\rstep 12\x1b[K"
    tqdm = types.ModuleType("tqdm.std")
    tqdm.tqdm = type("tqdm", (), {"_instances": {1}})
    monkeypatch.setitem(sys.modules, "tqdm.std", tqdm)
    bar = _progress.Progress(None)
    before = screen.getvalue()
    bar.show([(0, "step 13")])
    bar.finish()
    assert screen.getvalue() == before


def test_a_notebook_has_a_cell(monkeypatch):
    shown = []

    class Handle:
        def update(self, value):
            shown.append(value.data)

    class Pretty:
        def __init__(self, data):
            self.data = data

    def display(value, display_id=False):
        shown.append(value.data)
        return Handle()

    python = types.ModuleType("IPython")
    python.get_ipython = lambda: type("ZMQInteractiveShell", (), {})()
    module = types.ModuleType("IPython.display")
    module.Pretty, module.display = Pretty, display
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(_progress, "_REDRAW_SECONDS", 0.0)
    bar = _progress.Progress(None)
    assert bar.on
    bar.show([(0, "step 1")])
    bar.show([(0, "step 2"), (1, "loss 3")])
    bar.finish()
    assert shown == ["step 1", "step 2  loss 3"]


def test_flops_are_counted_where_they_are_asked_for(tmp_path, capsys):
    pytest.importorskip("torch.utils.flop_counter")
    config = {"train_micro_batch_size_per_gpu": 4, "flops_profiler": {"enabled": True, "profile_step": 2}}
    with make(net(width=64), tmp_path, config=config) as engine:
        run(engine, batches(3))
        report = engine.report()
    # Of a layer 2 x (64 x 128 + 128 x 64) a token, four layers, and the head of 50 words; backward is twice that.
    assert report["model_flops_per_step"] == 3 * 32 * (4 * 2 * 2 * 64 * 128 + 2 * 64 * 50)
    assert report["model_flops_per_second"] > 0
    share = report["model_flops_per_second"] / report["product_flops_per_second"]
    assert report["mfu"] == pytest.approx(share) if share <= 1 else report["mfu"] is None
    told = capsys.readouterr().err
    assert told.count("flops_profiler: step 2") == 1 and "of a product of 1024 x 1024" in told and "never reached" not in told
    with make(net(width=64), tmp_path / "short", config=config) as engine:
        run(engine, batches(1))
    assert "flops_profiler.profile_step: step 2 was never reached, the last one was 1: no profile was made" in capsys.readouterr().err


def test_no_step_is_faster_than_the_machine(capsys):
    report = {"world_size": 2, "model_flops_per_second": 8.0, "totals": {}}
    assert Report.of(json.dumps(report), None, 16.0)["mfu"] == 0.25
    assert Report.of(json.dumps(report), None, 1.0)["mfu"] is None
    assert "mfu" not in Report.of(json.dumps(report))
    settings = types.SimpleNamespace(
        dtype="fp32", flops_profiler={"enabled": True, "profile_step": 1, "output_file": ""}, monitors=False, wandb=None, progress=False
    )
    settings.device = torch.device("cpu")
    watch = _watch.Watch(None, settings, "run", False, [], 0, types.SimpleNamespace(rank=0, world=1))
    watch._rate = 10.0
    watch._profile({"step": 1}, 40.0, 1.0)
    told = capsys.readouterr().err
    assert "400" not in told and "other work disturbed what it is held against" in told


@pytest.mark.filterwarnings("ignore")
def test_who_looks_on_and_fails_costs_no_step(tmp_path, monkeypatch):
    """wandb's errors are no OSError, and a warning may be an error."""

    class CommError(Exception):
        pass

    class Run:
        logged = []

        def log(self, values, step):
            Run.logged.append(step)
            if len(Run.logged) == 2:
                raise CommError("no network")

        def finish(self):
            raise CommError("no network")

    fake = types.ModuleType("wandb")
    fake.run, fake.init = None, lambda **_: Run()
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = {**configuration(tmp_path), "wandb": {"enabled": True}, "flops_profiler": {"enabled": True, "output_file": str(tmp_path / "gone" / "profile")}}
    (tmp_path / "gone").mkdir()
    model, data = net(), batches(5)
    scheduler = torch.optim.lr_scheduler.ConstantLR
    engine = make(model, tmp_path / "run", config=config, lr_scheduler=scheduler)
    (tmp_path / "gone").rmdir()  # what initialize has found in order
    heard = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for batch in data:
            try:
                run(engine, [batch])
            except UserWarning as warning:
                heard.append(str(warning))
        assert engine.global_steps == 5 and engine.lr_scheduler.last_epoch == 5
        with pytest.raises(UserWarning, match="no network"):
            engine.close()
    assert len(heard) == 2 and "flops_profiler" in heard[0] and "no network" in heard[1]
    assert engine.report()["steps"][-1]["step"] == 5
    assert len(lines(tmp_path)) - 1 == 5  # each step once


def test_a_profile_waits_for_nobody(tmp_path, capsys, never_waits):
    """A pipe in the place of its file is refused at the call; one that is put there later costs no step, and the profile is on stderr."""
    pytest.importorskip("torch.utils.flop_counter")
    path = tmp_path / "profile"
    config = {"train_micro_batch_size_per_gpu": 4, "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(path)}}
    engine = make(net(), tmp_path / "run", config=config)
    os.mkfifo(path)
    with pytest.raises(OSError, match="flops_profiler.output_file is no regular file"):
        make(net(), tmp_path / "other", config=config)
    with pytest.warns(UserWarning, match="flops_profiler: .*not a regular file"):
        run(engine, batches(1))
    engine.close()
    assert "flops_profiler: step 1: " in capsys.readouterr().err


def test_the_breakdown_of_each_step(tmp_path, capfd):
    config = {"train_micro_batch_size_per_gpu": 4, "wall_clock_breakdown": True}
    with make(net(), tmp_path, config=config) as engine:
        run(engine, batches(3))
        assert "breakdown" not in engine.last_step
    lines = [line for line in capfd.readouterr().err.splitlines() if "time (ms)" in line]
    assert [line.split()[1] for line in lines] == ["1", "2", "3"]
    for line in lines:
        parts = dict(part.strip().split(": ") for part in line.split("|")[1:])
        assert {"fwd", "bwd", "step", "all"} <= set(parts) and 0 < float(parts["fwd"]) < float(parts["all"]) and float(parts["bwd"]) > 0


def test_what_ranks_exchanged(tmp_path, on_ranks, capfd):
    config = {"train_micro_batch_size_per_gpu": 4, "comms_logger": {"enabled": True}}
    told = on_ranks(
        """
        import json, sys
        sys.path.insert(0, sys.argv[2])
        import penstock, torch
        from engine_models import batches, net, step
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        with penstock.initialize(model=model, optimizer=optimizer, config=json.loads(sys.argv[3]), state_dir=sys.argv[1])[0] as engine:
            for batch in batches(2):
                step(engine, batch)
        """,
        2,
        tmp_path,
        os.path.dirname(__file__),
        json.dumps(config),
    )
    assert [status for status, _, _ in told] == [0, 0], told
    assert "exchanges of this rank" in told[0][2] and "exchanges" not in told[1][2]
    with make(net(), tmp_path / "alone", config=config) as engine:
        run(engine, batches(1))
    assert "exchanges between ranks: none" in capfd.readouterr().err


def test_a_budget_of_wear_is_told_and_kept(tmp_path):
    data = batches(12)

    def limited(terabytes, **options):
        return make(net(), tmp_path / "run", config={"penstock": {"wear_budget_tb": terabytes}}, **options)

    with make(net(), tmp_path / "run") as engine:
        run(engine, data[:4])
        a_step = engine.plan()["nvme_write_bytes_per_step"]
        written = engine.last_step["written_bytes"]
    assert a_step > 0 and written >= 3 * a_step
    budget = (written + 3.5 * a_step) * 1e-12
    with limited(budget, resume=True) as engine:
        with pytest.warns(UserWarning, match="penstock.wear_budget_tb: a step writes .* are used up 3 steps from here"):
            step(engine, data[4])
        with pytest.raises(RuntimeError, match=r"after step \d+, which is committed: .*has written .* TB to its drives, of .*raise the budget"):
            run(engine, data[5:])
        stopped = engine.global_steps
        assert 5 < stopped < 12
        with pytest.raises(RuntimeError, match=f"after step {stopped}, which is committed"):
            step(engine, data[0])
        engine.save_checkpoint(tmp_path / "kept")
        with torch.no_grad():
            engine.eval()
            engine(**data[0])
    with limited(budget, resume=True) as engine:
        with pytest.raises(RuntimeError, match=f"after step {stopped}, which is committed"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(engine, data[0])
    with limited(2 * budget, resume=True) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(engine, data[0])
        assert engine.global_steps == stopped + 1


def test_what_watches_ends_though_the_bytes_written_cannot_be_kept(tmp_path):
    engine = make(net(), tmp_path / "run")
    run(engine, batches(2))
    ended, own = [], engine._run.watch.close

    def fails():
        raise OSError(28, "No space left on device", "count")

    engine._wear.end = fails
    engine._run.watch.close = lambda: (own(), ended.append(True))
    with pytest.raises(OSError, match="No space left"):
        engine.close()
    assert ended == [True]


def test_what_is_stuck_is_named(tmp_path, in_child):
    script = """
        import json, sys, time
        sys.path.insert(0, sys.argv[2])
        import penstock, torch
        from engine_models import batches, net, step

        class Slow(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.seconds = torch.nn.Linear(32, 32), 0.0

            def forward(self, x):
                time.sleep(self.seconds)
                return self.linear(x)

        model = net()
        model.norm = slow = Slow()
        config = {"penstock": json.loads(sys.argv[3])}
        optimizer = torch.optim.AdamW(model.parameters())
        with penstock.initialize(model=model, optimizer=optimizer, config=config, state_dir=sys.argv[1])[0] as engine:
            for batch in batches(2):
                step(engine, batch)
            slow.seconds = float(sys.argv[4])
            step(engine, batches(1)[0])
            print(engine.global_steps, [line for line in engine.log() if "stuck" in line])
    """
    status, out, err = in_child(script, tmp_path / "a", os.path.dirname(__file__), json.dumps({"watchdog_seconds": 0.3}), 1.5)
    assert status == 0, err
    assert "penstock: stuck: forward of block" in err and "without a sign of life" in err
    assert "; the run waits (penstock.watchdog_abort_seconds would end it)" in err
    assert "no longer stuck: forward of block" in err and out.startswith("3 ['penstock: stuck: forward")
    status, out, err = in_child(script, tmp_path / "b", os.path.dirname(__file__), json.dumps({"watchdog_abort_seconds": 0.6}), 60, timeout=50)
    assert status == 1 and not out and "ended by penstock.watchdog_abort_seconds: the last commit stands, and resume=True" in err
    status, out, err = in_child(script.replace("state_dir=sys.argv[1]", "state_dir=sys.argv[1], resume=True"), tmp_path / "b", os.path.dirname(__file__), "{}", 0)
    assert status == 0 and out.startswith("5 []"), err

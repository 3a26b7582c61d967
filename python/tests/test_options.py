"""Options that a call takes are obeyed or refused: none is lost in silence. That each has such a test, test_keywords.py holds."""

import base64
import errno
import importlib.util
import inspect
import os
import warnings

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
import penstock.deepspeed as deepspeed  # noqa: E402
from penstock._launcher import launch  # noqa: E402
from engine_models import all_names, batches, make, net, plain_losses, step  # noqa: E402
from torch import nn  # noqa: E402


def kept(tmp_path):
    """A checkpoint of three steps with a scheduler, and the engine's weights then."""
    model = net()
    with make(model, tmp_path / "first", lr_scheduler=scheduler) as engine:
        for batch in batches(3):
            step(engine, batch)
        engine.save_checkpoint(tmp_path / "kept", client_state={"epoch": 7})
        return {name: value.clone() for name, value in engine.state_dict().items()}


def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def test_weights_alone_are_loaded(tmp_path):
    """As a fine-tuning begins: no moment, no step and no scheduler goes on."""
    values = kept(tmp_path)
    data = batches(3, seed=5)
    oracle = net()
    oracle.load_state_dict(values)
    expected, _ = plain_losses(oracle, all_names(oracle), [[batch] for batch in data])
    with make(net(seed=3), tmp_path / "second", lr_scheduler=scheduler) as engine:
        path, client = engine.load_checkpoint(tmp_path / "kept", load_module_only=True)
        assert path.endswith("step-00000003") and client == {"epoch": 7}
        losses = [step(engine, batches(1, seed=5)[0])]
        assert engine.global_steps == 1 and engine.lr_scheduler.last_epoch == 1
        assert losses == pytest.approx(expected[:1], abs=1e-5)
        # And into an engine that has begun: its moments and its step stay.
        moment = engine.read_state(engine.module.norm.weight, "first moment")
        engine.load_checkpoint(tmp_path / "kept", load_module_only=True)
        for name, value in engine.state_dict().items():
            assert torch.equal(value, values[name]), name
        assert torch.equal(engine.read_state(engine.module.norm.weight, "first moment"), moment) and engine.global_steps == 1


def test_a_checkpoint_of_another_model_is_loaded_as_far_as_it_goes(tmp_path):
    values = kept(tmp_path)

    class Longer(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(9)
            model = net(seed=9)
            self.embed, self.layers, self.norm, self.head = model.embed, model.layers, model.norm, model.head
            self.more = nn.Linear(50, 50)

        def forward(self, x, targets):
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            return nn.functional.cross_entropy(self.more(self.head(self.norm(x))).flatten(0, 1), targets.flatten())

    model = Longer()
    before = model.more.weight.detach().clone()
    with make(model, tmp_path / "second") as engine:
        with pytest.raises(ValueError, match=r"has no more\.(weight|bias), which the model has: load_module_strict=False"):
            engine.load_checkpoint(tmp_path / "kept", load_module_only=True)
        engine.load_checkpoint(tmp_path / "kept", load_module_only=True, load_module_strict=False)
        assert torch.equal(model.more.weight.detach(), before) and torch.equal(model.norm.weight.detach(), values["norm.weight"])
        step(engine, batches(1)[0])


def test_the_schedulers_state_is_left_where_it_is_not_wanted(tmp_path):
    kept(tmp_path)
    for wanted, count in ((True, 4), (False, 1)):
        with make(net(), tmp_path / str(wanted), lr_scheduler=scheduler) as engine:
            engine.load_checkpoint(tmp_path / "kept", load_lr_scheduler_states=wanted)
            step(engine, batches(1)[0])
            assert engine.global_steps == 4 and engine.lr_scheduler.last_epoch == count


@pytest.mark.parametrize("begun", [False, True])
def test_without_optimizer_states_weights_and_scheduler_go_on(tmp_path, begun):
    values = kept(tmp_path)
    for wanted, count in ((True, 3), (False, 0)):
        model = net()
        with make(model, tmp_path / f"second {wanted}", lr_scheduler=scheduler) as engine:
            if begun:
                step(engine, batches(1)[0])
                count += not wanted
            engine.load_checkpoint(tmp_path / "kept", load_optimizer_states=False, load_lr_scheduler_states=wanted)
            assert engine.lr_scheduler.last_epoch == count
            engine.eval()(**batches(1)[0])
            for name, value in engine.state_dict().items():
                assert torch.equal(value, values[name]), name
            step(engine.train(), batches(1)[0])
            assert engine.global_steps == 1 + begun and engine.lr_scheduler.last_epoch == count + 1


def test_what_is_not_served_of_a_checkpoint_is_refused_by_its_name(tmp_path):
    kept(tmp_path)
    with make(net(), tmp_path / "second") as engine:
        with pytest.raises(TypeError, match="load_module_only"):
            engine.load_checkpoint(tmp_path / "kept", load_module_only="yes")
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine = deepspeed.initialize(model=net(), config=config)[0]
    step(engine, batches(1)[0])
    with pytest.warns(UserWarning, match="exclude_frozen_parameters: a checkpoint is the whole state"):
        engine.save_checkpoint(tmp_path / "whole", exclude_frozen_parameters=True)
    with warnings.catch_warnings():  # told once
        warnings.simplefilter("error")
        engine.save_checkpoint(tmp_path / "whole", exclude_frozen_parameters=True)
    with pytest.raises(NotImplementedError, match="custom_load_fn"):
        engine.load_checkpoint(tmp_path / "kept", custom_load_fn=print)
    with pytest.raises(NotImplementedError, match="lr_kwargs"):
        engine.step(lr_kwargs={"epoch": 1})
    engine.save_checkpoint(tmp_path / "more", exclude_frozen_parameters=False)
    before = (tmp_path / "more" / "latest").read_text()
    step(engine, batches(1)[0])
    engine.save_checkpoint(tmp_path / "more", save_latest=False)
    assert (tmp_path / "more" / "latest").read_text() == before and (tmp_path / "more" / "global_step2").exists()
    engine.destroy()


def test_a_checkpoint_is_loaded_into_an_engine_that_has_begun(tmp_path):
    """The run that was there ends, and the checkpoint's goes on, with the bits that it would have had."""
    values = kept(tmp_path)
    with make(net(), tmp_path / "oracle", lr_scheduler=scheduler) as engine:
        engine.load_checkpoint(tmp_path / "kept")
        expected = [step(engine, batch) for batch in batches(3, seed=8)]
    for offload in ("nvme", "none"):
        where = {"state_dir": str(tmp_path / "other")} if offload == "nvme" else {"offload": "none"}
        model = net(seed=4)
        engine = penstock.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), gradient_clipping=1.0, lr_scheduler=scheduler, overwrite=True, **where
        )[0]
        with engine:
            step(engine, batches(1)[0])
            path, client = engine.load_checkpoint(tmp_path / "kept")
            assert client == {"epoch": 7} and engine.client_state == client and engine.global_steps == 3
            for name, value in engine.state_dict().items():  # before any forward
                assert torch.equal(value, values[name]), name
            assert [step(engine, batch) for batch in batches(3, seed=8)] == expected
    with make(net(), tmp_path / "another") as engine:
        step(engine, batches(1)[0])
        with pytest.raises(RuntimeError, match="overwrite=True"):
            engine.load_checkpoint(tmp_path / "kept")
        step(engine, batches(1)[0])


CONFIG = """{
  // What DeepSpeed's reader takes: comments,
  "train_micro_batch_size_per_gpu": 4, # of both kinds
  optimizer: {
    type: AdamW
    params: {"lr": 1e-2, 'weight_decay': 0.1,}
  },
  "gradient_clipping": 1.0,   /* and commas at ends */
  "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "NVME"}},
}
"""


def test_a_configuration_is_read_as_deepspeed_reads_it(tmp_path):
    text = CONFIG.replace("NVME", str(tmp_path / "nvme"))
    path = tmp_path / "ds_config.hjson"
    path.write_text(text)
    given = [str(path), path, base64.urlsafe_b64encode(text.encode()).decode()]
    data = batches(3)
    expected, _ = plain_losses(net(), [{**all_names(net())[0], "weight_decay": 0.1}], [[batch] for batch in data])
    for config in given:
        engine = deepspeed.initialize(model=net(), config=config)[0]
        assert [step(engine, batch) for batch in data] == pytest.approx(expected, abs=1e-5)
        assert engine.config["optimizer"]["params"]["lr"] == 1e-2
        engine.destroy()
    with penstock.initialize(model=net(), config=given[2])[0] as engine:
        assert step(engine, data[0]) == pytest.approx(expected[0], abs=1e-5)
    with deepspeed.zero.Init(config_dict_or_path=str(path)):
        net()
    with pytest.raises(FileNotFoundError, match="base64"):
        penstock.initialize(model=net(), config="no/such/file.json")
    path.write_text("{'train_batch_size': }")
    with pytest.raises(ValueError, match=r"ds_config\.hjson: .*line 1"):
        penstock.initialize(model=net(), config=path)
    with pytest.raises(ValueError, match=r"ds_config\.hjson"):
        deepspeed.initialize(model=net(), config=path)


@pytest.mark.parametrize("section, told", [
    ({"activation_checkpointing": {"cpu_checkpointing": True}}, "activation_checkpointing.cpu_checkpointing: accepted and ignored"),
    ({"aio": {"use_gds": True}}, "aio.use_gds: accepted and ignored: from Python"),
    ({"penstock": {"device_memory": "4GiB"}}, "penstock.device_memory: accepted and ignored: from Python"),
    ({"penstock": {"io_threads": 2}}, "penstock.io_threads: accepted and ignored"),
    ({"zero_optimization": {"stage": 3, "reduce_bucket_size": 10}}, "zero_optimization.reduce_bucket_size: accepted and ignored"),
    ({"zero_optimization": {"stage": 3, "allgather_bucket_size": 10}}, "zero_optimization.allgather_bucket_size: accepted and ignored"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
     "zero_optimization.offload_optimizer.ratio: accepted and ignored: from Python"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pipeline_read": False}}}, "pipeline_read false"),
    ({"flops_profiler": {"enabled": True, "detailed": True}}, "flops_profiler.detailed: accepted and ignored: from Python"),
])  # fmt: skip
def test_a_key_without_effect_says_so(section, told):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        penstock.initialize(model=net(), config={"train_micro_batch_size_per_gpu": 4, **section}, offload="none")
    lines = [str(each.message) for each in caught if told in str(each.message)]
    assert len(lines) == 1 and "\n" not in lines[0], [str(each.message) for each in caught]


def test_a_size_means_the_same_everywhere(tmp_path):
    from penstock._buffers import byte_size
    from penstock._fp32 import _size_of

    for text, value in {"4GB": 4 * 10**9, "4G": 4 * 10**9, "4GiB": 2**32, "512m": 512 * 10**6, "1e9": 10**9, "17": 17}.items():
        assert byte_size(text, "host_memory") == value and _size_of(text) == value
        config = {"train_micro_batch_size_per_gpu": 4, "penstock": {"host_memory": text}}
        engine = penstock.initialize(model=net(), config=config, offload="none")[0]
        assert engine._settings.host_memory == value
        engine.close()
    for wrong in ("4X", "-1", "", "GiB"):
        with pytest.raises(ValueError, match="host_memory"):
            byte_size(wrong, "host_memory")


def test_no_memory_is_no_budget_at_any_door(tmp_path, capsys):
    """Refused with the value, the bound and how a size is written."""

    def section(value):
        return {"config": {"train_micro_batch_size_per_gpu": 4, "penstock": {"host_memory": value}}}

    batch = {"example": batches(1)[0]}
    doors = (
        lambda value: penstock.initialize(model=net(), offload="none", host_memory=value),
        lambda value: penstock.plan(net(), offload="none", host_memory=value, **batch),
        lambda value: penstock.LLM(tmp_path, host_memory=value),
        lambda value: penstock.optim.AdamW(net().parameters(), state_dir=tmp_path, host_memory=value),
        lambda value: penstock.initialize(model=net(), offload="none", **section(value)),
        lambda value: penstock.plan(net(), offload="none", **section(value), **batch),
    )
    for value in (0, "0", "0GiB", -1, 0.0):
        for door in doors:
            with pytest.raises(ValueError, match=r"host_memory.*must be a size.*GiB") as refused:
                door(value)
            assert str(int(float(str(value).rstrip("GiB")))) in str(refused.value) and "\n" not in str(refused.value)
    if importlib.util.find_spec("uvicorn") is None:
        return
    from penstock._serve.program import main

    assert main([str(tmp_path), "--host-memory", "0", "--port", "0"]) == 2
    told = capsys.readouterr().err
    assert "--host-memory is 0: must be a size above 0, as" in told and len(told.splitlines()) == 1


def test_a_path_that_cannot_be_what_it_is_to_be_is_refused_at_the_call(tmp_path):
    """And not with the first forward, or after the step that would be written."""
    (tmp_path / "file").write_text("")
    batch = {"example": batches(1)[0]}

    def config(**section):
        return {"train_micro_batch_size_per_gpu": 4, **section}

    def place(path):
        return {"offload_optimizer": {"device": "nvme", "nvme_path": str(path)}}

    for path in (tmp_path / "file", tmp_path / "file" / "sub"):
        for state_dir in (path, str(path), [tmp_path / "a", path], [f"{tmp_path / 'a'}=1", f"{path}=2"]):
            for call in (penstock.initialize, penstock.plan):
                with pytest.raises(NotADirectoryError, match="state_dir is no directory") as refused:
                    call(net(), state_dir=state_dir, **(batch if call is penstock.plan else {}))
                assert refused.value.filename == str(tmp_path / "file")
        for section in (
            {"penstock": {"state_dirs": [str(path)]}},
            {"zero_optimization": {"stage": 3, **place(path)}},
            {"csv_monitor": {"enabled": True, "output_path": str(path)}},
            {"tensorboard": {"enabled": True, "output_path": str(path)}},
        ):
            with pytest.raises(NotADirectoryError, match="(state_dir|output_path) is no directory"):
                penstock.initialize(net(), config=config(**section), state_dir=tmp_path / "run" if "output_path" in str(section) else None)
        with pytest.raises(NotADirectoryError, match="state_dir is no directory"):
            penstock.optim.AdamW(net().parameters(), state_dir=path)
    for output, error in ((tmp_path, IsADirectoryError), (tmp_path / "none" / "x", FileNotFoundError), (tmp_path / "file" / "x", NotADirectoryError)):
        profiled = config(flops_profiler={"enabled": True, "output_file": str(output)})
        with pytest.raises(error, match="flops_profiler.output_file") as refused:
            penstock.initialize(net(), config=profiled, offload="none")
        assert "\n" not in str(refused.value)
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_a_directory_that_cannot_be_made_is_named_with_what_it_was_to_be(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    (tmp_path / "nothing").symlink_to(tmp_path / "not-there")
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}

    def with_deepspeeds_name(path):
        config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(path)
        deepspeed.initialize(model=net(), config=config)

    def on_disk(path):
        with penstock.init_on_disk(path):
            pass

    for path, number in (("file", errno.ENOTDIR), ("file/a/b", errno.ENOTDIR), ("nothing", errno.EEXIST), ("nothing/a", errno.ENOENT)):
        for what, call in (
            ("nvme_path", with_deepspeeds_name),
            ("directory", on_disk),
            ("state_dir", lambda path: penstock.optim.AdamW(net().parameters(), state_dir=path)),
        ):
            if what == "state_dir" and path.startswith("nothing"):
                continue  # it is made where its link leads
            with pytest.raises(OSError, match=f"{what} (is no directory|cannot be made).*: give another place") as refused:
                call(tmp_path / path)
            assert refused.value.errno == number and refused.value.filename in (str(tmp_path / path), str(tmp_path / path.split("/")[0]))
            assert "\n" not in str(refused.value)
    script = tmp_path / "script.py"
    script.write_text("")
    assert launch(["--num_gpus", "2", "--enable_each_rank_log", str(tmp_path / "file"), str(script)]) == 2
    error = capfd.readouterr().err
    assert "--enable_each_rank_log is no directory: give another place" in error and len(error.splitlines()) == 1


def test_a_step_that_the_caller_owns_updates(tmp_path):
    """managed_gradient_accumulation false: step() is the boundary, whatever has been counted."""
    data = batches(6)
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3, "gradient_clipping": 1.0, "managed_gradient_accumulation": False,
    }  # fmt: skip
    model = net()
    oracle = net()
    optimizer = torch.optim.AdamW(oracle.parameters(), lr=1e-2)
    with penstock.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config, state_dir=tmp_path)[0] as engine:
        at = 0
        for count in (1, 3, 2):  # forwards of a step; each loss counts for a third, as DeepSpeed's
            for batch in data[at : at + count]:
                loss = engine(**batch)
                engine.backward(loss)
                expected = oracle(**batch)
                (expected / 3).backward()
                assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
            engine.step()
            torch.nn.utils.clip_grad_norm_(oracle.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            at += count
        assert engine.global_steps == 3
        with pytest.raises(RuntimeError, match="managed_gradient_accumulation is false"):
            engine.set_gradient_accumulation_boundary(True)


def test_an_optimizers_groups_may_be_empty(tmp_path):
    """As Trainer makes them of an adapter: one with weight decay, and one without that has nothing."""
    data = batches(4)
    for place in (0, 1, 2):
        model, plain = net(), net()
        groups = []
        for each in (model, plain):
            given = [{"params": [p for p in each.parameters() if p.dim() > 1]}, {"params": [p for p in each.parameters() if p.dim() == 1], "lr": 1e-3}]
            given.insert(place, {"params": [], "weight_decay": 0.5, "eps": 1e-3})
            groups.append(given)
        optimizer = torch.optim.AdamW(groups[1], lr=1e-2)
        expected = []
        for batch in data:
            loss = plain(**batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())
        state = tmp_path / str(place)
        with make(model, state, optimizer=torch.optim.AdamW(groups[0], lr=1e-2)) as engine:
            assert [step(engine, batch) for batch in data[:2]] == pytest.approx(expected[:2], abs=1e-5)
        again = net()
        by_size = [[p for p in again.parameters() if (p.dim() > 1) == large] for large in (True, False)]
        given = [{"params": by_size[0]}, {"params": by_size[1], "lr": 1e-3}]
        given.insert(place, {"params": [], "weight_decay": 0.5, "eps": 1e-3})
        with make(again, state, optimizer=torch.optim.AdamW(given, lr=1e-2), resume=True) as engine:
            assert [step(engine, batch) for batch in data[2:]] == pytest.approx(expected[2:], abs=1e-5)


def test_a_group_of_another_optimizer_is_named(tmp_path):
    """accelerate hands the groups of Adafactor, whose eps is a pair, to DeepSpeedCPUAdam."""
    from penstock.ops.adam import DeepSpeedCPUAdam

    model = net()
    given = torch.optim.AdamW(model.parameters(), lr=1e-2).param_groups
    given[0]["eps"] = (1e-30, 1e-3)
    with pytest.raises(TypeError, match=r"eps of this DeepSpeedCPUAdam is \(1e-30, 0.001\).*Adafactor.*adamw_torch"):
        make(model, tmp_path, optimizer=DeepSpeedCPUAdam(given, lr=1e-2))


def test_a_sparse_gradient_is_a_gradient(tmp_path):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(20, 16, sparse=True), nn.Linear(16, 16), nn.Linear(16, 4))

    x = torch.tensor([[1, 5, 5], [0, 19, 1]])
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    ours = model()
    with make(ours, tmp_path, optimizer=torch.optim.SGD(ours.parameters(), lr=0.1), gradient_clipping=0.0) as engine:
        for _ in range(3):
            expected = plain(x).square().mean()
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


def test_a_checkpointing_that_offloads_is_told(tmp_path):
    from penstock._engine._modules import switch_off_checkpointing

    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1, n_positions=8))
    if not hasattr(model, "activation_checkpointing_enable"):
        pytest.skip("this transformers has no such option")
    model.activation_checkpointing_enable(offload=True)
    assert switch_off_checkpointing(model.modules())
    model.activation_checkpointing_enable()
    assert not switch_off_checkpointing(model.modules())
    model.activation_checkpointing_enable(offload=True)
    engine = make(model, tmp_path)
    tokens = torch.arange(8)[None]
    with pytest.warns(UserWarning, match="offload=True: the processor computes, and saved activations are in host memory"):
        engine(input_ids=tokens, labels=tokens)
    engine.close()


def test_two_engines_of_one_nvme_path_before_either_has_begun(tmp_path):
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}},
    }  # fmt: skip
    first, second = (deepspeed.initialize(model=net(seed=seed), config=config)[0] for seed in (0, 1))
    data = batches(3)
    for engine, seed in ((second, 1), (first, 0)):
        expected, _ = plain_losses(net(seed=seed), all_names(net()), [[batch] for batch in data])
        assert [step(engine, batch) for batch in data] == pytest.approx(expected, abs=1e-5)
    first.destroy()
    second.destroy()
    assert list(tmp_path.iterdir()) == []


def test_state_directories_take_weights_as_argument_and_in_the_configuration(tmp_path):
    def bytes_in(directory):
        return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())

    a, b = tmp_path / "a", tmp_path / "b"
    for arguments in (
        {"state_dir": [f"{a}=3", b]},
        {"config": {"train_batch_size": 1, "penstock": {"state_dirs": [f"{a}=3", str(b)]}}, "overwrite": True},
    ):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
        with penstock.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), **arguments)[0] as engine:
            engine.backward(engine(torch.zeros(1, 256)).sum())
            engine.step()
            assert engine.report()["state_dir_shares"] == [0.75, 0.25]
        assert bytes_in(a) > 2 * bytes_in(b)
    with pytest.raises(ValueError, match="weight of a state directory"):
        penstock.initialize(model=torch.nn.Linear(2, 2), state_dir=[f"{a}=-1", b])


OBJECTS = {"model", "optimizer", "model_parameters", "lr_scheduler", "config_params", "training_data", "collate_fn", "unknown"}


def test_the_keywords_of_initialize_are_settings_of_the_table(capfd):
    from penstock import _core

    assert _core.run_penstock(["settings"]) == 0
    page = capfd.readouterr().out
    keywords = {line.split("Python `")[1].split("=`")[0] for line in page.splitlines() if "Python `" in line}
    assert keywords == set(inspect.signature(penstock.initialize).parameters) - OBJECTS
    told = penstock.initialize.__doc__
    assert all(f"    {keyword}: " in told for keyword in keywords)


def test_a_configuration_has_the_types_that_scripts_give(tmp_path):
    """Paths, types of elements, and scalars of torch and numpy; what no configuration has is refused by its place."""
    numpy = pytest.importorskip("numpy")
    config = {
        "train_micro_batch_size_per_gpu": numpy.int64(4),
        "gradient_clipping": torch.tensor(0.5),
        "steps_per_print": float("inf"),
        "communication_data_type": torch.bfloat16,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": tmp_path}},
        "penstock": {"blocks": ("layers.0", "layers.1"), "forwards_per_step": numpy.int32(3)},
    }
    with pytest.warns(UserWarning, match="communication_data_type: accepted and ignored"):
        engine = penstock.initialize(model=net(), config=config)[0]
    settings = engine._settings
    assert (settings.kept["gradient_clipping"], settings.micro_batch_size, settings.forwards) == (0.5, 4, 3)
    assert settings.blocks == ["layers.0", "layers.1"]
    assert settings.state_dirs == [str(tmp_path)]
    engine.close()
    for wrong, told in (
        ({"gradient_clipping": float("nan")}, "gradient_clipping is nan: a configuration has finite numbers"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": torch.zeros(2)}}}, "optimizer.params.lr is of the type Tensor"),
        ({"gradient_clipping": print}, "gradient_clipping is of the type builtin_function_or_method"),
        ({"zero_optimization": {3: "stage"}}, "zero_optimization has a key that is no text: 3"),
        ({"train_batch_size": 2**64}, "train_batch_size is a number of more than 64 bits"),
        ({"csv_monitor": {"job_name": "\ud800"}}, "csv_monitor.job_name is no text"),
    ):
        with pytest.raises(ValueError, match=told):
            penstock.initialize(model=net(), config=wrong, offload="none")
    nested = {}
    for _ in range(100):
        nested = {"optimizer": nested}
    with pytest.raises(ValueError, match="is nested deeper"):
        penstock.initialize(model=net(), config=nested, offload="none")
    nested["itself"] = nested
    with pytest.raises(ValueError, match="is nested deeper"):
        penstock.initialize(model=net(), config=nested, offload="none")


def test_a_keyword_is_checked_as_its_key_is(tmp_path):
    for wrong, told in (
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: must be a whole number"),
        ({"forwards_per_step": 1.5}, "forwards_per_step: must be a whole number"),
        ({"gradient_clipping": -1}, "gradient_clipping: must be a number of 0 or more, not -1"),
        ({"dtype": torch.int8}, "dtype is .*: fp32, bf16 and fp16 are served"),
        ({"offload": "disk"}, "offload: must be one of none, cpu, nvme"),
        ({"blocks": "layers"}, "blocks: must be a list of names"),
        ({"logits_chunk_size": -1}, "logits_chunk_size: must be a whole number"),
        ({"chunked_modules": "mlp"}, "chunked_modules: must be a list of names"),
        ({"chunked_modules": ["mlp"]}, "chunked_modules: the model has no module 'mlp'"),
        ({"chunk_size": 0}, "chunk_size: must be a whole number"),
        ({"state_dir": []}, "state_dir: must be a list of directories"),
    ):
        with pytest.raises(ValueError, match=told):
            penstock.initialize(model=net(), **{"offload": "none", **wrong})
    with pytest.raises(TypeError, match="no argument 'gradient_cliping' .did you mean 'gradient_clipping'"):
        penstock.initialize(model=net(), gradient_cliping=1)
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}
    with pytest.raises(ValueError, match="is not a micro-batch of 4 x 4 accumulation steps"):
        penstock.initialize(model=net(), config=config, gradient_accumulation_steps=4, offload="none")
    with warnings.catch_warnings(record=True) as caught:  # what a keyword says is not told as DeepSpeed's
        warnings.simplefilter("always")
        penstock.initialize(model=net(), config=config, gradient_clipping=0.25, offload="none")[0].close()
    assert not [each for each in caught if str(each.message).startswith("gradient_clipping")]


def test_what_a_keyword_says_a_configuration_says_under_penstock(tmp_path):
    own = {"seed": 7, "device": "cpu", "progress": True, "rank_timeout": 12.5, "dtype": "bf16"}
    engine = penstock.initialize(model=net(), config={"penstock": own}, offload="none")[0]
    assert (engine._settings.dtype, engine._settings.progress, engine._settings.rank_timeout, str(engine.device)) == ("bf16", True, 12.5, "cpu")
    engine.close()
    # Arguments win.
    given = dict(progress=False, rank_timeout=3, dtype=torch.float32, offload="none")
    engine = penstock.initialize(model=net(), config={"penstock": own}, **given)[0]
    assert (engine._settings.dtype, engine._settings.progress, engine._settings.rank_timeout) == ("fp32", False, 3)
    engine.close()
    # Trainer and accelerate have no other way.
    nvme = {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}
    config = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}, "penstock": own}
    engine = deepspeed.initialize(model=net(), config=config)[0]
    assert engine.bfloat16_enabled() and engine.engine._settings.progress and engine.engine._settings.rank_timeout == 12.5
    engine.destroy()
    for wrong, told in (
        ({"penstock": {"seed": -1}}, "penstock.seed: must be a whole number"),
        ({"penstock": {"rank_timeout": 0.5}}, "penstock.rank_timeout: must be a number of 1 or more, not 0.5"),
        ({"penstock": {"progress": "yes"}}, "penstock.progress: must be true or false"),
        ({"penstock": {"dtype": "int8"}}, "penstock.dtype: must be one of fp32, bf16, fp16"),
        ({"penstock": {"device": ["cpu"]}}, "penstock.device: must be text"),
        ({"penstock": {"dtype": "fp32"}, "bf16": {"enabled": True}}, "penstock.dtype: fp32 beside bf16.enabled: true; leave one of them out"),
        ({"penstock": {"dtype": "fp16"}, "fp16": {"enabled": False}}, "penstock.dtype: fp16 beside fp16.enabled: false"),
    ):
        with pytest.raises(ValueError, match=told):
            penstock.initialize(model=net(), config=wrong, offload="none")


def test_a_seed_of_the_configuration_is_the_seed(tmp_path):
    def seed_of(configured, **options):
        own = {"optimizer_states": "8bit", **({} if configured is None else {"seed": configured})}
        with make(net(), tmp_path / "run", config={"penstock": own}, overwrite=True, **options) as engine:
            step(engine, batches(1)[0])
            return engine.report()["seed"]

    assert (seed_of(None), seed_of(7), seed_of(None, seed=8), seed_of(3, seed=9)) == (1, 7, 8, 9)


def test_an_error_of_the_engine_names_settings_as_python_spells_them(tmp_path):
    engine = penstock.initialize(model=net(), offload="none", host_memory="16KiB", optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))[0]
    with pytest.raises(RuntimeError, match="too small: the least that works.* with offload='nvme' less would do") as raised:
        engine(**batches(1)[0])
    assert "--" not in str(raised.value)


def test_a_setting_is_found_by_any_spelling_and_a_misspelt_one_names_the_nearest(capfd):
    from penstock import _core

    entries = []
    for spelling in ("gradient_clipping", "--clip", "clip"):
        assert _core.run_penstock(["settings", spelling]) == 0
        entries.append(capfd.readouterr().out)
    assert entries[0].startswith("### gradient_clipping\n") and len(set(entries)) == 1
    assert _core.run_penstock(["settings", "gradient_cliping"]) == 2
    assert 'did you mean "gradient_clipping"' in capfd.readouterr().err

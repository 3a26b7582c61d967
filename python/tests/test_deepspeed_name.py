"""What scripts import of DeepSpeed besides its engine: served by Penstock, or refused in words when it is called."""

import importlib
import importlib.util
import json
import os
import sys

import pytest

torch = pytest.importorskip("torch")

import penstock.deepspeed as deepspeed  # noqa: E402
from engine_models import all_names, batches, net, plain_losses, step  # noqa: E402
from torch import nn  # noqa: E402


def test_the_name_is_penstocks():
    assert importlib.import_module("deepspeed.git_version_info").version == deepspeed.__version__
    assert importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine is deepspeed.DeepSpeedEngine
    # It takes DeepSpeed's words for timing besides, so it is no more torch's own.
    assert importlib.import_module("deepspeed.comm").all_reduce.__wrapped__ is torch.distributed.all_reduce


# A script imports deepspeed, and names the rest by attribute.
ATTRIBUTES = """
    accelerator.real_accelerator.get_accelerator checkpoint.utils.clone_tensors_for_torch_save comm.comm.all_reduce elasticity.elasticity.ElasticityError
    env_report.main git_version_info.version launcher.runner.main moe.layer.MoE monitor.monitor.MonitorMaster ops.adam.cpu_adam.DeepSpeedCPUAdam
    ops.aio.aio_handle ops.op_builder.AsyncIOBuilder pipe.PipelineModule profiling.flops_profiler.get_model_profile
    profiling.flops_profiler.profiler.FlopsProfiler runtime.activation_checkpointing.checkpointing.checkpoint runtime.config.DeepSpeedConfig
    runtime.dataloader.RepeatingLoader runtime.engine.DeepSpeedEngine runtime.fp16.loss_scaler.LossScaler runtime.lr_schedules.WarmupLR
    runtime.utils.see_memory_usage runtime.zero.config.ZeroStageEnum runtime.zero.offload_config.OffloadDeviceEnum
    runtime.zero.partition_parameters.ZeroParamStatus runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live
    runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer runtime.zero.utils.is_zero_param sequence.layer utils.groups.initialize utils.logging.logger
    utils.timer.ThroughputTimer utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint zero.Init
"""


def test_modules_are_attributes_of_their_packages(in_child):
    text = f"""
        import functools, logging
        import penstock.deepspeed as deepspeed
        for name in {ATTRIBUTES.split()!r}:
            assert functools.reduce(getattr, name.split("."), deepspeed) is not None, name
        deepspeed.utils.logging.logger.setLevel(logging.ERROR)
        assert not isinstance(deepspeed, deepspeed.runtime.engine.DeepSpeedEngine)
        assert deepspeed.comm.comm.get_rank() == 0
        import deepspeed.runtime.zero.partition_parameters
        print("done")
        """
    status, out, error = in_child(text)
    assert (status, out) == (0, "done\n"), error


def test_an_import_of_it_loads_what_it_needs_alone(in_child):
    """The rest is loaded when it is looked at."""
    text = """
        import sys
        import torch, penstock._deepspeed, penstock.ops.adam, penstock.ops.aio
        before = set(sys.modules)
        import penstock.deepspeed
        print(sorted(each for each in set(sys.modules) - before if "deepspeed" in each and each.count(".") > 2))
        print([each for each in ("transformers", "accelerate", "tensorboard", "wandb") if each in sys.modules])
        """
    status, out, error = in_child(text)
    assert status == 0, error
    loaded, others = out.splitlines()
    assert "runtime.engine" not in loaded and "partition_parameters" not in loaded and others == "[]", out


@pytest.mark.parametrize("name", ["no_such_module", "runtime.no_such_module", "runtime.zero.stage_4", "utils.no.such", "comm.distributed_c10d", "zero.nothing"])
def test_a_module_that_is_not_there_says_what_is_in_one_line(name):
    first = name.split(".")[0]
    with pytest.raises(ModuleNotFoundError, match=r"not served by Penstock, .*(has the modules \w+|docs.deepspeed.md).*; leave it out, or run with DeepSpeed itself") as raised:
        importlib.import_module(f"deepspeed.{name}")
    assert "\n" not in str(raised.value) and f"deepspeed.{first}" in str(raised.value)
    package, _, last = f"deepspeed.{name}".rpartition(".")
    if package in sys.modules:
        assert importlib.util.find_spec(f"deepspeed.{name}") is None  # who asks is told no
    if package in sys.modules and package != "deepspeed.comm":  # which has torch.distributed's attributes
        with pytest.raises(ImportError, match="not served by Penstock"):
            exec(f"from {package} import {last}")
        with pytest.raises(AttributeError, match="not served by Penstock") as raised:
            getattr(sys.modules[package], last)
        assert "\n" not in str(raised.value)


def engine_of(tmp_path, **options):
    options.setdefault("config", {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0})
    config = {**options.pop("config"), "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    model = net()
    optimizer = options.pop("optimizer", lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))(model.parameters())
    scheduler = options.pop("scheduler", lambda optimizer: None)(optimizer)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=scheduler, **options)[0]


def test_elasticity(tmp_path, monkeypatch):
    elasticity = importlib.import_module("deepspeed.elasticity")
    section = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "min_gpus": 1, "max_gpus": 10000, "version": 0.1}
    batch, ranks = elasticity.compute_elastic_config({"elasticity": section}, "0.18.9")
    assert batch == 1680 and 1 in ranks and 840 in ranks and 17 not in ranks  # as DeepSpeed's documentation has it
    assert elasticity.compute_elastic_config({"elasticity": section}, "0.18.9", world_size=4) == (batch, ranks, 6)
    assert elasticity.compute_elastic_config({"elasticity": section}, "0.18.9", return_microbatch=True)[2] == 6
    with pytest.raises(elasticity.ElasticityIncompatibleWorldSize, match="17 ranks cannot share"):
        elasticity.compute_elastic_config({"elasticity": section}, "0.18.9", world_size=17)
    for wrong in ({}, {"elasticity": {"enabled": False}}, {"elasticity": {"enabled": True, "micro_batch_sizes": [2]}}):
        with pytest.raises(elasticity.ElasticityConfigError):
            elasticity.compute_elastic_config(wrong, "0.18.9")
    assert elasticity.elasticity_enabled({"elasticity": section}) and not elasticity.elasticity_enabled({})


def test_an_engine_takes_the_elastic_batch(tmp_path):
    section = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [4], "max_gpus": 4, "version": 0.1}
    with pytest.warns(UserWarning, match="elasticity: 8 sequences a step, for 1, 2 ranks; the script gives each of 1 in a step 2 micro-batches of 4"):
        engine = engine_of(tmp_path, config={"elasticity": section, "gradient_clipping": 1.0})
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()) == (8, 4, 2)
    data = batches(4)
    made = [step(engine, batch) for batch in data]
    assert engine.global_steps == 2
    expected, _ = plain_losses(net(), all_names(net()), [data[:2], data[2:]])
    assert [(made[0] + made[1]) / 2, (made[2] + made[3]) / 2] == pytest.approx(expected, abs=1e-5)
    engine.destroy()
    with pytest.raises(ValueError, match="elasticity: 1 rank cannot share the batch of .* evenly; start 2"):
        engine_of(tmp_path, config={"elasticity": {**section, "min_gpus": 2}})


def test_schedules_are_those_of_the_configuration(tmp_path):
    schedules = importlib.import_module("deepspeed.runtime.lr_schedules")
    parameters = {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 3, "warmup_type": "linear"}
    data = batches(6)

    def rates(**options):
        engine = engine_of(tmp_path, **options)
        told = []
        for batch in data:
            told.append(engine.get_lr()[0])
            step(engine, batch)
        engine.destroy()
        return told

    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}
    named = rates(config={**config, "scheduler": {"type": "WarmupDecayLR", "params": {**parameters, "total_num_steps": 6}}})
    assert rates(scheduler=lambda optimizer: schedules.WarmupDecayLR(optimizer, 6, **parameters)) == named and len(set(named)) > 3
    optimizer = torch.optim.AdamW(net().parameters(), lr=1e-2)
    later = schedules.WarmupDecayLR(optimizer, total_num_steps=6, last_batch_iteration=2, **parameters)
    assert later.get_last_lr() == [pytest.approx(named[3])] and later.last_batch_iteration == 2
    placed = schedules.WarmupDecayLR(optimizer, 6, **parameters)
    placed.step(2)
    assert placed.get_last_lr() == later.get_last_lr() and placed.state_dict() == {"last_batch_iteration": 2}
    placed.load_state_dict({"last_batch_iteration": 0})
    assert placed.get_last_lr() == [pytest.approx(named[1])]
    with pytest.raises(ValueError, match="warmup_kind"):
        schedules.WarmupLR(optimizer, warmup_kind="linear")
    for made in (schedules.WarmupCosineLR(optimizer, 6), schedules.OneCycle(optimizer, 1e-4, 1e-2), schedules.LRRangeTest(optimizer, 1e-3)):
        made.step()
        made.step()
        assert made.get_last_lr()[0] > 0


def test_a_scheduler_that_is_set_takes_the_place_of_the_first(tmp_path):
    """Lightning sets None, and makes the steps itself."""
    parameters = {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 8, "warmup_type": "linear"}
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "scheduler": {"type": "WarmupLR", "params": parameters}}
    data = batches(4)

    def rates(change, directory):
        engine = engine_of(tmp_path / directory, config=dict(config))
        own = change(engine)
        told = []
        for batch in data:
            told.append(engine.get_lr()[0])
            step(engine, batch)
            if own is not None:
                own.step()
        return engine, told

    engine, expected = rates(lambda engine: None, "engines")
    engine.destroy()

    def by_the_caller(engine):
        own, engine.lr_scheduler = engine.lr_scheduler, None
        assert engine.lr_scheduler is None and engine.engine.lr_scheduler is None
        return own

    engine, told = rates(by_the_caller, "callers")
    assert told == expected and len(set(told)) == 3
    engine.destroy()

    def another(engine):
        engine.set_lr(1e-2)
        engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda update: 0.5**update)

    engine, told = rates(another, "another")
    assert told == [pytest.approx(1e-2 * 0.5**update) for update in range(4)]
    engine.save_checkpoint(tmp_path / "kept")
    with pytest.raises(TypeError, match="a scheduler has step"):
        engine.lr_scheduler = object()
    assert type(engine.lr_scheduler).__name__ == "LambdaLR"
    engine.destroy()
    engine = engine_of(tmp_path / "again", config=dict(config))
    another(engine)
    assert engine.load_checkpoint(tmp_path / "kept")[0] is not None
    step(engine, data[0])
    assert engine.lr_scheduler.state_dict()["last_epoch"] == 5 and engine.get_lr() == [pytest.approx(1e-2 * 0.5**5)]
    engine.destroy()


def test_the_data_parallel_group_is_that_of_all(tmp_path, on_ranks):
    engine = engine_of(tmp_path)
    assert engine.data_parallel_group is None
    engine.destroy()
    text = """
        import os, sys, torch
        sys.path.insert(0, sys.argv[2])
        import penstock.deepspeed as deepspeed
        from engine_models import net
        deepspeed.init_distributed()
        place = os.path.join(sys.argv[1], os.environ["RANK"])
        offload = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": place}}
        config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": offload}
        engine = deepspeed.initialize(model=net(), config=config)[0]
        assert engine.data_parallel_group is torch.distributed.group.WORLD is deepspeed.utils.groups._get_data_parallel_group()
        value = torch.ones(1)
        deepspeed.comm.all_reduce(value, group=engine.data_parallel_group)
        print(value.item(), torch.distributed.get_world_size(group=engine.data_parallel_group), flush=True)
        engine.destroy()
        deepspeed.comm.barrier()
        torch.distributed.destroy_process_group()
        """
    for status, out, error in on_ranks(text, 2, tmp_path, os.path.dirname(__file__)):
        assert (status, out) == (0, "2.0 2\n"), error[-3000:]


def test_fused_adam_is_the_engines(tmp_path):
    from deepspeed.ops.adam import FusedAdam

    data = batches(3)
    engine = engine_of(tmp_path, optimizer=lambda parameters: FusedAdam(parameters, lr=1e-2, weight_decay=0.01))
    made = [step(engine, batch) for batch in data]
    engine.destroy()
    expected, _ = plain_losses(net(), all_names(net()), [[batch] for batch in data])
    assert made == pytest.approx(expected, abs=1e-5)
    with pytest.raises(NotImplementedError, match="AdamW"):
        FusedAdam(net().parameters()).step()


def test_states_are_set(tmp_path):
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param, safe_set_full_optimizer_state

    engine = engine_of(tmp_path)
    step(engine, batches(1)[0])
    weight = engine.module.norm.weight
    for get, put in (
        (safe_get_full_fp32_param, safe_set_full_fp32_param),
        (lambda p: safe_get_full_optimizer_state(p, "exp_avg"), lambda p, v: safe_set_full_optimizer_state(p, v, "exp_avg")),
    ):
        value = get(weight) + 1
        put(weight, value)
        assert torch.equal(get(weight), value)
    with pytest.raises(ValueError, match="no optimizer state 'exp'"):
        safe_set_full_optimizer_state(weight, value, "exp")
    engine.destroy()


def test_the_profile_of_a_model(capsys):
    profiler = importlib.import_module("deepspeed.profiling.flops_profiler")
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).train()
    flops, macs, parameters = profiler.get_model_profile(model, input_shape=(3, 8), as_string=False)
    assert (flops, macs, parameters) == (2 * 3 * (8 * 16 + 16 * 4), 3 * (8 * 16 + 16 * 4), 8 * 16 + 16 + 16 * 4 + 4) and model.training
    assert "flops_profiler: step 1: 212 parameters, 1.2kFLOPs" in capsys.readouterr().out
    told = profiler.get_model_profile(model, args=[torch.ones(3, 8)], print_profile=False)
    assert told == ("1.2kFLOPs", "576MACs", "212") and not capsys.readouterr().out
    with pytest.raises(ValueError, match="input_shape, args or kwargs"):
        profiler.get_model_profile(model)
    counted = profiler.FlopsProfiler(model)
    counted.start_profile()
    model(torch.ones(3, 8)).sum().backward()
    counted.stop_profile()
    assert counted.get_total_flops() > flops and counted.get_total_duration() > 0
    counted.end_profile()
    assert counted.get_total_flops() == 0


def test_checkpointing_computes(tmp_path):
    deepspeed.checkpointing.configure(None, partition_activations=True)
    assert deepspeed.checkpointing.is_configured()
    assert deepspeed.checkpointing.checkpoint(lambda a, b: a + b, 1, 2) == 3


def test_estimates_and_reports_print(capfd, tmp_path):
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live

    estimate_zero3_model_states_mem_needs_all_live(net(), num_gpus_per_node=2)
    assert "per CPU" in capfd.readouterr().out
    with pytest.raises(ValueError):
        importlib.import_module("deepspeed.runtime.zero.stage_1_and_2").estimate_zero2_model_states_mem_needs_all_cold(-1)
    capfd.readouterr()
    assert importlib.import_module("deepspeed.env_report").main(arguments=["--dir", str(tmp_path)]) == 0
    out = capfd.readouterr().out
    assert "torch" in out and torch.__version__.split("+")[0] in out and "io_uring" in out


def test_ds_report_is_penstock_env(capfd, monkeypatch, tmp_path):
    from penstock import _programs

    assert _programs.report_environment(["--hide_operator_status", "--json", "--dir", str(tmp_path)]) == 0
    assert json.loads(capfd.readouterr().out)


def test_memory_is_told(caplog):
    import logging

    caplog.set_level(logging.INFO, logger="penstock")
    importlib.import_module("deepspeed.runtime.utils").see_memory_usage("here", force=True)
    importlib.import_module("deepspeed.utils").log_dist("there", ranks=[0])
    importlib.import_module("deepspeed.utils").log_dist("nowhere", ranks=[3])
    assert "here: " in caplog.text and "there" in caplog.text and "nowhere" not in caplog.text


def test_torchs_own_modules_do_not_become_deepspeeds():
    import deepspeed.comm

    assert deepspeed.comm.all_reduce.__wrapped__ is torch.distributed.all_reduce and deepspeed.comm.ReduceOp is torch.distributed.ReduceOp
    with pytest.raises(ModuleNotFoundError, match="deepspeed.comm.distributed_c10d is not served"):
        importlib.import_module("deepspeed.comm.distributed_c10d")

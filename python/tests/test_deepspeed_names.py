"""Names of DeepSpeed that scripts import, one table of them: each is there, and what is not served says so in one line when it is called."""

import importlib
import inspect
import itertools

import pytest

torch = pytest.importorskip("torch")

import penstock.deepspeed as deepspeed  # noqa: E402
from engine_models import batches, net, step  # noqa: E402

NAMES = {
    "deepspeed": "initialize init_distributed add_config_arguments get_accelerator logger log_dist zero comm checkpointing init_inference "
    "DeepSpeedEngine ops utils OnDevice DeepSpeedConfig PipelineModule InferenceEngine default_inference_config",
    "deepspeed.accelerator": "get_accelerator set_accelerator",
    "deepspeed.utils": "logger log_dist RepeatingLoader OnDevice groups safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
    "safe_set_full_fp32_param safe_set_full_optimizer_state safe_set_full_grad safe_get_local_fp32_param safe_get_local_grad "
    "safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state set_z3_leaf_modules "
    "unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module z3_leaf_parameter instrument_w_nvtx",
    "deepspeed.utils.logging": "logger log_dist",
    "deepspeed.utils.timer": "SynchronizedWallClockTimer ThroughputTimer",
    "deepspeed.utils.groups": "_get_data_parallel_world_size _get_data_parallel_rank _get_data_parallel_group _get_model_parallel_world_size "
    "initialize _get_sequence_parallel_world_size",
    "deepspeed.utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint",
    "deepspeed.runtime.engine": "DeepSpeedEngine",
    "deepspeed.runtime.config": "DeepSpeedConfig",
    "deepspeed.runtime.zero.config": "DeepSpeedZeroConfig ZeroStageEnum",
    "deepspeed.runtime.zero.offload_config": "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig OffloadDeviceEnum OffloadStateTypeEnum",
    "deepspeed.runtime.zero": "Init GatheredParameters ZeroParamStatus",
    "deepspeed.runtime.zero.partition_parameters": "ZeroParamStatus GatheredParameters Init",
    "deepspeed.runtime.zero.utils": "is_zero_param",
    "deepspeed.runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3",
    "deepspeed.runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
    "deepspeed.runtime.zero.parameter_offload": "DeepSpeedZeRoOffload",
    "deepspeed.runtime.zero.tiling": "TiledLinear",
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler",
    "deepspeed.runtime.dataloader": "DeepSpeedDataLoader RepeatingLoader",
    "deepspeed.runtime.utils": "see_memory_usage clip_grad_norm_",
    "deepspeed.runtime.lr_schedules": "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest",
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": "MMapIndexedDataset",
    "deepspeed.runtime.activation_checkpointing.checkpointing": "checkpoint configure reset get_cuda_rng_tracker model_parallel_cuda_manual_seed",
    "deepspeed.checkpointing": "configure checkpoint reset get_cuda_rng_tracker model_parallel_cuda_manual_seed",
    "deepspeed.zero": "Init GatheredParameters TiledLinear MiCS_Init register_external_parameter unregister_external_parameter",
    "deepspeed.comm": "init_distributed all_reduce barrier get_rank get_world_size get_local_rank log_summary mpi_discovery broadcast all_gather",
    "deepspeed.ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "deepspeed.ops.lion": "DeepSpeedCPULion FusedLion",
    "deepspeed.ops.adagrad": "DeepSpeedCPUAdagrad",
    "deepspeed.ops.lamb": "FusedLamb",
    "deepspeed.ops.op_builder": "AsyncIOBuilder GDSBuilder PinMemoryBuilder CPUAdamBuilder",
    "deepspeed.ops.gds": "GDSBuilder",
    "deepspeed.ops.transformer": "DeepSpeedTransformerLayer",
    "deepspeed.ops.sparse_attention": "SparseSelfAttention",
    "deepspeed.launcher.runner": "main",
    "deepspeed.monitor.monitor": "MonitorMaster",
    "deepspeed.checkpoint": "DeepSpeedCheckpoint",
    "deepspeed.checkpoint.ds_to_universal": "main",
    "deepspeed.sequence.layer": "DistributedAttention",
    "deepspeed.compression.compress": "init_compression",
    "deepspeed.inference.config": "DeepSpeedInferenceConfig",
    "deepspeed.linear": "LoRAConfig OptimizedLinear",
    "deepspeed.module_inject": "replace_transformer_layer",
    "deepspeed.moe.layer": "MoE",
    "deepspeed.moe.utils": "split_params_into_different_moe_groups_for_optimizer",
    "deepspeed.pipe": "PipelineModule LayerSpec TiedLayerSpec",
    "deepspeed.runtime.pipe.topology": "PipeModelDataParallelTopology",
    "deepspeed.runtime.hybrid_engine": "DeepSpeedHybridEngine",
    "deepspeed.autotuning": "Autotuner",
}

# Called with anything: what to do instead is part of the one line.
REFUSED = [
    ("deepspeed.accelerator", "set_accelerator", "CUDA_VISIBLE_DEVICES"),
    ("deepspeed.utils", "OnDevice", "init_on_disk"),
    ("deepspeed.utils", "safe_set_full_grad", "gradient_clipping"),
    ("deepspeed.utils", "safe_get_local_fp32_param", "safe_get_full_"),
    ("deepspeed.runtime.config", "DeepSpeedConfig", "deepspeed.initialize"),
    ("deepspeed.runtime.dataloader", "DeepSpeedDataLoader", "DataLoader"),
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "deepspeed.initialize"),
    ("deepspeed.zero", "TiledLinear", "torch.nn.Linear"),
    ("deepspeed.checkpointing", "get_cuda_rng_tracker", "torch.manual_seed"),
    ("deepspeed.comm", "mpi_discovery", "torchrun"),
    ("deepspeed.ops.gds", "GDSBuilder", "deepspeed.ops.aio"),
    ("deepspeed.sequence.layer", "DistributedAttention", "batches"),
    ("deepspeed.compression.compress", "init_compression", "penstock pack"),
    ("deepspeed.linear", "OptimizedLinear", "peft"),
    ("deepspeed.moe.utils", "is_moe_param", "expert parallelism"),
    ("deepspeed.runtime.pipe.topology", "ProcessTopology", "torch.nn.Sequential"),
    ("deepspeed.autotuning", "Autotuner", "penstock plan"),
    ("deepspeed.monitor.monitor", "MonitorMaster", "SummaryWriter"),
    ("deepspeed.elasticity", "DSElasticAgent", "torchrun"),
    ("deepspeed.pipe", "PipelineModule", "torch.nn.Sequential"),
    ("deepspeed.pipe", "LayerSpec", "block by block"),
    ("deepspeed.moe.layer", "MoE", "experts as modules"),
    ("deepspeed.ops.lamb", "FusedLamb", "AdamW is served"),
    ("deepspeed", "init_inference", "penstock generate"),
    ("deepspeed.runtime.utils", "clip_grad_norm_", "gradient_clipping"),
]


@pytest.mark.parametrize("module", NAMES)
def test_what_scripts_import_is_there(module):
    found = importlib.import_module(module)
    missing = [name for name in NAMES[module].split() if not hasattr(found, name)]
    assert not missing


@pytest.mark.parametrize("module, name, instead", REFUSED)
def test_what_is_not_served_says_what_to_do_in_one_line(module, name, instead):
    refused = getattr(importlib.import_module(module), name)
    required = [each for each in inspect.signature(refused).parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD and each.default is each.empty]
    with pytest.raises(NotImplementedError, match=instead) as raised:
        refused(*[object()] * max(1, len(required)))
    assert "\n" not in str(raised.value)


def test_the_accelerator_answers_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "current_stream", "Stream"):
        assert getattr(accelerator, name)(0) is None
    assert accelerator.max_memory_allocated() == 0 and accelerator.is_bf16_supported() and 0 < accelerator.available_memory() <= accelerator.total_memory()
    assert torch.equal(accelerator.pin_memory(torch.ones(2)), torch.ones(2)) and accelerator.FloatTensor([1.0]).dtype == torch.float32
    with accelerator.device(0), accelerator.stream(None):
        accelerator.manual_seed(3)
    with pytest.raises(AttributeError, match="torch.cuda and torch have their own"):
        getattr(accelerator, "no_such_name")


def test_a_repeating_loader_begins_again():
    loader = importlib.import_module("deepspeed.utils").RepeatingLoader([1, 2])
    assert list(itertools.islice(loader, 5)) == [1, 2, 1, 2, 1]


def test_the_engine_has_deepspeeds_names_and_its_models(tmp_path):
    config = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}},
    }  # fmt: skip
    model = net(tied=False)
    model.greeting = lambda: "the model's own"
    engine = deepspeed.initialize(model=model, config=config)[0]
    for batch in batches(2):
        step(engine, batch)
    assert engine.was_step_applied() and not engine.fp16_enabled() and not engine.bfloat16_enabled() and engine.zero_optimization()
    assert engine.global_samples == 8 and engine.get_mom() == [(0.9, 0.999)] and engine.greeting() == "the model's own"
    engine.set_lr(1e-3)
    step(engine, batches(1)[0])
    assert engine.get_lr() == [1e-3]
    assert engine.save_16bit_model(tmp_path / "weights")
    saved = torch.load(tmp_path / "weights" / "pytorch_model.bin")
    for name, value in engine.module_state_dict().items():
        torch.testing.assert_close(saved[name], value)
    for name, instead in (("deepspeed_io", "DataLoader"), ("set_train_batch_size", "gradient_accumulation_steps"), ("eval_batch", "no_grad")):
        with pytest.raises(NotImplementedError, match=instead):
            getattr(engine, name)(1)
    with pytest.raises(AttributeError, match="neither the engine nor its model, a Net, has 'no_such_name'"):
        getattr(engine, "no_such_name")
    engine.destroy()

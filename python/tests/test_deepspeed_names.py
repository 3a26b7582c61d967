"""Names of DeepSpeed that scripts import, one table of them: each is there, and what is not served says so in one line when it is called."""

import functools
import importlib
import inspect
import json
import logging
import os
import types

import pytest

torch = pytest.importorskip("torch")

import penstock.deepspeed as deepspeed  # noqa: E402
from engine_models import batches, net, step  # noqa: E402
from penstock import _throughput  # noqa: E402

NAMES = {
    "deepspeed": "initialize init_distributed add_config_arguments get_accelerator logger log_dist zero comm checkpointing init_inference "
    "DeepSpeedEngine ops utils OnDevice DeepSpeedConfig PipelineModule InferenceEngine default_inference_config dist version git_hash git_branch "
    "ADAM_OPTIMIZER LAMB_OPTIMIZER MUON_OPTIMIZER TORCH_DISTRIBUTED_DEFAULT_PORT DeepSpeedConfigError DeepSpeedDataLoader is_compile_supported "
    "DeepSpeedTransformerLayer DeepSpeedTransformerConfig replace_transformer_layer revert_transformer_layer set_autotp_mode PipelineEngine "
    "DeepSpeedHybridEngine DeepSpeedInferenceConfig DeepSpeedOptimizer DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable add_tuning_arguments "
    "set_optimizer_flags load_ds_config",
    "deepspeed.constants": "TORCH_DISTRIBUTED_DEFAULT_PORT CROSS_RANK CROSS_SIZE LOCAL_RANK default_pg_timeout",
    "deepspeed.accelerator.abstract_accelerator": "DeepSpeedAccelerator",
    "deepspeed.accelerator.real_accelerator": "get_accelerator is_current_accelerator_supported",
    "deepspeed.accelerator": "get_accelerator set_accelerator",
    "deepspeed.utils": "logger log_dist RepeatingLoader OnDevice groups safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
    "safe_set_full_fp32_param safe_set_full_optimizer_state safe_set_full_grad safe_get_local_fp32_param safe_get_local_grad "
    "safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state set_z3_leaf_modules "
    "set_z3_leaf_module set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module "
    "z3_leaf_parameter instrument_w_nvtx",
    "deepspeed.utils.logging": "logger log_dist log_dist_once warning_once print_dist set_log_level_from_string get_current_level should_log_le log_levels",
    "deepspeed.utils.timer": "SynchronizedWallClockTimer ThroughputTimer CudaEventTimer",
    "deepspeed.utils.groups": "_get_data_parallel_world_size _get_data_parallel_rank _get_data_parallel_group _get_model_parallel_world_size "
    "initialize _get_sequence_parallel_world_size get_data_parallel_world_size get_data_parallel_rank get_data_parallel_group "
    "get_tensor_model_parallel_world_size get_tensor_model_parallel_rank get_model_parallel_world_size get_model_parallel_rank "
    "_get_data_parallel_group_ranks _get_broadcast_src_rank _get_sequence_parallel_rank _get_sequence_data_parallel_world_size "
    "_get_sequence_data_parallel_rank _get_sequence_data_parallel_group _get_expert_parallel_world_size _get_expert_data_parallel_world_size mpu",
    "deepspeed.utils.tensor_fragment": "fragment_address tensor_fragment safe_get_full_fp32_param safe_get_local_fp32_param",
    "deepspeed.utils.z3_leaf_module": "set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix",
    "deepspeed.utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint",
    "deepspeed.runtime.engine": "DeepSpeedEngine DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable EngineTimers",
    "deepspeed.runtime.config": "DeepSpeedConfig DeepSpeedConfigError DeepSpeedConfigWriter ADAGRAD_OPTIMIZER ADAM_OPTIMIZER ADAMW_OPTIMIZER "
    "LAMB_OPTIMIZER ONEBIT_ADAM_OPTIMIZER ONEBIT_LAMB_OPTIMIZER ZERO_ONE_ADAM_OPTIMIZER LION_OPTIMIZER MUON_OPTIMIZER DEEPSPEED_OPTIMIZERS "
    "get_optimizer_name get_gradient_accumulation_steps",
    "deepspeed.runtime.zero.config": "DeepSpeedZeroConfig ZeroStageEnum get_zero_config ZERO_OPTIMIZATION OffloadDeviceEnum "
    "DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig",
    "deepspeed.runtime.zero.offload_config": "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig OffloadDeviceEnum OffloadStateTypeEnum",
    "deepspeed.runtime.zero": "Init GatheredParameters ZeroParamStatus register_external_parameter unregister_external_parameter MiCS_Init TiledLinear "
    "TiledLinearReturnBias unwrap_model_for_generation",
    "deepspeed.runtime.zero.partition_parameters": "ZeroParamStatus GatheredParameters Init register_external_parameter unregister_external_parameter",
    "deepspeed.runtime.zero.utils": "is_zero_param",
    "deepspeed.runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3 estimate_zero3_model_states_mem_needs unwrap_model_for_generation",
    "deepspeed.runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
    "deepspeed.runtime.zero.parameter_offload": "DeepSpeedZeRoOffload",
    "deepspeed.runtime.zero.tiling": "TiledLinear TiledLinearReturnBias",
    "deepspeed.runtime.sequence_parallel.ulysses_sp": "SequenceTiledCompute TiledFusedLogitsLoss TiledMLP sequence_tiled_compute TiledLoss "
    "AutogradComputeMLP UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter UlyssesSPFwdLossBwdWithLogits",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": "get_sequence_parallel_group",
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler LossScalerBase CreateLossScaler",
    "deepspeed.runtime.dataloader": "DeepSpeedDataLoader RepeatingLoader",
    "deepspeed.runtime.utils": "see_memory_usage clip_grad_norm_ move_to_device copy_to_device set_random_seed empty_cache noop_decorator get_global_norm "
    "get_grad_norm CheckOverflow PartitionedTensor memory_status partition_balanced DummyOptim",
    "deepspeed.runtime.lr_schedules": "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest VALID_LR_SCHEDULES LR_RANGE_TEST ONE_CYCLE WARMUP_LR "
    "WARMUP_DECAY_LR WARMUP_COSINE_LR LR_SCHEDULE WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS CYCLE_MIN_LR TOTAL_NUM_STEPS COS_MIN_RATIO "
    "add_tuning_arguments get_config_from_args get_lr_from_config",
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": "MMapIndexedDataset",
    **dict.fromkeys(
        ("deepspeed.runtime.activation_checkpointing.checkpointing", "deepspeed.checkpointing"),
        "checkpoint configure reset is_configured get_cuda_rng_tracker model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed "
        "partition_activations_in_checkpoint set_num_layers non_reentrant_checkpoint CudaRNGStatesTracker CheckpointFunction partition_activations",
    ),
    "deepspeed.zero": "Init GatheredParameters TiledLinear TiledLinearReturnBias MiCS_Init register_external_parameter unregister_external_parameter",
    "deepspeed.comm": "init_distributed all_reduce barrier get_rank get_world_size get_local_rank log_summary mpi_discovery broadcast all_gather "
    "all_gather_into_tensor all_gather_object all_gather_coalesced all_reduce_coalesced all_to_all all_to_all_single allgather_fn batch_isend_irecv "
    "broadcast_object_list configure destroy_process_group gather get_all_ranks_from_group get_global_rank get_world_group has_all_gather_into_tensor "
    "has_all_reduce_coalesced has_coalescing_manager has_reduce_scatter_tensor in_aml in_aws_sm in_dlts inference_all_reduce init_deepspeed_backend "
    "initialize_mesh_device TorchBackend irecv is_available is_initialized isend monitored_barrier new_group recv reduce reduce_scatter reduce_scatter_fn "
    "reduce_scatter_tensor reset_log scatter send set_backend ReduceOp",
    "deepspeed.ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "deepspeed.ops.lion": "DeepSpeedCPULion FusedLion",
    "deepspeed.ops.adagrad": "DeepSpeedCPUAdagrad",
    "deepspeed.ops.lamb": "FusedLamb",
    "deepspeed.ops.aio": "aio_handle AsyncIOBuilder",
    "deepspeed.ops.op_builder": "AsyncIOBuilder GDSBuilder PinMemoryBuilder CPUAdamBuilder",
    "deepspeed.ops.gds": "GDSBuilder",
    "deepspeed.ops.transformer": "DeepSpeedTransformerLayer",
    "deepspeed.ops.sparse_attention": "SparseSelfAttention",
    "deepspeed.io": "FastFileWriter FastFileWriterConfig MockFileWriter PyFileWriter",
    "deepspeed.launcher.runner": "main",
    "deepspeed.monitor.monitor": "MonitorMaster",
    "deepspeed.checkpoint": "DeepSpeedCheckpoint",
    "deepspeed.checkpoint.ds_to_universal": "main",
    "deepspeed.sequence.layer": "DistributedAttention",
    "deepspeed.compression.compress": "init_compression",
    "deepspeed.compression.helper": "recursive_getattr recursive_setattr module_replacement",
    "deepspeed.comm.reduce_op": "ReduceOp",
    "deepspeed.comm.torch": "TorchBackend",
    "deepspeed.comm.config": "DeepSpeedCommsConfig",
    "deepspeed.elasticity.constants": "ELASTICITY",
    "deepspeed.elasticity.config": "ElasticityConfig",
    "deepspeed.monitor.config": "get_monitor_config",
    "deepspeed.monitor.tensorboard": "TensorBoardMonitor",
    "deepspeed.checkpoint.constants": "OPTIMIZER_STATE_DICT",
    "deepspeed.checkpoint.universal_checkpoint": "load_hp_checkpoint_state",
    "deepspeed.launcher.multinode_runner": "PDSHRunner",
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
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "deepspeed.initialize"),
    ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig", "penstock train --config FILE --check"),
    ("deepspeed.runtime.zero.config", "get_zero_config", "dictionary"),
    ("deepspeed.runtime.fp16.loss_scaler", "CreateLossScaler", "fp16"),
    ("deepspeed.utils.groups", "get_tensor_model_parallel_group", "get_data_parallel_group"),
    ("deepspeed.utils.groups", "_get_expert_parallel_group", "no parallelism but that of batches"),
    ("deepspeed.utils.groups", "_create_model_parallel", "no parallelism but that of batches"),
    ("deepspeed.utils.tensor_fragment", "tensor_fragment", "safe_get_full_fp32_param"),
    ("deepspeed.runtime.comm.coalesced_collectives", "reduce_scatter_coalesced", "uncompressed"),
    ("deepspeed.runtime.swap_tensor.aio_config", "get_aio_config", "offload_param"),
    ("deepspeed.compile", "init_z3", "without torch.compile"),
    ("deepspeed.checkpointing", "CheckpointFunction", "checkpoint"),
    ("deepspeed.checkpointing", "partition_activations", "checkpoint"),
    ("deepspeed.runtime.sequence_parallel.ulysses_sp", "UlyssesSPAttentionHF", "batches"),
    ("deepspeed.runtime.sequence_parallel.ulysses_sp", "TiledLoss", "logits_chunk_size"),
    ("deepspeed.runtime.sequence_parallel.parallel_state_sp", "get_sequence_parallel_group", "batches"),
    ("deepspeed.comm", "mpi_discovery", "torchrun"),
    ("deepspeed.ops.gds", "GDSBuilder", "deepspeed.ops.aio"),
    ("deepspeed.io", "FastFileWriter", "penstock.save"),
    ("deepspeed.sequence.layer", "DistributedAttention", "batches"),
    ("deepspeed.compression.compress", "init_compression", "penstock pack"),
    ("deepspeed.compression.helper", "module_replacement", "penstock pack"),
    ("deepspeed", "DeepSpeedTransformerLayer", "modules as they are"),
    ("deepspeed", "add_tuning_arguments", "scheduler in the configuration"),
    ("deepspeed", "replace_transformer_layer", "penstock generate"),
    ("deepspeed.runtime.config", "get_optimizer_name", "a dictionary"),
    ("deepspeed.runtime.utils", "get_global_norm", "engine.get_global_grad_norm"),
    ("deepspeed.runtime.utils", "memory_status", "engine.report"),
    ("deepspeed.runtime.zero.stage3", "estimate_zero3_model_states_mem_needs", "penstock estimate"),
    ("deepspeed.comm", "TorchBackend", "init_distributed"),
    ("deepspeed.monitor.wandb", "WandbMonitor", "the engine writes them"),
    ("deepspeed.utils.timer", "SynchronizedWallClockTimer", "wall_clock_breakdown"),
    ("deepspeed.linear", "OptimizedLinear", "peft"),
    ("deepspeed.moe.utils", "is_moe_param", "expert parallelism"),
    ("deepspeed.runtime.pipe.topology", "ProcessTopology", "torch.nn.Sequential"),
    ("deepspeed.autotuning", "Autotuner", "penstock plan"),
    ("deepspeed.monitor.monitor", "MonitorMaster", "SummaryWriter"),
    ("deepspeed.elasticity", "DSElasticAgent", "torchrun"),
    ("deepspeed.pipe", "PipelineModule", "torch.nn.Sequential"),
    ("deepspeed.pipe", "LayerSpec", "block by block"),
    ("deepspeed.moe.layer", "MoE", "experts as modules"),
    ("deepspeed", "init_inference", "penstock generate"),
    ("deepspeed.runtime.utils", "clip_grad_norm_", "gradient_clipping"),
]


# Of the objects that scripts have, as DeepSpeed has them: f() is called without arguments, f is a function, v= is a value and no function, and * is
# refused when it is called.
ACCELERATOR = """
    BFloat16Tensor ByteTensor DoubleTensor Event FloatTensor HalfTensor IntTensor LongTensor Stream available_memory() build_extension() capture_to_graph
    communication_backend_name() create_graph() create_op_builder current_device() current_device_name() current_stream() default_generator
    default_stream() device() device_count() device_name() empty_cache() export_envs() get_compile_backend() get_op_builder get_rng_state()
    handles_memory_backpressure() initial_seed() is_available() is_bf16_supported() is_current_stream_capturing() is_fp16_supported()
    is_fp64_supported() is_pinned is_synchronized_device() is_triton_supported() lazy_call manual_seed manual_seed_all max_memory_allocated()
    max_memory_cached() max_memory_reserved() memory_allocated() memory_cached() memory_reserved() memory_stats() on_accelerator op_builder_dir()
    pin_empty pin_empty_like pin_memory pin_memory_alignment() prefer_triton_grouped_mm() random() range_pop() range_push register_host_memory*
    replay_graph reset_max_memory_allocated() reset_max_memory_cached() reset_peak_memory_stats() resolves_data_dependency() set_compile_backend*
    set_device set_rng_state set_visible_devices_envs stream supported_dtypes() synchronize() total_memory() unpin_memory unregister_host_memory()
    use_host_timers() visible_devices_envs()
"""
ENGINE = """
    save_16bit_model save_fp16_model deepspeed_io training_dataloader= collate_fn= was_step_applied() fp16_enabled() bfloat16_enabled()
    zero_optimization() zero_optimization_stage() get_mom() get_lr() set_lr set_train_batch_size* set_train_micro_batch_size*
    set_gradient_accumulation_steps* loss_scale() global_samples= global_steps= skipped_steps= micro_steps= empty_partition_cache() offload_states()
    reload_states() module_state_dict() load_module_state_dict* data_parallel_group= scale* no_sync() coalesce_grad_reduction() train_batch_size()
    train_micro_batch_size_per_gpu() gradient_accumulation_steps() get_global_grad_norm() is_gradient_accumulation_boundary()
    set_gradient_accumulation_boundary allreduce_gradients* eval_batch* compile* save_checkpoint load_checkpoint destroy zero_grad() world_size=
    dp_world_size= global_rank= local_rank= device= config= module= optimizer= lr_scheduler= zero_gather_16bit_weights_on_model_save()
    _zero3_consolidated_16bit_state_dict() dataloader_drop_last() train() eval()
"""
OPTIMIZER = "param_groups= state_dict() load_state_dict step zero_grad() overflow= cur_scale= parameter_offload="
PARAMETER = "ds_id= ds_status= ds_shape= ds_numel= ds_tensor= partition_numel()"


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
    flat = accelerator.pin_memory(torch.ones(2, 3, dtype=torch.int16), make_copy=False, match_shape=False)
    assert flat.shape == (6,) and flat.dtype == torch.int16 and accelerator.pin_memory(torch.ones(2, 3), make_copy=False).shape == (2, 3)
    accelerator.range_push("a mark", domain="mine", category="one")
    accelerator.range_pop(domain="mine")
    with accelerator.device(0), accelerator.stream(None):
        accelerator.manual_seed(3)
    with pytest.raises(AttributeError, match="torch.cuda and torch have their own"):
        getattr(accelerator, "no_such_name")


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
    for name, instead in (("set_train_batch_size", "gradient_accumulation_steps"), ("eval_batch", "no_grad")):
        with pytest.raises(NotImplementedError, match=instead):
            getattr(engine, name)(1)
    with pytest.raises(AttributeError, match="neither the engine nor its model, a Net, has 'no_such_name'"):
        getattr(engine, "no_such_name")
    engine.destroy()


def test_the_engine_answers_for_its_configuration(tmp_path):
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}, "reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": "auto"}
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    }  # fmt: skip
    with pytest.warns(UserWarning):
        engine = deepspeed.initialize(model=net(tied=False), config=config)[0]
    assert (engine.gradient_clipping(), engine.steps_per_print(), engine.get_batch_info()) == (0.5, 10, (8, 4, 2))
    assert (engine.optimizer_name(), engine.optimizer_params(), engine.scheduler_name()) == ("AdamW", {"lr": 1e-2}, "WarmupLR")
    assert (engine.zero_reduce_bucket_size(), engine.zero_prefetch_bucket_size(), engine.zero_offload_optimizer()) == (1000, 50_000_000, None)
    assert engine.zero_offload_param()["device"] == "nvme" and engine.dynamic_loss_scale() and engine.initial_dynamic_scale() == 65536
    assert not (engine.pld_enabled() or engine.amp_enabled() or engine.is_compiled or engine.has_moe_layers) and engine.mp_world_size == 1
    for name, instead in (("timers", "wall_clock_breakdown"), ("sparse_allreduce", "exchange gradients"), ("moe_layers", "parallelism")):
        with pytest.raises(AttributeError, match=f"{name} of DeepSpeed's engine is not served by Penstock: .*{instead}") as raised:
            getattr(engine, name)
        assert "\n" not in str(raised.value)
    engine.destroy()


def test_the_answers_of_a_configuration_are_deepspeeds_and_know_all_spellings():
    from penstock._deepspeed_answers import answer_of

    golden = os.path.join(os.path.dirname(__file__), "../../tests/golden/configs.json")
    with open(golden, encoding="utf-8") as file:
        nothing = next(each for each in json.load(file)["cases"] if each["name"] == "nothing")
    assert answer_of(json.loads(nothing["text"]), "gradient_clipping") == nothing["answer"]["gradient_clipping"] == 1.0
    for spelling in ("stage3_max_live_parameters", "max_live_parameters"):
        assert answer_of({"zero_optimization": {spelling: 5}}, "zero_max_live_parameters") == 5
    assert answer_of({}, "zero_max_live_parameters") == 1_000_000_000 and answer_of({}, "aio_config") == {}
    assert answer_of({"checkpoint": {"load_universal": True}}, "load_universal_checkpoint") is True


def test_each_name_of_the_objects_is_served_or_refused_in_one_line(tmp_path):
    config = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}},
    }  # fmt: skip
    engine = deepspeed.initialize(model=net(tied=False), config=config)[0]
    step(engine, batches(1)[0])
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    objects = {ACCELERATOR: accelerator, ENGINE: engine, OPTIMIZER: engine.optimizer, PARAMETER: engine.module.head.weight}
    for names, of in objects.items():
        for name in names.split():
            found = getattr(of, name.rstrip("*()="))
            assert name.endswith("=") != (inspect.isroutine(found) or isinstance(found, functools.partial) or isinstance(found, type)), name
            if name.endswith("()"):
                found()
            if name.endswith("*"):
                with pytest.raises(NotImplementedError, match=r"not served: \S+") as raised:
                    found(1)
                assert "\n" not in str(raised.value), name
    group, loader, status = engine.data_parallel_group, engine.training_dataloader, objects[PARAMETER].ds_status
    assert group is None and loader is None and status is deepspeed.runtime.zero.ZeroParamStatus.NOT_AVAILABLE
    assert torch.distributed.is_available() and engine.lr_scheduler is None and engine.optimizer.overflow is False
    assert (engine.global_steps, engine.skipped_steps, engine.micro_steps, engine.world_size, engine.global_rank, engine.local_rank) == (1, 0, 0, 1, 0, 0)
    assert objects[PARAMETER].ds_tensor.numel() == objects[PARAMETER].ds_numel == objects[PARAMETER].ds_shape.numel()
    assert engine.loss_scale() == 0 and engine.optimizer.cur_scale == 1 and engine.optimizer.parameter_offload.module.ds_external_parameters() is not None
    for builder in ("AsyncIOBuilder", "PinMemoryBuilder"):
        made = accelerator.create_op_builder(builder)
        assert made.is_compatible() and made.load() is not None
    assert accelerator.create_op_builder("CPUAdamBuilder").is_compatible() and not accelerator.create_op_builder("GDSBuilder").is_compatible()
    for builder, instead in (("CPUAdamBuilder", "DeepSpeedCPUAdam"), ("GDSBuilder", "AsyncIOBuilder")):
        with pytest.raises(NotImplementedError, match=instead):
            accelerator.create_op_builder(builder).load()
    with pytest.raises(AttributeError, match="torch.distributed has none"):
        getattr(deepspeed.comm, "no_such_name")
    engine.destroy()


@pytest.mark.parametrize("package", ["sequence", "compression", "inference", "linear", "module_inject", "moe.utils", "runtime.pipe"])
def test_a_package_says_what_to_do_in_its_place(package):
    found = importlib.import_module(f"deepspeed.{package}")
    assert found.__doc__.startswith("Not served: ") and len(found.__doc__) > 30
    with pytest.raises(NotImplementedError, match=f"deepspeed.{package}.Anything is not served by Penstock: "):
        found.Anything()
    with pytest.raises(AttributeError, match="Anything.below: Not served: .{20}") as raised:
        getattr(found.Anything, "below")
    assert "\n" not in str(raised.value)


def test_groups_are_those_of_one_process():
    groups = importlib.import_module("deepspeed.utils.groups")
    for name in NAMES["deepspeed.utils.groups"].split():
        if name.endswith("_world_size") or name == "_get_max_expert_size":
            assert getattr(groups, name)() == 1, name
        elif name.endswith("_rank"):
            assert getattr(groups, name)() == 0, name
        elif name.endswith("_group"):
            assert getattr(groups, name)() is None, name
    assert groups._get_data_parallel_group_ranks() == [0] and groups._get_expert_parallel_world_size("ep_size_1") == 1
    with pytest.raises(AttributeError, match=r"deepspeed.utils.groups.no_such_name is not served by Penstock: get_data_parallel_group\(\)"):
        getattr(groups, "no_such_name")


def test_calls_of_comm_take_deepspeeds_words(on_ranks):
    text = """
        import inspect, torch
        import penstock.deepspeed as deepspeed
        from deepspeed import comm
        deepspeed.init_distributed()
        words = {"prof": True, "log_name": "mine", "debug": "here"}
        rank, value = comm.get_rank(), torch.ones(2)
        comm.all_reduce(value, **words)
        comm.inference_all_reduce(value, **words)
        comm.broadcast(value, 0, **words)
        both = [torch.zeros(1), torch.zeros(1)]
        comm.all_gather(both, torch.full((1,), float(rank)), **words)
        comm.barrier(**words)
        if rank == 0:
            comm.send(value, 1, **words)
        else:
            comm.recv(value, 0, **words)
        comm.reduce(value, 0, **words)
        assert comm.all_reduce is comm.all_reduce and inspect.signature(comm.all_reduce) == inspect.signature(torch.distributed.all_reduce)
        print(value.tolist() if rank == 0 else "", [each.item() for each in both])
        """
    told = on_ranks(text, 2)
    assert [status for status, _, _ in told] == [0, 0], told
    assert told[0][1] == "[8.0, 8.0] [0.0, 1.0]\n"


def test_helpers_that_need_no_engine_do_what_deepspeeds_do(capsys, caplog):
    from deepspeed.compression.helper import recursive_getattr, recursive_setattr
    from deepspeed.runtime.utils import copy_to_device, move_to_device, noop_decorator, set_random_seed
    from deepspeed.utils.logging import get_current_level, log_dist_once, print_dist, set_log_level_from_string, should_log_le

    model = net()
    assert recursive_getattr(model, "layers.1.up") is model.layers[1].up and recursive_getattr(model, "head") is model.head
    for name in ("layers.1.up", "head"):
        recursive_setattr(model, name, torch.nn.Identity())
        assert isinstance(recursive_getattr(model, name), torch.nn.Identity)
    batch = {"ids": torch.arange(3), "more": [torch.ones(2), (torch.zeros(1),)]}
    moved = move_to_device(batch, "meta")
    assert moved["ids"].is_meta and moved["more"][1][0].is_meta and not batch["ids"].is_meta
    some = copy_to_device({"ids": batch["ids"], "name": "text"}, "meta", criterion_func=torch.is_tensor)
    assert some["ids"].is_meta and some["name"] == "text"
    assert move_to_device([batch["ids"], 5], "cpu", torch.is_tensor)[0] is batch["ids"]
    set_random_seed(3)
    drawn = torch.rand(1)
    set_random_seed(3)
    assert torch.equal(torch.rand(1), drawn) and noop_decorator(net) is net
    level = get_current_level()
    with caplog.at_level("DEBUG", logger="penstock"):
        for _ in range(2):
            log_dist_once("said once", ranks=[0], level=20)
        log_dist_once("said of another level", level=10)
    assert ("said of another level", 10) in [(each.message, each.levelno) for each in caplog.records]
    assert [each.message for each in caplog.records].count("said once") == 1
    print_dist("a line", ranks=[-1])
    assert capsys.readouterr().out == "[Rank 0] a line\n"
    set_log_level_from_string("error")
    assert should_log_le("error") and not should_log_le("info")
    deepspeed.logger.setLevel(level)
    other = logging.getLogger("another")
    set_log_level_from_string("warning", custom_logger=other)
    assert other.level == logging.WARNING and get_current_level() == level
    with pytest.raises(ValueError, match="loud is no level"):
        set_log_level_from_string("loud")


def test_a_timer_tells_every_so_many_steps():
    from deepspeed.utils.timer import ThroughputTimer

    told = []
    timer = ThroughputTimer(config=None, batch_size=4, start_step=1, steps_per_output=2, monitor_memory=False, logging_fn=told.append)
    timer.stop(global_step=True)
    assert (timer.micro_step_count, timer.global_step_count) == (0, 0)  # it was not started
    for _ in range(4):
        for is_last in (False, True):
            timer.start()
            timer.stop(global_step=is_last)
    assert (timer.micro_step_count, timer.global_step_count) == (8, 4) and len(told) == 2
    assert "step 4" in told[1] and "samples/s since step 1" in told[1]
    assert timer.avg_samples_per_sec() == pytest.approx(3 * 4 / timer.total_elapsed_time)
    for _ in range(2):
        timer.start()
        timer.stop(global_step=True, report_speed=False)
    silent = ThroughputTimer(types.SimpleNamespace(enabled=False), steps_per_output=1, logging_fn=told.append)
    silent.start()
    silent.stop(global_step=True)
    assert len(told) == 2


def test_a_timer_counts_from_the_first_of_several_forwards(monkeypatch):
    now = [1.0]
    monkeypatch.setattr(_throughput, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    timer = _throughput.ThroughputTimer(batch_size=4, start_step=0)
    for now[0] in (1.0, 3.0):
        timer.start()
    now[0] = 5.0
    timer.stop(global_step=True)
    assert (timer.micro_step_count, timer.total_elapsed_time, timer.avg_samples_per_sec()) == (1, 4.0, 1.0)


def test_the_engines_timer_counts_steps_and_epochs(tmp_path):
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}},
    }  # fmt: skip
    engine = deepspeed.initialize(model=net(), config=config)[0]
    timer = engine.tput_timer
    assert timer.avg_samples_per_sec() == float("-inf") and timer.batch_size == 8
    for epoch in range(2):
        for batch in batches(6):
            step(engine, batch)
        assert timer.micro_step_count == 6
        timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count, timer.global_step_count) == (2, 0, 6) and timer.total_elapsed_time > 0
    assert timer.avg_samples_per_sec() == pytest.approx((6 - timer.start_step) * 8 / timer.total_elapsed_time)
    engine.eval()
    with torch.no_grad():
        engine(**batches(1)[0])
    assert timer.global_step_count == 6
    engine.destroy()


def test_marks_of_leaf_modules_are_kept():
    utils = importlib.import_module("deepspeed.utils")
    model = net()
    layers = list(model.layers)
    assert utils.set_z3_leaf_modules(model, [type(layers[0])]) == layers == utils.get_z3_leaf_modules(model)
    assert utils.unset_z3_leaf_modules(model, ["Layer"]) == layers and utils.get_z3_leaf_modules(model) == []
    assert utils.set_z3_leaf_modules_by_name(model, ["layers.0", "head"]) == ([layers[0], model.head], [])
    assert utils.set_z3_leaf_modules_by_suffix(model, ["norm"], flag=False)[0][-1] is model.norm
    assert utils.set_z3_leaf_modules_by_name(model, ["none", "head"], raise_if_not_found=False) == ([model.head], ["none"])
    assert utils.set_z3_leaf_modules_by_suffix(model, ["none"], raise_if_not_found=False) == ([], ["none"])
    assert utils.set_z3_leaf_modules(model, [torch.nn.Conv2d], raise_if_not_found=False) == []
    utils.set_z3_leaf_module(model.norm, True)
    assert utils.z3_leaf_module(model.norm) and not utils.z3_leaf_module(model) and not utils.z3_leaf_parameter(model.head.weight)
    for call, wanted in (
        (utils.set_z3_leaf_modules, [torch.nn.Conv2d]), (utils.unset_z3_leaf_modules, ["Conv2d"]), (utils.set_z3_leaf_modules_by_name, ["none"]),
        (utils.set_z3_leaf_modules_by_suffix, ["none"]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="no module of this Net is .* raise_if_not_found=False") as raised:
            call(model, wanted)
        assert "\n" not in str(raised.value)


def test_the_flat_value_is_there_wherever_the_number_is(tmp_path):
    config = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}},
    }  # fmt: skip
    model = net(tied=False)
    weight, other = model.head.weight, torch.nn.Parameter(torch.ones(2))
    before = weight.detach().clone()
    engine = deepspeed.initialize(model=model, config=config)[0]
    assert torch.equal(weight.ds_tensor, before.flatten())  # before the first forward
    step(engine, batches(1)[0])
    trained = weight.ds_tensor.clone()
    assert trained.shape == (weight.ds_numel,) and not torch.equal(trained, before.flatten())
    with deepspeed.zero.GatheredParameters([weight]):
        assert torch.equal(weight.ds_tensor, trained) and torch.equal(weight.detach().flatten(), trained)
    engine.destroy()
    assert torch.equal(weight.ds_tensor, trained)
    assert not hasattr(other, "ds_tensor") and not hasattr(torch.nn.Parameter, "ds_tensor")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("device", ["nvme", "none"])
def test_inference_with_zero_evaluates_and_generates(tmp_path, device, dtype):
    zero = {"stage": 3, "offload_param": {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}}
    x = batches(1)[0]["x"]

    def generate(self, x, count):
        for _ in range(count):
            x = torch.cat([x, self(x)[:, -1:].argmax(-1)], 1)
        return x

    def model():
        made = net(dropout=0.5)
        type(made).generate = generate
        return made if dtype is None else made.to(dtype)

    with torch.no_grad():
        expected = model().eval()
        logits, tokens = expected(x), expected.generate(x, 3)
        engine = deepspeed.init_inference(model(), config={"zero": zero, "mp_size": 1}, **({} if dtype is None else {"dtype": dtype}))
        assert not engine.training and not engine.module.training and engine.optimizer is None
        made = engine(x)
        assert made.dtype == logits.dtype
        torch.testing.assert_close(made, logits, atol=1e-5 if dtype is None else 2e-2, rtol=0)
        assert torch.equal(engine.generate(x, 3), tokens)
    engine.destroy()
    del type(engine.module).generate


@pytest.mark.parametrize(
    "options, says",
    [
        ({}, "without zero of stage 3 is not served: with zero={'stage': 3"),
        ({"zero": {"stage": 2}}, "without zero of stage 3"),
        ({"tensor_parallel": {"tp_size": 2}}, r"init_inference\(tensor_parallel=\) is not served: there is no parallelism"),
        ({"mp_size": 4}, r"init_inference\(mp_size=\) is not served"),
        ({"replace_with_kernel_inject": True}, "modules stay what they are"),
        ({"checkpoint": "checkpoints.json"}, "from_pretrained"),
        ({"quant": {"enabled": True}}, "penstock pack"),
        ({"moe": {"enabled": False}}, "without zero of stage 3"),
        ({"zero": {"stage": 3}, "dtype": torch.int8}, "torch.bfloat16"),
    ],
)
def test_other_inference_is_refused_with_the_way_out(options, says):
    with pytest.raises(NotImplementedError, match=says) as raised:
        deepspeed.init_inference(net(), **{"tensor_parallel": {"tp_size": 1}, "replace_method": "auto", "kernel_inject": False, **options})
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="mp_size is 1 in config and 2 as a keyword"):
        deepspeed.init_inference(net(), config={"mp_size": 1}, mp_size=2)
    with pytest.raises(TypeError, match="unexpected option 'no_such_option'"):
        deepspeed.init_inference(net(), no_such_option=1)


def test_loss_scalers_of_deepspeeds_files_are_loaded_as_data(tmp_path):
    """torch.load(weights_only=True) of optimizer states, with the classes that scripts call safe."""
    if not hasattr(torch.serialization, "add_safe_globals"):
        pytest.skip("this torch has no torch.serialization.add_safe_globals")
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler, LossScalerBase
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    dynamic = {"cur_scale": 65536.0, "cur_iter": 7, "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000, "dynamic": True}
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    forge(path, static={"cur_scale": 4.0, "dynamic": False}, dynamic=dynamic, address={"numel": 12, "start": 5})
    with pytest.raises(Exception, match="(?i)weights.only"):
        torch.load(path, weights_only=True)
    with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, LossScalerBase, ZeroStageEnum, fragment_address]):
        state = torch.load(path, weights_only=True)["optimizer_state_dict"]
    assert type(state["static"]) is LossScaler and state["static"].loss_scale == 4.0 and not state["static"].dynamic
    assert vars(state["dynamic"]) == dynamic and isinstance(state["dynamic"], LossScalerBase)
    assert state["address"] == fragment_address(12, 5) and state["stage"] is ZeroStageEnum.gradients
    assert torch.equal(state["fp32"], torch.arange(3.0))
    assert DynamicLossScaler(2.0**16, 1000, 1.0, 2, False).cur_scale == 65536 and LossScaler(8).loss_scale == 8
    with pytest.raises(NotImplementedError, match="LossScaler.backward is not served by Penstock: the engine scales losses"):
        LossScaler(8).backward(torch.ones(1))


def forge(path, static, dynamic, address):
    """A file as DeepSpeed writes it: objects of these classes under its modules' names, pickled where they are other classes than ours."""
    import enum

    names = {
        "LossScaler": "deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler": "deepspeed.runtime.fp16.loss_scaler",
        "fragment_address": "deepspeed.utils.tensor_fragment",
    }  # fmt: skip
    kinds = {name: type(name, (), {"__module__": module}) for name, module in names.items()}
    kinds["ZeroStageEnum"] = enum.Enum("ZeroStageEnum", {"gradients": 2}, type=int, module="deepspeed.runtime.zero.config")
    made = {}
    for name, (kind, values) in {"static": ("LossScaler", static), "dynamic": ("DynamicLossScaler", dynamic), "address": ("fragment_address", address)}.items():
        made[name] = kinds[kind]()
        made[name].__dict__.update(values)
    made.update(stage=kinds["ZeroStageEnum"].gradients, fp32=torch.arange(3.0))
    modules = {name: importlib.import_module(kind.__module__) for name, kind in kinds.items()}
    own = {name: getattr(modules[name], name) for name in kinds}
    try:
        for name, kind in kinds.items():
            setattr(modules[name], name, kind)  # pickle looks whether the name is the class's
        torch.save({"optimizer_state_dict": made}, path)
    finally:
        for name, kind in own.items():
            setattr(modules[name], name, kind)

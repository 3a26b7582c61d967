"""What DeepSpeed's engine answers of its configuration, and its names that are not served, each with what to do instead."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional

from . import _core

#: Where DeepSpeed's users bound the norm of gradients.
CLIPPING = "gradient_clipping in the configuration"

#: Calls without arguments: where the configuration has the answer, and DeepSpeed's default. What Penstock makes of a key is another matter.
_CONFIGURED: Dict[str, Dict[str, Any]] = _core.deepspeed_answers()

#: Calls without arguments whose answer is always the same here: what is not served is off.
_ALWAYS: Dict[str, Any] = {
    **dict.fromkeys(
        "amp_enabled autotuning_enabled autotuning_profile_model_info compile_autosp compile_autotp compile_zero_optimization_stage "
        "curriculum_enabled_legacy curriculum_learning_enabled data_efficiency_enabled data_sampling_enabled eigenvalue_enabled is_deepcompile_active "
        "is_deepcompile_enabled is_elastic_model_parallel_supported pld_enabled quantize_training random_ltd_enabled "
        "torch_autocast_enabled torch_autocast_z0_gradscaler uses_parallelization_pass_only zero_cpu_offload zero_use_cpu_optimizer".split(),
        False,
    ),
    **dict.fromkeys(("zero_optimization_partition_gradients", "zero_optimization_partition_weights", "zero_grad_hooks", "checkpoint_tag_validation_enabled"), True),
    "checkpoint_tag_validation_fail": False,
    "swap_tensor_config": None,
    "get_model_parallel_rank": 0,
    "get_tensor_parallel_rank": 0,
    "get_sequence_parallel_group": None,
    "autotp_size": 0,
    "torch_autocast_dtype": None,
    "torch_autocast_lower_precision_safe_modules": None,
}

#: Attributes whose value is always the same here.
ATTRIBUTES: Dict[str, Any] = {
    "has_moe_layers": False,
    "is_compiled": False,
    "pipeline_parallelism": False,
    "mp_world_size": 1,
    "sequence_parallel_size": 1,
    "seq_parallel_group": None,
    "mpu": None,
    "num_experts": [],
    "use_ds_comm": False,
    "inside_no_sync_ctxt": False,
    "enable_backward_allreduce": True,
    "dont_change_device": False,
    "loaded_checkpoint_mp_world_size": None,
}

_EXCHANGES = "engine.backward(loss) and engine.step() exchange gradients by themselves"
_RANKS = "there is no parallelism but that of batches: engine.data_parallel_group"
_LOADED = "engine.load_checkpoint and engine.save_checkpoint read and write all of it"
_TIMES = "wall_clock_breakdown in the configuration, and engine.engine.report() has times and bytes of each step"
_COMPILE = "blocks are computed as they are: compile modules of the model by themselves"
_DATA = "the caller loads its data: torch.utils.data"
_OFF = "the feature is not served: what asks whether it is enabled gets False"
#: What to do instead of each.
_INSTEAD = {
    **dict.fromkeys(
        "all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_gradients allreduce_no_retain buffered_allreduce_fallback "
        "communication_data_type get_data_types gradient_average postscale_gradients scale_wrt_gas sparse_all_gather sparse_allreduce "
        "sparse_allreduce_bucket sparse_allreduce_no_retain sparse_tensor_module_names flatten unflatten gas_boundary_ctr warn_unscaled_loss".split(),
        _EXCHANGES,
    ),
    **dict.fromkeys(
        "all_to_all_group expert_data_parallel_group expert_parallel_group gate_modules is_first_weights_partition_group local_all_to_all_group "
        "mesh_device moe_layers seq_data_parallel_group seq_dp_world_size tensor_parallel_config dist_backend".split(),
        _RANKS,
    ),
    **dict.fromkeys(
        "checkpoint_engine checkpoint_mp_rank checkpoint_writer_enabled load_moe_state_dict loaded_checkpoint_dp_world_size save_non_zero_checkpoint "
        "save_zero_checkpoint param_names".split(),
        _LOADED,
    ),
    **dict.fromkeys(
        "engine_timers engine_timers_cache flops flops_profiler fwd_duration get_wall_clock_timers log_level losses memory_breakdown monitor "
        "print_forward_breakdown summary_events timers update_interval".split(),
        _TIMES,
    ),
    **dict.fromkeys(
        "get_autosp_backend get_autotp_backend get_compile_time get_deepcompile_backend get_deepspeed_compile_backend register_compile_pass".split(), _COMPILE
    ),
    **dict.fromkeys(
        "curriculum_learning_config curriculum_params_legacy curriculum_scheduler_legacy data_efficiency_config data_sampling_config first_dataloader_check "
        "is_iterable_style_dataset is_map_style_dataset random_ltd_config random_ltd_initialize random_ltd_scheduler "
        "set_custom_curriculum_learning_schedule set_data_post_process_func training_data".split(),
        _DATA,
    ),
    **dict.fromkeys(
        "autotuning_end_profile_step autotuning_metric autotuning_metric_path autotuning_model_info autotuning_model_info_path autotuning_start_profile_step "
        "block_eigenvalue compression_scheduler eigenvalue eigenvalue_gas_boundary_resolution eigenvalue_layer_name eigenvalue_layer_num "
        "eigenvalue_max_iter eigenvalue_stability eigenvalue_tol eigenvalue_verbose get_pld_theta optimized_linear_base_weight_sharding "
        "optimized_linear_lora_enabled pld_gamma pld_params pld_theta progressive_layer_drop quantizer".split(),
        _OFF,
    ),
    **dict.fromkeys("basic_optimizer client_lr_scheduler client_optimizer clip_fp32_gradients".split(), "engine.optimizer and engine.lr_scheduler"),
    **dict.fromkeys("module_forward_post_hook module_forward_pre_hook".split(), "register_forward_hook of the model, or of a module in it"),
}


def found_in(config: Mapping[str, Any], path: str, default: Any) -> Any:
    """What the configuration has at this path. default: where it has nothing there, or "auto"."""
    held: Any = config
    for key in path.split("."):
        held = held.get(key) if isinstance(held, Mapping) else None
    return default if held is None or held == "auto" else held


def answers(name: str) -> bool:
    """Whether ``answer_of`` knows this call."""
    return name in _CONFIGURED or name in _ALWAYS


def answer_of(config: Mapping[str, Any], name: str) -> Any:
    """Of a call of this name, without arguments."""
    if name in _ALWAYS:
        return _ALWAYS[name]
    answer = _CONFIGURED[name]
    given = [found_in(config, path, None) for path in answer["paths"]]
    return next((each for each in given if each is not None), answer["default"])


def instead_of(name: str) -> Optional[str]:
    """What to do instead of using this name of DeepSpeed's engine. None: it is not one that is refused."""
    return _INSTEAD.get(name)

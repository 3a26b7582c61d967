"""Modules by DeepSpeed's names that have no file here, and modules as attributes of their packages.

Parts that are not served are imported, and say what to use instead when anything of them is called. Modules that DeepSpeed keeps a name in,
and Penstock elsewhere, have the other's names. Every other name below ``deepspeed`` is a ModuleNotFoundError of one line.
"""

import importlib
import importlib.abc
import importlib.machinery
import pkgutil
import sys
import types
from typing import Any, Callable, Optional, Sequence

from penstock._deepspeed import absent
from penstock._deepspeed_answers import CLIPPING

_BATCHES = "there is no parallelism but that of batches"
#: What stands for each, with all that is below it.
INSTEAD = {
    "sequence": f"{_BATCHES}: a whole sequence is computed by one process, block by block",
    "compression": "penstock trains and writes whole weights; `penstock pack` makes weights of 4 and 8 bit for `penstock generate`",
    "inference": "deepspeed.init_inference with zero of stage 3, or `penstock generate`",
    "linear": "peft's LoRA trains through penstock.initialize as it is",
    "module_inject": "modules stay what they are; `penstock generate`, or penstock.initialize and engine.generate",
    "model_implementations": "modules stay what they are; `penstock generate`, or penstock.initialize and engine.generate",
    "compile": "blocks are computed as they are, without torch.compile",
    "datastates": "engine.save_checkpoint copies while training goes on, on the drive itself",
    "nvme": "the commands ds_io and ds_nvme_tune measure a drive",
    "moe.experts": "there is no expert parallelism: a model that has its experts as modules, as transformers' have, is trained",
    "moe.mappings": "there is no expert parallelism: a model that has its experts as modules, as transformers' have, is trained",
    "moe.utils": "there is no expert parallelism: groups of the optimizer are the caller's",
    "moe.sharded_moe": "there is no expert parallelism: a model that has its experts as modules, as transformers' have, is trained",
    "autotuning": "`penstock plan` says what a run needs, and how long a step takes",
    "nebula": "engine.save_checkpoint copies while training goes on, on the drive itself",
    "runtime.pipe": f"{_BATCHES}: a torch.nn.Sequential of the layers goes through memory block by block",
    "runtime.hybrid_engine": "the engine generates: engine.module.generate, under torch.no_grad()",
    "runtime.data_pipeline": "the caller loads its data: torch.utils.data",
    "runtime.comm": "ranks exchange gradients as bytes, uncompressed: torch.distributed for tensors of your own",
    "runtime.compression": "ranks exchange gradients as bytes, uncompressed",
    "runtime.domino": f"{_BATCHES}",
    "runtime.tensor_parallel": f"{_BATCHES}",
    "runtime.sequence_parallel.parallel_state_sp": f"{_BATCHES}: a whole sequence is computed by one process, block by block",
    "runtime.zenflow": "updates are made with their own step: leave zenflow out of the configuration",
    "runtime.superoffload": "states on the drive or in host memory are updated there by themselves: offload_optimizer in the configuration",
    "runtime.swap_tensor": "offload_param and offload_optimizer in the configuration: the engine reads and writes the drive by itself",
    "runtime.checkpoint_engine": "engine.save_checkpoint and engine.load_checkpoint; checkpoint.writer.decoupled in the configuration copies beside training",
    "runtime.model_checkpointing": "engine.save_checkpoint; checkpoint.writer.decoupled in the configuration copies beside training",
    "runtime.fp16.onebit": "AdamW, Adam, Adagrad, Lion, SGD and Lamb in the configuration: gradients are exchanged whole",
    "runtime.fp16.fused_optimizer": "fp16 in the configuration: deepspeed.initialize makes the optimizer",
    "runtime.fp16.unfused_optimizer": "fp16 in the configuration: deepspeed.initialize makes the optimizer",
    "runtime.bf16_optimizer": "bf16 in the configuration: deepspeed.initialize makes the optimizer",
    "runtime.base_optimizer": "deepspeed.initialize makes the engine, and its optimizer",
    "runtime.config_utils": "the configuration is a dictionary, or a file: `penstock train --config FILE --check` says what becomes of each key",
    "runtime.eigenvalue": "torch.autograd.functional has products with a Hessian",
    "runtime.progressive_layer_drop": "the model decides which of its layers it calls",
    "runtime.quantize": "`penstock pack` makes weights of 4 and 8 bit for `penstock generate`",
    "runtime.weight_quantizer": "`penstock pack` makes weights of 4 and 8 bit for `penstock generate`",
    "runtime.sparse_tensor": "embeddings with sparse=False: gradients are dense",
    "runtime.state_dict_factory": "the model's from_pretrained, or load_state_dict, before deepspeed.initialize",
    "runtime.compiler": "blocks are computed as they are, without torch.compile",
    "runtime.zero.parameter_offload": "the engine fetches blocks by itself; modules have no hooks of its own",
    "runtime.zero.mics": "each rank has its part of the states: penstock.init_on_disk builds a model that is larger than memory",
    "runtime.zero.linear": "torch.nn.Linear: one block of the model at a time is in memory",
    "runtime.zero.leaf_module_config": "blocks are fetched whole; zero_optimization of the configuration is a dictionary",
    "runtime.zero.offload_states": "states are on the drive, or in the host memory of the plan: nothing is left to offload",
    "runtime.zero.partitioned_param_coordinator": "the engine fetches blocks by itself; engine.report() tells what was moved",
    "runtime.zero.contiguous_memory_allocator": "the engine has its memory by itself: host_memory bounds it",
    "runtime.zero.muon": "AdamW, Adam, Adagrad, Lion, SGD and Lamb in the configuration: Muon needs a whole tensor at once",
    "ops.fp_quantizer": "`penstock pack` makes weights of 4 and 8 bit for `penstock generate`",
    "ops.quantizer": "`penstock pack` makes weights of 4 and 8 bit for `penstock generate`",
    "ops.random_ltd": "the model decides which tokens its layers see",
    "ops.deepspeed4science": "torch's own kernels compute the model: torch.nn.attention",
    "ops.transformer": "torch's own kernels compute the model: its modules as they are",
    "ops.sparse_attention": "torch's own kernels compute the model: torch.nn.attention",
    "ops.gds": "deepspeed.ops.aio reads and writes host memory",
    "checkpoint.ds_to_universal": "engine.load_checkpoint reads checkpoints of any number of ranks, universal or not",
    "io": "penstock.save(obj, path) is torch.save through the I/O engine, durable",
    "launcher.launch": "torchrun starts the processes",
    "comm.backend": "torch.distributed's process group is the one there is: init_distributed makes it",
    "comm.torch": "torch.distributed's process group is the one there is: init_distributed makes it",
    "comm.config": "comms_logger in the configuration is a dictionary",
    "monitor.config": "tensorboard, csv_monitor and wandb in the configuration are dictionaries",
    "monitor.comet": "tensorboard, csv_monitor and wandb in the configuration: the engine writes them",
    "monitor.csv_monitor": "tensorboard, csv_monitor and wandb in the configuration: the engine writes them",
    "monitor.tensorboard": "tensorboard, csv_monitor and wandb in the configuration: the engine writes them",
    "monitor.wandb": "tensorboard, csv_monitor and wandb in the configuration: the engine writes them",
    "checkpoint.constants": "engine.load_checkpoint and engine.save_checkpoint read and write all of it",
    "checkpoint.universal_checkpoint": "engine.load_checkpoint reads checkpoints of any number of ranks, universal or not",
    "checkpoint.zero_checkpoint": "engine.load_checkpoint reads checkpoints of any number of ranks, universal or not",
    "checkpoint.reshape_utils": "engine.load_checkpoint reads checkpoints of any number of ranks, universal or not",
    "elasticity.config": "elasticity in the configuration is a dictionary",
    "elasticity.constants": "elasticity in the configuration is a dictionary",
    "elasticity.utils": "torchrun starts the processes: deepspeed.elasticity.compute_elastic_config has their batches",
    "launcher.multinode_runner": "torchrun starts processes on several machines",
    "ops.adam.zenflow": "updates are made with their own step: leave zenflow out of the configuration",
    "profiling.config": "flops_profiler in the configuration",
}


_CONFIG = "the configuration is a dictionary, or a file: `penstock train --config FILE --check` says what becomes of each key"
_ENGINE = "deepspeed.initialize makes the engine, and its optimizer"
_SCHEDULE = "scheduler in the configuration, or a scheduler of deepspeed.runtime.lr_schedules"
GRADIENTS = f"the gradients are the engine's, which clips them: {CLIPPING}, engine.get_global_grad_norm()"
_MEMORY = "torch.cuda tells of a device's memory, engine.report() of the engine's"
_COLLECTIVES = "torch.distributed exchanges tensors, deepspeed.comm by the same names"
#: Single names of modules that are here: imported as what refuses to be called, with what to do instead.
NAMES = {
    "": {
        "DeepSpeedTransformerConfig DeepSpeedTransformerLayer": INSTEAD["ops.transformer"],
        "replace_transformer_layer revert_transformer_layer set_autotp_mode": INSTEAD["module_inject"],
        "PipelineEngine": INSTEAD["runtime.pipe"],
        "DeepSpeedHybridEngine": INSTEAD["runtime.hybrid_engine"],
        "DeepSpeedInferenceConfig": INSTEAD["inference"],
        "add_tuning_arguments": _SCHEDULE,
        "DeepSpeedOptimizer DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable set_optimizer_flags load_ds_config": _ENGINE,
    },
    "accelerator": {"DeepSpeedAccelerator is_current_accelerator_supported": "get_accelerator() is the one there is: torch's device, or the processor"},
    "ops.adam": {"ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3": INSTEAD["runtime.zenflow"]},
    "runtime.config": {
        "DeepSpeedConfig": "give the dictionary, or the file, to deepspeed.initialize(config=...)",
        "DeepSpeedConfigWriter HybridEngineConfig get_optimizer_name get_optimizer_params get_scheduler_name get_scheduler_params "
        "get_gradient_clipping get_gradient_accumulation_steps get_train_batch_size get_train_micro_batch_size_per_gpu get_steps_per_print": _CONFIG,
    },
    "runtime.engine": {"DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable": _ENGINE, "EngineTimers": "engine.report() has times and bytes of each step"},
    "runtime.lr_schedules": {
        "add_tuning_arguments get_config_from_args get_lr_from_config get_torch_optimizer override_1cycle_params override_lr_range_test_params override_params "
        "override_warmupLR_params parse_arguments update_lr": _SCHEDULE,
    },
    "runtime.utils": {
        "clip_tensors_by_global_norm get_global_norm get_global_norm_of_tensors get_flattened_grad_norm get_grad_norm get_grad_zeros get_norm_with_moe_layers "
        "get_norm_with_moe_layers_fast get_weight_norm CheckOverflow align_dense_tensors": GRADIENTS,
        "get_ma_status memory_status torch_max_memory_reserved torch_memory_reserved mem_alloced mem_cached": _MEMORY,
        "all_gather_dp_groups all_gather_into_tensor_dp_groups PartitionedTensor": _COLLECTIVES,
        "graph_process": INSTEAD["runtime.compiler"],
        "DummyOptim": _ENGINE,
        "partition_balanced partition_uniform": INSTEAD["runtime.pipe"],
    },
    "runtime.zero": {"unwrap_model_for_generation": "the engine generates: engine.module.generate, under torch.no_grad()"},
    "runtime.zero.stage3": {
        "estimate_zero3_model_states_mem_needs": "estimate_zero3_model_states_mem_needs_all_live and _all_cold, or `penstock estimate`",
        "unwrap_model_for_generation": "the engine generates: engine.module.generate, under torch.no_grad()",
    },
    "runtime.zero.stage_1_and_2": {
        "estimate_zero2_model_states_mem_needs": "estimate_zero2_model_states_mem_needs_all_live and _all_cold, or `penstock estimate`",
    },
    "utils": {
        "get_full_hp_grad get_full_hp_param set_full_hp_grad set_full_hp_param get_hp_fragment_mapping link_hp_params lazy_init_hp_params_optimizer_state "
        "safe_update_full_grad_vectorized": "values are whole: safe_get_full_fp32_param and its like",
    },
    "utils.timer": {"SynchronizedWallClockTimer CudaEventTimer": "wall_clock_breakdown in the configuration, and engine.report(), tell where the time of a step goes"},
}


#: Modules whose names are another's here, which is imported with the first of them that is looked at.
SAME = {
    "accelerator.real_accelerator": "accelerator",
    "checkpoint.deepspeed_checkpoint": "checkpoint",
    "accelerator.abstract_accelerator": "accelerator",
    "comm.comm": "comm",
    "comm.reduce_op": "comm",
    "elasticity.elastic_agent": "elasticity",
    "elasticity.elasticity": "elasticity",
    "ops.adagrad.cpu_adagrad": "ops.adagrad",
    "ops.adam.cpu_adam": "ops.adam",
    "ops.adam.fused_adam": "ops.adam",
    "ops.lamb.fused_lamb": "ops.lamb",
    "ops.lion.cpu_lion": "ops.lion",
    "ops.lion.fused_lion": "ops.lion",
    "ops.op_builder.all_ops": "ops.op_builder",
    "ops.op_builder.async_io": "ops.op_builder",
    "ops.op_builder.cpu_adam": "ops.op_builder",
    "ops.op_builder.gds": "ops.op_builder",
    "utils.init_on_device": "utils",
    "utils.nvtx": "utils",
}
_NAME = "deepspeed."


class NotServedError(ModuleNotFoundError):
    """A module of DeepSpeed's that is not here: one line that says what is."""

    def __init__(self, name: str) -> None:
        # Without `name`: Python takes this error for its own where a `from` names a module, and drops its text.
        super().__init__(not_here(name))


def not_here(name: str) -> str:
    """What to say of a name below ``deepspeed`` that Penstock does not have."""
    package = sys.modules.get(name.rpartition(".")[0])
    path = list(getattr(package, "__path__", ()))
    has = sorted(each.name for each in pkgutil.iter_modules(path) if not each.name.startswith("_"))
    instead = f"{package.__name__} has the modules {', '.join(has)}" if package is not None and has else "docs/deepspeed.md has the names that are served"
    return f"{name} is not served by Penstock, which answers to DeepSpeed's name in this process: {instead}; leave it out, or run with DeepSpeed itself"


def attributes_of(package: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module of this name: what ``NAMES`` refuses, its modules, each when it is first looked at. Else AttributeError, of one line."""

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name.startswith("_"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = name_of(package, name)
        if found is not None:
            return found
        if not hasattr(sys.modules[package], "__path__"):
            raise AttributeError(not_here(f"{package}.{name}"))
        try:
            return importlib.import_module(f"{package}.{name}")
        except NotServedError as error:
            raise AttributeError(str(error)) from None

    return __getattr__


def name_of(module: str, name: str) -> Any:
    """The name of a module that is imported and refuses to be called, the same at each look. None: it is not one of them."""
    for names, instead in NAMES.get(module.partition(_NAME)[2], {}).items():
        if name in names.split():
            found = absent(f"{module}.{name}", instead)
            setattr(sys.modules[module], name, found)
            return found
    return None


def absent_below(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module of which some is here: all else is imported, and says what to use instead when it is called."""

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = absent(f"{module}.{name}", _instead(module) or "")
        setattr(sys.modules[module], name, found)
        return found

    return __getattr__


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return absent_below(self.__name__)(name)


class _Same(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_NAME + SAME[self.__name__[len(_NAME) :]]), name)


def _instead(name: str) -> Optional[str]:
    below = name.partition(_NAME)[2]
    return next((text for part, text in INSTEAD.items() if below == part or below.startswith(part + ".")), None)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Optional[Sequence[str]], target: Any = None) -> Any:
        if not fullname.startswith(_NAME):
            return None
        if fullname[len(_NAME) :] in SAME:
            return importlib.machinery.ModuleSpec(fullname, self)
        if _instead(fullname) is not None:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        # Who only asks whether there is one (importlib.util.find_spec) wants None.
        if sys._getframe(2).f_globals.get("__name__") == "importlib.util":
            return None
        raise NotServedError(fullname)

    def create_module(self, spec: Any) -> types.ModuleType:
        below = spec.name[len(_NAME) :]
        if below in SAME:
            return _Same(spec.name, f"The names of {_NAME}{SAME[below]}.")
        return _Module(spec.name, f"Not served: {_instead(spec.name)}.")

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """After all other finders: what Penstock has is found before."""
    if not any(type(each).__name__ == "_Finder" and type(each).__module__ == __name__ for each in sys.meta_path):
        sys.meta_path.append(_Finder())

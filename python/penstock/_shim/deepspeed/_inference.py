"""deepspeed.init_inference: with ZeRO-3 of the weights an engine that evaluates and generates; else refused."""

from typing import Any, Dict, Mapping, Optional, Tuple

import torch
from torch import nn

from penstock import _core
from penstock._deepspeed import DeepSpeedEngine, initialize

_WAY = (
    "with zero={'stage': 3, 'offload_param': {'device': 'nvme', 'nvme_path': DIR}} the weights are read block by block; `penstock generate` makes texts, "
    "and deepspeed.initialize without an optimizer gives an engine that evaluates"
)
_BATCHES = "there is no parallelism but that of batches"
_KERNELS = "modules stay what they are"
_LOADED = "load the weights into the model before, by its from_pretrained or load_state_dict"
_REASONS = {
    **dict.fromkeys(("tensor_parallel", "tp", "mp_size", "mpu"), _BATCHES),
    **dict.fromkeys(("moe", "ep_size", "ep_group", "expert_group", "ep_mp_group", "expert_mp_group", "moe_experts", "moe_type"), _BATCHES),
    **dict.fromkeys(("replace_with_kernel_inject", "kernel_inject", "injection_policy", "injection_dict", "injection_policy_tuple"), _KERNELS),
    **dict.fromkeys(("enable_cuda_graph", "use_triton", "triton_autotune", "transposed_mode"), _KERNELS),
    **dict.fromkeys(("checkpoint", "base_dir", "checkpoint_config", "ckpt_config", "set_empty_params", "training_mp_size"), _LOADED),
    "quant": "`penstock pack` makes weights of 4 and 8 bit for `penstock generate`",
    "save_mp_checkpoint_path": "engine.save_16bit_model writes the weights",
}
# Of DeepSpeed's kernels, or of no effect in DeepSpeed itself.
_WITHOUT_EFFECT = frozenset(
    "replace_method triangular_masking tm return_tuple max_out_tokens max_tokens min_out_tokens min_tokens keep_module_on_host config args".split()
)
_OFF = (None, False, 1, "", "auto", "standard", [1])
_SIZES = ("tp_size", "ep_size")
_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32", "torch.float"), torch.float32),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16", "torch.half"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
}


# Whether the value asks for what it names.
def _asks(value: Any) -> bool:
    if isinstance(value, Mapping):
        if not value or value.get("enabled") is False:
            return False
        sizes = [value[name] for name in _SIZES if name in value]
        return sizes != [1] or not set(value) <= {"enabled", *_SIZES}
    return not any(value is each or (type(value) is type(each) and value == each) for each in _OFF)


def _merged(config: Any, options: Mapping[str, Any]) -> Dict[str, Any]:
    if config is None:
        given: Dict[str, Any] = {}
    elif isinstance(config, Mapping):
        given = dict(config)
    else:
        given = dict(_core.config_of(config))
    for name, value in options.items():
        if name in given and given[name] != value:
            raise ValueError(f"init_inference: {name} is {given[name]!r} in config and {value!r} as a keyword: leave one of them out")
    return {**given, **options}


def _dtype_of(model: nn.Module, given: Any) -> torch.dtype:
    if given is None:
        return next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    dtype = _DTYPES.get(str(given))
    if dtype is None:
        raise NotImplementedError(f"init_inference(dtype={given}) is not served: torch.float32, torch.bfloat16 or torch.float16")
    return dtype


def _settled(config: Any, options: Mapping[str, Any]) -> Tuple[Mapping[str, Any], Any]:
    """The configuration's zero, and dtype. NotImplementedError, TypeError: of what is not served, and of unknown names."""
    settings = _merged(config, options)
    dtype = settings.pop("dtype", None)
    zero = settings.pop("zero", None) or {}
    for name, value in settings.items():
        if name in _REASONS and _asks(value):
            raise NotImplementedError(f"init_inference({name}=) is not served: {_REASONS[name]}; {_WAY}")
        if name not in _REASONS and name not in _WITHOUT_EFFECT:
            raise TypeError(f"init_inference() got an unexpected option {name!r}")
    if not isinstance(zero, Mapping) or zero.get("stage") != 3:
        raise NotImplementedError(f"init_inference without zero of stage 3 is not served: {_WAY}")
    return zero, dtype


def init_inference(model: Optional[nn.Module] = None, config: Any = None, **options: Any) -> DeepSpeedEngine:
    """An engine of the model in evaluation mode, which has ``generate`` and all else that the model has. ``zero`` says where the weights are.

    dtype: of the weights from now on; the model's own where it is not given (DeepSpeed's is float16). Tensor parallelism, injected kernels,
    quantization and checkpoints are refused.
    """
    zero, given = _settled(config, options)
    if not isinstance(model, nn.Module):
        raise TypeError(f"init_inference: model is a {type(model).__name__}, and must be a torch.nn.Module")
    dtype = _dtype_of(model, given)
    described = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": dict(zero),
        "fp16": {"enabled": dtype == torch.float16},
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
    engine: DeepSpeedEngine = initialize(model=model, config=described)[0]
    engine.eval()
    return engine

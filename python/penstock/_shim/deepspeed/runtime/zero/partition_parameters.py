"""What transformers looks for when it builds a model under zero.Init: constructors that are torch's own here."""

from typing import Any, Callable

import torch

from penstock._deepspeed import GatheredParameters as GatheredParameters
from penstock._deepspeed import Init as Init
from penstock._deepspeed import ZeroParamStatus as ZeroParamStatus
from penstock._deepspeed import register_external_parameter as register_external_parameter
from penstock._deepspeed import unregister_external_parameter as unregister_external_parameter

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(constructor: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    return constructor

"""Where a parameter lies in a flat tensor, as checkpoints of DeepSpeed's hold it, and the functions that DeepSpeed has here."""

import dataclasses

from penstock._deepspeed import absent

from . import safe_get_full_fp32_param as safe_get_full_fp32_param
from . import safe_get_full_grad as safe_get_full_grad
from . import safe_get_full_optimizer_state as safe_get_full_optimizer_state
from . import safe_get_local_fp32_param as safe_get_local_fp32_param
from . import safe_get_local_grad as safe_get_local_grad
from . import safe_get_local_optimizer_state as safe_get_local_optimizer_state
from . import safe_set_full_fp32_param as safe_set_full_fp32_param
from . import safe_set_full_grad as safe_set_full_grad
from . import safe_set_full_optimizer_state as safe_set_full_optimizer_state
from . import safe_set_local_fp32_param as safe_set_local_fp32_param
from . import safe_set_local_grad as safe_set_local_grad
from . import safe_set_local_optimizer_state as safe_set_local_optimizer_state

tensor_fragment = absent(
    "deepspeed.utils.tensor_fragment.tensor_fragment", "the engine has no flat tensors: deepspeed.utils.safe_get_full_fp32_param reads a value"
)


@dataclasses.dataclass
class fragment_address:  # noqa: N801
    """Elements, and the first of them."""

    numel: int
    start: int

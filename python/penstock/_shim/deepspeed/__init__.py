"""DeepSpeed's name, answered by Penstock: what transformers, accelerate and usual scripts ask of it.

It is found instead of DeepSpeed after ``import penstock.deepspeed`` or under ``python -m penstock.run``. What is not here is not
served; an attribute that is missing says so.
"""

import sys
from typing import Any, Optional

from penstock._deepspeed import DeepSpeedEngine, absent, init_distributed, initialize
from penstock.deepspeed import VERSION

from . import _refused, accelerator, checkpoint, comm, constants, ops, runtime, utils, zero
from . import comm as dist
from ._inference import init_inference as init_inference
from .accelerator import get_accelerator as get_accelerator
from .constants import TORCH_DISTRIBUTED_DEFAULT_PORT as TORCH_DISTRIBUTED_DEFAULT_PORT
from .pipe import PipelineModule as PipelineModule
from .runtime.activation_checkpointing import checkpointing as checkpointing

from .runtime.config import ADAM_OPTIMIZER as ADAM_OPTIMIZER
from .runtime.config import LAMB_OPTIMIZER as LAMB_OPTIMIZER
from .runtime.config import MUON_OPTIMIZER as MUON_OPTIMIZER
from .runtime.config import DeepSpeedConfig as DeepSpeedConfig
from .runtime.config import DeepSpeedConfigError as DeepSpeedConfigError
from .runtime.dataloader import DeepSpeedDataLoader as DeepSpeedDataLoader
from .utils import OnDevice as OnDevice
from .utils import log_dist as log_dist
from .utils import logger as logger

_refused.install()
sys.modules[__name__ + ".checkpointing"] = checkpointing

__version__ = VERSION
__git_hash__: Optional[str] = None
__git_branch__: Optional[str] = None
version, git_hash, git_branch = __version__, __git_hash__, __git_branch__

__all__ = ["DeepSpeedEngine", "add_config_arguments", "init_distributed", "init_inference", "initialize", "tp_model_init", "zero"]


def add_config_arguments(parser: Any) -> Any:
    """DeepSpeed's: adds --deepspeed and --deepspeed_config."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true")
    group.add_argument("--deepspeed_config", default=None, type=str)
    return parser


def is_compile_supported() -> bool:
    """torch.compile over the engine is not served: blocks are computed as they are."""
    return False


def tp_model_init(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("tensor parallelism is not served: Penstock trains with ZeRO's data parallelism")


_INFERENCE = "deepspeed.init_inference(model, zero={'stage': 3, ...}), or `penstock generate`"
InferenceEngine = absent("deepspeed.InferenceEngine", _INFERENCE)
default_inference_config = absent("deepspeed.default_inference_config", _INFERENCE)


__getattr__ = _refused.attributes_of(__name__)

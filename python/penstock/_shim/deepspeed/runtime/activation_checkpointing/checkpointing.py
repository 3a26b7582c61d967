"""The blocks of an engine's model are computed again in backward, whatever its forward calls; elsewhere torch's checkpointing is what computes."""

import contextlib
import copy
import functools
import warnings
from typing import Any, Callable, Dict, Iterator, Optional, Set

import torch
import torch.utils.checkpoint

from penstock._deepspeed import absent
from penstock._engine._engine import an_engine_is_open

from ..._refused import attributes_of
from ...accelerator import get_accelerator

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_OFFSET = 2718  # of the seed of the parts of a model

_INSTEAD = "deepspeed.checkpointing.checkpoint(function, *args)"
CheckpointFunction = absent("deepspeed.checkpointing.CheckpointFunction", _INSTEAD)
partition_activations = absent("deepspeed.checkpointing.partition_activations", _INSTEAD)
_configured = False
num_layers: Optional[int] = None


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: Optional[bool] = None,
    contiguous_checkpointing: Optional[bool] = None,
    num_checkpoints: Optional[int] = None,
    checkpoint_in_cpu: Optional[bool] = None,
    synchronize: Optional[bool] = None,
    profile: Optional[bool] = None,
) -> None:
    """Taken, and of no effect: warns of what would change where inputs are kept."""
    global _configured
    _configured = True
    if checkpoint_in_cpu:
        warnings.warn(
            "checkpoint_in_cpu: accepted and ignored: the inputs that are saved, one for each block, stay in the memory of the device that computes",
            stacklevel=2,
        )


def is_configured() -> bool:
    """Whether ``configure`` was called."""
    return _configured


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The function of these arguments. Backward computes it again: with its block, in an engine, and by itself elsewhere."""
    if an_engine_is_open() or not torch.is_grad_enabled():
        return function(*args)
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = functools.wraps(checkpoint)(lambda function, *args: checkpoint(function, *args))


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Taken, and of no effect: a model is in one part, so that there is nothing to partition among."""


def set_num_layers(nlayers: int) -> None:
    """Taken, and of no effect but for ``num_layers``."""
    global num_layers
    num_layers = nlayers


def reset() -> None:
    """Nothing is kept that a reset would drop."""


class CudaRNGStatesTracker:
    """Random states of the accelerator by name (of the processor where there is none), each of which ``fork`` goes on with."""

    def __init__(self) -> None:
        self.states_: Dict[str, torch.Tensor] = {}
        self.seeds_: Set[int] = set()

    def reset(self) -> None:
        """There are no states."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> Dict[str, torch.Tensor]:
        return copy.copy(self.states_)

    def set_states(self, states: Dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """A state that begins with the seed. ValueError: the name or the seed is there already."""
        if seed in self.seeds_ or name in self.states_:
            raise ValueError(f"the state {name!r} of seed {seed}: one of this name, or of this seed, is there already; reset() drops all")
        accelerator = get_accelerator()
        now = accelerator.get_rng_state()
        accelerator.manual_seed(seed)
        self.states_[name] = accelerator.get_rng_state()
        self.seeds_.add(seed)
        accelerator.set_rng_state(now)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Within, random numbers are of the state of this name, which goes on from there the next time. ValueError: there is none."""
        if name not in self.states_:
            raise ValueError(f"there is no state {name!r}: add it, or call model_parallel_cuda_manual_seed(seed)")
        accelerator = get_accelerator()
        now = accelerator.get_rng_state()
        accelerator.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = accelerator.get_rng_state()
            accelerator.set_rng_state(now)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the accelerator, and the tracker's state for the parts of a model, of which there is one."""
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + _OFFSET)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seeds the tracker's state for the parts of a model anew."""
    with _tracker.fork():
        get_accelerator().manual_seed(seed + _OFFSET)


__getattr__ = attributes_of(__name__)

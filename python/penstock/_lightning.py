"""Lightning's strategy for DeepSpeed, with Penstock under DeepSpeed's name: it runs without a GPU too, and logs each training_step once.

Modules of Lightning are changed as they are imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any, Callable, Dict, Iterator, Optional, Sequence

_steps_made_again = 0  # of which nothing is logged


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Within, a LightningModule's log() does nothing: its training_step is looked at, or made again for backward, and has logged, or will."""
    global _steps_made_again
    _steps_made_again += 1
    try:
        yield
    finally:
        _steps_made_again -= 1


def _logs_once(module: Any) -> None:
    own = module.LightningModule.log

    @functools.wraps(own)
    def log(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _steps_made_again:
            own(self, *args, **kwargs)

    module.LightningModule.log = log


def _serves_the_strategy(module: Any) -> None:
    """A DeepSpeedStrategy's accelerator may be the processor, whose devices have no index; its checkpoints read weights once."""
    accelerators = sys.modules[module.CUDAAccelerator.__module__.rpartition(".")[0]]
    validate = module._validate_device_index_selection

    def validate_of_gpus(parallel_devices: Sequence[Any]) -> None:
        count = len(parallel_devices)
        # Of the environment that penstock.run makes for one process, Lightning takes it that others have been started, and waits for them.
        if count > 1 and os.environ.get("WORLD_SIZE") == "1" and "LOCAL_WORLD_SIZE" not in os.environ:
            raise RuntimeError(f"devices={count}, and this is the only process: torchrun --nproc-per-node {count} -m penstock.run SCRIPT starts as many")
        if any(device.type != "cpu" for device in parallel_devices):
            validate(parallel_devices)

    if hasattr(module.DeepSpeedStrategy, "lightning_module_state_dict"):
        module.DeepSpeedStrategy.lightning_module_state_dict = _names_alone
    module.CUDAAccelerator = (module.CUDAAccelerator, accelerators.CPUAccelerator)  # for isinstance alone
    module._validate_device_index_selection = validate_of_gpus


def _names_alone(strategy: Any) -> Dict[str, Any]:
    """For save_checkpoint, which leaves the state_dict to the engine: parameters without values, as they are with DeepSpeed's ZeRO-3, and buffers."""
    import torch

    from ._engine._modules import persistent_buffers

    module = strategy.lightning_module
    names = {name: torch.empty(0, dtype=parameter.dtype) for name, parameter in module.named_parameters(remove_duplicate=False)}
    return {**names, **{name: buffer for name, (_, _, buffer, _) in persistent_buffers(module).items()}}


_CHANGES: Dict[str, Callable[[Any], None]] = {
    **{f"{package}.core.module": _logs_once for package in ("lightning.pytorch", "pytorch_lightning")},
    **{
        f"{package}.strategies.deepspeed": _serves_the_strategy
        for package in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
    },
}


class _Loader(importlib.abc.Loader):
    def __init__(self, own: Any, change: Callable[[Any], None]) -> None:
        self._own, self._change = own, change

    def create_module(self, spec: Any) -> Any:
        return self._own.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._own.exec_module(module)
        self._change(module)

    def __getattr__(self, name: str) -> Any:  # what inspect, say, asks of a loader
        return getattr(self._own, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Optional[Sequence[str]], target: Any = None) -> Any:
        if fullname not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _CHANGES[fullname])
        return spec


def watch_imports() -> None:
    """Lightning is changed when it is imported; what of it has been is changed now."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        for name, change in _CHANGES.items():
            if name in sys.modules:
                change(sys.modules[name])

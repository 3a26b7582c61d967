"""Parts of DeepSpeed that are not served: they are imported, and say what to use instead when anything of them is called."""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, Optional, Sequence

from penstock._deepspeed import absent

_BATCHES = "there is no parallelism but that of batches"
#: What stands for each, with all that is below it.
INSTEAD = {
    "sequence": f"{_BATCHES}: a whole sequence is computed by one process, block by block",
    "compression": "penstock trains and writes whole weights; `penstock pack` makes weights of 4 and 8 bit for `penstock generate`",
    "inference": "`penstock generate`, or penstock.initialize without an optimizer and engine.generate",
    "linear": "peft's LoRA trains through penstock.initialize as it is",
    "module_inject": "modules stay what they are; `penstock generate`, or penstock.initialize and engine.generate",
    "moe.utils": "there is no expert parallelism: groups of the optimizer are the caller's",
    "moe.sharded_moe": "there is no expert parallelism: a model that has its experts as modules, as transformers' have, is trained",
    "autotuning": "`penstock plan` says what a run needs, and how long a step takes",
    "nebula": "engine.save_checkpoint copies while training goes on, on the drive itself",
    "runtime.pipe": f"{_BATCHES}: a torch.nn.Sequential of the layers goes through memory block by block",
    "runtime.hybrid_engine": "the engine generates: engine.module.generate, under torch.no_grad()",
    "runtime.data_pipeline": "the caller loads its data: torch.utils.data",
    "runtime.compiler": "blocks are computed as they are, without torch.compile",
    "runtime.zero.parameter_offload": "the engine fetches blocks by itself; modules have no hooks of its own",
    "runtime.zero.tiling": "torch.nn.Linear: one block of the model at a time is in memory",
    "runtime.zero.mics": "each rank has its part of the states: penstock.init_on_disk builds a model that is larger than memory",
    "ops.transformer": "torch's own kernels compute the model: its modules as they are",
    "ops.sparse_attention": "torch's own kernels compute the model: torch.nn.attention",
    "ops.gds": "deepspeed.ops.aio reads and writes host memory",
    "checkpoint.ds_to_universal": "engine.load_checkpoint reads checkpoints of any number of ranks, universal or not",
    "io": "penstock.save(obj, path) is torch.save through the I/O engine, durable",
    "launcher.launch": "torchrun starts the processes",
    "profiling.config": "flops_profiler in the configuration",
}


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found = absent(f"{self.__name__}.{name}", _instead(self.__name__) or "")
        setattr(self, name, found)
        return found


def _instead(name: str) -> Optional[str]:
    below = name.partition("deepspeed.")[2]
    return next((text for part, text in INSTEAD.items() if below == part or below.startswith(part + ".")), None)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Optional[Sequence[str]], target: Any = None) -> Any:
        if not fullname.startswith("deepspeed.") or _instead(fullname) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name, f"Not served: {_instead(spec.name)}.")

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """After all other finders: what Penstock has is found before."""
    if not any(type(each).__name__ == "_Finder" and type(each).__module__ == __name__ for each in sys.meta_path):
        sys.meta_path.append(_Finder())

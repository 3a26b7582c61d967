"""deepspeed.accelerator: a GPU where torch has one, else the processor."""

import contextlib
import importlib
from typing import Any, Callable, Dict, List, Optional

import torch

from .._refused import attributes_of

_TENSORS = ("BFloat16Tensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor", "LongTensor")
# Of torch.cuda: what each gives without a GPU.
_OF_GPU: Dict[str, Any] = {
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"), None),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached", "max_memory_cached"), 0),
    **dict.fromkeys(("Stream", "Event", "current_stream", "default_stream"), None),
    "memory_stats": {},
    "is_current_stream_capturing": False,
}


def _nothing(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


class _Accelerator:
    def __init__(self) -> None:
        self._gpu = torch.cuda.is_available()

    def device_name(self, index: Optional[int] = None) -> str:
        if not self._gpu:
            return "cpu"
        return "cuda" if index is None else f"cuda:{index}"

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def current_device(self) -> int:
        return torch.cuda.current_device() if self._gpu else 0

    def device_count(self) -> int:
        return torch.cuda.device_count() if self._gpu else 1

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        return not self._gpu

    def device(self, index: Optional[int] = None) -> Any:
        return torch.cuda.device(self.current_device() if index is None else index) if self._gpu else contextlib.nullcontext()

    def stream(self, stream: Any) -> Any:
        return torch.cuda.stream(stream) if self._gpu else contextlib.nullcontext()

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def get_rng_state(self, device_index: Optional[int] = None) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.current_device() if device_index is None else device_index) if self._gpu else torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: Optional[int] = None) -> None:
        if self._gpu:
            torch.cuda.set_rng_state(new_state, self.current_device() if device_index is None else device_index)
        else:
            torch.set_rng_state(new_state)

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._gpu else True

    def is_fp16_supported(self) -> bool:
        return True

    def is_triton_supported(self) -> bool:
        return self._gpu

    def supported_dtypes(self) -> List[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def total_memory(self, device_index: Optional[int] = None) -> int:
        return self._memory()[1] if not self._gpu else torch.cuda.get_device_properties(device_index or self.current_device()).total_memory

    def available_memory(self, device_index: Optional[int] = None) -> int:
        return self._memory()[0]

    def _memory(self) -> Any:
        if self._gpu:
            return torch.cuda.mem_get_info()
        with open("/proc/meminfo") as file:
            named = {line.split(":")[0]: int(line.split()[1]) << 10 for line in file}
        return named["MemAvailable"], named["MemTotal"]

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """make_copy=False: other memory of its type, whose values are anything, and of its shape, or with match_shape=False flat."""
        if not make_copy:
            return torch.empty(tensor.shape if match_shape else (tensor.numel(),), dtype=tensor.dtype, pin_memory=self._gpu)
        return tensor.pin_memory() if self._gpu else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned() if self._gpu else False

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device_name()

    # Memory of the host: of the caller's device where that is a GPU, else as it is.
    def pin_empty(self, *size: Any, **options: Any) -> torch.Tensor:
        return torch.empty(*size, pin_memory=self._gpu, **options)

    def pin_empty_like(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=self._gpu, **options)

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Nothing to do: it is let go with its last reference."""

    def pin_memory_alignment(self) -> int:
        return 1

    def is_fp64_supported(self) -> bool:
        return True

    def prefer_triton_grouped_mm(self) -> bool:
        return False

    # What depends on a GPU that works on its own is so where there is one.
    def use_host_timers(self) -> bool:
        return not self._gpu

    def resolves_data_dependency(self) -> bool:
        return not self._gpu

    def handles_memory_backpressure(self) -> bool:
        return not self._gpu

    def default_generator(self, device_index: int) -> Any:
        return torch.cuda.default_generators[device_index] if self._gpu else torch.default_generator

    def create_graph(self) -> Any:
        return torch.cuda.CUDAGraph() if self._gpu else None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return torch.cuda.graph(graph, pool, stream) if self._gpu else contextlib.nullcontext()

    def replay_graph(self, graph: Any) -> None:
        if self._gpu:
            graph.replay()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return torch.cuda._lazy_call(callback) if self._gpu else callback()

    def export_envs(self) -> List[str]:
        return []

    def visible_devices_envs(self) -> List[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: Any, local_accelerator_ids: Any) -> None:
        current_env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        return "inductor"

    def set_compile_backend(self, backend: str) -> None:
        raise NotImplementedError("set_compile_backend is not served: give torch.compile of a module of the model its backend=")

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> Any:
        return getattr(importlib.import_module(self.op_builder_dir()), class_name)

    def create_op_builder(self, class_name: str) -> Any:
        return self.get_op_builder(class_name)()

    def build_extension(self) -> Any:
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def register_host_memory(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("register_host_memory is not served: pin_empty gives memory that is pinned where there is a GPU")

    def unregister_host_memory(self, *_: Any, **__: Any) -> None:
        """Nothing to do: none was registered."""

    def range_push(self, message: str, domain: Any = None, category: Any = None) -> None:
        """Marks are not kept."""

    def range_pop(self, domain: Any = None) -> None:
        """Marks are not kept."""

    # memory_allocated, synchronize, Stream, Event, FloatTensor and the others: torch.cuda's, or what holds where there is no GPU.
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _TENSORS:
            return getattr(torch.cuda if self._gpu else torch, name)
        if name in _OF_GPU:
            return getattr(torch.cuda, name) if self._gpu else _nothing(_OF_GPU[name])
        raise AttributeError(f"get_accelerator().{name} is not served by Penstock: torch.cuda and torch have their own")

    # Ranks meet in host memory.
    def communication_backend_name(self) -> str:
        return "gloo"


def get_accelerator() -> _Accelerator:
    return _Accelerator()


def set_accelerator(accelerator: Any) -> None:
    raise NotImplementedError("set_accelerator is not served: the device is penstock.initialize(device=...), or CUDA_VISIBLE_DEVICES")


__getattr__ = attributes_of(__name__)

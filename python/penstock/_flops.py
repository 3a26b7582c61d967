"""DeepSpeed's profiler of a forward: matrix products as torch counts them (2.1 and newer), parameters, seconds."""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from ._engine._progress import count
from ._files import write_text


def _counter() -> Any:
    try:
        from torch.utils.flop_counter import FlopCounterMode
    except ImportError as error:
        raise NotImplementedError("this torch counts no FLOPs: 2.1 and newer do") from error
    return FlopCounterMode(display=False)


_WHOLE = "accepted and ignored: the profile is one line, of the whole model"


class FlopsProfiler:
    """Counts what is computed between start_profile and stop_profile. A multiply-add is one MAC and two FLOPs.

    ds_engine changes nothing: the model says what is computed. recompute_fwd_factor and ignore_list are refused.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        if recompute_fwd_factor:
            raise NotImplementedError("recompute_fwd_factor is not served: what is computed again is counted where it is computed; multiply by it yourself")
        self.model = model
        self.started = False
        self._counting: Any = None
        self._begin = self._seconds = 0.0
        self._flops = 0

    def start_profile(self, ignore_list: Any = None) -> None:
        if ignore_list:
            raise NotImplementedError("ignore_list is not served: all that the model computes is counted")
        self._counting = _counter()
        self._counting.__enter__()
        self._begin = time.perf_counter()
        self.started = True

    def stop_profile(self) -> None:
        if self._counting is None:
            return
        self._seconds = time.perf_counter() - self._begin
        self._counting.__exit__(None, None, None)
        self._flops, self._counting = int(self._counting.get_total_flops()), None

    def reset_profile(self) -> None:
        self.stop_profile()
        self._flops, self._seconds = 0, 0.0

    def end_profile(self) -> None:
        self.reset_profile()
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> Union[int, str]:
        return f"{count(self._flops)}FLOPs" if as_string else self._flops

    def get_total_macs(self, as_string: bool = False) -> Union[int, str]:
        return f"{count(self._flops // 2)}MACs" if as_string else self._flops // 2

    def get_total_params(self, as_string: bool = False) -> Union[int, str]:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return count(parameters) if as_string else parameters

    def get_total_duration(self, as_string: bool = False) -> Union[float, str]:
        return f"{self._seconds * 1e3:.2f} ms" if as_string else self._seconds

    def print_model_profile(
        self, profile_step: int = 1, module_depth: int = -1, top_modules: int = 1, detailed: bool = True, output_file: Optional[str] = None
    ) -> None:
        """One line, of the whole model: module_depth, top_modules and detailed change nothing, and the first two warn."""
        for name, value, default in (("module_depth", module_depth, -1), ("top_modules", top_modules, 1)):
            if value != default:
                warnings.warn(f"{name}: {_WHOLE}", stacklevel=2)
        rate = self._flops / self._seconds if self._seconds else 0.0
        line = (
            f"flops_profiler: step {profile_step}: {self.get_total_params(True)} parameters, {self.get_total_flops(True)} in matrix products "
            f"({self.get_total_macs(True)}) in {self.get_total_duration(True)}: {count(rate)}FLOP/s\n"
        )
        if output_file is None:
            sys.stdout.write(line)
            return
        write_text(output_file, line)


def get_model_profile(
    model: nn.Module,
    input_shape: Optional[Sequence[int]] = None,
    args: Sequence[Any] = (),
    kwargs: Optional[Dict[str, Any]] = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: Optional[str] = None,
    ignore_modules: Optional[List[Any]] = None,
    mode: str = "forward",
) -> Tuple[Any, Any, Any]:
    """DeepSpeed's: (FLOPs, MACs, parameters) of one forward, or with mode "generate" of model.generate.

    input_shape: of a tensor of ones; else args and kwargs are the model's. Counted are matrix products and convolutions, no activations.
    print_profile, detailed, module_depth, top_modules, output_file: as for FlopsProfiler.print_model_profile. ignore_modules is refused.
    ValueError: neither is given.
    """
    if ignore_modules:
        raise NotImplementedError("ignore_modules is not served: all that the model computes is counted")
    if mode not in ("forward", "generate"):
        raise ValueError(f"mode is {mode!r}: forward or generate")
    given = list(args)
    if input_shape is not None:
        first = next(model.parameters(), None)
        given = [torch.ones(tuple(input_shape), dtype=torch.float32 if first is None else first.dtype, device=None if first is None else first.device)]
    if not given and not kwargs:
        raise ValueError("get_model_profile needs input_shape, args or kwargs")
    call: Any = model if mode == "forward" else model.generate
    profiler, was_training = FlopsProfiler(model), model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                call(*given, **(kwargs or {}))
            profiler.start_profile()
            try:
                call(*given, **(kwargs or {}))
            finally:
                profiler.stop_profile()
    finally:
        model.train(was_training)
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    return profiler.get_total_flops(as_string), profiler.get_total_macs(as_string), profiler.get_total_params(as_string)

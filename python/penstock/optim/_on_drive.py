"""What all optimizers with states on the drive have in common."""

from __future__ import annotations

import atexit
import contextlib
import logging
import mmap
import os
import tempfile
import weakref
from collections import OrderedDict
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

import torch

from .. import _core
from .._engine._interrupts import deferred
from .._small_files import make_directory
from .._buffers import PathLike, byte_size, truth
from .._tensors import DTYPES, check_gradient, check_parameter, in_layout_of, mark_changed, name_of, not_negative, number, threads
from ._on_device import Passage, Passing, is_on_device

_log = logging.getLogger("penstock")

_SECTOR = 4096
_DEFAULT_MEMORY = 256 << 20
_LEAST_MEMORY = 2 << 20

_optimizers: "weakref.WeakSet[OnDrive]" = weakref.WeakSet()


class _Held:
    """A tensor that torch's load_state_dict is not to see: it would cast it to the parameter's type."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> "_Held":
        return self


class OnDrive(torch.optim.Optimizer):
    """A torch.optim.Optimizer whose states live on a drive.

    Parameters are float32, bfloat16 or float16, in host memory or on a CUDA device, and stay where they are. Moments are
    float32. Beside a 16-bit parameter the drive holds what it lacks to a float32 master, so that small updates are not
    lost; a parameter that is changed otherwise (load_state_dict() of the model, an assignment) is noticed, and its master
    begins there.

    step() reads, updates and writes in C++ without the GIL; Ctrl-C takes effect after it. Parameters on a device pass
    through host memory, 64 MiB or the largest of them at a time: one piece is updated by the processor while others are
    copied. That takes three such pieces of host memory, pinned, beside host_memory. A failing drive
    raises OSError with errno, filename, offset and length. If nothing was changed by then, step() can be made again; if
    something was, parameters and states do not belong together any more, and every call but load_state_dict() raises
    RuntimeError. What is on the drive goes with the process, and has no checksums: bytes that a drive returns wrongly
    without an error are not noticed, as penstock.initialize notices them. state_dict() is what outlives a process.
    A forked child must not use it (RuntimeError); it cannot be pickled or copied (TypeError): state_dict()
    can.
    """

    _kind = ""
    _step_supports_amp_scaling = True  # GradScaler hands over its scale; the gradients are not gone through twice

    def __init__(
        self,
        params: Any,
        defaults: Dict[str, Any],
        *,
        state_dir: Optional[PathLike] = None,
        host_memory: Union[int, str, None] = None,
        nvme_offload_dir: Optional[PathLike] = None,
        nvme_offload_fraction: Optional[float] = None,
        offload_gradients: bool = False,
    ) -> None:
        self._core: Optional[_core.DriveOptimizer] = None
        if state_dir is None:
            state_dir = nvme_offload_dir
        elif nvme_offload_dir is not None:
            raise ValueError("state_dir and nvme_offload_dir are two names of one thing: give one")
        share = -1.0
        if nvme_offload_fraction is not None:
            share = number(nvme_offload_fraction, "nvme_offload_fraction")
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"nvme_offload_fraction is {nvme_offload_fraction}, must be from 0 to 1")
        if state_dir is None:
            if share != 0.0:
                raise ValueError("state_dir is missing: give a directory on the drive that is to hold the states")
            state_dir = tempfile.gettempdir()
        self._directory = os.path.realpath(os.fsdecode(state_dir))
        memory = _DEFAULT_MEMORY if host_memory is None else byte_size(host_memory, "host_memory", _LEAST_MEMORY)
        make_directory(self._directory, "state_dir")
        self._core = _core.DriveOptimizer(self._directory, memory, share, threads())
        self._numbers_of: Dict[torch.Tensor, int] = {}  # the parameter's number in the extension
        self._shapes: Dict[torch.Tensor, Tuple[torch.dtype, torch.Size, torch.device]] = {}
        self._passages: Dict[torch.device, Passage] = {}
        self._torn = False  # a step that came to a part of the parameters
        self._gradients: Dict[torch.Tensor, torch.Tensor] = {}  # in host memory, of offload_gradients
        self._offload_gradients = truth(offload_gradients, "offload_gradients")
        if self._offload_gradients and not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
            raise ValueError(f"offload_gradients=True takes torch 2.1 or newer, and this is {torch.__version__}")
        self._loaded = True  # False: in the middle of load_state_dict()
        try:
            super().__init__(params, defaults)
        except BaseException:
            self._core = None
            raise
        _optimizers.add(self)

    # What differs between the optimizers.

    def _numbers(self, group: Dict[str, Any]) -> List[float]:
        """The group's hyperparameters in the extension's order; ValueError for what is wrong."""
        raise NotImplementedError

    def _keys(self, group: Dict[str, Any]) -> Tuple[Tuple[str, str], ...]:
        """The states of the group's parameters: (key in the state dict, "m" or "v")."""
        raise NotImplementedError

    def _initial(self, group: Dict[str, Any]) -> float:
        """What v begins with."""
        return 0.0

    _counts_steps = True  # whether the state has a `step`
    _state_from_the_start = False  # whether torch's namesake has states before the first step

    # Groups.

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group, at any time, and reserves its space on the drive.

        Raises ValueError or TypeError for what cannot be served and OSError where there is no room; nothing is added then.
        """
        self._check_usable()
        super().add_param_group(param_group)
        group_index = len(self.param_groups) - 1
        group = self.param_groups[group_index]
        try:
            self._check_group(group)
            self._numbers(group)
            keys = {which for _, which in self._keys(group)}
            specifications = []
            for index, p in enumerate(group["params"]):
                check_parameter(p, name_of(self.param_groups, group_index, index), self._who(), of_devices=True)
                specifications.append((p.numel(), DTYPES[p.dtype], "m" in keys, "v" in keys, self._initial(group)))
            first = self._core.add(specifications)  # type: ignore[union-attr]
        except BaseException:
            del self.param_groups[-1]
            raise
        for index, p in enumerate(group["params"]):
            self._numbers_of[p] = first + index
            self._shapes[p] = (p.dtype, p.shape, p.device)
            if self._offload_gradients and is_on_device(p) and p.requires_grad:
                p.register_post_accumulate_grad_hook(_hook_of(self))
        self._say()

    def _check_group(self, group: Dict[str, Any]) -> None:
        for key, why in (
            ("amsgrad", "would need a third state"),
            ("capturable", "is for CUDA graphs"),
            ("differentiable", "would need the graph of the step"),
        ):
            if group.get(key):
                raise ValueError(f"{self._who()} has no {key}: it {why}; use torch.optim.{self._who()} for it")
        if group.get("foreach") and group.get("fused"):
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        not_negative(group["lr"], "learning rate")

    # Steps.

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Updates all parameters that have gradients, as torch's namesake does.

        closure: computes the loss anew and returns it; its loss is returned. Arguments and gradients are checked before
        anything is changed. Raises ValueError, TypeError for what cannot be served; OSError, RuntimeError: see the class.
        """
        self._check_usable()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and float(found_inf) != 0.0:
            return loss
        grad_scale = getattr(self, "grad_scale", None)
        scale = 1.0 if grad_scale is None else 1.0 / float(grad_scale)
        groups = []
        updates: List[Passing] = []
        for group_index, group in enumerate(self.param_groups):
            self._check_group(group)
            groups.append(self._numbers(group))
            group_scale = -scale if group.get("maximize") else scale
            for index, p in enumerate(group["params"]):
                taken = self._gradients.get(p)
                gradient = p.grad if taken is None else taken
                if gradient is None:
                    continue
                if taken is None and (gradient.dtype != p.dtype or gradient.layout != torch.strided or gradient.device != p.device):
                    check_gradient(gradient, p, name_of(self.param_groups, group_index, index), self._who())
                self._check_unchanged(p, group_index, index)
                if not (gradient.is_contiguous() and p.is_contiguous()):
                    gradient = in_layout_of(gradient, p)
                updates.append(Passing(p, gradient, (self._numbers_of[p], group_index, group_scale), taken is not None))
        if not updates:
            return loss
        self._update(groups, updates)
        self._gradients.clear()
        for each in updates:
            mark_changed(each.value)
        self._say()
        return loss

    def _update(self, groups: List[List[float]], updates: List[Passing]) -> None:
        """Of values and gradients wherever they are."""
        parts = 0

        def update(there: List[Passing]) -> None:
            nonlocal parts
            given = [(each.key[0], each.value.data_ptr(), each.gradient.data_ptr(), DTYPES[each.gradient.dtype], *each.key[1:]) for each in there]
            self._core.step(self._kind, groups, given)  # type: ignore[union-attr]
            parts += 1

        on_device = [each for each in updates if is_on_device(each.value)]
        if not on_device:
            update(updates)
            return
        with deferred():
            try:
                in_memory = [each for each in updates if not is_on_device(each.value)]
                if in_memory:
                    update(in_memory)
                for device in dict.fromkeys(each.value.device for each in on_device):
                    self._passage(device).update([each for each in on_device if each.value.device == device], update)
            except BaseException:
                self._torn = parts > 0
                raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients that have left for host memory are forgotten."""
        self._gradients.clear()
        super().zero_grad(set_to_none)

    def _gradient_came(self, p: torch.Tensor) -> None:
        """Backward has made it: with offload_gradients it leaves for host memory, and its own is free."""
        if self._core is None or p.grad is None:
            return
        if p in self._gradients:
            raise RuntimeError(
                f"a second backward before step() of this {self._who()}: with offload_gradients=True the gradients of the first one have left "
                "for host memory; step() or zero_grad() first, or leave offload_gradients out to accumulate"
            )
        check_gradient(p.grad, p, "a parameter", self._who())
        self._gradients[p] = self._passage(p.device).take(p, p.grad)
        p.grad = None

    def _passage(self, device: torch.device) -> Passage:
        if device not in self._passages:
            self._passages[device] = Passage(device)
        return self._passages[device]

    def _check_unchanged(self, p: torch.Tensor, group_index: int, index: int) -> None:
        if self._shapes[p] != (p.dtype, p.shape, p.device):
            dtype, shape, device = self._shapes[p]
            raise ValueError(
                f"{name_of(self.param_groups, group_index, index)} is {p.dtype} on {p.device} now; this optimizer was made for "
                f"{dtype} with shape {tuple(shape)} on {device}: make the optimizer after the model has been moved or cast"
            )
        if not p.is_contiguous() or p.data_ptr() == 0:
            check_parameter(p, name_of(self.param_groups, group_index, index), self._who(), of_devices=True)

    # Checkpoints.

    def state_dict(self) -> Dict[str, Any]:
        """The state as torch's namesake gives it, and ``master`` (float32) beside those of 16-bit parameters.

        The tensors are memory maps of a second file without a name in state_dir, a copy of this moment: they take no
        memory until they are looked at, and go when nothing refers to them. Raises OSError where there is no room.
        """
        self._check_usable()
        with self._states_shown():
            return super().state_dict()

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Loads a state_dict() of this optimizer or of its torch namesake; moments of any type are taken as float32.

        Where no master is given, those of 16-bit parameters begin at the parameters. The order to load model and
        optimizer in does not matter. Raises ValueError, with nothing changed, for a state of other shapes or groups.
        After a broken step this makes the optimizer whole again (load the model as well).
        """
        self._check_open()
        state_dict = state_dict.copy()
        hooks = getattr(self, "_optimizer_load_state_dict_pre_hooks", None)
        for hook in list(hooks.values()) if hooks else ():
            given = hook(self, state_dict)
            state_dict = state_dict if given is None else given
        # What an older torch did not write has its default.
        state_dict["param_groups"] = [{**self.defaults, **group} for group in state_dict["param_groups"]]
        for given_group in state_dict["param_groups"]:
            self._check_group(given_group)
            self._numbers(given_group)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [(p, group) for group in self.param_groups for p in group["params"]]
        states = dict(state_dict["state"])
        for index, (p, group) in zip(saved, parameters):
            if index in states:
                self._check_state(states[index], p, group, index)
                states[index] = {k: _Held(v) if isinstance(v, torch.Tensor) else v for k, v in states[index].items()}
        state_dict["state"] = states
        if hooks:  # they have run
            self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        whole, self._loaded = self._loaded, False
        try:
            super().load_state_dict(state_dict)
        except ValueError:  # it did not fit, and was not taken
            self._loaded = whole
            raise
        finally:
            if hooks:
                self._optimizer_load_state_dict_pre_hooks = hooks
        taken, self.state = self.state, type(self.state)(dict)  # type: ignore[has-type]
        self._set_states(taken)
        self._loaded, self._torn = True, False
        self._say()

    def _check_state(self, state: Dict[str, Any], p: torch.Tensor, group: Dict[str, Any], index: Any) -> None:
        if not state:
            return
        keys = [key for key, _ in self._keys(group)]
        for key in keys:
            if key not in state and self._counts_steps:
                raise ValueError(f"the state of parameter {index} has no {key!r}: it is not of {self._who()}")
        for key in (*keys, "master"):
            value = state.get(key)
            if value is not None and (not isinstance(value, torch.Tensor) or value.shape != p.shape):
                raise ValueError(f"{key!r} of parameter {index} is not a tensor of the shape {tuple(p.shape)}")

    def _set_states(self, taken: Any) -> None:
        """Puts the states on the drive; parameters without any begin anew."""
        states: List[Any] = []
        keep: List[torch.Tensor] = []
        small = 0

        def flush() -> None:
            nonlocal small
            self._core.set_states(states)  # type: ignore[union-attr]
            states.clear()
            keep.clear()
            small = 0

        everything = sum(len(group["params"]) for group in self.param_groups)
        for group in self.param_groups:
            which_of = dict(self._keys(group))
            for p in group["params"]:
                state = {k: v.value if isinstance(v, _Held) else v for k, v in taken.get(p, {}).items()}
                address = {"master": 0, "m": 0, "v": 0}
                any_given = False
                for key, which in [*which_of.items(), ("master", "master")]:
                    value = state.get(key)
                    if value is None or (which == "master" and p.dtype == torch.float32):
                        continue
                    any_given = True
                    whole = in_layout_of(value.detach().to("cpu", torch.float32), p)
                    if whole is not value:
                        small += whole.numel() * 4
                    keep.append(whole)
                    address[which] = whole.data_ptr()
                updates = int(state["step"]) if "step" in state else int(any_given)
                states.append((self._numbers_of[p], address["master"], address["m"], address["v"], updates))
                # Copies of states in another type or layout are not to fill the memory.
                if small > 64 << 20 and not self._core.broken and len(states) < everything:  # type: ignore[union-attr]
                    flush()
        flush()

    @contextlib.contextmanager
    def _states_shown(self) -> Iterator[None]:
        """self.state as torch has it, for as long as torch packs it."""
        counts = self._core.updates()  # type: ignore[union-attr]
        updates = {p: counts[index] for p, index in self._numbers_of.items()}
        places = []
        values = []  # which the masters are made of
        wanted: List[Tuple[torch.Tensor, str, int]] = []
        end = 0
        for group in self.param_groups:
            keys = self._keys(group)
            for p in group["params"]:
                if updates[p] == 0 and not self._state_from_the_start:
                    continue
                offset = {"master": -1, "m": -1, "v": -1}
                given = [*keys, ("master", "master")] if p.dtype != torch.float32 else list(keys)
                for key, which in given:
                    offset[which] = end
                    wanted.append((p, key, end))
                    end += -(-p.numel() * 4 // _SECTOR) * _SECTOR
                value = self._passage(p.device).value(p) if is_on_device(p) and p.dtype != torch.float32 else p
                values.append(value)
                places.append((self._numbers_of[p], value.data_ptr(), offset["master"], offset["m"], offset["v"]))
        shown: Any = type(self.state)(dict)
        if end:
            mapped = self._copied(places, end)
        for p, key, offset_of in wanted:
            if p.numel() == 0:
                shown[p][key] = torch.zeros_like(p, dtype=torch.float32, device="cpu")
                continue
            flat = torch.frombuffer(mapped, dtype=torch.float32, count=p.numel(), offset=offset_of)
            shown[p][key] = torch.as_strided(flat, p.shape, p.stride())
        for group in self.param_groups:
            for p in group["params"]:
                if self._counts_steps and (updates[p] != 0 or self._state_from_the_start):
                    shown[p] = {"step": torch.tensor(float(updates[p])), **shown[p]}
        kept, self.state = self.state, shown  # type: ignore[has-type]
        try:
            yield
        finally:
            self.state = kept

    def _copied(self, places: List[Tuple[int, int, int, int, int]], nbytes: int) -> mmap.mmap:
        with tempfile.TemporaryFile(dir=self._directory, prefix="penstock-state-dict-") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                error.filename = self._directory
                raise
            self._core.copy_states(places, file.fileno())  # type: ignore[union-attr]
            # A page that the drive did not take would be read as zeros, or be a signal.
            try:
                os.fsync(file.fileno())
            except OSError as error:
                error.filename = self._directory
                raise
            # Private: a change of such a tensor changes this process's memory alone.
            return mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY)

    # The end.

    def stats(self) -> Dict[str, int]:
        """Bytes of states on the drive and in memory, of buffers, and what was read and written since the beginning."""
        self._check_open()
        return self._core.stats()  # type: ignore[union-attr]

    def close(self) -> None:
        """Gives memory and drive back. Every call but this one raises afterwards."""
        self._core = None

    def __enter__(self) -> "OnDrive":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __getstate__(self) -> Dict[str, Any]:
        raise TypeError(
            f"a penstock.optim.{self._who()} has its states on a drive and cannot be pickled or copied: save its state_dict()"
        )

    def _who(self) -> str:
        return type(self).__name__

    def _check_open(self) -> None:
        if self._core is None:
            raise RuntimeError(f"this {self._who()} is closed: its states are gone; make a new one and load a state_dict()")
        if not self._core.here:
            raise RuntimeError(
                f"this {self._who()} was made in the parent process: a forked child must make its own (in the worker, or use "
                "the start method 'spawn')"
            )

    def _check_usable(self) -> None:
        self._check_open()
        if self._core.broken or self._torn:  # type: ignore[union-attr]
            raise RuntimeError(
                f"a transfer failed in the middle of a step of this {self._who()}: parameters and states do not belong together "
                "any more; load a checkpoint of both, model and optimizer"
            )
        if not self._loaded:
            raise RuntimeError(f"a load_state_dict() of this {self._who()} did not come to its end: make it again")

    def _say(self) -> None:
        for line in self._core.take_log():  # type: ignore[union-attr]
            _log.warning("optim: %s", line)


def _hook_of(optimizer: OnDrive) -> Callable[[torch.Tensor], None]:
    """For a parameter, which does not keep its optimizer."""
    known = weakref.ref(optimizer)

    def hook(p: torch.Tensor) -> None:
        here = known()
        if here is not None:
            here._gradient_came(p)

    return hook


@atexit.register
def _close_all() -> None:
    for optimizer in list(_optimizers):
        if optimizer._core is not None and optimizer._core.here:
            optimizer.close()



"""Weights, moments and gradients as the caller reads and writes them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import weakref
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ._attributes import version_of
from ._given import Given
from ._hidden import OUTSIDE, Read
from ._on_disk import tensors_on_disk
from ._record import Record
from ._run import Run
from ._training import Training


class State:
    """Owns the parameters that are gathered for looking at, until the next forward. Between steps, but where it is said."""

    def __init__(self, given: Given, run: Run, record: Record, training: Training) -> None:
        self._given = given
        self._run = run
        self._record = record
        self._training = training
        self._looked_at: List[nn.Parameter] = []  # those that are gathered, and not to be written back
        self._reads: "weakref.WeakValueDictionary[int, Read]" = weakref.WeakValueDictionary()  # by the parameter's id, while a copy is held
        self._taken: Dict[str, Tuple["weakref.ref[torch.Tensor]", int]] = {}  # by name: tensors that parameters were set to, and their versions

    def before_pass(self) -> None:
        """A forward begins, which fetches its own values: what is gathered for looking at has them no more, and copies are of the values before."""
        if self._looked_at:
            self._end_of_looking()
        self._forget_reads()
        if self._taken:
            self._check_taken()
        self._record.describe()

    def _end_of_looking(self) -> None:
        looked_at, self._looked_at = self._looked_at, []
        self._run.gathered = False
        self._run.weights.take_back(looked_at)
        self._run.ready().values_were_here()

    def read_state(self, parameter: nn.Parameter, kind: str = "parameter") -> torch.Tensor:
        """One parameter's fp32 master, "first moment", "second moment" or "gradient" (of the last step, before clipping).

        Between backward and ``step()`` the gradient is that of the step to come, whose update is made by reading it; ``step()`` must
        follow. Over several ranks all of them call it, and each gets the whole of it.
        """
        self._run.ready()
        if kind == "gradient":
            self._training.make_early()
        if not self._run.gathered:
            self._record.describe()
        value = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        self._run.core.read(self._run.names[id(parameter)], kind, value.data_ptr(), value.numel() * 4)
        return value

    def write_state(self, parameter: nn.Parameter, value: torch.Tensor, kind: str = "parameter") -> None:
        """Writes it, and commits that. Over several ranks all of them call it, with the same value."""
        self._run.ready()
        if tuple(value.shape) != tuple(parameter.shape):
            raise ValueError(f"a value of shape {tuple(value.shape)} for a parameter of {tuple(parameter.shape)}")
        value = value.detach().to("cpu", torch.float32).contiguous()
        self._run.core.write(self._run.names[id(parameter)], kind, value.data_ptr(), list(value.shape))
        read = self._reads.pop(id(parameter), None)
        if read is not None:
            read.current = False

    @contextmanager
    def gathered(self, parameters: Optional[Sequence[nn.Parameter]] = None, write_back: bool = False, source: int = 0) -> Iterator[None]:
        """All of these parameters (default: all) have their values, in the dtype that they came in, up to the next forward at the latest.

        write_back: what was changed within is written to the engine at the end. They must fit into memory. Over several ranks all of
        them come here; what rank ``source`` has changed is written.
        """
        runtime = self._run.ready()
        if runtime.is_inside and not write_back:
            with runtime.fetched(list(parameters or [each for _, each in self._given.parameters()])):
                yield
            return
        if runtime.is_open:
            raise RuntimeError("a step is open: its weights are gathered between step() and the next forward")
        wanted = list(parameters) if parameters is not None else [each for _, each in self._given.parameters()]
        read = []
        if self._run.gathered:
            raise RuntimeError("engine.gathered() within itself")
        for parameter in wanted:
            value = self._as_it_came_in(parameter)
            read.append(value.clone() if write_back else value)
            self._run.weights.lend(parameter, value)
        self._run.gathered = True
        if not write_back:
            self._looked_at = wanted
        try:
            yield
            if write_back:
                self._run.gathered = False
                changed = [not torch.equal(parameter.data, before) for parameter, before in zip(wanted, read)]
                changed = json.loads(self._run.ranks.texts("which values were changed", json.dumps(changed))[source])
                self._write_back([parameter for parameter, whether in zip(wanted, changed) if whether], source)
        finally:
            if write_back:
                self._run.gathered = False
                self._run.weights.take_back(wanted)
                runtime.values_were_here()
            elif self._looked_at is wanted:
                self._end_of_looking()

    # Each is a commit: between the first and the last of them commits say that the state is neither the old nor the new one.
    def _write_back(self, parameters: Sequence[nn.Parameter], source: int) -> None:
        if len(parameters) > 1:
            self._record.mark_partly_written(True)
        for parameter in parameters:
            value = parameter.data.contiguous()
            self._run.ranks.share(value, source)
            self._write_changed(parameter, value, self.read_state(parameter) if _is_rounded(value) else None)
        if len(parameters) > 1:
            self._record.mark_partly_written(False)

    def value_of(self, parameter: nn.Parameter) -> Optional[torch.Tensor]:
        """As it came in; None where the parameter has it just now."""
        return self.copy_of(parameter) if self._run.weights.is_hidden(parameter) else None

    def copy_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """As it came in. RuntimeError: a step is open."""
        self._check_no_pass(parameter, False)
        return self._as_it_came_in(parameter)

    def _check_no_pass(self, parameter: nn.Parameter, wants_graph: bool) -> None:
        runtime = self._run.ready()
        if runtime.is_open:
            name = self._name_of(parameter)
            if wants_graph or runtime.is_inside:
                raise RuntimeError(OUTSIDE.format(name))
            raise RuntimeError(f"a step is open: {name} is read, or changed, between step() and the next forward")

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next(name for name, each in self._given.parameters() if each is parameter)

    def read_of(self, parameter: nn.Parameter, wants_graph: bool) -> Read:
        """Its value as it came in, whose changes in place are written. RuntimeError: a step is open.

        wants_graph: a loss is made of it, so that the forward that is open is computed again in the step.
        """
        if wants_graph:
            self._training.end_pass_for_loss()
        self._check_no_pass(parameter, wants_graph)
        read = self._reads.get(id(parameter))
        if read is None or not read.current:
            with torch.inference_mode(False):
                value = self._as_it_came_in(parameter)
            name = self._name_of(parameter)
            read = Read(name, value, functools.partial(self._write_read, parameter), functools.partial(self._took, name))
            self._reads[id(parameter)] = read
        if wants_graph and read.with_graph is None:
            read.with_graph = self._training.reader_of(parameter, read.name)
        return read

    # Elements that have not changed keep the bits of their masters, which have more than 16.
    def _write_changed(self, parameter: nn.Parameter, value: torch.Tensor, master: Optional[torch.Tensor]) -> None:
        if master is not None and _is_rounded(value):
            value = torch.where(value == master.to(value.dtype), master, value.to(torch.float32))
        self.write_state(parameter, value)

    # As gathered(write_back=True) does it.
    def _write_read(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        self._check_no_pass(parameter, False)
        self._training.check_between_steps(self._name_of(parameter))
        master = self.read_state(parameter)
        same = "same" if torch.equal(master.to(value.dtype), value) else "changed"
        if set(self._run.ranks.texts("whether a value was changed", same)) == {"same"}:
            return
        read = self._reads.get(id(parameter))
        self._write_changed(parameter, value, master)
        if read is not None and read.value is value:
            read.current, self._reads[id(parameter)] = True, read

    # parameter.data = tensor makes the tensor the parameter's memory, in plain PyTorch.
    def _took(self, name: str, tensor: torch.Tensor) -> None:
        of_all = tensor if tensor._base is None else tensor._base
        self._taken[name] = weakref.ref(of_all), version_of(of_all)

    def _check_taken(self) -> None:
        for name, (known, version) in list(self._taken.items()):
            tensor = known()
            if tensor is None or version_of(tensor) != version:
                del self._taken[name]
            if tensor is not None and version_of(tensor) != version:
                raise RuntimeError(
                    f"{name} was given a tensor (parameter.data = tensor) that was changed in place afterwards: the engine has what it was given, and "
                    "the change is not in it. Give the tensor once more after a change, or change parameter.data in place"
                )

    def _forget_reads(self) -> None:
        for read in list(self._reads.values()):
            read.current = False
        self._reads.clear()

    def _as_it_came_in(self, parameter: nn.Parameter) -> torch.Tensor:
        return self.read_state(parameter).to(self._given.dtypes[id(parameter)])

    def patch_module(self) -> None:
        """``state_dict`` and ``load_state_dict`` of the module gather the parameters, and its ``zero_grad`` is the engine's."""
        self._forget_reads()
        module = self._given.module
        own, load = module.state_dict, module.load_state_dict

        @functools.wraps(own)
        def state_dict(*args: Any, **kwargs: Any) -> Any:
            with self.gathered():
                return own(*args, **kwargs)

        @functools.wraps(load)
        def load_state_dict(*args: Any, **kwargs: Any) -> Any:
            if kwargs.pop("assign", False):
                raise ValueError("load_state_dict(assign=True) would put other parameters in the place of the engine's")
            with self.gathered(write_back=True):
                return load(*args, **kwargs)

        module.state_dict = state_dict  # type: ignore[method-assign]
        module.load_state_dict = load_state_dict  # type: ignore[method-assign]
        if self._given.zero_grad_of_module:
            module.zero_grad = self._given.optimizer.zero_grad  # type: ignore[method-assign]

    def values_to_keep(self) -> List[torch.Tensor]:
        """Of all parameters, block by block, as they came in: in files of the drive that has the state, which go with the last of them, else
        in memory.
        """
        self._run.ready().give_up("the engine was closed")
        dirs = self._given.settings.state_dirs
        with tensors_on_disk(os.path.dirname(os.path.abspath(dirs[0]))) if dirs else contextlib.nullcontext(lambda value: value) as place:
            return [place(self._as_it_came_in(parameter)) for _, parameter in self._given.parameters()]


# Whether a master has more bits than the value that a program sees.
def _is_rounded(value: torch.Tensor) -> bool:
    return value.element_size() < 4

"""What is asked of a module while an engine has its values: its copy, and the state_dict of a part of it, are whole."""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, cast

import torch
from torch import nn

from ._blocks import Block
from ._hidden import Copy, own_class
from ._modules import heed_no_set_to_itself, heed_set_to_itself

_PLACE = "_penstock_whole"  # in a model's __dict__: the Whole of its last engine
_OURS = ("__deepcopy__", "__reduce_ex__", "state_dict", "load_state_dict", "zero_grad", "_penstock_engine", _PLACE)


def _refuses_pickle(_: Any) -> Any:
    raise TypeError("a model whose parameters an engine has cannot be pickled, nor can a part of it: save its state_dict(), which is whole")


class Whole:
    """Hooks of a model's modules and parameters. They outlive the engine, and then say that it was closed."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        replaced: Sequence[Tuple[nn.Module, Optional[Callable[..., Any]]]],
        value_of: Callable[[nn.Parameter], Optional[torch.Tensor]],
    ) -> None:
        """replaced: modules with an engine's forward, and the forward of their own instance before it.

        value_of: a parameter's value as it came in; None where the parameter itself has it just now.
        """
        earlier = model.__dict__.get(_PLACE)
        if earlier is not None:
            earlier.remove()
        self._model = model
        self._value_of = value_of
        self._parameters = [parameter for block in blocks for _, parameter in block.parameters]
        self._owned = {id(parameter) for parameter in self._parameters}
        self._forwards: Dict[int, Optional[Callable[..., Any]]] = {}
        for module, previous in replaced:
            self._forwards.setdefault(id(module), previous)
        self._hooks: Dict[int, Any] = {}  # of each module, in its _state_dict_hooks
        for parameter in self._parameters:
            parameter.__deepcopy__ = self._copy_of_parameter(parameter)  # type: ignore[attr-defined]
            parameter.__reduce_ex__ = _refuses_pickle  # type: ignore[method-assign]
            heed_no_set_to_itself(parameter)
        for module in model.modules():
            self._hooks[id(module)] = module._register_state_dict_hook(self._fill)
            module.__dict__["__deepcopy__"] = self._copy_of_module(module)
            module.__dict__["__reduce_ex__"] = _refuses_pickle
        model.__dict__[_PLACE] = self

    def remove(self) -> None:
        """The hooks are gone."""
        for parameter in self._parameters:
            heed_set_to_itself(parameter)
            for name in ("__deepcopy__", "__reduce_ex__"):
                parameter.__dict__.pop(name, None)
        for module in self._model.modules():
            for name in ("__deepcopy__", "__reduce_ex__"):
                module.__dict__.pop(name, None)
            handle = self._hooks.get(id(module))
            if handle is not None:
                handle.remove()
        self._model.__dict__.pop(_PLACE, None)

    def _fill(self, module: nn.Module, state: Dict[str, Any], prefix: str, _: Any) -> None:
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) not in self._owned or prefix + name not in state:
                continue
            value = state[prefix + name]
            if isinstance(value, Copy):  # detach() has read it
                state[prefix + name] = value.plain()
                continue
            read = self._value_of(parameter)
            if read is None:
                continue
            if value is parameter:
                raise RuntimeError("state_dict(keep_vars=True) of parameters that are not in memory: take it within engine.gathered()")
            state[prefix + name] = read

    def _copy_of_parameter(self, parameter: nn.Parameter) -> Callable[[Dict[int, Any]], nn.Parameter]:
        def copied(memo: Dict[int, Any]) -> nn.Parameter:
            if id(parameter) not in memo:
                value = self._value_of(parameter)
                value = parameter.data.clone() if value is None else value
                memo[id(parameter)] = own_class(parameter)(value, parameter.requires_grad)
            return memo[id(parameter)]  # type: ignore[no-any-return]

        return copied

    # As copy.deepcopy makes one, without what the engine has put there.
    def _copy_of_module(self, module: nn.Module) -> Callable[[Dict[int, Any]], nn.Module]:
        def copied(memo: Dict[int, Any]) -> nn.Module:
            kind = type(module)
            if hasattr(kind, "__deepcopy__"):
                raise TypeError(f"{kind.__name__} copies itself in its own way, without values: build another one, and load state_dict()")
            made: nn.Module = cast(Any, kind).__new__(kind)
            memo[id(module)] = made
            state = {name: value for name, value in module.__dict__.items() if name not in _OURS}
            if id(module) in self._forwards:
                state.pop("forward", None)
                if self._forwards[id(module)] is not None:
                    state["forward"] = self._forwards[id(module)]
            hooks = module._state_dict_hooks
            state["_state_dict_hooks"] = type(hooks)((key, hook) for key, hook in hooks.items() if hook != self._fill)
            state = copy.deepcopy(state, memo)
            set_state = getattr(made, "__setstate__", None)
            if set_state is not None:
                set_state(state)
            else:
                made.__dict__.update(state)
            return made

        return copied

"""Drives the engine from a model's own forward and backward.

Every block's module gets a forward that enters the block's use in the engine (its weights have arrived then), computes, and
leaves it. In training each block is computed under torch's checkpointing: forward keeps the block's inputs, and backward enters
the block once more and computes it again. Rules that this rests on:

- Backward of a block begins when a gradient reaches its outputs (a hook on them), or when its first saved tensor is asked for.
- autograd runs what it can of a block before it goes on to the one before it, so a block is left when the next is entered.
- The last use is entered once, as backward: it is computed with its graph, and nothing is computed again.
- Uses that a pass does not come to are entered and left without computing.
- Backward ends at the first use whose block trains, unless what goes into the model wants a gradient. What comes before it is computed
  without a graph.

``Runtime`` puts its parts together, and names what of them the engine uses. Each part knows those above it only:

- ``Stages``: the order of the blocks; ``OpenPass``: what is open of a pass; ``Changing``: the modules whose attributes a forward changes
- ``SavedInputs``: what blocks were given, until their backward
- ``Entering``: entering and leaving the uses of blocks
- ``BackwardPass``: where backward is
- ``Passes``: how a pass begins and ends
- ``BlockForwards``, ``ModelForward``: the forwards, patched
- ``VerticalOrder``: several micro-batches in one pass
"""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ._accumulation import Part
from ._backward_pass import BackwardPass
from ._block_forwards import BlockForwards
from ._blocks import Block
from ._changing import Changing
from ._entering import Entering
from ._model_forward import ModelForward
from ._head_places import HeadPlaces
from ._modules import parts_with_all_parameters, replace_forward, restore_forward
from ._open_pass import OpenPass
from ._pieces import Pieces
from ._passes import Passes
from ._saved_inputs import SavedInputs
from ._settings import DTYPES, Settings
from ._stages import Stages
from ._trace import Use
from ._vertical_order import VerticalOrder
from ._weights import Weights


class Runtime:
    """The model's modules, patched, and the pass that is open."""

    def __init__(
        self,
        core: Any,
        model: nn.Module,
        blocks: Sequence[Block],
        uses: Sequence[Use],
        weights: Weights,
        trains: Sequence[Sequence[bool]],
        input_gradients: bool,
        changing: Sequence[nn.Module],
        settings: Settings,
        world: int,
        pieces: Pieces,
    ) -> None:
        """trains: of each parameter of each block, whether it is updated. input_gradients: what goes into the model may ask for them.

        changing: modules whose attributes a forward changes. world: ranks that train together. pieces: installed.
        """
        self._weights = weights
        self._device = device = settings.device
        loss_factor = settings.forwards / settings.micro_batches
        self._stages = stages = Stages(blocks, uses, trains, input_gradients)
        self._open = open_pass = OpenPass()
        self._changing = known = Changing(model, changing)
        planned = json.loads(core.info())["saved_activations"]
        saved = SavedInputs(core, planned, uses, device, weights.streams is not None)
        self._entering = entering = Entering(core, stages, weights, open_pass, known, saved, loss_factor, settings.host_memory)
        self._backward = backward = BackwardPass(stages, weights, open_pass, entering, device, loss_factor)
        self._passes = passes = Passes(core, model, stages, weights, open_pass, entering, backward, saved)
        self._blocks = BlockForwards(model, stages, open_pass, entering, backward, passes, known, saved, several_ranks=world > 1)
        self._forward = forward = ModelForward(model, stages, open_pass, entering, backward, passes, known, saved, DTYPES[settings.dtype], device)
        self.pieces = pieces
        pieces.heads.place = HeadPlaces(stages, open_pass).of
        order = VerticalOrder(core, model, stages, open_pass, backward, passes, forward, known, device, loss_factor)

        # What the engine calls, without a call of its own in between.
        self.begin, self.finish, self.give_up = passes.begin, passes.finish, passes.give_up
        self.backward, self.take_forward, self.open_ends = passes.backward, passes.take_forward, passes.open_ends
        self.open_forward = passes.open_forward
        self.check_trains, self.are_here, self.fetched = passes.check_trains, passes.are_here, self._blocks.fetched
        self.called = forward.called
        self.train_forward, self.forward_of_accumulation = forward.train, forward.for_accumulation
        self.train_batch, self.repeat = order.train_batch, order.repeat
        self.settle_changing = known.settle
        self.complain = saved.complain

        #: Modules whose forward is another, and the forward of their own instance before.
        self.replaced: List[Tuple[nn.Module, Optional[Callable[..., Any]]]] = []
        self._patch(model, blocks)

    def _patch(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        for block in blocks:
            for name, module in block.modules:
                self._replace(module, self._blocks.of(name, module))
        modules = {id(module) for block in blocks for _, module in block.modules}
        wholes = {id(part) for part in parts_with_all_parameters(model)}
        for part in model.modules():
            if part is model:
                continue
            if id(part) in wholes:
                self._replace(part, self._forward.of_whole(part, part.forward))
            elif any(id(each) in modules for each in part.modules()) and id(part) not in modules:
                self._replace(part, self._forward.of_part(part.forward))
        self._replace(model, self._forward.of_model(model.forward))
        #: The model's, patched.
        self.forward_of_model = self._forward.patched = model.forward
        self._backward.refuse_outside()

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.replaced.append((module, replace_forward(module, forward)))

    def connect(
        self,
        before_pass: Callable[[], None],
        on_interrupted: Callable[[], Any],
        on_training_forward: Callable[[Tuple[Any, ...], Dict[str, Any], Optional[Part]], Any],
        flops_of: Callable[[int, int], float],
        zeros_change: bool,
    ) -> None:
        """The engine's part, before the first pass.

        before_pass: called before a pass begins. on_interrupted: a pass is open, and another is to begin. on_training_forward: begins the
        pass, then calls train_forward. flops_of: what a step computes, from its tokens and samples on all ranks; 0 where that is not known.
        zeros_change: whether a weight without a gradient is updated by zeros, and that changes it (moments, weight decay).
        """
        self._passes.before_pass, self._passes.on_interrupted, self._passes.flops_of = before_pass, on_interrupted, flops_of
        self._forward.on_training_forward = on_training_forward
        self._backward.zeros_change = zeros_change

    @property
    def trains(self) -> bool:
        """Whether any parameter is updated; otherwise every forward is an evaluation."""
        return self._stages.trains

    @property
    def first_trained(self) -> int:
        """The use where backward ends."""
        return self._stages.first_trained

    @property
    def is_open(self) -> bool:
        return self._open.is_open

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in the model's forward."""
        return self._open.here.inside_model

    @property
    def backward_came(self) -> bool:
        """Whether any gradient has come to the pass that is open."""
        return self._passes.backward_came

    @property
    def gradient_came(self) -> bool:
        """Whether backward has left a gradient at any weight that trains, in the pass that is open."""
        return self._passes.gradient_came

    @property
    def counts(self) -> Tuple[int, int]:
        """Tokens and samples of the pass that was finished last, on all ranks."""
        return self._passes.counts

    @property
    def spoiled(self) -> str:
        """Why the weights in memory are not the engine's any more; empty: they are."""
        return self._entering.spoiled

    @property
    def changing(self) -> List[nn.Module]:
        """Modules whose attributes a forward changes."""
        return self._changing.modules

    @property
    def changed_last(self) -> List[nn.Module]:
        """The same, of the last forward of ``forward_of_accumulation``."""
        return self._changing.last

    def values_were_here(self) -> None:
        """Parameters had their values for a while (engine.gathered), and may have been changed in place then."""
        self._weights.note_hidden()

    def device_report(self) -> Optional[Dict[str, Any]]:
        """What a report says of the device beside the engine's own; None: nothing."""
        if self._weights.on_device is not None:
            return self._weights.on_device.report()
        if self._weights.streams is None or self._device.type != "cuda":
            return None
        return {"tensors_peak_bytes": torch.cuda.max_memory_reserved(self._device)}

    def let_go(self) -> None:
        """The engine's memory is not read any more; the parameters are in host memory, without values."""
        self._weights.close()

    def close(self) -> None:
        """The modules' forwards are their own again."""
        self.give_up("the engine was closed")
        for module, previous in reversed(self.replaced):
            restore_forward(module, previous)
        self._backward.close()

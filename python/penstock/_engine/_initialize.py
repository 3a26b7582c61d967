"""``penstock.initialize``: arguments and configuration to an engine."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Tuple, Union

import torch
from torch import nn

from .._buffers import truth
from .._data_loader import DeepSpeedDataLoader
from . import _base_weights
from ._device import choose_devices, tell_of_unused_settings
from ._engine import Engine
from ._keywords import Keywords, StartKeywords
from ._optimizer import EngineOptimizer, optimizer_of
from ._ranks import world_size
from ._settings import Settings, check_names, takes

if TYPE_CHECKING:
    from typing_extensions import Unpack


#: For initialize: the engine evaluates and generates only, whatever requires a gradient.
NO_OPTIMIZER: Any = object()


@takes(Keywords, StartKeywords)
def initialize(
    model: Optional[nn.Module] = None,
    config: Any = None,
    optimizer: Union[torch.optim.Optimizer, Callable[[Any], torch.optim.Optimizer], None] = None,
    model_parameters: Any = None,
    lr_scheduler: Any = None,
    *,
    config_params: Any = None,
    resume: Union[bool, str] = False,
    overwrite: bool = False,
    ranks: Optional[bool] = None,
    training_data: Any = None,
    collate_fn: Any = None,
    **keywords: Unpack[StartKeywords],
) -> Tuple[Engine, EngineOptimizer, Optional[DeepSpeedDataLoader], Any]:
    """An engine for an unmodified torch module, after ``deepspeed.initialize``.

    What is a number, a name or a list here is a key of the configuration too, under "penstock" where DeepSpeed has none: Trainer and
    accelerate reach all of it. ``resume``, ``overwrite`` and ``ranks`` are of one start, and no configuration's.

    model: with its values, in host memory; what is on a GPU is taken from there.
    config: a DeepSpeed configuration, as a dictionary or the path of a JSON file. What it gives and the engine does otherwise is a
        warning; what it cannot do is a ValueError. Arguments win over it.
    optimizer: a new torch.optim.AdamW, Adam, SGD or Adagrad, FusedLamb or another of DeepSpeed's, penstock.optim.LAMB or Lion (or a
        function from parameters to one): its groups and values are taken.
        Without it, the configuration's; without that, AdamW with torch's defaults. None is needed where no parameter requires a
        gradient: the engine evaluates and generates only.
    model_parameters: parameters, or groups of them, for the configuration's optimizer; the default is all that require gradients.
    lr_scheduler: of ``engine.optimizer``, or a function that makes one of it; ``engine.step()`` makes its steps.
    resume: go on from what ``state_dir`` holds; "auto": if it holds a run. What cannot be read, or is damaged, is an error.
    overwrite: what ``state_dir`` held when the process was started may be replaced; at a prompt or in a notebook, what it holds now. What
        another process trains there later is not.
    ranks: False: this process trains by itself, whatever others there are. Default: the processes of torch.distributed's process
        group train together, which is made of torchrun's environment where there is none and WORLD_SIZE is above 1.

    Returns (engine, engine.optimizer, None, the scheduler), as DeepSpeed does.
    """
    if model is None:
        raise TypeError("initialize needs model=")
    given: Dict[str, Any] = {**keywords}
    for name in ("args", "mpu"):
        if given.pop(name, None) is not None:
            raise ValueError(f"{name} is not served: config= says the configuration, and there is no parallelism but that of batches")
    check_names(initialize, given)
    device = given.pop("device", None)
    world = world_size(None if ranks is None else truth(ranks, "ranks"))
    settings = Settings(config if config is not None else config_params, given, world)
    settings.device, settings.engine_device = choose_devices(settings.chosen_device if device is None else device, settings.device_memory)
    overwrite = truth(overwrite, "overwrite")
    if resume != "auto":
        resume = truth(resume, "resume (or 'auto')")
    _base_weights.check(settings)
    for note in (*settings.notes, *tell_of_unused_settings(settings)):
        warnings.warn(note, stacklevel=2)
    parameters = model_parameters
    if parameters is None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parameters = list(parameters)
    was_given = optimizer is not None
    if not isinstance(optimizer, torch.optim.Optimizer):
        settings.has_no_optimizer = optimizer is NO_OPTIMIZER
        if settings.has_no_optimizer or not any(parameter.requires_grad for parameter in model.parameters()):
            settings.nothing_trains = True
            optimizer = torch.optim.SGD(list(model.parameters()), lr=0.0)  # groups alone: it makes no step
        elif optimizer is not None:
            optimizer = optimizer(parameters)
        else:
            optimizer = optimizer_of(settings.optimizer, parameters)
    loader = None
    if training_data is not None:
        if not settings.micro_batch_size:
            raise ValueError("training_data= is loaded in batches of the configuration's train_micro_batch_size_per_gpu, and there is none")
        loader = DeepSpeedDataLoader(training_data, settings.micro_batch_size, pin_memory=True, collate_fn=collate_fn, data_parallel_world_size=world)
    engine = Engine(model, settings, optimizer, lr_scheduler, settings.blocks, resume, overwrite, 1 if settings.seed is None else settings.seed, was_given)
    return engine, engine.optimizer, loader, engine.lr_scheduler

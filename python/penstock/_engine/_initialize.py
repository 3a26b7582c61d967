"""``penstock.initialize``: arguments and configuration to an engine."""

from __future__ import annotations

import difflib
import inspect
import warnings
from typing import Any, Callable, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from .._buffers import truth, whole_number
from .._data_loader import DeepSpeedDataLoader
from . import _base_weights
from ._device import choose_devices, tell_of_unused_settings
from ._engine import Engine
from ._optimizer import EngineOptimizer, optimizer_of
from ._ranks import world_size
from ._settings import PathLike, Settings, keywords_of


# The first that is given; None is not.
def _first_of(*values: Any) -> Any:
    return next(value for value in values if value is not None)


#: For initialize: the engine evaluates and generates only, whatever requires a gradient.
NO_OPTIMIZER: Any = object()


def initialize(
    model: Optional[nn.Module] = None,
    config: Any = None,
    optimizer: Union[torch.optim.Optimizer, Callable[[Any], torch.optim.Optimizer], None] = None,
    model_parameters: Any = None,
    lr_scheduler: Any = None,
    *,
    config_params: Any = None,
    state_dir: Union[None, PathLike, Sequence[PathLike]] = None,
    host_memory: Union[None, int, str] = None,
    device_memory: Union[None, int, str] = None,
    dtype: Any = None,
    offload: Optional[str] = None,
    gradient_accumulation_steps: Optional[int] = None,
    forwards_per_step: Optional[int] = None,
    gradient_clipping: Optional[float] = None,
    blocks: Optional[Sequence[str]] = None,
    logits_chunk_size: Optional[int] = None,
    chunked_modules: Optional[Sequence[Union[str, type]]] = None,
    chunk_size: Optional[int] = None,
    missing_gradients: Optional[str] = None,
    saved_activations: Optional[str] = None,
    base_weights: Optional[PathLike] = None,
    zero_quantized_weights: Optional[bool] = None,
    zero_quantized_gradients: Optional[bool] = None,
    resume: Union[bool, str] = False,
    overwrite: bool = False,
    seed: Optional[int] = None,
    device: Union[None, str, int, torch.device] = None,
    progress: Optional[bool] = None,
    ranks: Optional[bool] = None,
    rank_timeout: Optional[float] = None,
    training_data: Any = None,
    collate_fn: Any = None,
    **unknown: Any,
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
    state_dir: a directory, or one for each drive, for weights and states; made where it is missing. Several share the bytes of a new
        run: in proportion to the measured speed of their drives, or to the weights of ["DIR=WEIGHT", ...]. In the configuration
        ``"penstock": {"state_dirs": [...]}``, in place of nvme_path.
    host_memory: bytes, or "4GiB", that the engine may take for weights, gradients, states and transfers, and, with weights and states on a drive,
        for the inputs that blocks keep for backward, three of each micro-batch apart. What torch takes for activations while a block is computed
        comes on top. Default: as much as it likes; of a model of which nothing trains, half of what is free.
    device_memory: bytes, or "16GiB", of the GPU that the engine's blocks and torch's tensors of a step may take together. Blocks get what a
        step's tensors, which the first forward finds out, leave of it: weights on their way, those that stay, and blocks that live there with
        their states and are updated there. Default: none, and torch copies the weights of each block through two buffers.
    dtype: torch.float32, bfloat16 or float16 (masters and states are fp32).
    offload: "nvme", "cpu" or "none": where weights and states live. Default: what the configuration's offload blocks say; "nvme" where
        there is a directory for them.
    gradient_accumulation_steps: micro-batches of a step, given all to ``engine.train_batch``, or one by one.
    forwards_per_step: of the model, where a loss is made of several (a pair of answers, two views of an image). Default: one for
        each micro-batch; more are noticed as they come, and computed twice.
    gradient_clipping: the largest global norm of a step's gradients; 0 for no bound. Default: the configuration's, else 0.
    blocks: names of modules that are fetched as one; parameters of none of them stay in memory for a whole pass. By default blocks are
        found.
    logits_chunk_size: tokens whose logits are computed at one time, with their loss, by a model that has a head that is an nn.Linear; 0: those
        of all tokens (the default). Losses are the same to rounding. What asks for whole logits before backward gets them; a kernel of one's own
        that takes their address is refused.
    chunked_modules: names (whole, or their ends: "mlp") or classes of modules that act on each token alone, which are computed in chunks of
        ``chunk_size`` tokens, in backward as well. One that does not is refused by name in the first forwards.
    chunk_size: tokens of such a chunk. Default: as many as a token has features there.
    missing_gradients: what a step does to a parameter that no gradient came to, in no micro-batch and on no rank. "skip" (the default), as
        torch.optim: weights and moments keep their bits, its count of updates stays as it is. "zeros", as DeepSpeed: it is updated as by
        a gradient of zeros. Also ``"penstock": {"missing_gradients": ...}`` in the configuration.
    saved_activations: where the inputs that blocks keep for backward wait for it: "memory", where they are computed; "host", in host memory and
        not on a GPU (with device_memory); "drive", beside the states on a drive; "auto", the default: in memory as far as host_memory or
        device_memory goes, and the others in the next of these. Losses have the same bits. Inputs that the model's outputs hold as well
        (output_hidden_states=True) take memory all the same, and so does what several blocks are given (masks, rotary positions).
    base_weights: the directory of the weights of what is frozen: safetensors as they are published, or as ``penstock pack`` coded them (QLoRA),
        which are decoded as they are read. They are read where they lie, as often as they are used, and are no part of the state, so the model may be
        built without values (``penstock.init_without_values``, or frozen parameters on the meta device). With state on a drive, in one
        process. The run records what the files are: it goes on with these alone, wherever they have been moved to.
    zero_quantized_weights: several ranks hand each other weights in 8 bits, with a scale for each 128 elements, as ZeRO++ does: half of the
        bytes of bf16. Losses are then not those of whole exchanges: a weight of another rank is off by up to 0.4% of the largest of its
        128. Recorded with the run. Default: False, as in DeepSpeed's configuration.
    zero_quantized_gradients: the same of gradients, in 4 bits: a quarter of the bytes of bf16, and a rank's share of a gradient is off by up
        to 7.2%. Default: False.
    resume: go on from what ``state_dir`` holds; "auto": if it holds a run. What cannot be read, or is damaged, is an error.
    overwrite: what ``state_dir`` held when the process was started may be replaced; at a prompt or in a notebook, what it holds now. What
        another process trains there later is not.
    seed: of what the engine itself draws: the rounding of 8-bit states. Default: 1.
    device: that computes forward and backward: "cuda", "cuda:1", "cpu". Default: the GPU where torch has one, as with DeepSpeed; with
        torchrun each process has its own.
    progress: a line on stderr, or in a notebook's cell, with step, loss, tokens and bytes a second. Default: where a terminal or a
        notebook shows it, and no bar of tqdm is open.
    ranks: False: this process trains by itself, whatever others there are. Default: the processes of torch.distributed's process
        group train together, which is made of torchrun's environment where there is none and WORLD_SIZE is above 1.
    rank_timeout: seconds that one of them may give no sign of life; ten times as long may pass until all have come to their first
        forward. Default: 30.

    Returns (engine, engine.optimizer, None, the scheduler), as DeepSpeed does.
    """
    keywords = keywords_of(locals())
    if model is None:
        raise TypeError("initialize needs model=")
    for name in ("args", "mpu"):
        if unknown.pop(name, None) is not None:
            raise ValueError(f"{name} is not served: config= says the configuration, and there is no parallelism but that of batches")
    if unknown:
        misspelt = min(unknown)
        near = difflib.get_close_matches(misspelt, inspect.signature(initialize).parameters, 1)
        raise TypeError(f"initialize has no argument {misspelt!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    world = world_size(None if ranks is None else truth(ranks, "ranks"))
    settings = Settings(config if config is not None else config_params, keywords, world)
    settings.device, settings.engine_device = choose_devices(settings.chosen_device if device is None else device, settings.device_memory)
    settings.progress = settings.draws_progress if progress is None else truth(progress, "progress")
    overwrite = truth(overwrite, "overwrite")
    if resume != "auto":
        resume = truth(resume, "resume (or 'auto')")
    seed = whole_number(_first_of(seed, settings.seed, 1), "seed", 0, 2**63 - 1)
    settings.rank_timeout = _first_of(rank_timeout, settings.chosen_rank_timeout, 30.0)
    if not settings.rank_timeout >= 1:
        raise ValueError(f"rank_timeout is {settings.rank_timeout}: a second, or more")
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
    engine = Engine(model, settings, optimizer, lr_scheduler, settings.blocks, resume, overwrite, seed, was_given)
    return engine, engine.optimizer, loader, engine.lr_scheduler

"""The keywords of ``penstock.initialize`` and ``penstock.plan`` that are settings.

This file is printed from the table in run/settings.cc by ``penstock settings --python``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Sequence, TypedDict, Union

if TYPE_CHECKING:
    import torch

    from ._settings import PathLike


class Keywords(TypedDict, total=False):
    """Of ``penstock.initialize`` and ``penstock.plan``.

    gradient_accumulation_steps: Micro-batches in a step. engine.train_batch takes all of them at once; a loop may give them one by one. Default: 1.
    gradient_clipping: Maximum global gradient norm; 0 disables clipping. Default: 0 without a configuration of DeepSpeed's.
    zero_quantized_weights: Ranks hand each other weights in 8 bits, with a scale for each 128 (ZeRO++'s qwZ): half the bytes of bf16. Each weight of
        another rank is off by up to 0.4% of the largest of its 128. Losses are then not those of whole exchanges. Recorded with the run. Default:
        false.
    zero_quantized_gradients: Ranks hand each other gradients in 4 bits, with a scale for each 128 (ZeRO++'s qgZ): a quarter of the bytes of bf16.
        Each rank's share of a gradient is off by up to 7.2% of the largest of its 128. Losses are then not those of whole exchanges. Recorded with
        the run. Default: false.
    offload: Where weights and optimizer state live: none (on the computing device), cpu or nvme. Default: nvme; none with a configuration of
        DeepSpeed's that has neither an offload block nor a directory.
    missing_gradients: What a step does to a parameter without a gradient: updates it by zeros, as DeepSpeed does, or leaves it as it is, as
        torch.optim does. A gradient is missing if none came in any micro-batch or on any rank. With "skip" weights and moments keep their bits, and
        the count of updates stays as it is. Default: skip; under DeepSpeed's name zeros, but for accelerate and Trainer.
    saved_activations: Where the inputs that blocks keep for backward wait for it: in the memory where they are computed (memory), of a device in host
        memory (host), or on the drive (drive). With auto they are in memory as far as the budget goes, and the others in the next tier. Losses have
        the same bits. Inputs that the model's outputs hold as well (output_hidden_states=True) take memory all the same, and so does what several
        blocks are given (masks, rotary positions). Default: auto.
    blocks: Names of the modules that are fetched as one; [""] is the whole model. Parameters of none of them stay in memory for a whole pass.
        Default: they are found.
    forwards_per_step: Forwards of the model whose losses a step may use. A loss may be made of several, as of a pair of answers or two views of an
        image. More are noticed as they come, and computed twice. Default: one for each micro-batch.
    dtype: Type of weights and activations, in the place of bf16.enabled and fp16.enabled, which it may not contradict. A torch.dtype, or its name;
        masters and optimizer states are fp32. Default: what bf16 and fp16 say, else fp32.
    logits_chunk_size: Tokens whose logits are computed at one time, with their loss; 0: those of all tokens. The head of the model is an nn.Linear.
        Losses are the same to rounding. What asks for whole logits before backward gets them; a kernel of one's own that takes their address is
        refused. Default: 0.
    chunked_modules: Names or classes of modules that act on each token alone (MLPs), which are computed in chunks of tokens. Names are whole, or
        their ends ("mlp"). Backward goes in chunks as well. A module that needs other tokens is refused by name in the first forwards. Default: none.
    chunk_size: Tokens of a chunk of chunked_modules. Default: as many as a token has features.
    base_weights: Directory of the weights of frozen parameters: safetensors as they are published, or as `penstock pack` coded them, which are read
        where they lie and kept nowhere else. They are no part of the state, so the model may be built without values (penstock.init_without_values,
        or frozen parameters on the meta device). With state on a drive, in one process. The run records what the files are: it goes on with these
        alone, wherever they have been moved to. Default: none: the state has them.
    """

    gradient_accumulation_steps: Optional[int]
    gradient_clipping: Optional[float]
    zero_quantized_weights: Optional[bool]
    zero_quantized_gradients: Optional[bool]
    offload: Optional[str]
    missing_gradients: Optional[str]
    saved_activations: Optional[str]
    blocks: Optional[Sequence[str]]
    forwards_per_step: Optional[int]
    dtype: Any
    logits_chunk_size: Optional[int]
    chunked_modules: Optional[Sequence[Union[str, type]]]
    chunk_size: Optional[int]
    base_weights: Optional[PathLike]


class StartKeywords(Keywords, total=False):
    """Of ``penstock.initialize``: those of every training, and those of a start and of a process.

    host_memory: Hard host memory budget, such as 512MiB or 4GiB. It holds weights, gradients, states and transfers and, with state on a drive, the
        inputs that blocks keep for backward, three of each micro-batch apart. What torch takes for activations while a block is computed comes on
        top. Default: no bound; of a model of which nothing trains, half of what is free.
    device_memory: Hard device memory budget. It holds the engine's blocks and torch's tensors of a step together. Blocks get what a step's tensors,
        which the first forward finds out, leave of it: weights on their way, those that stay, and blocks that live there with their states and are
        updated there. Default: none: weights are copied block by block, and no state is on the device.
    state_dir: Directory of the training state. Several directories share its bytes: in proportion to the measured speed of their drives, or to the
        weights of DIR=WEIGHT. It is made where it is missing. In the configuration, it takes the place of nvme_path. Default: required with offload
        to nvme.
    replan: Whether a run whose first steps take half as much again as was predicted or more, or half as much or less, is planned once more with what
        they showed (auto) or not (off). The engine plans before a later step and goes on with the same bits; ``engine.log()`` and ``engine.report()``
        say what came of it. With state on a drive, in one process. Default: auto.
    seed: Seed of what the engine itself draws: the rounding of 8-bit optimizer states. Default: 1.
    device: Device that computes forward and backward: cpu, cuda or cuda:1. With torchrun each process has its own. Default: the GPU where torch has
        one.
    progress: Draws a line with step, loss, tokens and bytes a second. Default: where a terminal or a notebook shows it; from deepspeed.initialize:
        false.
    rank_timeout: Heartbeat timeout of other ranks in seconds; 10 times as long for the rendezvous, 60 times for a rank that answers but makes no
        progress. Default: 30.
    resume_ranks: How many processes go on with a run: as many as made it (same), or any number (any). With any, its state is cut anew in its
        directories, and made of the newest checkpoint where parts of it are gone. As after ``torchrun --max-restarts`` without a lost host. A kill
        before the new state is whole leaves the old one. The newest checkpoint is that in the directory of the run's last ``save_checkpoint``.
        Default: same.
    """

    host_memory: Union[None, int, str]
    device_memory: Union[None, int, str]
    state_dir: Union[None, PathLike, Sequence[PathLike]]
    replan: Optional[str]
    seed: Optional[int]
    device: Union[None, str, int, torch.device]
    progress: Optional[bool]
    rank_timeout: Optional[float]
    resume_ranks: Optional[str]

"""torch optimizers whose states live on a drive: AdamW, Adam, Adagrad, Lion, SGD, LAMB.

>>> import penstock.optim
>>> optimizer = penstock.optim.AdamW(model.parameters(), lr=1e-4, state_dir="/nvme", host_memory="1GiB")

Each takes its torch.optim namesake's arguments, is a ``torch.optim.Optimizer``, takes parameters in host memory and on CUDA devices, and takes
besides:

state_dir: a directory on the drive, made where it is missing. The states are in a file there that has no name: it goes with the
    optimizer, however the process ends, so a checkpoint is torch's own, of ``state_dict()``.
host_memory: bytes of buffers, and of states that stay in memory where there is room; at least 2 MiB. A number, or a
    text like "512MiB". 256 MiB where it is not given.
nvme_offload_dir: ColossalAI's name of state_dir.
nvme_offload_fraction: ColossalAI's: this share of the states, from 0 to 1, lives on the drive, the rest in memory, beside
    the buffers of host_memory.
offload_gradients: torchao's: True copies each gradient of a parameter on a device to host memory as soon as backward has made it, and frees it there
    (``grad`` is None then). Takes one backward a step, and no clipping, as nobody sees all gradients. Host memory has all gradients then, pinned.
"""

from ._optimizers import LAMB, SGD, Adagrad, Adam, AdamW, Lion

__all__ = ["LAMB", "SGD", "Adagrad", "Adam", "AdamW", "Lion"]

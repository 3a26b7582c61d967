"""Computations in parts of a sequence, by one process. What ranks would share of a sequence is not served."""

from penstock._deepspeed import absent
from penstock._tiled import SequenceTiledCompute as SequenceTiledCompute
from penstock._tiled import TiledFusedLogitsLoss as TiledFusedLogitsLoss
from penstock._tiled import TiledMLP as TiledMLP
from penstock._tiled import sequence_tiled_compute as sequence_tiled_compute

from ..._refused import attributes_of

_NAME = "deepspeed.runtime.sequence_parallel.ulysses_sp"
_BATCHES = "there is no parallelism but that of batches: a whole sequence is computed by one process, block by block"
UlyssesSPAttentionHF = absent(f"{_NAME}.UlyssesSPAttentionHF", _BATCHES)
UlyssesSPDataLoaderAdapter = absent(f"{_NAME}.UlyssesSPDataLoaderAdapter", _BATCHES)
UlyssesSPFwdLossBwdWithLogits = absent(f"{_NAME}.UlyssesSPFwdLossBwdWithLogits", _BATCHES)
_CHUNKS = "logits are computed in chunks with their loss: logits_chunk_size, or TiledFusedLogitsLoss"
TiledLoss = absent(f"{_NAME}.TiledLoss", _CHUNKS)
AutogradComputeMLP = absent(f"{_NAME}.AutogradComputeMLP", "TiledMLP with one shard")

__all__ = [
    "AutogradComputeMLP",
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "UlyssesSPFwdLossBwdWithLogits",
    "sequence_tiled_compute",
]
__getattr__ = attributes_of(__name__)

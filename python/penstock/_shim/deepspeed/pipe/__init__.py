from penstock._deepspeed import absent

from .._refused import attributes_of

_INSTEAD = "there is no parallelism but that of batches: a torch.nn.Sequential of the layers goes through memory block by block"
PipelineModule = absent("deepspeed.pipe.PipelineModule", _INSTEAD)
LayerSpec = absent("deepspeed.pipe.LayerSpec", _INSTEAD)
TiedLayerSpec = absent("deepspeed.pipe.TiedLayerSpec", _INSTEAD)

__getattr__ = attributes_of(__name__)

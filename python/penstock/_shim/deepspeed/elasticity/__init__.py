"""Elastic batch sizes, by DeepSpeed's rule of version 0.1. Nothing restarts ranks by itself."""

from penstock._deepspeed import ElasticityConfigError as ElasticityConfigError
from penstock._deepspeed import ElasticityError as ElasticityError
from penstock._deepspeed import ElasticityIncompatibleWorldSize as ElasticityIncompatibleWorldSize
from penstock._deepspeed import absent
from penstock._deepspeed import compute_elastic_config as compute_elastic_config
from penstock._deepspeed import elasticity_enabled as elasticity_enabled

from .._refused import attributes_of

DSElasticAgent = absent("deepspeed.elasticity.DSElasticAgent", "torchrun restarts processes, and engine.load_checkpoint takes any number of ranks")

__getattr__ = attributes_of(__name__)

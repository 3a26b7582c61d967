"""Matrix products of a model's forward, as torch counts them. Of a training: flops_profiler in the configuration, and engine.report()."""

from penstock._flops import FlopsProfiler as FlopsProfiler
from penstock._flops import get_model_profile as get_model_profile

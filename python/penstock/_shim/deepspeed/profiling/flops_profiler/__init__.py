from ..._refused import attributes_of
from .profiler import FlopsProfiler as FlopsProfiler
from .profiler import get_model_profile as get_model_profile

__getattr__ = attributes_of(__name__)

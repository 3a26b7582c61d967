from .._refused import attributes_of
from . import flops_profiler as flops_profiler

__getattr__ = attributes_of(__name__)

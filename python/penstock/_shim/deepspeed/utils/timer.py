from penstock._throughput import ThroughputTimer as ThroughputTimer

from .._refused import attributes_of

__getattr__ = attributes_of(__name__)

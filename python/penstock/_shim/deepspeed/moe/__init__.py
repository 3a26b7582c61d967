from .._refused import attributes_of
from . import layer as layer

__getattr__ = attributes_of(__name__)

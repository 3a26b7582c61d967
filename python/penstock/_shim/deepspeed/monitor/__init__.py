from .._refused import attributes_of
from . import monitor as monitor

__getattr__ = attributes_of(__name__)

from .._refused import attributes_of
from . import adagrad as adagrad
from . import adam as adam
from . import lamb as lamb
from . import lion as lion
from . import op_builder as op_builder

__getattr__ = attributes_of(__name__)

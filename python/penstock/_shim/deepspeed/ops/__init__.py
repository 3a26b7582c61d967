from . import adagrad as adagrad
from . import adam as adam
from . import lamb as lamb
from . import lion as lion
from . import op_builder as op_builder

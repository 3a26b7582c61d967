from . import adagrad as adagrad
from . import adam as adam
from . import lion as lion

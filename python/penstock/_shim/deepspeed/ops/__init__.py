from . import adagrad as adagrad
from . import adam as adam
from . import lamb as lamb
from . import lion as lion

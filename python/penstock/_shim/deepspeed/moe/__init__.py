from . import layer as layer

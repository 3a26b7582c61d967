from . import monitor as monitor

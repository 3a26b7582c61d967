"""Not served: penstock trains and writes whole weights; `penstock pack` makes weights of 4 and 8 bit for `penstock generate`."""

from .._refused import absent_below

__getattr__ = absent_below(__name__)

from . import utils as utils

from penstock._deepspeed import logger as logger

from . import log_dist as log_dist

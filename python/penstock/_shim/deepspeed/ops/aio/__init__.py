from penstock.ops.aio import *  # noqa: F403

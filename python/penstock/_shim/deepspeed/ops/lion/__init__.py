from penstock.ops.lion import DeepSpeedCPULion as DeepSpeedCPULion

from ..._refused import attributes_of


class FusedLion(DeepSpeedCPULion):
    """The same: an engine's updates are its own, on whatever device the model is computed."""

__getattr__ = attributes_of(__name__)

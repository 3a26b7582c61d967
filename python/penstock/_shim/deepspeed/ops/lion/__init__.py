from penstock.ops.lion import DeepSpeedCPULion as DeepSpeedCPULion


class FusedLion(DeepSpeedCPULion):
    """The same: an engine's updates are its own, on whatever device the model is computed."""

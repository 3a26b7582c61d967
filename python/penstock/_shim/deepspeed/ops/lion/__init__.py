from penstock.ops.lion import DeepSpeedCPULion as DeepSpeedCPULion

from penstock.ops.adam import DeepSpeedCPUAdam as DeepSpeedCPUAdam

from penstock.ops.adagrad import DeepSpeedCPUAdagrad as DeepSpeedCPUAdagrad

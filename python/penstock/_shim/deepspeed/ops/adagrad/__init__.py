from penstock.ops.adagrad import DeepSpeedCPUAdagrad as DeepSpeedCPUAdagrad

from ..._refused import attributes_of

__getattr__ = attributes_of(__name__)

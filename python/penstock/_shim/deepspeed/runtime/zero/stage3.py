from penstock._deepspeed import absent
from penstock._deepspeed import estimate_zero3_model_states_mem_needs_all_cold as estimate_zero3_model_states_mem_needs_all_cold
from penstock._deepspeed import estimate_zero3_model_states_mem_needs_all_live as estimate_zero3_model_states_mem_needs_all_live

from ..._refused import attributes_of

DeepSpeedZeroOptimizer_Stage3 = absent("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3", "deepspeed.initialize makes the engine, and its optimizer")

__getattr__ = attributes_of(__name__)

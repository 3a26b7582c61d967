"""DeepSpeed's functions over checkpoints and state directories, Penstock's and its own."""

from typing import List

from penstock._fp32 import checkpoint_files
from penstock._fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert_zero_checkpoint_to_fp32_state_dict
from penstock._fp32 import get_fp32_state_dict_from_zero_checkpoint as get_fp32_state_dict_from_zero_checkpoint
from penstock._fp32 import load_state_dict_from_zero_checkpoint as load_state_dict_from_zero_checkpoint
from penstock._fp32 import main


def get_optim_files(checkpoint_dir: str) -> List[str]:
    return checkpoint_files(checkpoint_dir, "_optim_states.pt$")


def get_model_state_files(checkpoint_dir: str) -> List[str]:
    return checkpoint_files(checkpoint_dir, "_model_states.pt$")


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    return get_model_state_files(checkpoint_dir)[0]


if __name__ == "__main__":
    main()

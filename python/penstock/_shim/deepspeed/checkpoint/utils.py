from typing import Any


def clone_tensors_for_torch_save(item: Any, device: Any = None) -> Any:
    """What the engine gives out are copies already."""
    return item

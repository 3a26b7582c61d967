"""Groups of ranks: one process trains."""


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_data_parallel_world_size() -> int:
    return 1

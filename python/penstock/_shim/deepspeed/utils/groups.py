"""Groups of ranks: there is that of all, which share the batch."""

from penstock._engine._ranks import world_size


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_data_parallel_world_size() -> int:
    return world_size(None)

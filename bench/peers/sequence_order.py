"""The order in which Penstock chooses sequences (models/data/dataset.h), for programs that are to see the same ones."""

SEED = 1  # of penstock train
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x):
    """splitmix64's finalizer."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 31)


def sequence_start(step, row, places):
    """Where a row of a step begins."""
    h = _mix((SEED + _GOLDEN) & _MASK)
    h = _mix(h ^ ((step + 2 * _GOLDEN) & _MASK))
    h = _mix(h ^ ((row + 3 * _GOLDEN) & _MASK))
    return (h * places) >> 64

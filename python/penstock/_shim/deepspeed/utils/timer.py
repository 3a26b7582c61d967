from penstock._deepspeed import absent

_INSTEAD = "wall_clock_breakdown in the configuration, and engine.report(), tell where the time of a step goes"
SynchronizedWallClockTimer = absent("deepspeed.utils.timer.SynchronizedWallClockTimer", _INSTEAD)
ThroughputTimer = absent("deepspeed.utils.timer.ThroughputTimer", _INSTEAD)

"""tensorboard, csv_monitor and wandb of the configuration are served by the engine, with its own values."""

from penstock._deepspeed import absent

_INSTEAD = (
    "tensorboard, csv_monitor and wandb in the configuration write loss, rate and loss scale; values of your own: "
    "torch.utils.tensorboard.SummaryWriter, csv.writer, wandb.log"
)
Monitor = absent("deepspeed.monitor.monitor.Monitor", _INSTEAD)
MonitorMaster = absent("deepspeed.monitor.monitor.MonitorMaster", _INSTEAD)

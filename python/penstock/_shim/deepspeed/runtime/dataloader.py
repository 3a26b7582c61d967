from penstock._deepspeed import absent

from ..utils import RepeatingLoader as RepeatingLoader

DeepSpeedDataLoader = absent("deepspeed.runtime.dataloader.DeepSpeedDataLoader", "the caller loads its data: torch.utils.data.DataLoader")

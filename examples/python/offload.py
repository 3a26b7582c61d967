"""A transformer whose AdamW lives on a drive, as scripts for torchao's CPUOffloadOptimizer and ColossalAI's HybridAdam become it.

    python offload.py DIRECTORY      a directory on the drive; it is left as it was found

With accumulation, clipping and a schedule; the losses are compared with torch.optim's.
"""

import functools
import sys

import torch

import penstock.optim


class Model(torch.nn.Module):
    def __init__(self, words=64, width=64):
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        self.body = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True), 2)
        self.head = torch.nn.Linear(width, words)

    def forward(self, x):
        return self.head(self.body(self.embed(x)))


def train(make_optimizer, steps=8, accumulate=2):
    torch.manual_seed(1)
    model = Model()
    optimizer = make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    losses = []
    for step in range(steps * accumulate):
        x = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), (x * 5 + 1).remainder(64).flatten()) / accumulate
        loss.backward()
        losses.append(loss.item() * accumulate)
        if step % accumulate < accumulate - 1:
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses


def main(directory):
    options = {"lr": 1e-3, "weight_decay": 0.1}
    expected = train(lambda parameters: torch.optim.AdamW(parameters, **options))
    ways = {
        "from torchao": {"fused": True, "state_dir": directory, "host_memory": "2MiB"},
        "from ColossalAI": {"nvme_offload_fraction": 1.0, "nvme_offload_dir": directory},
    }
    worst = 0.0
    for name, own in ways.items():
        losses = train(functools.partial(penstock.optim.AdamW, **options, **own))
        worst = max(worst, *[abs(a - b) / b for a, b in zip(losses, expected)])
        print(f"{name}: losses {losses[0]:.4f} to {losses[-1]:.4f}")
    print(f"at most {worst:.1e} from torch.optim's")
    return 0 if worst < 1e-5 else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))

"""A model whose optimizer states live on a drive: trains, saves, resumes, and compares itself with torch.optim.

    python optim.py DIRECTORY        a directory on the drive; it is left as it was found
"""

import os
import sys
import tempfile

import torch

import penstock.optim


def build_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))


def train(model, optimizer, first, steps):
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + first + step))
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(32, 256, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_drive(model, directory):
    return penstock.optim.AdamW(model.parameters(), lr=1e-3, state_dir=directory, host_memory="2MiB")


def main(directory):
    model = build_model()
    expected = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 0, 10)

    model = build_model()
    optimizer = on_drive(model, directory)
    losses = train(model, optimizer, 0, 5)
    print(f"{optimizer.stats()['drive_bytes'] >> 20} MiB of states on the drive, {optimizer.stats()['ring_bytes'] >> 20} MiB of buffers")
    with tempfile.TemporaryDirectory(dir=directory) as checkpoints:
        path = os.path.join(checkpoints, "checkpoint.pt")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        optimizer.close()

        # As another process would.
        saved = torch.load(path)
    model = build_model()
    optimizer = on_drive(model, directory)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"]
    losses += train(model, optimizer, 5, 5)

    worst = max(abs(a - b) / b for a, b in zip(losses, expected))
    print(f"losses {losses[0]:.4f} to {losses[-1]:.4f}; at most {worst:.1e} from torch.optim's")
    return 0 if worst < 1e-5 else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))

"""Small models for the engine's tests, and the same training in plain PyTorch."""

import copy

import penstock
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, scale=1.0):
        return x + scale * self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """An embedding, layers and a head that is tied to it; returns its loss, or its logits without targets."""

    def __init__(self, layers=4, width=32, words=50, dropout=0.0, tied=True):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.left_out = None  # the number of a layer

    def forward(self, x, targets=None):
        x = self.embed(x)
        for number, layer in enumerate(self.layers):
            if number != self.left_out:
                x = layer(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def net(seed=0, **options):
    torch.manual_seed(seed)
    return Net(**options)


def batches(count, size=4, length=8, words=50, seed=1):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        x = torch.randint(0, words, (size, length), generator=generator)
        made.append({"x": x, "targets": (x * 7 + 3) % words})
    return made


def make(model, directory, **options):
    """An engine of the model, clipped and with AdamW unless `options` say otherwise."""
    options.setdefault("optimizer", torch.optim.AdamW(model.parameters(), lr=1e-2))
    options.setdefault("gradient_clipping", 1.0)
    return penstock.initialize(model=model, state_dir=str(directory), **options)[0]


def step(engine, batch):
    """One step of one batch, as scripts make it; returns the loss."""
    loss = engine(**batch)
    engine.backward(loss)
    engine.step()
    return loss.item()


def plain_losses(model, groups, steps, clip=1.0, schedule=None, per_step_seed=True):
    """Losses of torch.optim.AdamW; `steps` has a list of micro-batches for each. Returns (losses, the trained copy)."""
    model = copy.deepcopy(model)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{**group, "params": [named[name] for name in group["params"]]} for group in groups], lr=1e-2)
    scheduler = schedule(optimizer) if schedule else None
    losses = []
    for number, step in enumerate(steps):
        if per_step_seed:
            torch.manual_seed(number)
        optimizer.zero_grad()
        total = 0.0
        for batch in step:
            loss = model(**batch) / len(step)
            loss.backward()
            total += loss.item()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(total)
    return losses, model


def all_names(model):
    return [{"params": [name for name, _ in model.named_parameters()]}]

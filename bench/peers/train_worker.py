"""One contestant of bench/peers/train, in the environment with torch, transformers and deepspeed.

    train_worker.py make MODEL TOKENS LAYERS HIDDEN HEADS VOCAB CONTEXT
    train_worker.py torch|deepspeed|torchao|colossalai|penstock MODEL TOKENS CONFIG BATCH SEQ STEPS

Prints a line of JSON a step: loss, seconds, bytes read and written by the kernel for this process, peak RSS.
"""

import json
import os
import pathlib
import sys
import time

import numpy
import torch

import peers
from sequence_order import SEED, sequence_start


def batches(tokens, batch, seq, steps):
    """Per step: ids and labels as transformers wants them, which shifts labels itself."""
    data = numpy.fromfile(tokens, dtype=numpy.uint16).astype(numpy.int64)
    for step in range(1, steps + 1):
        starts = [sequence_start(step, row, len(data) - seq) for row in range(batch)]
        yield torch.from_numpy(numpy.stack([data[start : start + seq + 1] for start in starts]))


def make(model, tokens, layers, hidden, heads, vocab, context):
    import transformers

    torch.manual_seed(SEED)
    # No dropout: the contestants draw differently.
    config = transformers.GPT2Config(
        vocab_size=vocab, n_positions=context, n_embd=hidden, n_layer=layers, n_head=heads, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    made = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():  # what bf16 holds: masters and weights begin equal for all
        for parameter in made.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    made.save_pretrained(model)
    rng = numpy.random.default_rng(SEED)
    # Words of a small language: something to learn.
    words = rng.integers(0, vocab, size=(512, 6), dtype=numpy.int64)
    words[rng.integers(0, 512, size=1 << 16)].reshape(-1).astype(numpy.uint16).tofile(tokens)
    print(json.dumps({"parameters": sum(p.numel() for p in made.parameters())}))


def load(model, dtype):
    import transformers

    made = transformers.GPT2LMHeadModel.from_pretrained(model).to(dtype)
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made.config.use_cache = False
    return made.train()


def loss_of(model, rows):
    logits = model(input_ids=rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))


class Plain:
    """bf16 weights, fp32 masters, torch's AdamW, everything in memory."""

    mends = ()

    def __init__(self, model, config):
        self.model = load(model, torch.bfloat16)
        self.clip = config["gradient_clipping"]
        self.parameters = list(self.model.parameters())
        self.masters = [p.detach().float() for p in self.parameters]
        wanted = config["optimizer"]["params"]
        self.optimizer = self.make_optimizer(lr=wanted["lr"], betas=tuple(wanted["betas"]), eps=wanted["eps"], weight_decay=wanted["weight_decay"])

    def make_optimizer(self, **options):
        return torch.optim.AdamW(self.masters, **options)

    def step(self, rows):
        loss = loss_of(self.model, rows)
        loss.backward()
        for master, parameter in zip(self.masters, self.parameters):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters):
                parameter.copy_(master)
        return loss.item()


class TorchAO(Plain):
    """The masters and moments of torch's AdamW, offloaded."""

    def make_optimizer(self, **options):
        from torchao.optim import CPUOffloadOptimizer

        return CPUOffloadOptimizer(self.masters, torch.optim.AdamW, **options)


class ColossalAI(Plain):
    """Masters in memory, both moments in files."""

    def make_optimizer(self, **options):
        from colossalai.nn.optimizer import CPUAdam

        return CPUAdam(self.masters, nvme_offload_fraction=1.0, nvme_offload_dir=os.environ["SWAP_DIR"], **options)


class DeepSpeed:
    def __init__(self, model, config):
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000))
        import deepspeed

        self.mends = mend_repeated_swap_in()
        deepspeed.init_distributed("gloo")
        self.engine, *_ = deepspeed.initialize(model=load(model, torch.float32), config=config)

    def step(self, rows):
        loss = loss_of(self.engine, rows)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()


class Penstock(DeepSpeed):
    """DeepSpeed's script, with another initialize."""

    mends = ()

    def __init__(self, model, config):
        import penstock

        self.engine, *_ = penstock.initialize(model=load(model, torch.float32), config=config, overwrite=True)


def mend_repeated_swap_in():
    """A weight that is used twice in the window of the prefetch is asked for twice, and the swapper asserts."""
    from deepspeed.runtime.swap_tensor import partitioned_param_swapper

    swapper = partitioned_param_swapper.AsyncPartitionedParameterSwapper
    swap_in = swapper.swap_in
    met = []

    def once(self, params, async_op=True, swap_in_buffers=None):
        left = [p for p in {id(p): p for p in params}.values() if p.ds_id not in self.param_id_to_buffer_id]
        if len(left) < len(params) and not met:
            met.append("DeepSpeed's NVMe prefetch asserts on a parameter that is asked for twice; asked for once")
        if left:
            swap_in(self, left, async_op=async_op, swap_in_buffers=swap_in_buffers)

    swapper.swap_in = once
    return met


def main():
    what, model, tokens, *rest = sys.argv[1:]
    if what == "make":
        make(model, tokens, *map(int, rest))
        return
    config = json.loads(pathlib.Path(rest[0]).read_text())
    batch, seq, steps = map(int, rest[1:])
    torch.manual_seed(SEED)
    runner = {"torch": Plain, "torchao": TorchAO, "colossalai": ColossalAI, "deepspeed": DeepSpeed, "penstock": Penstock}[what](model, config)
    before = peers.own_usage()
    for step, rows in enumerate(batches(tokens, batch, seq, steps), 1):
        at = time.perf_counter()
        loss = runner.step(rows)
        seconds = time.perf_counter() - at
        after = peers.own_usage()
        moved = after["read"] + after["written"] - before["read"] - before["written"]
        line = {"step": step, "losses": loss, "seconds": seconds, "bytes": moved, "rss": after["rss"], "mends": list(runner.mends)}
        print(json.dumps(line), flush=True)
        before = after


if __name__ == "__main__":
    main()

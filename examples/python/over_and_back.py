"""One script on both sides: DeepSpeed begins, Penstock goes on, DeepSpeed goes on from there.

    python over_and_back.py --until 20 --save there                              # DeepSpeed
    python -m penstock.run over_and_back.py --until 40 --load there --save back   # Penstock: the same file, not a line changed
    python over_and_back.py --until 60 --load back                               # DeepSpeed again

Prints the loss of every step, from 1 on. A run that never moves (`--until 60`) has the same to some 1e-6.
"""

import argparse
import os
import pathlib

import deepspeed
import torch
import transformers

SEQ = 64


def config(load):
    """ZeRO-3, fp32. What Penstock writes for DeepSpeed is the universal format, which DeepSpeed reads only if its config asks for it."""
    universal = bool(load) and (pathlib.Path(load) / "latest_universal").exists()
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "checkpoint": {"load_universal": universal},
    }


def batch(step):
    """Two rows of this file's bytes. A step always has the same ones, so a run that goes on needs no state of a data loader."""
    text = torch.frombuffer(bytearray(pathlib.Path(__file__).read_bytes()), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - SEQ, (2,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + SEQ] for start in starts])


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--until", type=int, required=True, help="the last step")
    parse.add_argument("--load", help="a directory with a checkpoint")
    parse.add_argument("--save", help="a directory for a checkpoint of the last step")
    given = parse.parse_args()
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(name, value)

    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=256, n_positions=SEQ, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )
    engine, *_ = deepspeed.initialize(model=model, config=config(given.load))
    if given.load:
        engine.load_checkpoint(given.load)
    for step in range(engine.global_steps + 1, given.until + 1):
        rows = batch(step)
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        engine.step()
        print(f"step {step}: loss {loss.item():.7f}", flush=True)
    if given.save and hasattr(engine, "export_checkpoint"):
        engine.export_checkpoint(given.save)  # Penstock, for DeepSpeed
    elif given.save:
        engine.save_checkpoint(given.save)


if __name__ == "__main__":
    main()

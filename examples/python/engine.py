"""An unmodified transformers model whose weights and states are larger than the memory that it is given.

    python engine.py DIRECTORY [STEPS]     again with the same directory: goes on where it was, also after kill -9
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import penstock


def main(directory, steps):
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=256, n_head=4, vocab_size=512, n_positions=128, bos_token_id=0, eos_token_id=0))
    engine, _, _, _ = penstock.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        state_dir=directory,
        host_memory="48MiB",
        gradient_clipping=1.0,
        resume="auto",
    )
    text = torch.arange(8 * 128).view(8, 128) * 7 % 512
    engine.eval()
    with torch.no_grad():
        engine(input_ids=text[:1])  # the first forward makes the state, or finds it
    plan = engine.plan()
    print(f"{plan['state_bytes'] >> 20} MiB of state, {plan['host_memory_bytes'] >> 20} MiB of memory, from step {engine.global_steps}")
    engine.train()
    while engine.global_steps < steps:
        batch = text[torch.randint(0, 8, (2,))]
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        print(f"step {engine.global_steps}: loss {loss.item():.4f}, {engine.last_step['seconds']:.2f} s", flush=True)
    engine.eval()
    print("says", engine.generate(text[:1, :4], max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist())
    engine.close()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10)

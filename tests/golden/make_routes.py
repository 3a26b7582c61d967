"""Writes tests/golden/routes.json: which experts the routers of a small mixture took, token by token of a text that it was not trained on.

A Qwen 3 MoE learns the sources of Python's standard library, with transformers' loss of balance, in words of a tokenizer that is trained on them too.
tests/golden/make routes runs it: a quarter of an hour on one core. Another Python, or another release of torch, writes other routes.
"""
import json
import os
import pathlib
import random
import sys
import sysconfig
import time

import tokenizers
import torch
import transformers

OUT = pathlib.Path(__file__).parent / "routes.json"
LAYERS, EXPERTS, CHOSEN = 6, 64, 4
WORDS, ROWS, LENGTH, STEPS = 2048, 8, 256, 400
TEXTS, TOKENS = 6, 256
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"  # an expert each


def sources():
    """Files of the standard library in a random order: those to learn from, and others."""
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    files = [file for file in files if not {"site-packages", "test", "tests"} & set(file.parts) and file.stat().st_size > 10_000]
    random.Random(1).shuffle(files)
    return files[TEXTS:], files[:TEXTS]


def words_of(files):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=WORDS, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train([str(file) for file in files], trainer)
    return lambda file: tokenizer.encode(file.read_text(encoding="utf-8", errors="replace")).ids


def make():
    torch.manual_seed(1)
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=WORDS, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, norm_topk_prob=True, decoder_sparse_step=1,
            max_position_embeddings=1024, output_router_logits=True, router_aux_loss_coef=0.01, tie_word_embeddings=True,
        )
    )  # fmt: skip


def train(model, data):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=STEPS, pct_start=0.1)
    begun = time.time()
    for step in range(STEPS):
        starts = torch.randint(0, len(data) - LENGTH, (ROWS,))
        rows = torch.stack([data[start : start + LENGTH] for start in starts])
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 19:
            print(f"step {step + 1} of {STEPS}: loss {loss.item():.3f}, {time.time() - begun:.0f} s", file=sys.stderr, flush=True)
    return loss.item()


@torch.no_grad()
def routes_of(model, tokens):
    """By layer, the experts of one token after the other, as letters."""
    taken = []
    hooks = [layer.mlp.gate.register_forward_hook(lambda _, __, out: taken.append(out[2])) for layer in model.model.layers]
    model.eval()(input_ids=torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return ["".join(LETTERS[expert] for token in of.tolist() for expert in sorted(token)) for of in taken]


def main():
    torch.set_num_threads(int(os.environ.get("THREADS", "1")))
    torch.use_deterministic_algorithms(True)
    learnt, others = sources()
    words = words_of(learnt)
    model = make()
    loss = train(model, torch.tensor([word for file in learnt for word in words(file)]))
    found = {
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}", "loss": round(loss, 3),
        "layers": LAYERS, "experts": EXPERTS, "chosen": CHOSEN, "letters": LETTERS, "texts": [routes_of(model, words(file)[:TOKENS]) for file in others],
    }  # fmt: skip
    OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

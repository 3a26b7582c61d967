"""A mixture of experts trained by an engine whose state is on the drive, beside plain PyTorch: losses, seconds and bytes a step.

    python bench/python_mixture.py DIRECTORY [--family qwen3_moe] [--memory 128MiB] [--steps 20] [--rows 2] [--length 64]

Transformers' module in fp32, AdamW, clipping at 1.0, byte by byte of Python's own sources. Prints a row for each: the largest difference of a loss from plain
PyTorch's, medians of seconds and bytes of the later half of the steps, and the share of experts that a step's routers chose. Ends with 1 where a loss is 1e-5
or more from plain PyTorch's.
"""

import argparse
import copy
import pathlib
import statistics
import sys
import sysconfig
import time

import penstock
import torch
import transformers

FAMILIES = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "head_dim": 32, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", {"num_experts": 16, "num_experts_per_tok": 4, "clip_qkv": None}),
}


def make(family):
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=256, hidden_size=256, intermediate_size=256, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=1024, output_router_logits=True, pad_token_id=None, bos_token_id=None, eos_token_id=None, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


def batches(steps, rows, length):
    text = torch.tensor(list((pathlib.Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()))
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - length, (rows,), generator=generator)
        yield torch.stack([text[start : start + length] for start in starts])


def experts_used(model, used):
    """Appends, of each layer's router, how many experts of all it chose."""
    def note(_, __, out):
        used.append(len(out[2].unique()) / out[0].shape[-1])

    return [layer.mlp.gate.register_forward_hook(note) for layer in model.model.layers]


def train(data, forward, backward, step):
    losses, seconds = [], []
    for rows in data:
        begun = time.perf_counter()
        loss = forward(input_ids=rows, labels=rows).loss
        backward(loss)
        step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begun)
    return losses, seconds


def plain(model, data):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    used = []
    hooks = experts_used(model, used)

    def step():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    losses, seconds = train(data, model, torch.Tensor.backward, step)
    for hook in hooks:
        hook.remove()
    return losses, seconds, statistics.mean(used)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_moe")
    parser.add_argument("--memory", default="128MiB")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model = make(given.family)
    data = list(batches(given.steps, given.rows, given.length))
    expected, plain_seconds, used = plain(copy.deepcopy(model), data)
    options = {"state_dir": given.directory, "host_memory": given.memory, "gradient_clipping": 1.0, "overwrite": True, "progress": False}
    with penstock.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), **options)[0] as engine:
        losses, seconds = train(data, engine, engine.backward, engine.step)
        report = engine.report()
    parameters, later = report["params"], given.steps // 2
    moved = statistics.median(step["nvme_read_bytes"] + step["nvme_write_bytes"] for step in report["steps"][later:])
    off = max(abs(a - b) for a, b in zip(losses, expected))
    print(f"{given.family}, {parameters / 1e6:.1f}M parameters, {given.rows} x {given.length} tokens, {given.steps} steps; a step's routers chose {used:.0%} of the experts\n")
    print("| | largest difference of a loss | first and last loss | s a step | MB a step | bytes a parameter | memory managed |\n|---|---|---|---|---|---|---|")
    print(f"| plain PyTorch | - | {expected[0]:.4f}, {expected[-1]:.4f} | {statistics.median(plain_seconds[later:]):.2f} | 0 | 0 | - |")
    print(
        f"| penstock.initialize, {given.memory} | {off:.1e} | {losses[0]:.4f}, {losses[-1]:.4f} | {statistics.median(seconds[later:]):.2f} | "
        f"{moved / 1e6:.0f} | {moved / parameters:.1f} | {report['peak_managed_bytes'] >> 20} MiB |"
    )
    return 0 if off < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())

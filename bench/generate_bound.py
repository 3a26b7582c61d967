#!/usr/bin/env python3
"""How much of the drive `penstock generate` gets: tokens a second beside a raw pass over the same bytes.

    bench/generate_bound.py DIR [--pairs 7] [--batch 1] [--host-memory 400MiB] [--tokens 8] [--kv auto] [--penstock PATH]

In turns, since drives drift: ds_io reads as many bytes as the model has past the page cache, with nothing else
to do, from a file of its own (made once, in --directory, which is to be on the model's drive); then `penstock
generate` makes --tokens tokens for each of --batch prompts. The bound is what a pass of it reads, at the rate of
the raw passes before and after. On an idle machine: who else computes takes time from one of the two. Prints a
line for each pair and the medians, as JSON with --json.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile


def raw_pass(args, directory, size):
    """Bytes a second of ds_io over a file of so many bytes on the same drive."""
    result = pathlib.Path(directory) / "raw.json"
    command = [args.ds_io, "--folder", directory, "--io_size", size, "--read", "--loops", 1, "--warmup_loops", 0,
               "--json", result]
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    return json.loads(result.read_text())["gbps_median"] * 1e9


def generate(args, directory):
    """The report of one run."""
    prompts = pathlib.Path(directory) / "prompts.jsonl"
    report = pathlib.Path(directory) / "report.json"
    with open(prompts, "w") as file:
        for i in range(args.batch):
            file.write(json.dumps({"tokens": [1 + (i * 7 + j * 13) % 200 for j in range(16)]}) + "\n")
    command = [args.penstock, "generate", args.model, "--prompts", prompts, "--tokens", args.tokens,
               "--batch", args.batch, "--host-memory", args.host_memory, "--kv", args.kv, "--kv-dir", directory,
               "--report", report, "--quiet"]
    if args.threads:
        command += ["--threads", args.threads]
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    return json.loads(report.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--host-memory", default="400MiB")
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--penstock", default="build/release/bin/penstock")
    parser.add_argument("--ds-io", default="build/release/bin/ds_io")
    parser.add_argument("--directory", default=".", help="of the raw file and of keys and values")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    files = sorted(str(path) for path in pathlib.Path(args.model).glob("*.safetensors"))
    if not files:
        parser.error(f"{args.model}: no safetensors there")
    rows = []
    size = sum(os.path.getsize(path) for path in files) >> 20 << 20
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        before = raw_pass(args, directory, size)
        for _ in range(args.pairs):
            report = generate(args, directory)
            after = raw_pass(args, directory, size)
            raw = (before + after) / 2
            before = after
            if report["decode_passes"] == 0:
                parser.error("no pass decoded: give more --tokens")
            pass_seconds = report["decode_seconds"] / report["decode_passes"]
            bound_seconds = report["decode_read_bytes"] / report["decode_passes"] / raw
            rows.append({"raw_gb_per_s": raw / 1e9, "gb_per_s": report["decode_read_bytes_per_s"] / 1e9,
                         "tokens_per_s": report["decode_tokens_per_second"],
                         "of_bound": bound_seconds / pass_seconds if pass_seconds > 0 else 0,
                         "predicted_over_measured": report["predicted_pass_seconds"] / pass_seconds,
                         "peak_rss_mib": report["peak_rss_bytes"] / 2**20})
            if not args.json:
                print("  ".join(f"{key} {value:.3f}" for key, value in rows[-1].items()), flush=True)
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    if args.json:
        print(json.dumps({"pairs": rows, "median": medians}, indent=2))
    else:
        print("median:  " + "  ".join(f"{key} {value:.3f}" for key, value in medians.items()))


if __name__ == "__main__":
    main()

"""Trains every class of transformers that can be made tiny, with plain torch and with penstock.initialize, and says where they differ.

usage: transformers_sweep.py [-j N] [--sample N [--seed N]] [--out FILE] [--table FILE] [--list] [CLASS ...]     (all of them without a name)

Each class is a process of its own. What becomes of one: same (to 1e-5 of the loss, four steps of AdamW, or of SGD where rounding alone
parts two plain trainings), refused, failed, differs, hung, died, or not made: transformers computes no loss of it here, or it wants a
library that is not there. Exits with 1 where any differs, fails, hangs
or dies. Limits are of processor time, so that a busy machine changes nothing. --sample draws classes at random: a part that stands for the
whole. A class that --out has already is not done again, so a sweep that was stopped goes on. --table writes what came of all of them in
Markdown, with the date.
"""

from __future__ import annotations

import argparse
import collections
import copy
import datetime
import faulthandler
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from typing import Any, Callable, Dict, List

import torch
import transformers

import penstock
import transformers_tiny as tiny

STEPS = 4
PATIENCE = 20  # times its processor time is what a class may take by the clock
RATE = 1e-3
TOLERANCE = 1e-5


def classes() -> List[str]:
    """Names of all classes of models, one of each model's that has the most in it first."""
    from transformers.models.auto import modeling_auto

    listed: Dict[str, str] = {}
    for name, mapping in vars(modeling_auto).items():
        if name.endswith("MAPPING_NAMES") and name != "CONFIG_MAPPING_NAMES":
            for value in mapping.values():
                for each in value if isinstance(value, (list, tuple)) else [value]:
                    listed.setdefault(each, name)
    heads = re.compile(r"(Model|Head|For[A-Z]\w+|Models)$")
    no_models = re.compile(r"PreTrained|Pretrained|^Auto|DataCollator|DataFormat|PermuteForRope|^RoFormerLayer$|^Bayesian")
    for each in dir(transformers):
        if each[0].isupper() and heads.search(each) and not no_models.search(each) and not each.endswith(("Config", "Processor", "Tokenizer")):
            listed.setdefault(each, "")
    return [each for each in listed if not no_models.search(each)]


def seeded(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    import numpy

    numpy.random.seed(number)


def trained(call: Callable[..., Any], backward: Callable[[torch.Tensor], None], optimizer: Any, batch: Dict[str, Any]) -> List[float]:
    losses = []
    for number in range(STEPS):
        seeded(number)
        loss = tiny.loss_of(call(**copy.deepcopy(batch)))
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def apart(found: List[float], expected: List[float]) -> float:
    if len(found) != len(expected) or any(each != each for each in [*found, *expected]):
        return float("inf")
    return max(abs(a - b) / max(abs(b), 1e-2) for a, b in zip(found, expected))


def check(name: str, directory: str, gentle: bool = False) -> Dict[str, Any]:
    """What became of the class. gentle: with SGD, for a model in which AdamW makes much of the last bits of gradients that are zero."""

    def optimizer_of(parameters: List[Any]) -> Any:
        return torch.optim.SGD(parameters, lr=RATE / 100) if gentle else torch.optim.AdamW(parameters, lr=RATE)

    kind = getattr(transformers, name)
    begun = time.time()
    model = batch = None
    reasons = []
    try:
        for model, level in tiny.tiny_model(kind):
            try:
                batch = tiny.tiny_batch(model, name)
                break
            except tiny.NotMade as error:
                reasons.append(f"level {level}: {error}")
    except tiny.NotMade as error:
        reasons.append(str(error))
    if batch is None:
        return {"kind": "not made", "why": " // ".join(reasons)[:1500]}
    count = sum(each.numel() for each in model.parameters())
    shapes = {each: list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__ for each, value in batch.items()}
    about = {"level": level, "reasons": reasons, "parameters": count, "batch": shapes}

    original = copy.deepcopy(model)

    def plain(noise: float = 0.0) -> Any:
        torch.manual_seed(0)
        other = copy.deepcopy(original)
        with torch.no_grad():
            for each in other.parameters():
                if noise:
                    each.mul_(1 + noise * torch.randn_like(each))
        return other, lambda loss: loss.backward(), optimizer_of([each for each in other.parameters() if each.requires_grad])

    expected = trained(*plain(), batch)
    about["losses"] = expected
    if any(each != each for each in expected):
        return {"kind": "not made", "why": "plain training gives NaN", **about}
    notes: List[str] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = optimizer_of([each for each in model.parameters() if each.requires_grad])
            engine = penstock.initialize(model=model, optimizer=optimizer, state_dir=directory, progress=False)[0]
            with engine:
                found = trained(engine, engine.backward, engine, batch)
                about["blocks"] = len(engine._given.blocks)
                about["resident"] = sum(each.numel() for block in engine._given.blocks if block.resident for _, each in block.parameters)
            notes = [str(each.message) for each in caught if "penstock" in str(each.filename)]
    except Exception as error:  # noqa: B902
        refused = "penstock" in type(error).__module__ or isinstance(error, (ValueError, TypeError)) and "penstock" in traceback.format_exc()[-600:]
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return {"kind": "refused" if refused else "failed", "why": why, "trace": traceback.format_exc()[-6000:], **about}
    about["found"], about["apart"], about["notes"] = found, apart(found, expected), notes
    about["seconds"] = time.time() - begun
    if about["apart"] <= TOLERANCE:
        return {"kind": "same", **about}
    noisy = trained(*plain(noise=1e-7), batch)
    about["noise"] = apart(noisy, expected)
    if about["noise"] > 0.1 * about["apart"] and not gentle:
        return {**check(name, directory + "-gentle", gentle=True), "gently": about["apart"]}
    return {"kind": "differs", "why": f"{about['apart']:.2e} apart: {found} and {expected}", **about}


def child(name: str, directory: str, memory: int, limit: int) -> Dict[str, Any]:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 10))
    transformers.logging.set_verbosity_error()
    resource.setrlimit(resource.RLIMIT_DATA, (memory << 30, memory << 30))
    try:
        return check(name, directory)
    except (tiny.NotMade, ImportError, MemoryError, AttributeError) as error:
        return {"kind": "not made", "why": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", "trace": traceback.format_exc()[-3000:]}
    except Exception as error:  # noqa: B902
        return {"kind": "not made", "why": f"plain: {type(error).__name__}: {' '.join(str(error).split())[:500]}", "trace": traceback.format_exc()[-3000:]}


def prepare() -> None:
    """Imports what every class needs, before processes are made of this one."""
    import torch._dynamo  # noqa: F401 - an optimizer's first step would
    import torch.utils.checkpoint  # noqa: F401
    import transformers.modeling_utils  # noqa: F401

    torch.set_num_threads(1)
    config = transformers.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.ones(1, 4, dtype=torch.long)
    trained(model, lambda loss: loss.backward(), torch.optim.AdamW(model.parameters()), {"input_ids": ids, "labels": ids})


def begin(name: str, where: str, memory: int, limit: int) -> int:
    process = os.fork()
    if process:
        return process
    os.setsid()
    stacks = open(os.path.join(where, "stacks"), "w")
    faulthandler.dump_traceback_later(PATIENCE * limit - 3, exit=False, file=stacks)
    faulthandler.register(signal.SIGXCPU, file=stacks, chain=True)
    quiet = os.open(os.path.join(where, "log"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    code = 1
    try:
        found = child(name, os.path.join(where, "state"), memory, limit)
        with open(os.path.join(where, "result"), "w") as file:
            json.dump(found, file)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


VERSIONS = f"transformers {transformers.__version__}, torch {torch.__version__}"


def read(path: str) -> Dict[str, Dict[str, Any]]:
    """What an earlier sweep has written there."""
    if not path or not os.path.exists(path):
        return {}
    with open(path) as file:
        return {found.pop("class"): found for found in map(json.loads, file)}


def write_table(path: str, results: Dict[str, Dict[str, Any]]) -> None:
    kinds = collections.Counter(found["kind"] for found in results.values())
    made = sum(kinds.values()) - kinds["not made"]
    with open(path, "w") as file:
        file.write(f"{datetime.date.today()}, {VERSIONS}, penstock {penstock.__version__}: {len(results)} classes, {made} of them made and given a loss.\n\n")
        file.write("| what became of it | classes | of those made |\n|---|---|---|\n")
        for kind, number in kinds.most_common():
            share = "" if kind == "not made" else f"{number / made:.1%}"
            file.write(f"| {kind} | {number} | {share} |\n")
        file.write("\n| class | what became of it | why |\n|---|---|---|\n")
        for name, found in sorted(results.items()):
            if found["kind"] not in ("same", "not made"):
                why = found.get("why", "").replace("|", "/")[:200]
                file.write(f"| {name} | {found['kind']} | {why} |\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="classes; a pattern begins with /")
    parser.add_argument("-j", type=int, default=2, dest="jobs")
    parser.add_argument("--out", default="", help="JSON lines, one of each class")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--sample", type=int, default=0, help="as many classes, drawn at random")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--table", default="", help="a Markdown file")
    parser.add_argument("--seconds", type=int, default=90, help="of processor time that a class may take")
    parser.add_argument("--memory", type=int, default=8, help="GiB that a class may take")
    given = parser.parse_args()
    names = []
    everything = classes()
    for each in given.names or ["/"]:
        names += [known for known in everything if re.search(each[1:], known)] if each.startswith("/") else [each]
    if given.sample:
        names = random.Random(given.seed).sample(sorted(set(names)), min(given.sample, len(set(names))))
    if given.list:
        print("\n".join(names))
        return 0
    before = read(given.out)
    results = {name: before[name] for name in names if name in before}
    out = open(given.out, "a") if given.out else None
    waiting, running = [name for name in names if name not in results], {}
    if waiting:
        prepare()
    base = tempfile.mkdtemp(prefix="sweep")
    while waiting or running:
        while waiting and len(running) < given.jobs:
            name = waiting.pop(0)
            where = os.path.join(base, name)
            os.makedirs(where)
            running[begin(name, where, given.memory, given.seconds)] = (name, where, time.time())
        time.sleep(0.02)
        for process, (name, where, begun) in list(running.items()):
            done, status = os.waitpid(process, os.WNOHANG)
            if not done and time.time() - begun < PATIENCE * given.seconds:
                continue
            if not done:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                status = 0
            if not done or os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
                taken = f"{given.seconds} s of processor time" if done else f"{PATIENCE * given.seconds} s"
                found = {"kind": "hung", "why": f"more than {taken}", "trace": open(os.path.join(where, "stacks")).read()[:5000]}
            elif os.path.exists(os.path.join(where, "result")):
                found = json.load(open(os.path.join(where, "result")))
            else:
                found = {"kind": "died", "why": f"status {status}: {open(os.path.join(where, 'log')).read()[-1500:]}"}
            del running[process]
            shutil.rmtree(where, ignore_errors=True)
            results[name] = found
            print(f"{name:48} {found['kind']:9} {time.time() - begun:5.1f}s {found.get('why', '')[:260]}", flush=True)
            if out:
                out.write(json.dumps({"class": name, **found}) + "\n")
                out.flush()
    shutil.rmtree(base, ignore_errors=True)
    kinds = collections.Counter(found["kind"] for found in results.values())
    print(f"{VERSIONS}: " + ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items())))
    if given.table:
        write_table(given.table, results)
    return 1 if any(kinds[each] for each in ("differs", "failed", "hung", "died")) else 0


if __name__ == "__main__":
    sys.exit(main())

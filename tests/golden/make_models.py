"""Writes the golden files; tests/golden/make says what with. The same releases write the same bytes."""
import copy
import inspect
import json
import logging
import os
import random
import tempfile
import warnings

import deepspeed
import hjson
import torch
import transformers
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
torch.set_num_threads(1)
OUT = os.path.dirname(os.path.abspath(__file__))
STEPS = 100  # of the run that "auto" keys are filled for
WARMUP = 10  # what Penstock's tenth of them comes to


def write(name, content):
    made = {"made_with": {"deepspeed": deepspeed.__version__, "transformers": transformers.__version__,
                          "hjson": hjson.__version__}}
    made.update(content)
    # One entry a line, so that differences can be read.
    text = json.dumps(made, ensure_ascii=True)
    for key, value in content.items():
        if isinstance(value, list):
            lines = ",\n  ".join(json.dumps(entry, ensure_ascii=True) for entry in value)
            text = text.replace(json.dumps({key: value}, ensure_ascii=True)[1:-1], f'\n"{key}": [\n  {lines}\n]')
    json.loads(text)
    with open(os.path.join(OUT, name), "w") as file:
        file.write(text + "\n")


# ---- GPT-2 by the keys of its config.json.

SHAPE = {"model_type": "gpt2", "n_layer": 2, "n_embd": 12, "n_head": 3, "n_positions": 16, "vocab_size": 11}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def formula(model):
    """Weights that a test can make again: exact in fp32."""
    with torch.no_grad():
        state = {n: v for n, v in model.state_dict().items() if n != "lm_head.weight"}
        for name, value in state.items():
            salt = sum((i + 1) * b for i, b in enumerate(name.encode())) % 65521
            e = torch.arange(value.numel(), dtype=torch.int64)
            x = ((e * 2654435761 + salt * 40503 + 12345) % 2**32) // 65536
            drawn = x.double() / 65536 - 0.5
            if name.endswith("weight") and ".ln_" in name:
                drawn = 1 + drawn / 4
            value.copy_(drawn.view(value.shape))


def tokens(batch, length, vocab):
    return torch.tensor([[(7 * i + 5 * r + i * i * (r + 1)) % vocab for i in range(length + 1)] for r in range(batch)])


def gpt2(keys, batch=2, length=8):
    config = transformers.GPT2Config(**keys, bos_token_id=None, eos_token_id=None, attn_implementation="eager")
    model = transformers.GPT2LMHeadModel(config)
    if not config.reorder_and_upcast_attn:  # which insists on fp32
        model = model.double()
    formula(model)
    ids = tokens(batch, length, config.vocab_size)
    loss_of = lambda: torch.nn.functional.cross_entropy(
        model(ids[:, :-1]).logits.view(-1, config.vocab_size), ids[:, 1:].reshape(-1))
    model.eval()
    evaluation = loss_of().item()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses, norms = [], []
    for _ in range(3):
        loss = loss_of()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"config": keys, "batch": batch, "length": length, "evaluation": evaluation, "losses": losses,
            "norms": norms}


def write_gpt2():
    base = {**SHAPE, **STILL}
    cases = [gpt2(base)]
    for name in ("gelu", "gelu_python", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "quick_gelu", "relu", "silu",
                 "swish", "tanh"):
        cases.append(gpt2({**base, "activation_function": name}))
    for keys in ({"layer_norm_epsilon": 0.1}, {"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True},
                 {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
                 {"reorder_and_upcast_attn": True}, {"n_inner": 20}, {"n_inner": 48}, {"n_inner": None},
                 {"initializer_range": 0.5}):
        cases.append(gpt2({**base, **keys}))
    long = {**base, "n_positions": 300, "scale_attn_by_inverse_layer_idx": True, "layer_norm_epsilon": 1e-3}
    cases.append(gpt2(long, batch=1, length=300))
    defaults = transformers.GPT2Config(**{k: v for k, v in SHAPE.items() if k != "model_type"}).to_dict()
    kept = ("model_type", "n_layer", "n_embd", "n_head", "n_positions", "vocab_size", "n_inner", "activation_function",
            "layer_norm_epsilon", "initializer_range", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
            "reorder_and_upcast_attn", "resid_pdrop", "embd_pdrop", "attn_pdrop", "tie_word_embeddings")
    # All keys that the class has of its own, so that a new one is seen.
    own = sorted(set(transformers.GPT2Config.__dataclass_fields__) -
                 set(transformers.PreTrainedConfig.__dataclass_fields__))
    write("gpt2.json", {"cases": cases, "given": SHAPE, "defaults": {k: defaults[k] for k in kept}, "keys": own,
                        "activations": sorted(transformers.activations.ACT2CLS)})


# ---- Configurations: what "auto" becomes, what DeepSpeed makes of the rest.

CLASSES = {"adam": DeepSpeedCPUAdam, "adamw": DeepSpeedCPUAdam, "adagrad": DeepSpeedCPUAdagrad,
           "lion": DeepSpeedCPULion, "sgd": torch.optim.SGD}
SCHEDULES = {n: getattr(lr_schedules, n)
             for n in ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")}
RATE = 0.25  # of an optimizer where the configuration has none
UPDATES = [1, 2, 3, 5, 8, 11, 12, 13, 14, 21, 22, 33, 50, 51, 52, 60, 90, 91, 92, 99, 100, 101, 102, 120]


def defaults_of(cls):
    return {n: p.default for n, p in inspect.signature(cls.__init__).parameters.items()
            if p.default is not inspect.Parameter.empty}


def filled(config):
    """`config` with every "auto" that Hugging Face's Trainer fills."""
    with tempfile.TemporaryDirectory() as directory:
        args = transformers.TrainingArguments(output_dir=directory, use_cpu=True, report_to=[])
        args.warmup_steps = WARMUP
        for key in ("optimizer", "scheduler"):  # the Trainer insists on one rate for both, and gets it
            rate = config.get("optimizer", {}).get("params", {}).get("lr")
            if isinstance(rate, float):
                args.learning_rate = rate
        process = HfTrainerDeepSpeedConfig(copy.deepcopy(config))
        process.mismatches = []
        process.trainer_config_process(args)
        process.mismatches = []  # numbers in the file are the user's
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{k: v for k, v in SHAPE.items()
                                                                        if k != "model_type"}))
        process.trainer_config_finalize_ = process.trainer_config_finalize
        process.fill_match = lambda key, value, *rest, **more: HfTrainerDeepSpeedConfig.fill_match(
            process, key, value, must_match=False)
        process.trainer_config_finalize(args, model, STEPS)
        return process.config


def optimizer_of(config):
    block = config.get("optimizer")
    if block is None:
        return None
    name = block["type"].lower()
    params = dict(block.get("params", {}))
    cls = CLASSES[name]
    if params.pop("torch_adam", False):
        cls = torch.optim.AdamW if name == "adamw" or params.get("adam_w_mode", True) else torch.optim.Adam
    known = defaults_of(cls)
    return {k: params.get(k, known[k]) for k in ("lr", "betas", "eps", "weight_decay", "momentum") if k in known}


def schedule_of(config, rate):
    """The rate (and Adam's beta1) of updates 1.. as the engine calls the schedule."""
    block = config.get("scheduler")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    params = dict(block.get("params", {}))
    if block["type"] in ("WarmupDecayLR", "WarmupCosineLR"):
        params.setdefault("total_num_steps", STEPS)  # DeepSpeed demands it, Penstock has --steps
    schedule = SCHEDULES[block["type"]](optimizer, **params)
    rates, betas = [], []
    for _ in range(UPDATES[-1]):
        rates.append(optimizer.param_groups[0]["lr"])
        betas.append(optimizer.param_groups[0]["betas"][0])
        schedule.step()
    at = lambda values: [values[update - 1] for update in UPDATES]
    answer = {"rates": at(rates)}
    if block["type"] == "OneCycle" and params.get("cycle_momentum", True):
        answer["beta1"] = at(betas)
    return answer


def answer_of(text):
    try:
        config = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
        config = filled(config) if '"auto"' in text or ": auto" in text else config
        with_batch = dict(config)
        if "train_batch_size" not in config and "train_micro_batch_size_per_gpu" not in config:
            with_batch["train_micro_batch_size_per_gpu"] = 2  # DeepSpeed demands one, Penstock has --batch
        ds = DeepSpeedConfig(with_batch)
        optimizer = optimizer_of(config)
        answer = {"train_batch_size": ds.train_batch_size, "micro_batch": ds.train_micro_batch_size_per_gpu,
                  "accumulation": ds.gradient_accumulation_steps, "gradient_clipping": ds.gradient_clipping,
                  "dtype": "bf16" if ds.bfloat16_config.enabled else "fp16" if ds.float16_config.enabled else "fp32",
                  "optimizer": optimizer, "stage": int(ds.zero_config.stage)}
        for name in ("offload_param", "offload_optimizer"):
            block = getattr(ds.zero_config, name)
            answer[name] = getattr(block.device, "value", block.device) if block is not None else None
        if "scheduler" in config:
            answer.update(schedule_of(config, optimizer["lr"] if optimizer else RATE))
        return answer
    except Exception as error:  # whatever it is, DeepSpeed refuses
        return {"refused": (str(error).strip().splitlines() or [type(error).__name__])[0][:160]}


def config_texts():
    yield "nothing but a batch", '{"train_batch_size": 8}'
    yield "nothing", "{}"
    for kind in ("Adam", "AdamW", "Adagrad", "Lion", "SGD"):
        yield f"{kind} without parameters", json.dumps({"train_batch_size": 4, "optimizer": {"type": kind}})
        keys = {"Adam": "lr betas eps weight_decay", "AdamW": "lr betas eps weight_decay", "Adagrad": "lr eps weight_decay",
                "Lion": "lr betas weight_decay", "SGD": "lr weight_decay"}[kind]
        yield f"{kind}, all auto", json.dumps({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
                                               "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
                                               "optimizer": {"type": kind, "params": dict.fromkeys(keys.split(), "auto")}})
    yield "LibTorch's AdamW", '{"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"torch_adam": true}}}'
    yield "LibTorch's Adam", ('{"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"torch_adam": true, '
                              '"adam_w_mode": false}}}')
    parameters = {
        "LRRangeTest": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 7, "lr_range_test_step_rate": 2.0,
                        "lr_range_test_staircase": True},
        "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "decay_lr_rate": 0.5, "cycle_first_step_size": 20,
                     "cycle_second_step_size": 30, "cycle_first_stair_count": 4, "cycle_second_stair_count": 5,
                     "decay_step_size": 3, "cycle_momentum": True, "cycle_min_mom": 0.7, "cycle_max_mom": 0.95,
                     "decay_mom_rate": 0.0},
        "WarmupLR": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.1, "warmup_num_steps": 12, "warmup_type": "linear"},
        "WarmupDecayLR": {"total_num_steps": 90, "warmup_min_lr": 0.001, "warmup_max_lr": 0.1, "warmup_num_steps": 12,
                          "warmup_type": "linear"},
        "WarmupCosineLR": {"total_num_steps": 90, "warmup_min_ratio": 0.1, "warmup_num_steps": 12, "cos_min_ratio": 0.05,
                           "warmup_type": "linear"}}
    needed = {"OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1}}
    def scheduled(kind, params, **optimizer):
        config = {"train_batch_size": 4, "scheduler": {"type": kind, "params": params}}
        if optimizer:
            config["optimizer"] = {"type": "AdamW", "params": optimizer}
        return json.dumps(config)
    for kind, params in parameters.items():
        yield f"{kind}, every parameter", scheduled(kind, params, lr=0.5)
        yield f"{kind}, no parameter", scheduled(kind, needed.get(kind, {}), lr=0.5)
        yield f"{kind}, no parameter and no optimizer", scheduled(kind, needed.get(kind, {}))
        for left_out in params:
            if left_out not in needed.get(kind, {}):
                yield f"{kind} without {left_out}", scheduled(kind, {k: v for k, v in params.items() if k != left_out}, lr=0.5)
    for kind in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        keys = [k for k in parameters[kind] if k not in ("warmup_type", "warmup_min_ratio", "cos_min_ratio")]
        for rate in ("auto", 0.002):
            yield f"{kind}, all auto, rate {rate}", scheduled(kind, dict.fromkeys(keys, "auto"), lr=rate)
    yield "fp16 off", '{"train_batch_size": 4, "fp16": {"enabled": false}}'
    yield "fp16 auto, bf16 auto", '{"train_batch_size": 4, "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}'
    yield "bf16", '{"train_batch_size": 4, "bf16": {"enabled": true}}'
    yield "fp16", '{"train_batch_size": 4, "fp16": {"enabled": true}}'
    yield "fp16 and bf16", '{"train_batch_size": 4, "fp16": {"enabled": true}, "bf16": {"enabled": true}}'
    yield "a batch that does not divide", '{"train_batch_size": 9, "train_micro_batch_size_per_gpu": 4}'
    yield "an unknown top-level key", '{"train_batch_size": 4, "my_client": {"x": 1}}'
    yield "an unknown key of ZeRO", '{"train_batch_size": 4, "zero_optimization": {"stage": 3, "comm_overlap": true}}'
    yield "a key twice", '{"train_batch_size": 4, "train_batch_size": 8}'
    yield "not a stage", '{"train_batch_size": 4, "zero_optimization": {"stage": 4}}'
    yield "stage 2 with offload_param", ('{"train_batch_size": 4, "zero_optimization": {"stage": 2, '
                                         '"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}}')
    yield "comments and commas", '{\n  # a note\n  "train_batch_size": 4, // and one\n  /* and\n one */ gradient_clipping: 0.5,\n}'
    yield "bare", "train_batch_size: 4\noptimizer: {\n  type: AdamW\n  params: { lr: 1e-4 }\n}\n"


def write_configs():
    write("configs.json", {"steps": STEPS, "warmup": WARMUP, "rate_without_optimizer": RATE, "updates": UPDATES,
                           "cases": [{"name": n, "text": t, "answer": answer_of(t)} for n, t in config_texts()]})


# ---- Every key that DeepSpeed looks at.

class Watched(dict):
    """A dictionary that keeps account of the keys that are asked for."""

    def __init__(self, content, asked):
        super().__init__(content)
        self.asked = asked

    def __copy__(self):
        return Watched(self, self.asked)

    def _ask(self, key):
        if isinstance(key, str):
            self.asked.add(key)

    def get(self, key, default=None):
        self._ask(key)
        return super().get(key, default)

    def __contains__(self, key):
        self._ask(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        self._ask(key)
        return super().__getitem__(key)

    def keys(self):
        return self


def write_keys():
    sections = {}
    top, inner = set(), {"aio": set(), "checkpoint": set(), "activation_checkpointing": set(), "optimizer": set(),
                         "scheduler": set()}
    config = {"train_batch_size": 1}
    for name, asked in inner.items():
        config[name] = Watched({"type": "Adam"} if name == "optimizer" else {"type": "WarmupLR"} if name == "scheduler"
                               else {}, asked)
    DeepSpeedConfig(Watched(config, top))
    removed = set(deepspeed.runtime.config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    sections[""] = sorted(top)
    for name, asked in inner.items():
        sections[name] = sorted(asked)
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (DeepSpeedZeroOffloadOptimizerConfig,
                                                       DeepSpeedZeroOffloadParamConfig)

    def fields(model):
        return sorted({n for name, field in model.model_fields.items() for n in (name, field.alias) if n})
    sections["zero_optimization"] = sorted(set(fields(DeepSpeedZeroConfig)) |
                                           set(deepspeed.runtime.config._REMOVED_ZERO_CONFIG_KEYS))
    sections["zero_optimization.offload_param"] = fields(DeepSpeedZeroOffloadParamConfig)
    sections["zero_optimization.offload_optimizer"] = fields(DeepSpeedZeroOffloadOptimizerConfig)
    sections["fp16"] = fields(DeepSpeedFP16Config)
    sections["bf16"] = fields(DeepSpeedBF16Config)
    parameters = lambda cls: sorted(set(inspect.signature(cls.__init__).parameters) -
                                    {"self", "optimizer", "params", "model_params", "adamw_mode", "kwargs"})
    for kind, cls in (("Adam", DeepSpeedCPUAdam), ("AdamW", DeepSpeedCPUAdam), ("Adagrad", DeepSpeedCPUAdagrad),
                      ("Lion", DeepSpeedCPULion), ("SGD", torch.optim.SGD)):
        sections[f"optimizer.params/{kind}"] = parameters(cls)
    for kind in ("Adam", "AdamW"):
        sections[f"optimizer.params/{kind}"] = sorted(set(sections[f"optimizer.params/{kind}"]) | {"adam_w_mode", "torch_adam"})
    for kind, cls in SCHEDULES.items():
        sections[f"scheduler.params/{kind}"] = parameters(cls)
    write("keys.json", {"sections": [[name, keys] for name, keys in sections.items()], "removed": sorted(removed)})


# ---- Updates of Adam, by LibTorch, which DeepSpeed's kernels follow.

def write_optimizers():
    cases = []
    start = [(-1) ** i * (i + 1) / 16 for i in range(8)]
    gradients = [[(((i * 37 + s * 101) % 29) - 14) / 32 for i in range(8)] for s in range(4)]
    for kind, config in (
            ("Adam", {}), ("AdamW", {}), ("AdamW", {"weight_decay": 0.1, "lr": 0.01}),
            ("Adam", {"weight_decay": 0.1, "lr": 0.01}), ("Adam", {"weight_decay": 0.1, "lr": 0.01, "adam_w_mode": False}),
            ("AdamW", {"torch_adam": True}), ("AdamW", {"betas": [0.5, 0.75], "eps": 0.01}), ("Adagrad", {}), ("SGD", {}),
            ("SGD", {"momentum": 0.9, "lr": 0.1})):
        params = optimizer_of({"optimizer": {"type": kind, "params": config}})
        decoupled = kind == "AdamW" or config.get("adam_w_mode", True)
        cls = {"Adagrad": torch.optim.Adagrad, "SGD": torch.optim.SGD}.get(
            kind, torch.optim.AdamW if decoupled else torch.optim.Adam)
        weight = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
        optimizer = cls([weight], **params)
        steps = []
        for gradient in gradients:
            weight.grad = torch.tensor(gradient, dtype=torch.float64)
            optimizer.step()
            steps.append(weight.tolist())
        cases.append({"config": {"optimizer": {"type": kind, "params": config}}, "weights": steps})
    write("optimizers.json", {"start": start, "gradients": gradients, "cases": cases})


# ---- HJSON.

HJSON = [
    '{"a": 1, "b": [1, 2.5, -3e2, true, false, null], "c": {"d": "e"}}',
    "{\n  # one\n  a: 1 // two\n  b: 2 /* three */\n  /* four\n  five */ c: 3,\n}",
    "{a: yes, it is, all, of, it\n b: 1}", "{a: [1, 2, 3,], b: [\n1\n2\n3\n], c: {},}", "a: 1\nb: two\nc: [x\ny]\n",
    "{'a': 'b', \"c\": 'd\"e', f: \"g'h\"}", "{a: 'it\\'s \\u00e9\\ud83d\\ude00\\n\\t\\/\\\\'}", '{"a b": 1, c : 2, d\n: 3}',
    "{\n  a: '''one\n     two\n   three'''\n  b:\n    '''\n    x\n      y\n    z\n    '''\n}", "{\n a: ''' one quote ' two '' end '''}",
    "{a: 007, b: 1., c: .5, d: +1, e: 1e5, f: 1E-5, g: -0, h: 1.0, i: 0x10, j: 1e400x}", "{a: 1 2, b: 3}", "{a: 1 b: 2}",
    "{a: true false\n b: nullx\n c: truer\n d: null # none\n e: true, f: -\n}", "{a: http://x.y/z\n b: /local_nvme\n c: C:\\dir\n}",
    "{a: 12345678901234567890, b: 9223372036854775807, c: -9223372036854775808, d: 1e10, e: 9999999999.0}",
    "{a: {b: {c: [[[]]]}}}", "{\r\n\"a\": 1,\r\n b: text\r\n}", "\ufeff{a: 1}", "{a: \u00e9t\u00e9 # x\n}", "# only\n{ /* a comment */ }",
    "{a: b}", "{a: b\n}", "{a: [b]}", "{a: [b\n]}", "{a: [\"b\" \"c\"]}", "{\"a\": \"b\" \"c\": \"d\"}", "{a: # nothing\n 1}",
    # refused
    "{", "{a", "{a:", "{a: 1", "{a: }", "{: 1}", "{a b: 1}", "{a: 1}}", "[1, 2", "{a: 1,, b: 2}", "{,}", "{a: [,]}", "{a: [1,,2]}",
    '{"a": "b\nc"}', '{"a": "\\x"}', '{"a": "\\u12"}', '{"a": "', "{a: /* }", "{a: 1, a: 2}", "{b: {a: 1\na: 2}}", "{a: :}", "{[: 1}",
    "{\n a: '''x}", "a: 1\n}", "{\"a\" 1}", "}", "{a: 1} b",
]


def read_hjson(text):
    try:
        return {"text": text, "value": hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)}
    except Exception:
        return {"text": text, "refused": True}


def write_hjson():
    draw = random.Random(20261)
    pieces = ["{", "}", "[", "]", ":", ",", "\n", " ", "#", "//", "/*", "*/", '"', "'", "a", "1", "-", "e5", ".", "true", "null", "\\", "\t"]
    texts = list(HJSON)
    while len(texts) < 600:
        text = draw.choice(HJSON[:28])
        for _ in range(draw.randint(1, 2)):
            at = draw.randint(0, len(text))
            kind = draw.randint(0, 2)
            if kind == 0:
                text = text[:at] + text[at + draw.randint(1, 3):]
            elif kind == 1:
                text = text[:at] + draw.choice(pieces) + text[at:]
            else:
                end = draw.randint(0, len(text))
                text = text[:at] + text[min(at, end):max(at, end)][:20] + text[at:]
        if text not in texts:
            texts.append(text)
    cases = []
    for text in texts:
        case = read_hjson(text)
        value = case.get("value")
        # Left out: no object or nothing at all (refused as a configuration), numbers beyond a double's range, halves of characters, and
        # triple quotes on the first line, where this reader of hjson looks for the line's beginning behind the text's end.
        if "value" in case and (not isinstance(value, dict) or hjson.decoder.getNext(text, 0)[0] == ""):
            continue
        if "'''" in text.split("\n")[0] or "Infinity" in json.dumps(case) or not text.strip() or any(
                "\ud800" <= c <= "\udfff" for c in json.dumps(value, ensure_ascii=False)):
            continue
        cases.append(case)
    write("hjson.json", {"cases": cases})


for job in (write_gpt2, write_configs, write_keys, write_optimizers, write_hjson):
    job()

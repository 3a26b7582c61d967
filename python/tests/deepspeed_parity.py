"""The same scripts under DeepSpeed itself, on the CPU, and under Penstock: every loss of 20 steps in fp32 is within 1e-5.

    python python/tests/deepspeed_parity.py --deepspeed PYTHON [--only CASE ...] [--keep DIRECTORY]

PYTHON is an interpreter that has deepspeed; this one has penstock. Each case is a script of DeepSpeed's or of a trainer's, which both run as it is:
Penstock by ``python -m penstock.run``. Prints a line a case, and ends with 1 where a script failed or losses differ. `make deepspeed-parity` makes both
interpreters and runs it.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

STEPS, CLOSE = 20, 1e-5


# --- the scripts. Each knows DeepSpeed alone, and returns its losses.


def tokens(count, length=16, words=99):
    import torch

    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(3, words, (count, 1), generator=generator)
    return (starts + 7 * torch.arange(length)) % (words - 3) + 3


def llama(transformers, **more):
    sizes = {"vocab_size": 99, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more)


def configuration(**more):
    return {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}, **more,
    }  # fmt: skip


def plain_loop(directory, accumulation=2):
    """deepspeed.initialize, engine, backward and step: two micro-batches a step, clipped, with a schedule."""
    import deepspeed
    import torch
    import transformers

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(llama(transformers))
    config = configuration(
        train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=accumulation, gradient_clipping=0.5, train_batch_size=2 * accumulation,
        scheduler={"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": STEPS, "warmup_max_lr": 1e-2}},
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config={**config, "zero_allow_untested_optimizer": True})
    losses = []
    for batch in tokens(2 * accumulation * STEPS).split(2):
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def two_forwards(directory):
    """A loss of two forwards of one engine, as a preference loss has it, beside a reference model that an engine without an optimizer evaluates."""
    import deepspeed
    import torch
    import transformers

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model, reference = (transformers.LlamaForCausalLM(llama(transformers)) for _ in range(2))
    config = configuration(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1, gradient_clipping=0.0, train_batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config={**config, "zero_allow_untested_optimizer": True})[0]
    frozen = deepspeed.initialize(model=reference, config=config)[0]
    frozen.eval()
    losses = []
    for chosen, rejected in zip(tokens(2 * STEPS).split(2), tokens(2 * STEPS, words=50).split(2)):
        with torch.no_grad():
            before = frozen(input_ids=chosen, labels=chosen).loss - frozen(input_ids=rejected, labels=rejected).loss
        margin = engine(input_ids=rejected, labels=rejected).loss - engine(input_ids=chosen, labels=chosen).loss
        loss = -torch.nn.functional.logsigmoid(margin + before)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def logged(trainer):
    trainer.train()
    return [float(each["loss"]) for each in trainer.state.log_history if "loss" in each]


def options(directory, **more):
    return {
        "output_dir": f"{directory}/out", "per_device_train_batch_size": 2, "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "learning_rate": 5e-3, "lr_scheduler_type": "cosine", "warmup_steps": 3, "deepspeed": configuration(), **more,
    }  # fmt: skip


def trainer(directory):
    """transformers' Trainer, of a model whose random values are drawn where the configuration of ZeRO-3 is known; accumulation, clipping, a schedule."""
    import torch
    import transformers

    args = transformers.TrainingArguments(**options(directory, gradient_accumulation_steps=2, weight_decay=0.1))
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(llama(transformers))
    data = [{"input_ids": each, "labels": each} for each in tokens(64)]
    return logged(transformers.Trainer(model=model, args=args, train_dataset=data))


def tokenizer(transformers):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    made.train_from_iterator(
        ["user assistant a b c d e f g h"],
        trainers.BpeTrainer(vocab_size=280, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
    )
    given = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    given.chat_template = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
    return given


def wide(transformers, seed):
    import torch

    torch.manual_seed(seed)
    config = llama(transformers)
    config.vocab_size = 280
    return transformers.LlamaForCausalLM(config)


def sft_lora(directory):
    """TRL's SFT of an adapter."""
    import datasets
    import peft
    import transformers
    import trl

    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    data = datasets.Dataset.from_list([{"text": text} for text in ("a b c d e f g h", "h g f e d c b a", "a c e g", "b d f h a c")] * 8)
    return logged(
        trl.SFTTrainer(
            model=wide(transformers, 0), args=trl.SFTConfig(**options(directory, bf16=False, max_length=64)), train_dataset=data, peft_config=lora,
            processing_class=tokenizer(transformers),
        )
    )  # fmt: skip


def gold(directory):
    """TRL's GOLD on policy: a student learns from a teacher's logits of texts that the student itself has drawn."""
    import datasets
    import transformers
    from trl.experimental import gold

    chats = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in (("a b c", "d e f"), ("b c", "d e h g"), ("a", "h"), ("c d", "g h a"))
    ] * 8
    more = {"bf16": False, "lmbda": 1.0, "max_length": 48, "max_completion_length": 6, "learning_rate": 1e-3}
    return logged(
        gold.GOLDTrainer(
            model=wide(transformers, 0), teacher_model=wide(transformers, 1), args=gold.GOLDConfig(**options(directory, **more)),
            train_dataset=datasets.Dataset.from_list(chats), processing_class=tokenizer(transformers),
        )
    )  # fmt: skip


CASES = {each.__name__: each for each in (plain_loop, two_forwards, trainer, sft_lora, gold)}


# --- both of them, and the comparison


def losses_of(name, command, directory):
    """Under this command of Python, in a process of its own. RuntimeError: it failed."""
    here = pathlib.Path(directory).resolve()
    here.mkdir(parents=True)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    environment = {**os.environ, **alone, "LOCAL_SIZE": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command, __file__, "case", name, str(here)], capture_output=True, text=True, check=False, timeout=1200, env=environment, cwd=here
    )
    told = here / "losses.json"
    if ran.returncode or not told.exists():
        (here / "stderr").write_text(ran.stdout + ran.stderr)
        last = [line for line in ran.stderr.splitlines() if line.strip()][-1:] or ["no word"]
        raise RuntimeError(f"status {ran.returncode}: {last[0][:300]} ({here / 'stderr'})")
    return json.loads(told.read_text())


def compare(name, deepspeed, directory):
    """A line that says how it went, and whether the losses are the same."""
    found = {}
    for which, command in (("DeepSpeed", [os.path.abspath(deepspeed)]), ("Penstock", [sys.executable, "-m", "penstock.run"])):
        try:
            told = losses_of(name, command, pathlib.Path(directory, name, which))
            found[which] = told["losses"]
            if told["by"] != which:
                return f"{name}: {command[0]} has run it under {told['by']}, and was to run it under {which}", False
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            return f"{name}: {which} failed: {error}", False
    theirs, ours = found["DeepSpeed"], found["Penstock"]
    if len(theirs) != len(ours) or len(ours) < STEPS:
        return f"{name}: {len(theirs)} losses under DeepSpeed, {len(ours)} under Penstock", False
    apart = [abs(one - other) for one, other in zip(theirs, ours)]
    most = max(apart) if all(each == each for each in apart) else float("nan")
    return f"{name}: {len(ours)} losses, {ours[0]:.6f} to {ours[-1]:.6f}, largest difference {most:.1e}", most <= CLOSE


def main():
    if sys.argv[1:2] == ["case"]:
        name, directory = sys.argv[2:]
        losses = CASES[name](directory)
        by = "Penstock" if "penstock" in sys.modules else "DeepSpeed"
        pathlib.Path(directory, "losses.json").write_text(json.dumps({"by": by, "version": sys.modules["deepspeed"].__version__, "losses": losses}))
        return 0
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--deepspeed", required=True, help="a Python that has deepspeed")
    parse.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parse.add_argument("--keep", help="what the scripts wrote stays there")
    given = parse.parse_args()
    same = True
    with tempfile.TemporaryDirectory(prefix="deepspeed-parity-") as directory:
        for name in given.only:
            line, good = compare(name, given.deepspeed, given.keep or directory)
            print(("same   " if good else "DIFFERS ") + line, flush=True)
            same &= good
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

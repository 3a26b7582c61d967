"""One contestant of bench/peers/long_context: TRL's SFTTrainer, as a script has it.

    long_context_worker.py make MODEL SETTINGS           writes the model that every contestant begins with
    long_context_worker.py train MODEL SETTINGS          trains it; under Penstock by `python -m penstock.run`

SETTINGS is a JSON object: layers, width, inner, heads, vocab, seq, steps, dtype, lora (its rank; 0: all weights), deepspeed (a configuration, or null),
directory. Prints a line of JSON a step: loss, seconds since the step before, and the peak of resident memory so far.
"""

import json
import pathlib
import sys
import time

import peers

SEED = 1


def make(model, settings):
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        vocab_size=settings["vocab"], hidden_size=settings["width"], intermediate_size=settings["inner"], num_hidden_layers=settings["layers"],
        num_attention_heads=settings["heads"], num_key_value_heads=max(1, settings["heads"] // 4), max_position_embeddings=settings["seq"],
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).to(getattr(torch, settings["dtype"]))
    made.save_pretrained(model)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="a")
    tokenizer.save_pretrained(model)
    print(json.dumps({"parameters": sum(parameter.numel() for parameter in made.parameters())}))


def rows(settings):
    """Texts of words of six tokens: something to learn."""
    import numpy

    random = numpy.random.default_rng(SEED)
    words = random.integers(3, settings["vocab"], size=(256, 6))
    for _ in range(settings["steps"]):
        text = words[random.integers(0, 256, size=settings["seq"] // 6 + 1)].reshape(-1)[: settings["seq"]]
        yield {"input_ids": text.tolist()}


def train(model, settings):
    import datasets
    import torch
    import transformers
    import trl

    torch.manual_seed(SEED)
    args = trl.SFTConfig(
        output_dir=settings["directory"], per_device_train_batch_size=1, gradient_accumulation_steps=1, max_steps=settings["steps"], logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-4, lr_scheduler_type="constant", max_grad_norm=1.0, bf16=False,
        max_length=settings["seq"], gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, deepspeed=settings["deepspeed"],
        dataset_num_proc=None, shuffle_dataset=False, seed=SEED,
    )  # fmt: skip
    read = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, settings["dtype"]))
    adapter = None
    if settings["lora"]:
        import peft

        adapter = peft.LoraConfig(r=settings["lora"], target_modules="all-linear", task_type="CAUSAL_LM")
    before = [time.perf_counter()]

    class Tell(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if "loss" in (logs or {}):
                now = time.perf_counter()
                line = {"loss": float(logs["loss"]), "seconds": now - before[0], "rss": peers.own_usage()["rss"]}
                print(json.dumps(line), flush=True)
                before[0] = time.perf_counter()

    trainer = trl.SFTTrainer(
        model=read, args=args, train_dataset=datasets.Dataset.from_list(list(rows(settings))), peft_config=adapter, callbacks=[Tell()],
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    before[0] = time.perf_counter()
    trainer.train()


if __name__ == "__main__":
    what, model, settings = sys.argv[1:]
    {"make": make, "train": train}[what](pathlib.Path(model), json.loads(settings))

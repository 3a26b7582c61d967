"""TRL's trainers with deepspeed=: losses and norms are those without it."""

import pytest

pytest.importorskip("torch")
for name in ("trl", "peft"):
    pytest.importorskip(name)

# All of them without an engine first: transformers and accelerate remember that there was one.
TRAINS = """
    import os, sys, tempfile
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000))
    import penstock.deepspeed
    import datasets, peft, torch, transformers, trl
    from accelerate.state import AcceleratorState
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from trl.experimental import cpo, gold, orpo

    OWN = {"logits_chunk_size": 3, "chunked_modules": ["mlp"], "chunk_size": 5} if os.environ.get("IN_CHUNKS") else {}

    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(["a b c d e f g h"] * 3, trainers.WordLevelTrainer(special_tokens=["<unk>", "<eos>"]))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")

    def model(seed=0, kind=transformers.LlamaForCausalLM, words=16, **more):
        torch.manual_seed(seed)
        sizes = dict(vocab_size=words, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        return kind(transformers.LlamaConfig(**sizes, pad_token_id=1, eos_token_id=1, **more))

    saved = tempfile.mkdtemp(dir=sys.argv[1])
    tokenizer.save_pretrained(saved)
    model(seed=2).save_pretrained(saved)

    def read():
        return transformers.LlamaForCausalLM.from_pretrained(saved)

    def loras():
        return dict(model=model(), peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    def judges():
        return dict(model=model(kind=transformers.LlamaForSequenceClassification, num_labels=1))

    two = lambda: dict(model=model(), ref_model=model(1))
    one = lambda: dict(model=model())
    texts = [{"text": "a b c d e f g h"}] * 6
    pairs = [{"prompt": "a b c", "chosen": " d e f", "rejected": " h g"}, {"prompt": "b c", "chosen": " d e", "rejected": " h g a b"}] * 3
    answers = [{"prompt": "a b c", "completion": " d e f", "label": True}, {"prompt": "b c", "completion": " d e", "label": False}] * 3
    asked = [{"prompt": "a b c"}, {"prompt": "b c"}, {"prompt": "d e f a"}] * 4
    judged = [{"chosen": each["prompt"] + each["chosen"], "rejected": each["prompt"] + each["rejected"]} for each in pairs]

    def different(completions, **_):
        return [float(len(set(each.split()))) for each in completions]

    def generates(*judges, **given):
        return {**given, "reward_funcs": list(judges), "reward_processing_classes": [tokenizer] * len(judges)}

    # GOLD wants chats, and bytes of their text.
    bytewise = Tokenizer(models.BPE())
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = dict(special_tokens=["<unk>", "<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bytewise.train_from_iterator(["user assistant a b c d e f g h"], trainers.BpeTrainer(vocab_size=280, **alphabet))
    chatting = transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")
    chatting.chat_template = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
    chats = [{"messages": [{"role": "user", "content": each["prompt"]}, {"role": "assistant", "content": each["chosen"]}]} for each in pairs]
    taught = lambda: dict(model=model(words=280), teacher_model=model(1, words=280), processing_class=chatting)
    resize = transformers.PreTrainedModel.resize_token_embeddings

    # To the size that it has, as GOLD does with its teacher: with ZeRO-3 transformers draws an embedding, and copies the old one into it.
    def resize_without_draws(self, *sizes, **more):
        with torch.random.fork_rng(devices=[]):
            return resize(self, *sizes, **more)

    transformers.PreTrainedModel.resize_token_embeddings = resize_without_draws

    answering = dict(max_steps=10, num_generations=2, max_completion_length=6)
    cases = {
        "SFT": (trl.SFTConfig, trl.SFTTrainer, texts, one, {}),
        "DPO": (trl.DPOConfig, trl.DPOTrainer, pairs, two, {}),
        "DPO-LoRA": (trl.DPOConfig, trl.DPOTrainer, pairs, loras, {}),
        "DPO-precomputed": (trl.DPOConfig, trl.DPOTrainer, pairs, two, {"precompute_ref_log_probs": True}),
        "DPO-precomputed-of-itself": (trl.DPOConfig, trl.DPOTrainer, pairs, lambda: dict(model=read()), {"precompute_ref_log_probs": True}),
        "KTO": (trl.KTOConfig, trl.KTOTrainer, answers, two, {}),
        "KTO-LoRA": (trl.KTOConfig, trl.KTOTrainer, answers, loras, {}),
        "ORPO": (orpo.ORPOConfig, orpo.ORPOTrainer, pairs, one, {}),
        "CPO": (cpo.CPOConfig, cpo.CPOTrainer, pairs, one, {}),
        "Reward": (trl.RewardConfig, trl.RewardTrainer, judged, judges, {}),
        "GRPO": (trl.GRPOConfig, trl.GRPOTrainer, asked, lambda: generates(different, model=model()), answering),
        "GRPO-reference": (
            trl.GRPOConfig, trl.GRPOTrainer, asked, lambda: generates(different, judges()["model"], model=read()),
            dict(answering, beta=0.1, num_iterations=2, gradient_accumulation_steps=2, ds3_gather_for_generation=False),
        ),
        "GRPO-LoRA": (trl.GRPOConfig, trl.GRPOTrainer, asked, lambda: generates(different, **loras()), dict(answering, beta=0.1)),
        "GOLD": (gold.GOLDConfig, gold.GOLDTrainer, chats, taught, dict(lmbda=0.0, max_length=32, max_completion_length=6)),
        "GOLD-on-policy": (gold.GOLDConfig, gold.GOLDTrainer, chats, taught, dict(lmbda=1.0, max_length=32, max_completion_length=6, max_steps=10)),
        "RLOO": (trl.RLOOConfig, trl.RLOOTrainer, asked, lambda: generates(different, model=read()), answering),
        "RLOO-LoRA": (trl.RLOOConfig, trl.RLOOTrainer, asked, lambda: generates(different, **loras()), answering),
    }

    def logged(name, deepspeed):
        AcceleratorState._reset_state(reset_partial_state=True)
        config, trainer, data, given, options = cases[name]
        given = given()  # first: where a configuration of ZeRO-3 is known transformers draws other values
        with tempfile.TemporaryDirectory() as directory:
            zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": directory}}
            described = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
            arguments = config(
                output_dir=directory + "/out", per_device_train_batch_size=2, logging_steps=1, report_to=[], save_strategy="no",
                deepspeed={**described, "zero_optimization": zero, "penstock": OWN} if deepspeed else None, use_cpu=True, bf16=False, fp16=False,
                gradient_checkpointing=False, disable_tqdm=True, learning_rate=1e-2 if "LoRA" in name else 1e-3, **{"max_steps": 3, **options},
            )
            made = trainer(args=arguments, train_dataset=datasets.Dataset.from_list(data), **{"processing_class": tokenizer, **given})
            made.train()
        told = [entry for entry in made.state.log_history if "loss" in entry]
        assert len(told) == arguments.max_steps
        return [(float(entry["loss"]), float(entry["grad_norm"]), entry.get("reward"), entry.get("completions/mean_length")) for entry in told]

    plain, ours = ({name: logged(name, deepspeed) for name in sys.argv[2:]} for deepspeed in (False, True))
    for name, steps in ours.items():
        loss, norm = (max(abs(one[at] - other[at]) for one, other in zip(steps, plain[name])) for at in (0, 1))
        assert loss < 1e-5 and norm < 1e-4, (name, plain[name], steps)
        assert [step[2:] for step in steps] == [step[2:] for step in plain[name]], (name, plain[name], steps)  # of what was generated
        print("trained", name)
"""

NAMES = ["SFT", "DPO", "DPO-LoRA", "DPO-precomputed", "DPO-precomputed-of-itself", "KTO", "KTO-LoRA", "ORPO", "CPO", "Reward", "GOLD"]
GENERATING = ["GRPO", "GRPO-reference", "GRPO-LoRA", "GOLD-on-policy", "RLOO", "RLOO-LoRA"]


@pytest.mark.parametrize("names", [NAMES, GENERATING], ids=["of_data", "that_generate"])
def test_losses_are_those_without_it(in_child, tmp_path, names):
    train(in_child, tmp_path, names)


def test_they_are_with_logits_in_chunks_too(in_child, tmp_path, monkeypatch):
    monkeypatch.setenv("IN_CHUNKS", "1")
    train(in_child, tmp_path, ["SFT", "DPO", "DPO-LoRA", "KTO", "CPO", "GRPO-reference"])


def train(in_child, tmp_path, names):
    status, out, err = in_child(TRAINS, tmp_path, *names, timeout=900)
    assert status == 0, err[-3000:]
    assert [line.split()[1] for line in out.splitlines() if line.startswith("trained")] == names

"""Unmodified transformers models through penstock.initialize: losses, logits and generated tokens are plain PyTorch's."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import penstock  # noqa: E402

WORDS = 99
SMALL = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2}


def text():
    x = torch.randint(3, WORDS, (2, 16))
    return {"input_ids": x, "labels": x}


def image():
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(0, 5, (2,))}


# name: (class, configuration class, its options, batch)
FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", dict(n_layer=2, n_embd=32, n_head=2, vocab_size=WORDS, n_positions=32, bos_token_id=0, eos_token_id=1), text),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, text),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", dict(GROUPED, tie_word_embeddings=True), text),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", dict(GROUPED, head_dim=8), text),
    "mistral": ("MistralForCausalLM", "MistralConfig", dict(GROUPED, sliding_window=8), text),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", dict(GROUPED, num_local_experts=4, output_router_logits=True), text),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", dict(GROUPED, head_dim=8), text),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", dict(SMALL, pad_token_id=0), text),
    "opt": ("OPTForCausalLM", "OPTConfig", dict(vocab_size=WORDS, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32, word_embed_proj_dim=32), text),
    "bloom": ("BloomForCausalLM", "BloomConfig", dict(vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4), text),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", dict(SMALL, max_position_embeddings=32), text),
    "t5": ("T5ForConditionalGeneration", "T5Config", dict(vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0), text),
    "bart": ("BartForConditionalGeneration", "BartConfig", dict(vocab_size=WORDS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32), text),
    "bert": ("BertForMaskedLM", "BertConfig", SMALL, text),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", dict(SMALL, embedding_size=16, num_hidden_layers=3), text),
    "vit": ("ViTForImageClassification", "ViTConfig", dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4, num_labels=5), image),
    "mamba": ("MambaForCausalLM", "MambaConfig", dict(vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=4), text),
}  # fmt: skip


def make(name):
    model, config, options, batch = FAMILIES[name]
    if not hasattr(transformers, model):
        pytest.skip(f"transformers {transformers.__version__} has no {model}")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**options)).train()
    return made, [batch() for _ in range(20)]


def plain_losses(model, data):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for number, batch in enumerate(data):
        torch.manual_seed(number)  # dropout's
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def engine_losses(engine, data):
    losses = []
    for number, batch in enumerate(data):
        torch.manual_seed(number)
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def on_drive(model, directory):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return penstock.initialize(model=model, optimizer=optimizer, state_dir=str(directory), gradient_clipping=1.0)[0]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_losses_logits_and_tokens(tmp_path, name):
    model, data = make(name)
    plain = copy.deepcopy(model)
    expected = plain_losses(plain, data)
    with on_drive(model, tmp_path) as engine:
        assert engine_losses(engine, data) == pytest.approx(expected, abs=1e-5)
        engine.eval()
        plain.eval()
        with torch.no_grad():
            torch.testing.assert_close(engine(**data[0]).logits, plain(**data[0]).logits, atol=2e-4, rtol=0)
        if "input_ids" in data[0] and hasattr(model, "generate") and name not in ("bert", "albert"):
            prompt = data[0]["input_ids"][:1, :5]
            options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
            assert torch.equal(engine.generate(prompt, **options), plain.generate(prompt, **options))


@pytest.mark.filterwarnings("ignore")
def test_what_is_saved_is_what_transformers_loads(tmp_path):
    model, data = make("llama")
    plain = copy.deepcopy(model)
    plain_losses(plain, data[:5])
    with on_drive(model, tmp_path / "state") as engine:
        for batch in data[:5]:
            engine.backward(engine(**batch).loss)
            engine.step()
        model.save_pretrained(tmp_path / "saved")
        whole = engine.state_dict()
    loaded = type(model).from_pretrained(tmp_path / "saved")
    for (name, value), other in zip(loaded.state_dict().items(), plain.state_dict().values()):
        assert torch.equal(value, whole[name])
        torch.testing.assert_close(value, other, atol=2e-4, rtol=0)


@pytest.mark.filterwarnings("ignore")
def test_checkpointing_of_transformers_is_the_engines(tmp_path):
    model, data = make("llama")
    expected = plain_losses(copy.deepcopy(model), data[:4])
    with on_drive(model, tmp_path) as engine:
        losses = []
        for batch in data[:4]:
            model.gradient_checkpointing_enable()
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_lengths_vary(tmp_path):
    model, _ = make("llama")
    plain = copy.deepcopy(model)
    data = []
    for length in (5, 31, 16, 1 + 1, 40):
        x = torch.randint(3, WORDS, (3, length))
        data.append({"input_ids": x, "labels": x})
    expected = plain_losses(plain, data)
    with on_drive(model, tmp_path) as engine:
        assert engine_losses(engine, data) == pytest.approx(expected, abs=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_peft_train_beside_a_frozen_base(tmp_path):
    peft = pytest.importorskip("peft")
    model, data = make("llama")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config)
    plain = copy.deepcopy(model)
    expected = plain_losses(plain, data)
    with on_drive(model, tmp_path / "state") as engine:
        assert engine_losses(engine, data) == pytest.approx(expected, abs=1e-5)
        state = engine.state_dict()
        for name, value in plain.state_dict().items():
            if "lora_" in name:
                torch.testing.assert_close(state[name], value, atol=2e-4, rtol=0)
            else:
                assert torch.equal(state[name], value), name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(tmp_path / "adapter")
        assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ["modules_to_save", "embedding", "prompt", "encoded prompt"])
def test_what_peft_puts_around_modules_trains(tmp_path, what):
    """Modules beside those that they stand for, which are never called, adapters of an embedding, prompts of their own."""
    peft = pytest.importorskip("peft")
    lora = {"r": 4, "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
    config = {
        "modules_to_save": lambda: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], **lora),
        "embedding": lambda: peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], **lora),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        "encoded prompt": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, task_type="CAUSAL_LM"),
    }[what]()
    model, data = make("llama")
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config)
    expected = plain_losses(copy.deepcopy(model), data[:3])
    with on_drive(model, tmp_path) as engine:
        assert engine_losses(engine, data[:3]) == pytest.approx(expected, abs=1e-5)

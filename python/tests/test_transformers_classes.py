"""Many classes of transformers, as they are: some steps are plain PyTorch's. A soak: PENSTOCK_SOAK=1 runs all of CLASSES.

Every class that can be made tiny is for transformers_sweep.py, a program beside this.
"""

import copy
import os

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import penstock  # noqa: E402
import transformers_sweep  # noqa: E402

WORDS = 99
SMALL = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2}
SEEN = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
READ = {**SMALL, "max_position_embeddings": 32}
HEARD = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "conv_dim": (16, 16), "conv_stride": (4, 4),
    "conv_kernel": (8, 8), "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "mask_time_length": 2, "num_feat_extract_layers": 2,
}  # fmt: skip


def text():
    x = torch.randint(3, WORDS, (2, 16))
    return {"input_ids": x, "labels": x}


def labelled():
    return {"input_ids": torch.randint(3, WORDS, (2, 16)), "labels": torch.randint(0, 2, (2,))}


def tokens():
    return {"input_ids": torch.randint(3, WORDS, (2, 16)), "labels": torch.randint(0, 2, (2, 16))}


def spans():
    return {"input_ids": torch.randint(3, WORDS, (2, 16)), "start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}


def pictures():
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


def pairs():
    return {**pictures(), "input_ids": torch.randint(3, WORDS, (2, 8)), "return_loss": True}


def classified():
    return {**pictures(), "labels": torch.randint(0, 2, (2,))}


def sound():
    return {"input_values": torch.randn(2, 400), "labels": torch.randint(1, 32, (2, 4))}


def both(kind):
    return dict(text_config={**READ, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}, vision_config=SEEN, **kind)


# name of the class: (configuration, its options, batch)
CLASSES = {
    "CLIPModel": ("CLIPConfig", both({"projection_dim": 16}), pairs),
    "SiglipModel": ("SiglipConfig", both({}), pairs),
    "ViTMAEForPreTraining": ("ViTMAEConfig", dict(SEEN, decoder_hidden_size=32, decoder_intermediate_size=64, decoder_num_hidden_layers=2, decoder_num_attention_heads=4), pictures),
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", dict(HEARD, layerdrop=0.3), sound),
    "HubertForCTC": ("HubertConfig", dict(HEARD, layerdrop=0.3), sound),
    "DebertaForMaskedLM": ("DebertaConfig", dict(READ, relative_attention=True, pos_att_type=["c2p", "p2c"], type_vocab_size=0), text),
    "DebertaV2ForMaskedLM": ("DebertaV2Config", dict(READ, relative_attention=True, pos_att_type=["c2p", "p2c"], type_vocab_size=0), text),
    "FunnelForMaskedLM": ("FunnelConfig", dict(vocab_size=WORDS, d_model=32, n_head=4, d_head=8, d_inner=64, block_sizes=[1, 1], num_decoder_layers=1), text),
    "FunnelForSequenceClassification": ("FunnelConfig", dict(vocab_size=WORDS, d_model=32, n_head=4, d_head=8, d_inner=64, block_sizes=[1, 1], num_decoder_layers=1), labelled),
    "ViTForImageClassification": ("ViTConfig", SEEN, classified),
    "DeiTForImageClassification": ("DeiTConfig", SEEN, classified),
    "BeitForImageClassification": ("BeitConfig", SEEN, classified),
    "Dinov2ForImageClassification": ("Dinov2Config", dict(SEEN), classified),
    "BertForPreTraining": ("BertConfig", READ, lambda: {**text(), "next_sentence_label": torch.randint(0, 2, (2,))}),
    "BertForSequenceClassification": ("BertConfig", READ, labelled),
    "RobertaForMaskedLM": ("RobertaConfig", dict(READ, max_position_embeddings=40), text),
    "ElectraForPreTraining": ("ElectraConfig", dict(READ, embedding_size=16), tokens),
    "DistilBertForQuestionAnswering": ("DistilBertConfig", dict(vocab_size=WORDS, dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=32), spans),
    "MPNetForMaskedLM": ("MPNetConfig", dict(READ, max_position_embeddings=40), text),
    "XLNetLMHeadModel": ("XLNetConfig", dict(vocab_size=WORDS, d_model=32, n_layer=2, n_head=4, d_inner=64), text),
    "FNetForMaskedLM": ("FNetConfig", dict(vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, max_position_embeddings=32), text),
    "RoFormerForMaskedLM": ("RoFormerConfig", READ, text),
    "NystromformerForMaskedLM": ("NystromformerConfig", dict(READ, segment_means_seq_len=16, num_landmarks=4), text),
    "SqueezeBertForMaskedLM": ("SqueezeBertConfig", dict(READ, embedding_size=32), text),
    "ModernBertForMaskedLM": ("ModernBertConfig", dict(READ, pad_token_id=0), text),
    "BigBirdForMaskedLM": ("BigBirdConfig", dict(READ, attention_type="original_full"), text),
    "T5ForConditionalGeneration": ("T5Config", dict(vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0), text),
    "PegasusForConditionalGeneration": ("PegasusConfig", dict(vocab_size=WORDS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32, decoder_start_token_id=0), text),
    "MambaForCausalLM": ("MambaConfig", dict(vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=4), text),
    "GPTNeoForCausalLM": ("GPTNeoConfig", dict(vocab_size=WORDS, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], max_position_embeddings=32, bos_token_id=0, eos_token_id=1), text),
    "GPTJForCausalLM": ("GPTJConfig", dict(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=32, bos_token_id=0, eos_token_id=1), text),
    "CodeGenForCausalLM": ("CodeGenConfig", dict(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=32, bos_token_id=0, eos_token_id=1), text),
    "FalconForCausalLM": ("FalconConfig", dict(vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4), text),
    "StableLmForCausalLM": ("StableLmConfig", GROUPED, text),
    "GemmaForCausalLM": ("GemmaConfig", dict(GROUPED, head_dim=8), text),
    "CohereForCausalLM": ("CohereConfig", GROUPED, text),
    "OlmoForCausalLM": ("OlmoConfig", GROUPED, text),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", dict(GROUPED, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16, output_router_logits=True), text),
    "LlavaForConditionalGeneration": ("LlavaConfig", None, None),
    "LlavaOnevisionForConditionalGeneration": ("LlavaOnevisionConfig", None, None),
}  # fmt: skip
# One of each kind: a scalar, tokens around layers, masks, layers dropped at random, weights that a parent uses, one that is never called.
QUICK = ["CLIPModel", "ViTMAEForPreTraining", "Wav2Vec2ForCTC", "DebertaV2ForMaskedLM", "FunnelForSequenceClassification"]


def llava(name):
    text_config = transformers.Qwen2Config(**GROUPED) if "Onevision" in name else transformers.LlamaConfig(**GROUPED)
    vision = transformers.SiglipVisionConfig(**SEEN) if "Onevision" in name else transformers.CLIPVisionConfig(**SEEN, projection_dim=16)
    configuration = getattr(transformers, CLASSES[name][0])
    strategy = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}
    extra = {"image_grid_pinpoints": [[16, 16]]} if "Onevision" in name else {}
    config = configuration(text_config=text_config, vision_config=vision, image_token_index=WORDS - 1, **strategy, **extra)
    if hasattr(config, "image_token_id"):
        config.image_token_id = WORDS - 1
    return config


def llava_batch(name):
    if "Onevision" in name:
        # One patch of the picture and the whole of it, each with its rows' ends.
        places = 16 + 16 + 4
        picture = {"pixel_values": torch.randn(1, 2, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])}
    else:
        places = 17
        picture = {"pixel_values": torch.randn(1, 3, 16, 16)}
    x = torch.randint(3, WORDS - 1, (1, places + 4))
    x[:, 2 : 2 + places] = WORDS - 1
    return {"input_ids": x, "labels": x, **picture}


def made(name):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    configuration, options, batch = CLASSES[name]
    config = llava(name) if options is None else getattr(transformers, configuration)(**options)
    model = getattr(transformers, name)(config).train()
    return model, [llava_batch(name) if batch is None else batch() for _ in range(3)]


def losses(call, optimizer, backward, data):
    found = []
    numpy = pytest.importorskip("numpy")
    for number, batch in enumerate(data):
        torch.manual_seed(number)
        numpy.random.seed(number)
        loss = call(**batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def check(name, directory):
    model, data = made(name)
    plain = copy.deepcopy(model)
    expected = losses(plain, torch.optim.SGD([each for each in plain.parameters() if each.requires_grad], lr=1e-2), lambda loss: loss.backward(), data)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    with penstock.initialize(model=model, optimizer=optimizer, state_dir=str(directory))[0] as engine:
        assert losses(engine, engine, engine.backward, data) == pytest.approx(expected, abs=1e-5, rel=1e-5)
        state = engine.state_dict()
        for each, value in plain.state_dict().items():
            torch.testing.assert_close(state[each], value, atol=1e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.filterwarnings("ignore")
def test_three_steps_are_plain_pytorchs(tmp_path, name):
    if name not in QUICK and not os.environ.get("PENSTOCK_SOAK"):
        pytest.skip("PENSTOCK_SOAK=1 runs it")
    check(name, tmp_path)


# One for each thing that a model may do besides: make a cache though nobody wants it, call layers again in a Function's backward, normalise
# by batches, share layers, choose experts, draw masks, drop layers at random; and kinds of inputs.
SWEPT = [
    "FlaubertModel", "GraniteMoeSWAForCausalLM", "ReformerModel", "ResNetModel", "MixtralForCausalLM", "AlbertForMaskedLM", "PatchTSMixerForRegression",
    "SmolVLMForConditionalGeneration", "FNetForNextSentencePrediction", "HubertForCTC", "SpeechT5ForSpeechToText",
]  # fmt: skip


@pytest.mark.parametrize("name", SWEPT)
@pytest.mark.filterwarnings("ignore")
def test_classes_of_the_sweep_train_with_adamw_as_in_plain_pytorch(tmp_path, name):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    found = transformers_sweep.check(name, str(tmp_path / "state"))
    assert found["kind"] == "same", found.get("why")

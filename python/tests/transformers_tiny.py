"""Tiny configurations and batches for any class of transformers, made of the fields that its configuration has."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
import transformers
from penstock._engine._tree import tensors_of
from torch import nn

VOCABULARY = 160
WIDTH = 64
HEADS = 4
WIDTH_OF_HEAD = 16
INNER = 96
IMAGE = 32
LENGTH = 16
LABELS = 3

_NOT_WIDTHS = re.compile(
    r"image|patch|vocab|window|kernel|stride|pool|chunk|block_size|token|crop|max_|num_(mel|feature|frames|hidden_layers)|sampl|pad|codebook_size"
    r"|context_|bucket|depth|grid|query_length|seq|positions|hop|mel|conv_pos|fft|rate$"
)
_LAYERS = re.compile(
    r"(^|_)(num_)?(hidden_|encoder_|decoder_|enc_|dec_|cross_|text_|vision_|resampler_)*(layers?|depth|n_blocks|num_blocks)$"
    r"|^n_layers?$|^num_(de|en)coder_layers$|num_hidden_layers"
)
_LISTS_OF_WIDTHS = re.compile(r"hidden_sizes|embed_dims?|channels|neck_hidden|stem_channels|widths|dims$|conv_dim|tdnn_dim|_size")
_FEATURES = (
    "num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim", "input_dim", "input_size", "num_mels", "n_mels",
)  # fmt: skip
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2, "cls_token_id": 1}

# What the rules below do not find by themselves, by the name of the configuration.
OPTIONS: Dict[str, Dict[str, Any]] = {  # fmt: skip
    "HunYuanDenseV1Config": {"head_dim": 16},
    "BambaConfig": {"mamba_n_heads": 4, "mamba_d_head": 32},
    "HunYuanMoEV1Config": {"head_dim": 16},
    "SwinConfig": {"window_size": 2},
    "Swinv2Config": {"window_size": 2},
    "DonutSwinConfig": {"window_size": 2},
    "MaskFormerSwinConfig": {"window_size": 2},
    # It draws with torch.seed(), another number each time.
    "ReformerConfig": {
        "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [32, 32], "attn_layers": ["local", "lsh"], "num_buckets": 2, "hash_seed": 0,
        "hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0, "lsh_attention_probs_dropout_prob": 0.0,
    },
}


class NotMade(Exception):
    """No tiny model, or no batch for it, was found."""


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _small_list(name: str, value: Any, level: int) -> Any:
    if "mrope_section" in name and level:
        return value
    if "mrope_section" in name:
        return [2, 3, 3] if len(value) == 3 else [WIDTH_OF_HEAD // 2 // len(value)] * len(value)
    if re.search(r"depths|num_layers|num_blocks|blocks_per|layer_repeats|num_encoder_blocks|num_repeats", name):
        return type(value)(min(each, 2 if number == 0 else 1) for number, each in enumerate(value))
    if re.search(r"image_size|input_size", name):
        return type(value)(min(each, IMAGE) for each in value)
    if level == 0 and _LISTS_OF_WIDTHS.search(name) and "kernel" not in name:
        return type(value)(each // 4 if each >= 32 and each % 4 == 0 else each for each in value)
    return value


def _small(name: str, value: Any, fields: Dict[str, Any], level: int) -> Any:
    """A field's tiny value. level 0: all are small; 1: widths stay; 2: all but numbers of layers stay."""
    if isinstance(value, (list, tuple)) and value and all(_is_whole(each) for each in value):
        return _small_list(name, value, level)
    if isinstance(value, dict):
        return {key: _small(key, each, fields, level) for key, each in value.items()}
    if not _is_whole(value) or value <= 1:
        return value
    if _LAYERS.search(name):
        return min(value, 2)
    if re.search(r"image_size|input_size$|pretrain_image", name) and value > IMAGE:
        return IMAGE
    if level >= 2:
        return value
    if re.search(r"vocab_size$|^vocab", name) and value > VOCABULARY:
        return VOCABULARY
    if re.search(r"(token_?id|token_index|_id|_index)$", name):
        return _SPECIAL.get(name, value) if value < VOCABULARY else value
    if re.search(r"max_position|n_positions|max_source_pos|max_target_pos|max_seq|max_2d_pos|n_ctx|num_position_emb|max_length", name):
        return min(value, 64)
    if re.search(r"patch_size", name) and value > 8:
        return 8
    if re.search(r"mask_(time|feature)_length", name):
        return 2
    if name in ("n_group", "topk_group"):
        return 1
    if name == "context_length":
        return min(value, 64)
    if re.search(r"^(mamba_)?n_groups?$|^num_groups$|_ngroups$", name):
        return min(value, 2)
    if re.search(r"num_frames", name):
        return min(value, 4)
    if re.search(r"(num|n)_(local_|routed_)?experts$|moe_num_experts|num_(routed|local)_experts", name):
        return min(value, 4)
    if re.search(r"per_tok|top_?k$|moe_k", name):
        return min(value, 2 if value <= 64 else 8)
    if level >= 1:
        return value
    listed = any(isinstance(fields.get(other), (list, tuple)) for other in ("num_heads", "num_attention_heads", "depths"))
    if re.search(r"key_value_heads|kv_heads|num_kv", name):
        return value if value <= 2 else (HEADS if value == fields.get("num_attention_heads") else 2)
    if re.search(r"heads?$|n_head|num_heads", name) and "dim" not in name:
        return min(value, HEADS)
    if re.search(r"head_dim|d_kv|d_head|dim_head|head_size", name) and value > WIDTH_OF_HEAD:
        return WIDTH_OF_HEAD
    if re.search(r"lora_rank", name):
        return 16
    if listed and re.search(r"^(embed_dim|hidden_size|embedding_size)$", name):
        return value // 4 if value % 4 == 0 and value >= 64 else value
    if re.search(r"intermediate|ffn|inner|d_ff|mlp_dim|feedforward|hidden_dim$|n_inner", name) and value > INNER:
        return INNER
    if value > WIDTH and re.search(r"size|dim|d_model|embd|width|channels|rank|hidden|features", name) and not _NOT_WIDTHS.search(name):
        return WIDTH
    return value


# Some configurations refuse to tell what differs by layer.
def _held(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: B902
        return None


def _fields(default: Any) -> Dict[str, Any]:
    if dataclasses.is_dataclass(default):
        return {each.name: _held(default, each.name) for each in dataclasses.fields(default) if each.init}
    known = inspect.signature(type(default).__init__).parameters
    return {name: _held(default, name) for name in known if name not in ("self", "kwargs", "args")}


def _shortened(value: List[Any], count: int) -> List[Any]:
    """As many of a list by layer as there are, each kind among them where that can be."""
    kinds = list(dict.fromkeys(value))
    return (kinds + [value[0]] * count)[:count] if len(kinds) <= count else kinds


def tiny_config(kind: type, level: int = 0) -> Any:
    """The configuration's class with small numbers."""
    default = kind()
    fields = _fields(default)
    given: Dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, transformers.PreTrainedConfig):
            given[name] = tiny_config(type(value), level)
        elif value is not None and not name.startswith("_"):
            small = _small(name, value, fields, level)
            if small != value:
                given[name] = small
    for name in ("vocab_size", "num_labels"):
        if name in fields and fields[name] is None:
            given[name] = VOCABULARY
    given.update(OPTIONS.get(kind.__name__, {}))
    layers = given.get("num_hidden_layers", fields.get("num_hidden_layers"))
    for name, value in fields.items():
        if isinstance(value, list) and value and _is_whole(fields.get("num_hidden_layers")) and len(value) == fields["num_hidden_layers"]:
            shortened = _shortened(value, layers) if isinstance(value[0], str) else value[:layers]
            if isinstance(value[0], str) and len(shortened) > layers:
                given["num_hidden_layers"] = layers = len(shortened)
            given[name] = shortened
    for name, value in fields.items():
        if isinstance(value, list) and name in given and given[name] != value and len(value) == fields.get("num_hidden_layers") and len(given[name]) != layers:
            given[name] = (value[:layers] if not isinstance(value[0], str) else (given[name] * layers)[:layers])
    # Sizes that follow from others are left to the configuration, and given only where it says no to that.
    derived = [name for name in given if name in ("head_dim", "layer_types") and fields.get(name) is not None]
    attempts = [given, {name: value for name, value in given.items() if name not in derived}]
    error: Optional[Exception] = None
    for attempt in attempts:
        try:
            made = kind(**attempt)
            if level == 0 and "mrope_section" in getattr(kind, "ignore_keys_at_rope_validation", ()) and isinstance(made.rope_parameters, dict):
                made.rope_parameters["mrope_section"] = [2, 3, 3]
            _settle(made)
            return made
        except Exception as raised:  # noqa: B902
            error = error or raised
    raise NotMade(f"config: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _settle(config: Any) -> None:
    """Tokens are below the vocabulary."""
    vocabulary = getattr(config, "vocab_size", None)
    text = getattr(config, "text_config", None)
    if not _is_whole(vocabulary) and text is not None:
        vocabulary = getattr(text, "vocab_size", None)
    last = (vocabulary if _is_whole(vocabulary) else VOCABULARY) - 1
    for name in list(vars(config)):
        value = vars(config)[name]
        if name.endswith(("token_id", "token_index", "_token_idx")) or name in ("image_token_id", "audio_token_id"):
            if isinstance(value, list):
                setattr(config, name, [min(each, 2) if _is_whole(each) else each for each in value])
            elif _is_whole(value) and value > last:
                setattr(config, name, _SPECIAL.get(name, last))
                if name not in _SPECIAL:
                    last -= 1
    if getattr(config, "num_labels", None) is not None and hasattr(config, "id2label"):
        try:
            config.num_labels = LABELS
        except Exception:  # noqa: B902
            pass
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0


def count_of(config: Any, kind: type) -> int:
    """Parameters of the model, without making them."""
    with torch.device("meta"):
        return sum(each.numel() for each in kind(copy.deepcopy(config)).parameters())


def tiny_model(kind: type, most: int = 4_000_000) -> Iterator[Tuple[nn.Module, int]]:
    """Models of the class, smaller widths first, where it can be made."""
    errors = []
    found = False
    for level in (0, 1, 2):
        try:
            config = tiny_config(kind.config_class, level)
            try:
                count = count_of(config, kind)
            except Exception:  # noqa: B902 - some compute with values
                count = 0
                if level:
                    raise NotMade("nobody knows how large it is") from None
            if count > most * (3 if level else 1):
                raise NotMade(f"{count:,} parameters")
            torch.manual_seed(0)
            model = kind(config).float().train()
            with torch.no_grad():
                for parameter in model.parameters():
                    if not bool(torch.isfinite(parameter).all()) or float(parameter.abs().max() if parameter.numel() else 0) > 1e3:
                        parameter.normal_(0, 0.02)
            found = True
            yield model, level
        except Exception as raised:  # noqa: B902
            errors.append(f"level {level}: {type(raised).__name__}: {str(raised).strip().splitlines()[0] if str(raised).strip() else ''}")
    if not found:
        raise NotMade(" / ".join(errors))


# --- batches


def _of(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these that the configuration, or one within it, has."""
    for holder in (config, *(getattr(config, each, None) for each in ("vision_config", "text_config", "audio_config", "encoder", "decoder", "backbone_config"))):
        if isinstance(holder, dict) or holder is None:
            continue
        for name in names:
            value = getattr(holder, name, None)
            if value is not None:
                return value
    return default


def _vision(config: Any) -> Any:
    for name in ("vision_config", "image_config", "vq_config", "encoder"):
        inner = getattr(config, name, None)
        if isinstance(inner, transformers.PreTrainedConfig) and getattr(inner, "image_size", None) is not None:
            return inner
    return config


def _side(config: Any) -> Tuple[int, int]:
    size = getattr(_vision(config), "image_size", None) or _of(config, "image_size", "input_size", default=IMAGE)
    if isinstance(size, dict):
        size = list(size.values())
    if isinstance(size, (list, tuple)):
        return tuple(size[-2:]) if len(size) > 1 else (size[0], size[0])  # type: ignore[return-value]
    return size, size


def _patches(config: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    vision = getattr(config, "vision_config", config)
    patch = getattr(vision, "patch_size", 8)
    patch = patch if _is_whole(patch) else patch[-1]
    times = getattr(vision, "temporal_patch_size", 1)
    times = times if _is_whole(times) else 1
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or getattr(vision, "num_channels", None) or 3
    return torch.randn(2 * 16, channels * times * patch * patch), torch.tensor([[1, 4, 4], [1, 4, 4]])


def _text(config: Any) -> Any:
    for name in ("text_config", "text_encoder", "language_config", "llm_config"):
        inner = getattr(config, name, None)
        if isinstance(inner, transformers.PreTrainedConfig):
            return inner
    return config


def words(config: Any, length: int = LENGTH) -> torch.Tensor:
    vocabulary = getattr(_text(config), "vocab_size", None)
    if not _is_whole(vocabulary):
        vocabulary = _of(config, "vocab_size", "encoder_vocab_size", "src_vocab_size", default=VOCABULARY)
    return torch.randint(3, max(4, vocabulary - 24), (2, length))


def _audio(config: Any) -> Any:
    inner = getattr(config, "audio_config", None) or getattr(config, "speech_encoder_config", None) or getattr(config, "encoder_config", None)
    return inner if isinstance(inner, transformers.PreTrainedConfig) else config


def _features(config: Any, time_last: bool) -> torch.Tensor:
    own = _audio(config)
    bins = next((getattr(own, name) for name in _FEATURES if _is_whole(getattr(own, name, None))), 80)
    positions = getattr(own, "max_source_positions", None)
    length = 2 * positions if _is_whole(positions) and time_last else 64
    return torch.randn(2, bins, length) if time_last else torch.randn(2, length, bins)


def labels_of(name: str, config: Any, batch: Dict[str, Any]) -> List[Dict[str, Any]]:
    """What the class's loss may be made of, likeliest first."""
    count = LABELS
    ids = batch.get("input_ids")
    side = _side(config)
    if "MultipleChoice" in name:
        return [{"labels": torch.randint(0, 2, (2,))}]
    if re.search(r"TokenClassification|AudioFrame", name):
        return [{"labels": torch.randint(0, count, ids.shape if ids is not None else (2, LENGTH))}]
    if re.search(r"QuestionAnswering", name):
        return [{"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}, {"labels": torch.rand(2, count)}, {"labels": torch.randint(3, 90, (2, 8))}]
    if re.search(r"NextSentence", name):
        return [{"labels": torch.randint(0, 2, (2,))}]
    if re.search(r"CTC|RNNT|TDT", name):
        return [{"labels": torch.randint(3, 20, (2, 3))}]
    if re.search(r"Detection|ForSegmentation", name):
        one = {"class_labels": torch.tensor([1, 0]), "boxes": torch.tensor([[0.5, 0.5, 0.4, 0.4], [0.3, 0.3, 0.2, 0.2]])}
        masked = {**one, "masks": (torch.rand(2, *side) > 0.5).float()}
        return [{"labels": [one, copy.deepcopy(one)]}, {"labels": [masked, copy.deepcopy(masked)]}]
    if re.search(r"UniversalSegmentation|InstanceSegmentation", name):
        return [{"mask_labels": [(torch.rand(2, *side) > 0.5).float() for _ in range(2)], "class_labels": [torch.tensor([0, 1]) for _ in range(2)]}]
    if re.search(r"SemanticSegmentation|ImageSegmentation", name):
        return [{"labels": torch.randint(0, count, (2, *side))}, {"labels": torch.rand(2, *side)}]
    if re.search(r"DepthEstimation|ImageMatting", name):
        return [{"labels": torch.rand(2, *side)}]
    if re.search(r"PreTraining|MaskedLM|CausalLM|LMHead|ConditionalGeneration|Generation", name) and ids is not None:
        more = {"next_sentence_label": torch.randint(0, 2, (2,))}
        return [{"labels": ids.clone(), **more}, {"labels": ids.clone()}, {"labels": torch.randint(0, 2, ids.shape)}]
    if re.search(r"Classification|XVector", name):
        return [{"labels": torch.randint(0, count, (2,))}, {"labels": torch.rand(2, count)}]
    return [{"labels": ids.clone()}] if ids is not None else [{"labels": torch.randint(3, 90, (2, 8))}, {"labels": torch.randint(0, count, (2,))}]


def _inputs(name: str, config: Any, known: Any) -> Iterator[Dict[str, Any]]:
    """Inputs without labels, all that the class takes first."""
    needed = {each for each, parameter in known.items() if parameter.default is inspect.Parameter.empty and parameter.kind == parameter.POSITIONAL_OR_KEYWORD}
    text: Dict[str, Any] = {}
    if "input_ids" in known:
        ids = words(config)
        if "MultipleChoice" in name:
            ids = torch.stack([ids, words(config)], 1)
        text["input_ids"] = ids
    if "attention_mask" in known and text:
        text["attention_mask"] = torch.ones_like(text["input_ids"])
    if "bbox" in known:
        text["bbox"] = torch.randint(0, 30, (2, LENGTH, 4)).cumsum(-1).clamp(max=60)
    if "decoder_input_ids" in known:
        text["decoder_input_ids"] = words(config, 8)
    for each in known:
        if each == "entity_ids" and each in needed:
            text[each] = torch.randint(1, 8, (2, 2))
    side = _side(config)
    channels = getattr(_vision(config), "num_channels", None) or getattr(_vision(config), "in_channels", None) or 3
    channels = channels if _is_whole(channels) else 3
    frames = _of(config, "num_frames", "frames_per_clip", default=4)
    still = torch.randn(2, channels, *side)
    kinds: List[Dict[str, Any]] = [{}]
    if "pixel_values" in known:
        flat, grid = _patches(config)
        several = torch.randn(2, frames, channels, *side)
        kinds = [{"pixel_values": still}]
        if "image_grid_thw" in known or "grid_thw" in known:
            place = "image_grid_thw" if "image_grid_thw" in known else "grid_thw"
            kinds.insert(0, {"pixel_values": flat, place: grid})
        if "image_sizes" in known:
            sizes = torch.tensor([list(side)] * 2)
            kinds = [{"pixel_values": still, "image_sizes": sizes}, {"pixel_values": still[:, None].expand(-1, 2, -1, -1, -1).contiguous(), "image_sizes": sizes}, *kinds]
        if "pixel_attention_mask" in known:
            kinds.append({"pixel_values": still[:, None], "pixel_attention_mask": torch.ones(2, 1, *side, dtype=torch.long)})
        kinds += [{"pixel_values": several}, {"pixel_values": still[:, None]}, {"pixel_values": torch.randn(2, 16, channels * 64)}]
        if "pixel_values" not in needed and text:
            kinds.append({})
    if "pixel_values_videos" in known and "pixel_values_videos" in needed:
        kinds = [{"pixel_values_videos": torch.randn(2, frames, channels, *side)}, {"pixel_values_videos": torch.randn(2, channels, frames, *side)}]
    if "hidden_states" in needed:
        width = _of(config, "hidden_size", "d_model", "embed_dim", default=WIDTH)
        flat, grid = _patches(config)
        kinds = [{"hidden_states": torch.randn(2, LENGTH, width)}, {"hidden_states": flat, **({"grid_thw": grid} if "grid_thw" in known else {})}]
    if "input_features" in known and ("input_features" in needed or not text or "audio" in name.lower()):
        kinds = [{**each, "input_features": _features(config, time_last)} for time_last in (True, False) for each in kinds] + ([{}] if text and "input_features" not in needed else [])
    if "input_values" in known:
        kinds = [{"input_values": torch.randn(2, 6400)}, {"input_values": torch.randn(2, 1, 6400)}, {"input_values": torch.randn(2, 64, _of(config, "num_mel_bins", default=128))}, {"input_values": torch.randn(2, LENGTH, WIDTH)}]
    if "past_values" in known:
        length, steps = _of(config, "context_length", default=32), _of(config, "prediction_length", default=8)
        lags = max(_of(config, "lags_sequence", default=[0]) or [0])
        channel = _of(config, "num_input_channels", "input_size", default=1)
        series = {"past_values": torch.randn(2, length + lags, channel) if channel > 1 else torch.randn(2, length + lags)}
        times = _of(config, "num_time_features", default=0)
        if "past_time_features" in known:
            series["past_time_features"] = torch.randn(2, length + lags, times)
            series["past_observed_mask"] = torch.ones_like(series["past_values"])
        if "future_values" in known:
            series["future_values"] = torch.randn(2, steps, channel) if channel > 1 else torch.randn(2, steps)
        if "future_time_features" in known:
            series["future_time_features"] = torch.randn(2, steps, times)
        kinds = [series, {"past_values": torch.randn(2, length, channel)}, {"past_values": torch.randn(2, length)}]
    for kind in kinds:
        yield {**text, **kind}
    if text and any(kinds):
        short = {each: value for each, value in text.items() if each != "attention_mask"}
        for kind in kinds:
            yield {**short, **kind}


def loss_of(out: Any) -> torch.Tensor:
    """The loss of a forward, or one made of all that it returns."""
    loss = getattr(out, "loss", None)
    if isinstance(out, dict) and loss is None:
        loss = out.get("loss")
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
        return loss
    parts = [each.float().pow(2).mean() for each in tensors_of(out) if each.is_floating_point() and each.requires_grad and each.numel()]
    if not parts:
        raise NotMade("nothing that it returns has a graph")
    return torch.stack(parts).sum()


_COUNTS = re.compile(r"tokens:? *(?:\w+ )?(\d+)[^\d]+features:?[^\d]*(\d+)|(\d+) \w+ tokens[^\d]+(\d+)", re.S)


def _places(config: Any) -> List[int]:
    """Ids that stand for a picture, or a sound."""
    found = []
    for name in ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index", "video_token_id", "speech_token_id", "image_context_token_id", "im_patch_id"):
        value = getattr(config, name, None)
        if _is_whole(value):
            found.append(value)
    return found[:1]


def _kinds_of_tokens(config: Any, ids: torch.Tensor) -> torch.Tensor:
    return sum((ids == place).long() for place in _places(config)) + torch.zeros_like(ids)


def tiny_batch(model: nn.Module, name: str) -> Dict[str, Any]:
    """A batch of which the model computes a loss that has a gradient and is finite. NotMade: none was found."""
    config = model.config
    known = inspect.signature(model.forward).parameters
    errors: List[str] = []

    def works(batch: Dict[str, Any]) -> bool:
        state = copy.deepcopy(dict(model.named_buffers()))
        try:
            torch.manual_seed(1)
            loss = loss_of(model(**batch))
            if not bool(torch.isfinite(loss)):
                raise NotMade("the loss is not finite")
            loss.backward()
            return True
        except Exception as raised:  # noqa: B902
            errors.append(f"{type(raised).__name__}: {' '.join(str(raised).split())[:300]}")
            return False
        finally:
            model.zero_grad(set_to_none=True)
            with torch.no_grad():
                for each, buffer in model.named_buffers():
                    if each in state and buffer.shape == state[each].shape:
                        buffer.copy_(state[each])

    torch.manual_seed(2)
    fallback: Optional[Dict[str, Any]] = None
    for inputs in _inputs(name, config, known):
        given = {each: value for each, value in inputs.items() if each in known}
        variants = [extra for extra in labels_of(name, config, given) if any(each in known for each in extra)] + [{}]
        for extra in variants:
            extra = {each: value for each, value in extra.items() if each in known}
            if "return_loss" in known:
                extra["return_loss"] = True
            batch = {**given, **extra}
            if "labels" in extra and "decoder_input_ids" in batch:
                batch.pop("decoder_input_ids")
            mark = len(errors)
            if "mm_token_type_ids" in known and "input_ids" in batch:
                batch["mm_token_type_ids"] = _kinds_of_tokens(config, batch["input_ids"])
            if works(batch):
                if extra or not variants[0]:
                    return batch
                fallback = fallback or batch
                break
            counts = _COUNTS.search(" ".join(errors[mark:]))
            places = _places(config)
            if counts and places and "input_ids" in batch and any(each in batch for each in ("pixel_values", "input_features", "input_values")):
                wanted = int(counts.group(2) or counts.group(4))
                each_row = max(1, wanted // 2)
                ids = words(config, each_row + 8)
                ids[:, 2 : 2 + each_row] = places[0]
                again = {**batch, "input_ids": ids}
                if "mm_token_type_ids" in again:
                    again["mm_token_type_ids"] = _kinds_of_tokens(config, ids)
                if "attention_mask" in again:
                    again["attention_mask"] = torch.ones_like(ids)
                if "labels" in extra and extra["labels"].shape[-1] == batch["input_ids"].shape[-1]:
                    again["labels"] = ids.clone()
                if works(again):
                    return again
    if fallback is not None:
        return fallback
    raise NotMade(" | ".join(dict.fromkeys(errors))[:900])

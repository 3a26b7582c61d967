"""penstock.plan: what an engine of a model would do, before anything is made."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import os
import traceback
from html import escape
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from .. import _core
from .._buffers import whole_number
from .._files import write_text
from .._small_files import exists
from . import _base_weights
from ._blocks import Block, find_blocks
from ._handed_over import check_types, described_blocks, described_stages, options_of, resident_bytes
from ._device import choose_devices, tell_of_unused_settings
from ._keywords import Keywords
from ._optimizer import describe, optimizer_of
from ._pieces import Pieces
from ._settings import DTYPES, PathLike, Settings, check_names, takes
from ._tensor_memory import StepTensors
from ._trace import Traced, Use, settled, trace, with_other_modes
from ._tree import counted, map_tensors
from ._watch import product_rate

if TYPE_CHECKING:
    from typing_extensions import Unpack

_META = torch.device("meta")


class Plan:
    """Where every byte of a training would live, what moves in a step, how long that takes and why. ``print(plan)`` is a page.

    Made by ``penstock.plan``. A notebook shows it as the page of ``html()``.
    """

    def __init__(self, core: Any, title: str, notes: Sequence[str]) -> None:
        self._core = core
        self._title = title
        self._told: Dict[str, Any] = json.loads(core.json(False))
        #: What it does not know, and assumes.
        self.notes = list(notes)

    @property
    def least_host_memory_bytes(self) -> int:
        """The least ``host_memory`` that ``initialize`` accepts."""
        return int(self._told["least_host_memory_bytes"])

    @property
    def predicted_step_seconds(self) -> float:
        """Of a step in which no gradient is clipped, on this machine."""
        return float(self._told["predicted_step_seconds"])

    @property
    def bound_by(self) -> str:
        """What the step waits for: "read", "write", "compute", "optimizer"."""
        return str(self._told["bound_by"])

    @property
    def nvme_bytes_per_param_per_step(self) -> float:
        """Read from and written to the drive."""
        return float(self._told["nvme_bytes_per_param_per_step"])

    def as_dict(self) -> Dict[str, Any]:
        """All of it, with the keys of ``penstock plan --json``, and ``notes``. What-ifs are planned when this is called."""
        return {**json.loads(self._core.json(True)), "notes": list(self.notes)}

    def __getitem__(self, name: str) -> Any:
        return self._told[name]

    def keys(self) -> Any:
        """With ``plan[key]``: ``dict(plan)`` is what is known without what-ifs."""
        return self._told.keys()

    def html(self, path: Optional[PathLike] = None) -> str:
        """The page that ``penstock plan --html`` makes: one file of HTML that asks nobody for anything. path: where it is written as well."""
        page = str(self._core.html(self._title))
        if path is not None:
            write_text(path, page)
        return page

    def __str__(self) -> str:
        return "\n".join([self._title, self._core.text().rstrip("\n"), *self.notes])

    def __repr__(self) -> str:
        return (
            f"<penstock.Plan of {self._title}: at least {self.least_host_memory_bytes} bytes of host memory, "
            f"{self.predicted_step_seconds:.3g} s a step, bound by {self.bound_by}>"
        )

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{escape(self.html(), quote=True)}" style="width: 100%; height: 40em; border: 0"></iframe>'


@takes(Keywords)
def plan(
    model_or_config: Any,
    batch: Optional[int] = None,
    seq: Optional[int] = None,
    host_memory: Union[None, int, str] = None,
    device_memory: Union[None, int, str] = None,
    state_dir: Union[None, PathLike, Sequence[PathLike]] = None,
    config: Any = None,
    *,
    optimizer: Any = None,
    example: Any = None,
    device: Union[None, str, int, torch.device] = None,
    **keywords: Unpack[Keywords],
) -> Plan:
    """What ``penstock.initialize`` would do with a model, before anything is made: where every byte lives, bytes moved, seconds a step.

    model_or_config: any torch module, with values or on the meta device, which stays as it is; or a configuration of transformers, its
        dictionary, or the path of its config.json or directory, of which the language model is planned.
    batch, seq: samples and tokens of each in a micro-batch. batch: by default the configuration's train_micro_batch_size_per_gpu, or 1. seq: of
        a language model, 1,024 or what it has at most by default.
    example: a batch in their place, of tensors as the model takes it (``model(**example)``, ``model(*example)``, ``model(example)``); their
        values do not matter.
    host_memory, config: as for ``initialize``. optimizer: a torch optimizer, whose parameters do not matter, or a function that makes one of
        parameters.
    state_dir: as for ``initialize``; its drive is measured for a second, with a file that goes again, unless ds_nvme_tune has stored its
        profile. Where nothing says where state is, it is on a drive whose rates are assumed, and the plan says so.
    device_memory: as for ``initialize``, of a GPU that is here. What a step's tensors take of it is found out on the meta device.
    device: that computes; a product of matrices is measured there.

    The step's compute is that of the matrices of parameters, 2 FLOPs a parameter and token and three times that for backward, at the rate of
    a product of two matrices that is measured here. Attention's own products and what torch does besides are not in it. Memory of
    activations is torch's, and comes on top, but for the inputs that blocks keep for backward (``saved_activations``).

    The forward is followed on the meta device, without values. Where a model's forward needs values, its modules' order is taken, and
    ``notes`` say so, and what ``initialize`` warns of in the configuration. TypeError, ValueError: it cannot be planned; names what and the way out. RuntimeError: host_memory is too small, with
    the least that would do.
    """
    given: Dict[str, Any] = {**keywords, "host_memory": host_memory, "device_memory": device_memory, "state_dir": state_dir}
    check_names(plan, given)
    if example is not None and not (batch is None and seq is None):
        raise ValueError("example= says how many samples and tokens there are: leave out batch= and seq=, or example=")
    described, title = _model_of(model_or_config)
    if getattr(described, "_penstock_engine", "") == "open":
        raise ValueError("this model has an engine: engine.plan() says what that has planned")
    model = _without_values(described)
    settings = Settings(config, given, needs_place=False)
    settings.device, settings.engine_device = choose_devices(settings.chosen_device if device is None else device, settings.device_memory)
    check_types(model)
    if next(model.parameters(), None) is None:
        raise ValueError(f"{title} has no parameters: there is nothing to plan")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"no parameter of {title} requires a gradient, and a plan is of a training: call requires_grad_() on what is to be trained")
    made = _optimizer_of(optimizer, settings, model)
    notes: List[str] = [*settings.notes, *tell_of_unused_settings(settings)]
    micro_batch = (settings.micro_batch_size or 1) if batch is None else whole_number(batch, "batch", 1, 2**30)
    found, uses, inputs = _followed(model, settings, example, micro_batch, seq, notes)
    tokens, samples = counted(*inputs)
    if settings.micro_batch_size not in (0, samples):
        what = "example=" if example is not None else "batch="
        notes.append(f"planned for a micro-batch of {samples}, as {what} has it: train_micro_batch_size_per_gpu is {settings.micro_batch_size}")
    rate = product_rate(DTYPES[settings.dtype], 512 if settings.device.type == "cpu" else 4096, settings.device, settles=0.1)
    for use in uses:
        use.seconds = 2.0 * _matrices(use.module) * (tokens or samples) / rate
    groups = {id(parameter): number for number, group in enumerate(made.param_groups) for parameter in group["params"]}
    told, marks, _ = described_blocks(model, found, groups, settings, lambda parameter: None)
    options = options_of(settings, describe(made), trains=True, resident_bytes=resident_bytes(found, settings, True))
    if settings.base_weights:
        _base_weights.check(settings)
        trains = [[each for each, _ in mark] for mark in marks]
        options["base"] = _base_weights.describe(model, found, trains, settings.base_weights, record=None, is_planned=True)
    if not settings.state_dirs and settings.offload == "nvme":
        options["state_dirs"] = [""]  # of no drive that is known
    sources = [
        f"compute: {_count(2.0 * sum(_matrices(use.module) for use in uses))}FLOPs of forward a token, by the matrices of parameters, at "
        f"{_count(rate)}FLOP/s, of a product of matrices measured just now"
    ]
    threads = torch.get_num_threads() if settings.device.type == "cpu" else 0
    core = _core.Plan(told, described_stages(uses), settings, json.dumps(options), threads, bool(settings.state_dirs) and settings.offload == "nvme", sources)
    shape = f"{tokens} tokens" if tokens else f"{samples} samples"
    return Plan(core, f"{title}, {shape} in a micro-batch", notes)


def _count(value: float) -> str:
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "


# The model, on the meta device where it is made here, and what it is called.
def _model_of(given: Any) -> Tuple[nn.Module, str]:
    if isinstance(given, nn.Module):
        return given, type(given).__name__
    if isinstance(given, (str, os.PathLike, Mapping)) or type(given).__module__.split(".")[0] == "transformers" or hasattr(given, "model_type"):
        return _of_transformers(given)
    raise TypeError(f"a plan is made of a torch module or of a configuration of transformers, not of {type(given).__name__}")


def _of_transformers(given: Any) -> Tuple[nn.Module, str]:
    try:
        import transformers
    except ImportError as error:
        raise ValueError("a configuration is planned with transformers: pip install transformers, or give the model itself") from error
    title = getattr(given, "name_or_path", "") or ""
    if isinstance(given, Mapping):
        described = dict(given)
        if not isinstance(described.get("model_type"), str):
            raise ValueError("the configuration has no model_type: it is none of transformers'")
        given = transformers.AutoConfig.for_model(**described)
    elif isinstance(given, (str, os.PathLike)):
        title = os.fspath(given)
        given = transformers.AutoConfig.from_pretrained(title, local_files_only=exists(title))
    with torch.device("meta") if hasattr(torch, "get_default_device") else _initialized_nowhere():
        model = transformers.AutoModelForCausalLM.from_config(given)
    return model, title or type(model).__name__


def _initialized_nowhere() -> Any:
    try:
        from accelerate import init_empty_weights
    except ImportError as error:
        raise ValueError("this torch makes no model on the meta device: give the model itself, or use torch 2.0 or newer") from error
    return init_empty_weights(include_buffers=True)


# A copy on the meta device, which takes no memory. Parameters that are one stay one.
def _without_values(model: nn.Module) -> nn.Module:
    memo: Dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=_META), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=_META)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # noqa: B902 - whatever a module's own __deepcopy__ says
        raise ValueError(f"{type(model).__name__} cannot be copied without its values ({type(error).__name__}: {error}): build it on the meta device") from error


def _optimizer_of(given: Any, settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if given is None:
        return optimizer_of(settings.optimizer, parameters)
    if not isinstance(given, torch.optim.Optimizer):
        return given(parameters)  # type: ignore[no-any-return]
    described = describe(given)
    options = {name: value for name, value in given.defaults.items() if name != "params"}
    made = optimizer_of({"type": described["type"], "lr": described["lr"]}, parameters)
    for group in made.param_groups:
        group.update(options)
    return made


# The blocks and their uses, as the first forward will show them, and that forward's inputs.
def _followed(
    model: nn.Module, settings: Settings, example: Any, batch: int, seq: Optional[int], notes: List[str]
) -> Tuple[List[Block], List[Use], Tuple[Tuple[Any, ...], Dict[str, Any]]]:
    blocks = find_blocks(model, settings.blocks, has_values=False)
    args, kwargs = _inputs(model, example, batch, seq)
    model.train()
    forward = functools.partial(model, *args, **kwargs)
    pieces = Pieces(model, settings)
    pieces.install()
    try:
        tensors = StepTensors(_META) if settings.counts_tensors else None
        again = functools.partial(trace, model, blocks, forward, _META, tensors, pieces)
        found, uses = settled(model, blocks, with_other_modes(model, blocks, again(), again))
        notes += pieces.notes()
        if tensors is not None:
            settings.step_tensor_bytes = tensors.bytes(settings.forwards, uses)
            notes += tensors.notes
        return found, uses, (args, kwargs)
    except Exception as error:  # noqa: B902 - what a forward says that wants values, or other inputs
        notes.append(
            f"the forward was not followed ({_where(model, error)}: {type(error).__name__}: {_line(error)}): blocks are planned in the order of the "
            "model's modules, as if each were used once in its own forward; example= gives a batch as the model takes it"
        )
    order = {id(module): number for number, module in enumerate(model.modules())}
    called = [(order[id(module)], module, name, number) for number, block in enumerate(blocks) for name, module in block.modules]
    uses = [Use(module, name, number) for _, module, name, number in sorted(called, key=lambda each: each[0])]
    found, uses = settled(model, blocks, Traced(uses, set(), []))
    return found, uses, (args, kwargs)


def _inputs(model: nn.Module, example: Any, batch: int, seq: Optional[int]) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    if example is not None:
        empty = map_tensors(example, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=_META))
        if isinstance(empty, Mapping):
            return (), dict(empty)
        return (tuple(empty), {}) if isinstance(empty, (tuple, list)) else ((empty,), {})
    name, most = _window(model)
    length = whole_number(min(1024, most) if seq is None else seq, "seq", 1, 2**30)
    if name and length > most:
        raise ValueError(
            f"seq is {length}: the model takes {most} tokens ({name} of its configuration); give fewer, change the configuration, or give example="
        )
    ids = torch.empty((batch, length), dtype=torch.int64, device=_META)
    taken = inspect.signature(model.forward).parameters
    if "input_ids" in taken:
        return (), {"input_ids": ids, **({"labels": ids} if "labels" in taken else {})}
    return (ids,), {}


# The key of its configuration that says how many tokens it takes, and how many; "" where there is none.
def _window(model: nn.Module) -> Tuple[str, int]:
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return name, value
    return "", 1024


# Of the module whose forward raised it.
def _where(model: nn.Module, error: BaseException) -> str:
    names = {id(module): name for name, module in model.named_modules()}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        holder = frame.f_locals.get("self")
        if isinstance(holder, nn.Module) and id(holder) in names:
            found = f"{names[id(holder)] or 'the model'}, a {type(holder).__name__}"
    return found or "before any module"


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


# Elements of matrices that a token is multiplied by: not of embeddings, which are looked up.
def _matrices(module: nn.Module) -> int:
    count, seen = 0, set()
    for part in module.modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            continue
        for parameter in part._parameters.values():
            if parameter is not None and parameter.dim() >= 2 and id(parameter) not in seen:
                seen.add(id(parameter))
                count += parameter.numel()
    return count

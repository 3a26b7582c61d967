"""Keywords that a call takes are obeyed, refused, or said to change nothing: one that does not exist is refused by every public call, and each
that does has a row below, with what shows it. A keyword without a row is a failure, and so is a row without its keyword."""

import ast
import datetime
import importlib
import inspect
import os
import pkgutil
import re
import types
import typing
import warnings

import pytest

torch = pytest.importorskip("torch")

import penstock  # noqa: E402
import penstock.deepspeed as deepspeed  # noqa: E402
from engine_models import batches, make, net, step  # noqa: E402
from penstock._engine._report import Report  # noqa: E402
from torch import nn  # noqa: E402

# --- all public calls


def modules():
    """Penstock's, and those that answer to DeepSpeed's name."""
    import deepspeed as shim

    for package in (penstock, shim):
        yield package.__name__
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not any(part.startswith("_") for part in found.name.split(".")):
                yield found.name


def names_in(module):
    if module is penstock:  # what its __getattr__ imports when it is asked for
        return [*module.__all__, *(each for each in re.findall(r'"(\w+)"', inspect.getsource(module.__getattr__)) if hasattr(module, each))]
    return getattr(module, "__all__", None) or [name for name in dir(module) if not name.startswith("_")]


def is_ours(found, module):
    where = str(getattr(found, "__module__", ""))
    if not callable(found) or where.split(".")[0] not in ("penstock", "deepspeed"):
        return False
    # The arguments of a Function of autograd are apply's, by place.
    if isinstance(found, type) and (issubclass(found, (BaseException, torch.autograd.Function)) or hasattr(found, "__members__")):
        return False
    # Without a list of its names a module of Penstock's has helpers of others.
    return hasattr(module, "__all__") or module is penstock or not module.__name__.startswith("penstock.") or where == module.__name__


def methods_of(kind):
    for each in kind.__mro__:
        if each.__module__.split(".")[0] not in ("penstock", "deepspeed"):
            continue
        for name, method in vars(each).items():
            method = getattr(method, "__func__", method)  # of a class or static
            if inspect.isfunction(method) and not name.startswith("_"):
                yield f"{each.__name__}.{name}", inspect.unwrap(method)  # an engine's are its parts'


def calls():
    """By name: penstock.save, deepspeed.initialize, Engine.step. What has several names has the first."""
    found, known = {}, set()

    def add(name, call):
        if id(call) not in known:
            known.add(id(call))
            found[name] = call

    for module in sorted(set(modules()), key=lambda name: (not name.startswith("penstock"), name)):
        module = importlib.import_module(module)
        for name in names_in(module):
            call = getattr(module, name)
            if not is_ours(call, module):
                continue
            add(f"{module.__name__}.{name}".replace("penstock.deepspeed.", "deepspeed."), call)
            for method, function in methods_of(call) if isinstance(call, type) else ():
                add(method, function)
    for method, function in methods_of(Report):
        add(method, function)
    return found


CALLS = calls()
# What is the model's has the model's arguments; and these are made by Penstock alone.
MODELS = ("Engine.forward", "Engine.generate", "Engine.state_dict", "DeepSpeedEngine.forward")
RESULTS = ("Report.of", "deepspeed.DeepSpeedEngine", "penstock.llm.Text", "penstock.llm.TextStream", "penstock.llm.TokenLogprob")
SCALER_CALLS = ("backward", "scale_gradient", "scale_loss", "update_scale")
# Refused whatever is given: NotImplementedError with what to do instead.
REFUSE = {name for name, call in CALLS.items() if str(call.__doc__).startswith("Not served")} | {
    "deepspeed.tp_model_init", "deepspeed.runtime.utils.clip_grad_norm_", *(f"LossScalerBase.{each}" for each in SCALER_CALLS),
}  # fmt: skip


def test_every_call_is_found():
    for name in (
        "penstock.initialize", "penstock.plan", "penstock.Plan", "penstock.LLM", "LLM.generate", "LLM.stream", "LLM.chat", "penstock.save", "penstock.load",
        "penstock.init_on_disk", "Plan.html", "Report.html", "Engine.save_checkpoint", "Engine.load_checkpoint", "Engine.gathered", "penstock.run.main",
        "penstock.optim.AdamW", "penstock.optim.Lion", "penstock.ops.adam.DeepSpeedCPUAdam", "DeepSpeedCPUAdam.step_subgroup", "penstock.ops.aio.aio_handle",
        "aio_handle.new_cpu_locked_tensor", "aio_handle.pread", "deepspeed.initialize", "DeepSpeedEngine.save_checkpoint", "DeepSpeedEngine.backward",
        "deepspeed.runtime.zero.Init", "deepspeed.runtime.zero.GatheredParameters", "deepspeed.runtime.activation_checkpointing.checkpointing.configure",
        "deepspeed.runtime.lr_schedules.WarmupLR", "deepspeed.utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict",
    ):  # fmt: skip
        assert name in CALLS, name
    assert len(CALLS) > 220


# --- a keyword that does not exist


class _Stub:
    """An engine whose calls must not be reached."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: penstock.Engine.__dict__[name](self, *args, **kwargs)


class _Wrapper:
    engine = _Stub()


SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
# Of those that take any name and must refuse it themselves: arguments that are right.
ARGUMENTS = {
    "penstock.initialize": lambda _: (nn.Linear(2, 2),),
    "penstock.plan": lambda _: (nn.Linear(2, 2),),
    "penstock.save": lambda directory: (1, directory / "new.pt"),
    "penstock.load": lambda directory: (directory / "there.pt",),
    "penstock.LLM": lambda directory: (directory,),
    "LLM.generate": lambda _: (None, "text"),
    "LLM.stream": lambda _: (None, "text"),
    "LLM.chat": lambda _: (None, []),
    "deepspeed.runtime.utils.clip_grad_norm_": lambda _: ([parameters()], 1.0),
    "aio_handle.pread": lambda directory: (penstock.ops.aio.aio_handle(), torch.zeros(4), directory / "there.pt"),
    "aio_handle.pwrite": lambda directory: (penstock.ops.aio.aio_handle(), torch.zeros(4), directory / "new"),
    "aio_handle.new_cpu_locked_tensor": lambda _: (penstock.ops.aio.aio_handle(), 4, torch.zeros(4)),
    "aio_handle.free_cpu_locked_tensor": lambda _: (penstock.ops.aio.aio_handle(), torch.zeros(4)),
    "DeepSpeedEngine.save_checkpoint": lambda _: (_Wrapper(), "none"),
    "DeepSpeedEngine.export_checkpoint": lambda _: (_Wrapper(), "none"),
    "deepspeed.init_inference": lambda _: (net(),),
    **{f"deepspeed.runtime.zero.{name}": lambda _: (4, 4) for name in ("TiledLinear", "TiledLinearReturnBias")},
    **{f"LossScalerBase.{name}": lambda _: (scaler(),) for name in SCALER_CALLS},
    **{f"deepspeed.runtime.lr_schedules.{name}": lambda _: (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1),) for name in SCHEDULES},
}


@pytest.mark.parametrize("name", sorted(set(CALLS) - set(MODELS)))
def test_a_keyword_that_does_not_exist_is_refused(tmp_path, name):
    # Python refuses it before the body runs; a body that takes any names must say so itself.
    torch.save({}, tmp_path / "there.pt")
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in inspect.signature(CALLS[name]).parameters.values())
    if takes_any:
        assert name in ARGUMENTS or name in REFUSE, f"{name} takes any keyword: say in ARGUMENTS what else it takes"
    with pytest.raises(NotImplementedError if name in REFUSE else TypeError if name not in ARGUMENTS else (TypeError, ValueError)) as raised:
        CALLS[name](*ARGUMENTS.get(name, lambda _: ())(tmp_path), no_such_option=1)
    told = str(raised.value)
    assert "\n" not in told and (name in REFUSE or "no_such_option" in told or "takes no arguments" in told), told


# --- a keyword that does


def scaler(kind="LossScaler", *args, **keywords):
    return getattr(importlib.import_module("deepspeed.runtime.fp16.loss_scaler"), kind)(*args, **keywords)


def scaler_of_a_scale(_):
    assert scaler(scale=4.0).loss_scale == 4.0


def dynamic_scaler(_):
    made = scaler("DynamicLossScaler", 8.0, 10, 1.0, 2, False, raise_error_at_min_scale=False, dtype=torch.bfloat16)
    assert (made.raise_error_at_min_scale, made.dtype) == (False, torch.bfloat16)


class Nothing:
    """It changes nothing, and the docstring says so: the call's, or that of another one like it."""

    def __init__(self, like=None):
        self.like = like


class Refused:
    """Any value but the default is an error that names it, or what it means. value: one; args: what else the call takes."""

    def __init__(self, value, args=(), also=None, told=None):
        self.value, self.args, self.also, self.told = value, args, also or {}, told


def held(*tests):
    """By tests elsewhere, "file: name", each of which names the keyword."""
    return tests


def of(row, *keywords):
    return dict.fromkeys(keywords, row)


def engine_with(**keywords):
    return penstock.initialize(net(), **{"offload": "none", **keywords})[0]


def setting(name, value, expected=None):
    """initialize(name=value) is what the engine then goes by."""

    def look(directory):
        engine = engine_with(**{name: value})
        assert getattr(engine._settings, name) == (value if expected is None else expected)
        engine.close()

    return look


def alone(directory):
    assert engine_with(ranks=False)._run.ranks.world == 1
    with pytest.raises(TypeError, match="ranks"):
        engine_with(ranks="no")


def by_config_params(directory):
    engine = engine_with(config_params={"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.25})
    assert engine.micro_batch_size == 3 and engine._settings.kept["gradient_clipping"] == 0.25
    engine.close()


def of_options(call):
    """Each option of a text is looked at by the function that looks at generate's: a value that is none is refused by its name."""

    class Core:
        vocabulary, default_max_tokens, default_stop, defaults = 10, 0, [], {}
        encode = staticmethod(lambda *given: [1])

    class Model(penstock.LLM):
        _core = Core()
        _prompts = staticmethod(lambda given: [[1]])
        chat_prompt = staticmethod(lambda messages: "text")

        def __init__(self):
            pass

        def __del__(self):
            pass

    def look_at(keyword):
        def look(directory):
            for value in (object(), [object()]):
                with pytest.raises((TypeError, ValueError), match=keyword):
                    made = getattr(Model(), call)("text" if call != "chat" else [], **{keyword: value})
                    list(made)

        return look

    return look_at


TEXTS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "repetition_penalty", "min_p", "min_tokens", "presence_penalty")
TEXTS += ("frequency_penalty", "logit_bias", "logprobs")


def parameters(values=4):
    torch.manual_seed(3)
    made = nn.Parameter(torch.randn(values, 3))
    made.grad = torch.randn(values, 3)
    return made


def after(kind, keywords, steps=5, **more):
    p = parameters()
    optimizer = kind([p], **{"lr": 0.1, **keywords, **more})
    for number in range(steps):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
        optimizer.step()
    return p.detach()


def alike(kind, torchs, keyword, value, **more):
    """An update with it is torch's with it, and another one than without."""

    def look(directory):
        place = {"state_dir": directory} if issubclass(kind, penstock.optim._on_drive.OnDrive) else {}
        mine = after(kind, {**more, keyword: value}, **place)
        assert not torch.allclose(mine, after(kind, more, **place), rtol=0, atol=1e-7), "it changes nothing"
        if torchs is not None:
            expected = after(torchs, {**more, keyword: value})
            assert torch.allclose(mine, expected, rtol=1e-4, atol=1e-5), (mine, expected)

    return look


PLACES = held("test_optim.py: test_the_bits_depend_on_no_memory_and_no_place")
ON_DRIVE = {
    **of(PLACES, "state_dir", "host_memory", "nvme_offload_fraction"),
    "nvme_offload_dir": held("test_optim.py: test_wrong_arguments_are_refused_by_name"),
    "offload_gradients": held("test_optim_device.py: test_gradients_leave_as_they_come"),
}


def on_drive(kind, torchs, values, nothing=(), refused=(), more=None):
    def place(directory):
        return {"state_dir": directory}

    rows = {keyword: alike(kind, torchs, keyword, value, **((more or {}).get(keyword, {}))) for keyword, value in values.items()}
    rows.update({keyword: Refused(True, lambda directory: ([parameters()],), place) for keyword in refused})
    return {**rows, **of(Nothing(), *nothing), **ON_DRIVE}


TAKES = {"foreach", "fused"}
optim, T = penstock.optim, torch.optim
CPU = penstock.ops.adam.DeepSpeedCPUAdam
ADAGRAD = penstock.ops.adagrad.DeepSpeedCPUAdagrad
LION = penstock.ops.lion.DeepSpeedCPULion
FUSED = penstock.ops.lamb.FusedLamb


def one(_=None):
    return ([parameters()],)


def sixteen(kind):
    """Moments in the type of the parameter."""

    def look(directory):
        for wide in (True, False):
            p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            optimizer = kind([p], lr=0.1, fp32_optimizer_states=wide)
            optimizer.step()
            states = {each.dtype for each in optimizer.state[p].values() if isinstance(each, torch.Tensor)}
            assert states == {torch.float32 if wide else torch.bfloat16}

    return look


def a_closure(kind):
    """It is called, and its loss returned."""

    def look(directory):
        place = {"state_dir": directory} if issubclass(kind, penstock.optim._on_drive.OnDrive) else {}
        assert kind([parameters()], lr=0.1, **place).step(closure=lambda: 5.0) == 5.0

    return look


def copies(directory):
    p, copy = parameters(), torch.zeros(4, 3, dtype=torch.bfloat16)
    CPU([p]).step(fp16_param_groups=[[copy]])
    assert torch.equal(copy, p.detach().bfloat16())


def file_of(directory, text=bytes(range(64))):
    (directory / "file").write_bytes(text)
    return directory / "file"


def at(call, start):
    """From byte 8 on."""

    def look(directory):
        handle, path = penstock.ops.aio.aio_handle(), file_of(directory)
        buffer = torch.full((8,), 7, dtype=torch.uint8)
        getattr(handle, call)(buffer, path, file_offset=8)
        handle.wait()
        if start == "read":
            assert buffer.tolist() == list(range(8, 16))
        else:
            assert path.read_bytes() == bytes(range(8)) + bytes([7] * 8) + bytes(range(16, 64))

    return look


def by_descriptor(call):
    def look(directory):
        handle, path = penstock.ops.aio.aio_handle(), file_of(directory)
        descriptor = os.open(path, os.O_RDWR)
        buffer = torch.full((8,), 7, dtype=torch.uint8)
        getattr(handle, call)(buffer, fd=descriptor)
        handle.wait()
        os.close(descriptor)
        assert buffer.tolist() == list(path.read_bytes()[:8])

    return look


def only_starts(call):
    def look(directory):
        handle, buffer = penstock.ops.aio.aio_handle(), torch.zeros(8, dtype=torch.uint8)
        for spelling in ("async", "async_"):
            assert getattr(handle, call)(buffer, file_of(directory), **{spelling: True}) == 0 and handle.wait() == 1
        with pytest.raises(TypeError):
            getattr(handle, call)(buffer, file_of(directory), **{"async": True, "async_": True})

    return look


def locked_by_either_name(directory):
    handle = penstock.ops.aio.aio_handle()
    made = handle.new_cpu_locked_tensor(4, example_tenosr=torch.zeros(1, dtype=torch.int16))
    assert made.dtype == torch.int16 and handle.is_pinned(made)
    with pytest.raises(TypeError, match="example_tensor and example_tenosr"):
        handle.new_cpu_locked_tensor(4, example_tensor=torch.zeros(1), example_tenosr=torch.zeros(1, dtype=torch.int16))
    with pytest.raises(TypeError, match="locked_tensor and tensor"):
        handle.free_cpu_locked_tensor(locked_tensor=made, tensor=made)
    assert handle.free_cpu_locked_tensor(tensor=made) is True
    assert handle.free_cpu_locked_tensor(locked_tensor=handle.new_cpu_locked_tensor(4, example_tensor=made)) is True


def group_with(**keywords):
    """What init_distributed makes torch's group with; None: none."""
    import torch.distributed as dist

    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        patch.setattr(dist, "init_process_group", lambda **given: made.append(given))
        deepspeed.init_distributed(**keywords)
    return made[0] if made else None


def times_out(directory):
    assert group_with(timeout=datetime.timedelta(seconds=7)) == {"backend": "gloo", "timeout": datetime.timedelta(seconds=7)}
    assert group_with(dist_backend="nccl", verbose=False) == {"backend": "gloo"}


def makes_no_group(directory):
    assert group_with(dist_init_required=False) is None and group_with(dist_init_required=True) is not None


def with_deepspeeds_name(directory, **keywords):
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    return deepspeed.initialize(**{"model": net(), "config": config, **keywords})


def config_of_args(directory):
    path = directory / "config.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 3}')
    for given in ({"args": types.SimpleNamespace(deepspeed_config=str(path))}, {"config_params": str(path)}):
        engine = with_deepspeeds_name(directory, config=None, **given)[0]
        assert engine.train_micro_batch_size_per_gpu() == 3
        engine.destroy()


def a_scheduler_without_optimizer_is_told(directory):
    config = {"train_micro_batch_size_per_gpu": 4}
    with pytest.warns(UserWarning, match="lr_scheduler: accepted and ignored: there is no optimizer"):
        with_deepspeeds_name(directory, config=config, lr_scheduler=lambda optimizer: None)[0].destroy()
    engine, _, _, made = with_deepspeeds_name(directory, lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1))
    assert isinstance(made, torch.optim.lr_scheduler.StepLR)
    engine.destroy()


def without_frozen(call):
    def look(directory):
        model = net()
        model.norm.weight.requires_grad_(False)
        engine = with_deepspeeds_name(directory, model=model)[0]
        for left_out in (False, True):
            if call == "module_state_dict":
                state = engine.module_state_dict(exclude_frozen_parameters=left_out)
            else:
                engine.save_16bit_model(directory, save_filename="some.bin", exclude_frozen_parameters=left_out)
                state = torch.load(directory / "some.bin")
            assert ("norm.weight" in state) is not left_out and "norm.bias" in state
        with pytest.raises(TypeError, match="exclude_frozen_parameters"):
            engine.module_state_dict(exclude_frozen_parameters="no")
        engine.destroy()

    return look


def loader_with(**keywords):
    return penstock._data_loader.DeepSpeedDataLoader(list(range(10)), 4, num_local_io_workers=0, **keywords)


def a_sampler(directory):
    assert [each.tolist() for each in loader_with(data_sampler=[3, 1, 2])] == [[3, 1, 2]]
    engine = with_deepspeeds_name(directory)[0]
    assert [each.tolist() for each in engine.deepspeed_io(list(range(10)), data_sampler=[3, 1], num_local_io_workers=0)] == [[3, 1]]
    engine.destroy()


def shares(directory):
    parts = [sorted(sum((each.tolist() for each in loader_with(data_parallel_world_size=2, data_parallel_rank=rank)), [])) for rank in (0, 1)]
    assert sorted(sum(parts, [])) == list(range(10)) and len(parts[0]) == 5


def collates(directory):
    assert next(iter(loader_with(collate_fn=len))) == 4


def drops_the_last(directory):
    assert len(loader_with(dataloader_drop_last=True)) == 2 and len(loader_with()) == 3


def pins(directory):
    """Where there is a GPU to pin for."""
    assert loader_with(pin_memory=True).dataloader.pin_memory is torch.cuda.is_available()


def default_type(directory):
    with deepspeed.zero.Init(dtype=torch.float64):
        assert nn.Linear(1, 1).weight.dtype == torch.float64
    with deepspeed.zero.Init(dtype=torch.float64, enabled=False):
        assert nn.Linear(1, 1).weight.dtype == torch.float32


def profiler():
    pytest.importorskip("torch.utils.flop_counter")
    from penstock._flops import FlopsProfiler

    made = FlopsProfiler(net())
    made.start_profile()
    with torch.no_grad():
        made.model(**batches(1)[0])
    made.stop_profile()
    return made


def as_text(name):
    def look(directory):
        call = getattr(profiler(), name)
        assert isinstance(call(as_string=True), str) and not isinstance(call(), str)

    return look


def printed(keyword, value):
    """One line: it warns where it would have been another one."""

    def look(directory):
        made = profiler()
        with pytest.warns(UserWarning, match=f"{keyword}: accepted and ignored: the profile is one line"):
            made.print_model_profile(**{keyword: value, "output_file": str(directory / "profile")})
        with pytest.warns(UserWarning, match=f"{keyword}: accepted and ignored"):
            profile_of(output_file=str(directory / "profile"), **{keyword: value})

    return look


def profile_of(**keywords):
    pytest.importorskip("torch.utils.flop_counter")
    from penstock._flops import get_model_profile

    return get_model_profile(**{"model": nn.Linear(4, 4), "input_shape": (2, 4), "as_string": False, **keywords})


def to_a_file(directory):
    profiler().print_model_profile(profile_step=7, output_file=str(directory / "profile"))
    assert (directory / "profile").read_text().startswith("flops_profiler: step 7: ")
    profile_of(output_file=str(directory / "other"), warm_up=3)
    assert (directory / "other").read_text().startswith("flops_profiler: step 3: ")


class Counts(nn.Linear):
    calls = 0

    def forward(self, x, scale=1.0):
        Counts.calls += 1
        return super().forward(x) * scale

    def generate(self, x):
        return self(self(x))


def warms_up(directory):
    Counts.calls = 0
    profile_of(model=Counts(4, 4), warm_up=3, print_profile=False)
    assert Counts.calls == 4


def generates(directory):
    once, twice = (profile_of(model=Counts(4, 4), mode=mode, print_profile=False)[0] for mode in ("forward", "generate"))
    assert twice == 2 * once > 0
    with pytest.raises(ValueError, match="mode"):
        profile_of(mode="other")


def its_keywords(directory):
    assert profile_of(model=Counts(4, 4), input_shape=None, kwargs={"x": torch.ones(2, 4), "scale": 2.0}, print_profile=False)[0] > 0


def estimated(name, keyword, value):
    def look(directory):
        from penstock import _deepspeed

        told = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_deepspeed._core, "run_penstock", lambda given: told.append(given) or 0)
            call = getattr(_deepspeed, name)
            given = (net(),) if name.endswith("live") else (1000, 100) if "zero3" in name else (1000,)
            call(*given)
            call(*given, **{keyword: value})
        flag = {"num_gpus_per_node": "--gpus-per-node", "num_nodes": "--nodes", "additional_buffer_factor": "--buffer-factor"}[keyword]
        assert [each[each.index(flag) + 1] for each in told][1] == str(value) != [each[each.index(flag) + 1] for each in told][0]

    return look


def estimates(name):
    return {
        keyword: estimated(name, keyword, value)
        for keyword, value in {"num_gpus_per_node": 3, "num_nodes": 5, "additional_buffer_factor": 2.5}.items()
    }


def passed_to_torch(name, call, **keywords):
    """To torch.distributed's function, where there is a group."""

    def look(directory):
        import torch.distributed as dist

        comm = importlib.import_module("deepspeed.comm")
        seen = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "is_initialized", lambda: True)
            patch.setattr(dist, name, lambda *given: seen.append(given))
            getattr(comm, call)(**keywords)
        assert seen == [tuple(keywords.values())]

    return look


def ranks_of_a_group(_):
    import torch.distributed as dist

    comm = importlib.import_module("deepspeed.comm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_process_group_ranks", lambda group: [group, 7])
        assert comm.get_all_ranks_from_group(group=1) == [1, 7]


def logged(directory):
    heard = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed.utils.logger, "log", lambda level, message: heard.append((level, message)))
        deepspeed.utils.log_dist("text", level=40)
        deepspeed.utils.log_dist("other", ranks=[5])
    assert heard == [(40, "text")]


def wear(directory):
    engine = make(net(), directory / "run")
    step(engine, batches(1)[0])
    report = engine.report()
    engine.close()
    assert report.html(rated_bytes_written=1e15) != report.html(rated_bytes_written=1e12)
    assert report.html(path=directory / "page.html") == (directory / "page.html").read_text()


def page_of_a_plan(directory):
    plan = penstock.plan(net(), offload="none", example=batches(1)[0])
    assert plan.html(path=directory / "page.html") == (directory / "page.html").read_text()


def its_own_loss(directory):
    with make(net(), directory / "run") as engine:
        own = engine.train_batch(batches(1), loss=lambda module, batch: module(**batch) * 2)
        assert own.item() == pytest.approx(2 * net()(**batches(1)[0]).item(), abs=1e-4)


def counts_in_tensors(directory):
    """Of the steps, as one of torch's own optimizers has them there."""
    with make(net(), directory / "run") as engine:
        step(engine, batches(1)[0])
        for wanted in (True, False):
            path = engine.export_checkpoint(directory / "out", f"of_{wanted}", torch_optimizer=wanted)
            assert isinstance(torch.load(f"{path}/zero/norm.weight/step.pt"), torch.Tensor) is wanted


def looks_up_prompts(directory):
    for value in (-1, 65):
        with pytest.raises(ValueError, match=f"prompt_lookup is {value}"):
            penstock.LLM(directory, prompt_lookup=value)


def program_of_arguments(directory):
    with pytest.raises(SystemExit, match="zero_to_fp32.py: .*none"):
        penstock._fp32.main(arguments=[str(directory / "none"), str(directory / "out")])


def gathers_some(directory):
    model = net()
    with make(model, directory / "run") as engine:
        step(engine, batches(1)[0])
        lent, lend = [], engine._run.weights.lend
        engine._run.weights.lend = lambda parameter, value: (lent.append(parameter), lend(parameter, value))
        for parameters, expected in (([model.norm.weight], [model.norm.weight]), (None, list(model.parameters()))):
            lent.clear()
            with engine.gathered(parameters=parameters):
                assert {id(each) for each in lent} == {id(each) for each in expected}


def kinds_of_state(directory):
    model = net()
    with make(model, directory / "run") as engine:
        step(engine, batches(1)[0])
        moment = engine.read_state(model.norm.weight, kind="first moment")
        assert not torch.equal(moment, engine.read_state(model.norm.weight))
        engine.write_state(model.norm.weight, moment * 2, kind="first moment")
        assert torch.equal(engine.read_state(model.norm.weight, kind="first moment"), moment * 2)


def batches_by_name(directory):
    with make(net(), directory / "run", gradient_accumulation_steps=2) as engine:
        assert engine.train_batch(batches=batches(2)).numel() == 1 and engine.global_steps == 1


def mode_of_the_module(directory):
    engine = engine_with()
    assert engine.train(mode=False).module.training is False and engine.train().module.training is True


def elastic_group(directory):
    from penstock._engine._ranks import world_size

    groups = importlib.import_module("deepspeed.utils.groups")
    for keywords in ({"ep_size": 2}, {"mpu": object()}):
        with pytest.raises(NotImplementedError, match="ep_size and mpu"):
            groups.initialize(**keywords)
    assert world_size(None) == 1


def command_of_args(directory):
    runner = importlib.import_module("deepspeed.launcher.runner")
    with pytest.raises(SystemExit) as ended:
        runner.main(args=["--num_gpus", "0", "none.py"])
    assert ended.value.code == 2


def plan_of(keyword, value):
    def look(directory):
        first, other = (penstock.plan(net(), offload="none", example=batches(1)[0], **given) for given in ({}, {keyword: value}))
        assert first.as_dict() != other.as_dict()

    return look


def plan_refuses(keyword, value):
    def look(directory):
        with pytest.raises(ValueError, match=keyword):
            penstock.plan(net(), offload="none", example=batches(1)[0], **{keyword: value})

    return look


def handed_over(keyword, value):
    """What the engine goes by is what FusedAdam was made with."""

    def look(directory):
        fused = importlib.import_module("deepspeed.ops.adam").FusedAdam
        told = []
        for given in ({}, {keyword: value}):
            model = net()
            engine = penstock.initialize(model, optimizer=fused(model.parameters(), lr=0.1, **given), offload="none")[0]
            told.append(dict(engine._given.described))
            engine.close()
        assert told[0] != told[1]

    return look


def refused_by_the_engine(directory):
    fused = importlib.import_module("deepspeed.ops.adam").FusedAdam
    for keyword, value in (("bias_correction", False), ("amsgrad", True)):
        model = net()
        with pytest.raises(ValueError, match=f"{keyword}={value} is not served"):
            penstock.initialize(model, optimizer=fused(model.parameters(), lr=0.1, **{keyword: value}), offload="none")


def checkpoints_in_memory(directory):
    with pytest.warns(UserWarning, match="checkpoint_in_cpu: accepted and ignored"):
        deepspeed.checkpointing.configure(checkpoint_in_cpu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deepspeed.checkpointing.configure(checkpoint_in_cpu=False)


def converts_one_tag(directory):
    zero_to_fp32 = importlib.import_module("deepspeed.utils.zero_to_fp32")
    model = net()
    model.norm.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
    with make(model, directory / "run", optimizer=optimizer) as engine:
        for tag in ("first", "second"):
            step(engine, batches(1)[0])
            engine.save_checkpoint(directory / "kept", tag)
    for tag in ("first", "second"):
        expected = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(directory / "kept", tag)
        loaded = zero_to_fp32.load_state_dict_from_zero_checkpoint(net(seed=4), directory / "kept", tag=tag).state_dict()
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(directory / "kept", directory / tag, tag=tag, exclude_frozen_parameters=True)
        written = torch.load(directory / tag / "pytorch_model.bin")
        assert all(torch.equal(value, loaded[name]) for name, value in expected.items())
        assert set(expected) - set(written) == {"norm.weight"} and all(torch.equal(value, expected[name]) for name, value in written.items())



OPTIONS = "test_options.py: "
LOADS = {
    "tag": held("test_deepspeed_checkpoint.py: test_what_was_loaded_is_a_run_like_any_other"),
    "load_module_strict": held(OPTIONS + "test_a_checkpoint_of_another_model_is_loaded_as_far_as_it_goes"),
    "load_optimizer_states": held(OPTIONS + "test_without_optimizer_states_weights_and_scheduler_go_on"),
    "load_lr_scheduler_states": held(OPTIONS + "test_the_schedulers_state_is_left_where_it_is_not_wanted"),
    "load_module_only": held(OPTIONS + "test_weights_alone_are_loaded"),
    "custom_load_fn": held(OPTIONS + "test_what_is_not_served_of_a_checkpoint_is_refused_by_its_name"),
    "names": held("test_deepspeed_checkpoint.py: test_names_of_another_model_are_mapped"),
    "trust_client_state": held("test_client_state.py: test_a_class_of_the_scripts_own_is_read_where_it_is_trusted"),
}
SAVES = {
    "tag": held("test_engine_mistakes.py: test_a_tag_is_a_name_of_its_own"),
    "client_state": held("test_save_beside_training.py: test_a_checkpoint_is_of_the_moment_of_the_call_and_training_is_as_without_it"),
    "save_latest": held(OPTIONS + "test_what_is_not_served_of_a_checkpoint_is_refused_by_its_name"),
}
BACKWARD = {
    "retain_graph": held("test_accumulation.py: test_two_backwards_of_a_forward_are_one_micro_batch"),
    "scale_wrt_gas": held("test_accumulation.py: test_a_boundary_that_comes_early"),
}
FILES = held("test_aio.py: test_the_forms_of_deepspeed")
LOADER = held("test_training_data.py: test_collate_fn_and_the_last_batch")
SETTINGS = held(OPTIONS + "test_a_keyword_is_checked_as_its_key_is")
PROGRAM = "test_sampling.py: test_the_program_makes_the_texts_of_the_package"
HIDDEN = {
    name: Refused(value, told=told)
    for name, value, told in (
        ("module", nn.Linear(1, 1), None), ("data_parallel_group", 1, None), ("mpu", 1, None), ("zero_param_parallel_group", 1, None),
        ("zero_quantized_weights", True, None), ("zero_quantized_nontrainable_weights", True, None), ("sequence_data_parallel_group", 1, None),
        ("param_swapper", 1, None),
    )
}  # fmt: skip
SCHEDULE = {"last_batch_iteration": held("test_deepspeed_name.py: test_schedules_are_those_of_the_configuration")}

LEAVES = "test_deepspeed_names.py: test_marks_of_leaf_modules_are_kept"
INFERENCE = "test_deepspeed_names.py: test_inference_with_zero_evaluates_and_generates"
KEYWORDS = {
    "penstock.initialize": {
        **of(held("test_training_data.py: test_collate_fn_and_the_last_batch"), "collate_fn", "training_data", "config"),
        **of(held("test_training_data.py: test_training_from_the_loader_is_plain_training"), "model", "optimizer"),
        "model_parameters": held("test_hugging_face.py: test_a_script_for_deepspeed_changes_one_line"),
        "lr_scheduler": held(OPTIONS + "test_a_checkpoint_is_loaded_into_an_engine_that_has_begun"),
        "config_params": by_config_params,
        "state_dir": held(OPTIONS + "test_state_directories_take_weights_as_argument_and_in_the_configuration"),
        "host_memory": held(OPTIONS + "test_no_memory_is_no_budget_at_any_door"),
        "device_memory": held(OPTIONS + "test_a_key_without_effect_says_so"),
        **of(SETTINGS, "dtype", "offload", "gradient_accumulation_steps", "forwards_per_step", "gradient_clipping", "blocks"),
        "logits_chunk_size": held("test_chunks.py: test_an_evaluation_gives_what_it_gave"),
        **of(held("test_chunks.py: test_modules_of_tokens_in_chunks"), "chunked_modules", "chunk_size"),
        "missing_gradients": held("test_missing_gradients.py: test_zeros_are_deepspeeds_meaning_by_choice_and_under_its_name"),
        "saved_activations": held("test_saved_activations.py: test_losses_have_the_same_bits_wherever_inputs_wait"),
        "replan": held("test_replan.py: test_a_run_that_was_predicted_wrong_is_planned_again_with_the_same_bits"),
        "base_weights": held("test_base_weights.py: test_losses_are_those_of_the_weights_that_lie_there"),
        **of(held("test_ranks.py: test_exchanges_in_fewer_bits"), "zero_quantized_weights", "zero_quantized_gradients"),
        "resume": held(OPTIONS + "test_an_optimizers_groups_may_be_empty"),
        "overwrite": held(OPTIONS + "test_a_checkpoint_is_loaded_into_an_engine_that_has_begun"),
        "seed": held(OPTIONS + "test_a_seed_of_the_configuration_is_the_seed"),
        "device": held("test_device.py: test_losses_are_plain_pytorchs"),
        "progress": setting("progress", True),
        "ranks": alone,
        "rank_timeout": setting("rank_timeout", 12.5),
        "resume_ranks": held("test_ranks.py: test_ranks_that_are_killed_go_on_with_another_number_where_that_is_said"),
    },
    "penstock.plan": {
        **of(held("test_plan.py: test_the_configurations_micro_batch_and_its_notes_are_the_plans"), "batch", "seq", "config", "offload"),
        **of(held("test_plan.py: test_bytes_a_parameter_are_those_of_the_report_after_three_steps"), "host_memory", "gradient_clipping"),
        "device_memory": held("test_engine_device.py: test_a_plan_is_of_the_device"),
        "device": held("test_engine_device.py: test_a_plan_is_of_the_device"),
        "state_dir": held(OPTIONS + "test_a_path_that_cannot_be_what_it_is_to_be_is_refused_at_the_call"),
        "optimizer": plan_of("optimizer", lambda p: torch.optim.SGD(p, lr=0.1)),
        "example": held("test_plan.py: test_more_tokens_take_longer_and_the_same_bytes"),
        "dtype": held("test_plan.py: test_more_tokens_take_longer_and_the_same_bytes"),
        "gradient_accumulation_steps": held("test_plan.py: test_the_least_is_what_an_engine_accepts_and_less_is_refused"),
        "forwards_per_step": plan_refuses("forwards_per_step", 1.5),
        "logits_chunk_size": held("test_chunks.py: test_a_plan_says_so"),
        "chunked_modules": plan_refuses("chunked_modules", ["none"]),
        "chunk_size": plan_refuses("chunk_size", 0),
        "missing_gradients": plan_refuses("missing_gradients", "none"),
        "blocks": held("test_plan.py: test_what_cannot_be_planned_is_named_with_a_way_out"),
        "saved_activations": held("test_saved_activations.py: test_a_plan_says_what_waits_where"),
        "base_weights": held("test_base_weights.py: test_the_configuration_and_a_plan_have_it_and_frozen_parameters_may_be_on_the_meta_device"),
        **of(held("test_ranks.py: test_one_process_says_that_it_has_nobody_to_exchange_with"), "zero_quantized_weights", "zero_quantized_gradients"),
    },
    "Plan.html": {"path": page_of_a_plan},
    "penstock.save": {"crc32": held("test_save.py: test_the_bytes_are_torchs_and_each_reads_the_others")},
    "penstock.LLM": {
        **of(held("test_llm.py: test_a_text_depends_on_prompt_seed_and_options_alone"), "host_memory", "batch", "kv", "kv_dir"),
        "device_memory": held("test_llm.py: test_wrong_arguments_are_refused_by_name"),
        "max_length": held("test_llm.py: test_a_prompt_beyond_what_the_model_takes_is_refused"),
        "prompt_lookup": looks_up_prompts,
        "threads": held("test_llm.py: test_several_threads_may_call"),
        "tokenizer": held("test_llm.py: test_chat_writes_the_prompt_of_the_models_own_template"),
        "base_weights": held("test_llm.py: test_frozen_weights_that_have_moved_are_where_base_weights_says"),
    },
    "LLM.generate": {**of(held(PROGRAM), *TEXTS, "n"), "stop": held("test_llm.py: test_stop_strings_end_a_text_before_them")},
    "LLM.stream": {keyword: of_options("stream")(keyword) for keyword in TEXTS},
    "LLM.chat": {
        **{keyword: of_options("chat")(keyword) for keyword in TEXTS},
        "stream": held("test_llm.py: test_chat_writes_the_prompt_of_the_models_own_template"),
    },
    "Engine.backward": BACKWARD,
    "Engine.train_batch": {
        "batches": batches_by_name,
        "loss": its_own_loss,
        "data_iter": held("test_engine.py: test_micro_batches_in_vertical_order"),
    },
    "Engine.zero_grad": {"set_to_none": Nothing()},
    "Engine.train": {"mode": mode_of_the_module},
    "Engine.read_state": {"kind": kinds_of_state},
    "Engine.write_state": {"kind": kinds_of_state},
    "Engine.gathered": {
        "parameters": gathers_some,
        "write_back": held("test_device.py: test_what_is_written_in_gathered_is_trained_on"),
        "source": held("test_keywords.py: test_what_the_source_has_changed_within_gathered_is_written_on_all"),
    },
    "Engine.save_checkpoint": {
        **SAVES,
        "replaces_others": held("test_save_beside_training.py: test_what_stands_in_for_a_checkpoint_of_another_run_is_not_removed"),
        "wait": held("test_save_beside_training.py: test_the_next_calls_wait_for_a_checkpoint"),
    },
    "Engine.load_checkpoint": LOADS,
    "Engine.export_checkpoint": {
        "tag": held("test_deepspeed_checkpoint.py: test_an_export_replaces_only_what_is_one_and_loses_nothing"),
        "names": held("test_deepspeed_checkpoint.py: test_names_of_another_model_are_mapped"),
        "torch_optimizer": counts_in_tensors,
        "overwrite": held("test_deepspeed_checkpoint.py: test_what_is_exported_is_loaded_bit_for_bit"),
    },
    "Engine.close": {"keep_values": held("test_parameters_outside.py: test_an_engine_that_ends_gives_the_values_back")},
    "Report.html": {"path": wear, "rated_bytes_written": wear},
    "DeepSpeedEngine.backward": BACKWARD,
    "DeepSpeedEngine.step": {"lr_kwargs": held(OPTIONS + "test_what_is_not_served_of_a_checkpoint_is_refused_by_its_name")},
    "DeepSpeedEngine.deepspeed_io": {
        **of(LOADER, "batch_size", "route", "collate_fn", "num_local_io_workers"), "pin_memory": pins, "data_sampler": a_sampler,
    },
    "DeepSpeedEngine.zero_grad": {"set_to_none": Nothing()},
    "DeepSpeedEngine.offload_states": of(Nothing(), "include", "device", "pin_memory", "non_blocking"),
    "DeepSpeedEngine.reload_states": of(Nothing(), "non_blocking"),
    "DeepSpeedEngine.module_state_dict": {"exclude_frozen_parameters": without_frozen("module_state_dict")},
    "DeepSpeedEngine.save_16bit_model": of(without_frozen("save_16bit_model"), "save_filename", "exclude_frozen_parameters"),
    "DeepSpeedEngine.compile": of(Refused(1, (None,), told="torch.compile"), "backend", "compile_kwargs", "schedule", "compiled_autograd_enabled"),
    "DeepSpeedEngine.save_checkpoint": SAVES,
    "DeepSpeedEngine.export_checkpoint": {"tag": held("test_deepspeed_checkpoint.py: test_an_export_replaces_only_what_is_one_and_loses_nothing")},
    "deepspeed.init_distributed": {
        **of(Nothing(), "dist_backend", "auto_mpi_discovery", "distributed_port", "verbose", "config"),
        "timeout": times_out,
        "dist_init_required": makes_no_group,
        "init_method": Refused("env://"), "rank": Refused(1), "world_size": Refused(2),
    },
    "deepspeed.initialize": {
        "args": config_of_args,
        "config_params": config_of_args,
        **of(held("test_training_data.py: test_training_from_the_loader_is_plain_training"), "model", "optimizer"),
        "model_parameters": held("test_hugging_face.py: test_a_script_for_deepspeed_changes_one_line"),
        **of(LOADER, "training_data", "collate_fn", "config"),
        **of(Nothing(), "distributed_port", "dist_init_required"),
        "lr_scheduler": a_scheduler_without_optimizer_is_told,
        "mpu": Refused(1), "mesh_param": Refused(1),
    },
    "penstock.ops.adam.DeepSpeedCPUAdam": {
        "lr": alike(CPU, T.Adam, "lr", 0.3), "betas": alike(CPU, T.Adam, "betas", (0.5, 0.6)), "eps": alike(CPU, T.Adam, "eps", 0.5),
        "weight_decay": alike(CPU, T.AdamW, "weight_decay", 0.3), "adamw_mode": alike(CPU, None, "adamw_mode", False, weight_decay=0.3),
        "bias_correction": held("test_ops_optimizers.py: test_without_bias_correction"), "amsgrad": Refused(True, one), "fp32_optimizer_states": sixteen(CPU),
    },
    "penstock.ops.adagrad.DeepSpeedCPUAdagrad": {
        "lr": alike(ADAGRAD, T.Adagrad, "lr", 0.3), "eps": alike(ADAGRAD, T.Adagrad, "eps", 0.5), "weight_decay": alike(ADAGRAD, T.Adagrad, "weight_decay", 0.3),
        "amsgrad": Refused(True, one), "fp32_optimizer_states": sixteen(ADAGRAD),
    },
    "penstock.ops.lion.DeepSpeedCPULion": {
        "lr": alike(LION, None, "lr", 0.3), "betas": alike(LION, None, "betas", (0.99, 0.1)), "weight_decay": alike(LION, None, "weight_decay", 0.3),
        "fp32_optimizer_states": sixteen(LION),
    },
    "penstock.ops.lamb.FusedLamb": {
        **{keyword: alike(FUSED, None, keyword, value, **more) for keyword, value, more in (
            ("lr", 0.3, {}), ("bias_correction", False, {}), ("betas", (0.5, 0.6), {}), ("eps", 0.5, {}), ("weight_decay", 0.3, {}),
            ("max_coeff", 0.05, {}), ("min_coeff", 9.0, {}),
        )},
        "eps_inside_sqrt": Refused(True, one), "max_grad_norm": Refused(1.0, one), "amsgrad": Refused(True, one),
    },
    "CPUOptimizer.step": {"closure": a_closure(CPU), "fp16_param_groups": copies},
    "DeepSpeedCPUAdam.step_subgroup": {"closure": held("test_ops_optimizers.py: test_a_subgroup_steps_and_goes_back")},
    "DeepSpeedCPUAdam.rollback_subgroup": {"closure": held("test_ops_optimizers.py: test_a_subgroup_steps_and_goes_back")},
    "FusedLamb.step": {"closure": a_closure(FUSED)},
    "OnDrive.step": {"closure": a_closure(optim.AdamW)},
    "OnDrive.zero_grad": {"set_to_none": held("test_optim_device.py: test_a_second_backward_is_refused_where_gradients_have_left")},
    "CPUAdamBuilder.is_compatible": of(Nothing(), "verbose"),
    "CPUAdamBuilder.load": {"verbose": Refused(True, (None,), told="CPUAdamBuilder.load is not served")},
    "AsyncIOBuilder.is_compatible": of(Nothing(), "verbose"),
    "AsyncIOBuilder.load": of(Nothing(), "verbose"),
    "PinMemoryBuilder.is_compatible": of(Nothing(), "verbose"),
    "PinMemoryBuilder.load": of(Nothing(), "verbose"),
    "penstock.ops.aio.aio_handle": {
        **of(held("test_aio.py: test_getters_give_what_the_handle_was_made_with"), "block_size", "queue_depth", "intra_op_parallelism"),
        **of(Nothing(), "single_submit", "overlap_events"),
    },
    "aio_handle.read": {"validate": FILES, "file_offset": at("read", "read")},
    "aio_handle.write": {"validate": FILES, "file_offset": at("write", "write")},
    "aio_handle.pread": {"validate": FILES, "async_": only_starts("pread"), "file_offset": at("pread", "read")},
    "aio_handle.pwrite": {"validate": FILES, "async_": only_starts("pwrite"), "file_offset": at("pwrite", "write")},
    "aio_handle.sync_pread": {"file_offset": at("sync_pread", "read")},
    "aio_handle.sync_pwrite": {"file_offset": at("sync_pwrite", "write")},
    "aio_handle.async_pread": {"filename": FILES, "file_offset": at("async_pread", "read"), "fd": by_descriptor("async_pread")},
    "aio_handle.async_pwrite": {"filename": FILES, "file_offset": at("async_pwrite", "write"), "fd": by_descriptor("async_pwrite")},
    "aio_handle.new_cpu_locked_tensor": {"example_tensor": locked_by_either_name},
    "aio_handle.free_cpu_locked_tensor": {"locked_tensor": locked_by_either_name},
    "penstock.optim.AdamW": on_drive(
        optim.AdamW, T.AdamW, {"lr": 0.3, "betas": (0.5, 0.6), "eps": 0.5, "weight_decay": 0.3, "maximize": True}, TAKES, ("amsgrad", "capturable", "differentiable")
    ),
    "penstock.optim.Adam": {
        **on_drive(
            optim.Adam, T.Adam, {"lr": 0.3, "betas": (0.5, 0.6), "eps": 0.5, "weight_decay": 0.3, "maximize": True}, TAKES, ("amsgrad", "capturable", "differentiable")
        ),
        "decoupled_weight_decay": alike(optim.Adam, None, "decoupled_weight_decay", True, weight_decay=0.3),
    },
    "penstock.optim.Adagrad": on_drive(
        optim.Adagrad, T.Adagrad, {"lr": 0.3, "lr_decay": 0.5, "weight_decay": 0.3, "initial_accumulator_value": 2.0, "eps": 0.5, "maximize": True}, TAKES, ("differentiable",)
    ),
    "penstock.optim.SGD": on_drive(
        optim.SGD, T.SGD, {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.3, "maximize": True, "dampening": 0.5, "nesterov": True}, TAKES, ("differentiable",),
        {"dampening": {"momentum": 0.5}, "nesterov": {"momentum": 0.5}},
    ),
    "penstock.optim.Lion": on_drive(optim.Lion, None, {"lr": 0.3, "betas": (0.99, 0.1), "weight_decay": 0.3, "maximize": True}),
    "penstock.optim.LAMB": on_drive(optim.LAMB, None, {
        "lr": 0.3, "betas": (0.5, 0.6), "eps": 0.5, "weight_decay": 0.3, "maximize": True, "bias_correction": False, "max_coeff": 0.05, "min_coeff": 9.0,
    }),
    "deepspeed.checkpoint.utils.clone_tensors_for_torch_save": of(Nothing(), "device"),
    "deepspeed.comm.barrier": of(passed_to_torch("barrier", "barrier", group=1, async_op=True, device_ids=[2]), "group", "async_op", "device_ids")
    | of(Nothing(), "prof", "log_name", "debug"),
    "deepspeed.utils.groups.get_all_ranks_from_group": {"group": ranks_of_a_group},
    "deepspeed.comm.get_rank": {"group": passed_to_torch("get_rank", "get_rank", group=1)},
    "deepspeed.comm.get_world_size": {"group": passed_to_torch("get_world_size", "get_world_size", group=1)},
    "deepspeed.elasticity.compute_elastic_config": {
        **of(held("test_deepspeed_name.py: test_elasticity"), "world_size", "return_microbatch"), **of(Nothing(), "target_deepspeed_version"),
    },
    "deepspeed.env_report.main": {
        **of(Nothing(), "hide_operator_status", "hide_errors_and_warnings"), "arguments": held("test_deepspeed_name.py: test_estimates_and_reports_print"),
    },
    "deepspeed.launcher.runner.main": {"args": command_of_args},
    "deepspeed.ops.lion.FusedLion": {
        "lr": alike(LION, None, "lr", 0.3), "betas": alike(LION, None, "betas", (0.99, 0.1)), "weight_decay": alike(LION, None, "weight_decay", 0.3),
        "fp32_optimizer_states": sixteen(LION),
    },
    "deepspeed.ops.adam.FusedAdam": {
        **of(held("test_deepspeed_name.py: test_fused_adam_is_the_engines"), "lr", "weight_decay"),
        **of(Nothing(), "set_grad_none"),
        **{keyword: handed_over(keyword, value) for keyword, value in {"betas": (0.5, 0.6), "eps": 0.5, "adam_w_mode": False}.items()},
        **of(refused_by_the_engine, "bias_correction", "amsgrad"),
    },
    "FusedAdam.step": {"closure": Refused(1, (None,), told="FusedAdam makes its steps within")},
    "GDSBuilder.is_compatible": of(Nothing("PinMemoryBuilder.is_compatible"), "verbose"),
    "GDSBuilder.load": of(Nothing("PinMemoryBuilder.load"), "verbose"),
    "deepspeed.profiling.flops_profiler.FlopsProfiler": {**of(Nothing(), "ds_engine"), "recompute_fwd_factor": Refused(0.5, lambda _: (net(),))},
    "FlopsProfiler.start_profile": {"ignore_list": Refused([nn.Linear], (None,))},
    **{f"FlopsProfiler.get_total_{each}": {"as_string": as_text(f"get_total_{each}")} for each in ("flops", "macs", "params", "duration")},
    "FlopsProfiler.print_model_profile": {
        "profile_step": to_a_file, "output_file": to_a_file, "module_depth": printed("module_depth", 2), "top_modules": printed("top_modules", 3),
        **of(Nothing(), "detailed"),
    },
    "deepspeed.profiling.flops_profiler.get_model_profile": {
        **of(held("test_deepspeed_name.py: test_the_profile_of_a_model"), "input_shape", "args", "print_profile", "as_string"),
        "kwargs": its_keywords, "warm_up": warms_up, "mode": generates, "output_file": to_a_file,
        "module_depth": printed("module_depth", 2), "top_modules": printed("top_modules", 3), **of(Nothing(), "detailed"),
        "ignore_modules": Refused([nn.Linear], lambda _: (net(),)),
    },
    "deepspeed.runtime.activation_checkpointing.checkpointing.configure": {
        **of(Nothing(), "mpu_", "deepspeed_config", "partition_activations", "contiguous_checkpointing", "num_checkpoints", "synchronize", "profile"),
        "checkpoint_in_cpu": checkpoints_in_memory,
    },
    "deepspeed.runtime.dataloader.DeepSpeedDataLoader": {
        "pin_memory": pins, "collate_fn": collates, "data_sampler": a_sampler, **of(shares, "data_parallel_world_size", "data_parallel_rank"),
        "dataloader_drop_last": drops_the_last, "num_local_io_workers": LOADER, **of(Nothing("DeepSpeedDataLoader.__init__"), "local_rank", "tput_timer"),
    },
    **{f"deepspeed.runtime.lr_schedules.{name}": SCHEDULE for name in SCHEDULES},
    "_Scheduler.step": SCHEDULE,
    **dict.fromkeys(
        ("deepspeed.runtime.utils.copy_to_device", "deepspeed.runtime.utils.move_to_device"),
        {"criterion_func": held("test_deepspeed_names.py: test_helpers_that_need_no_engine_do_what_deepspeeds_do")},
    ),
    "deepspeed.utils.log_dist_once": of(held("test_deepspeed_names.py: test_helpers_that_need_no_engine_do_what_deepspeeds_do"), "ranks", "level"),
    "deepspeed.utils.logging.print_dist": {"ranks": held("test_deepspeed_names.py: test_helpers_that_need_no_engine_do_what_deepspeeds_do")},
    "deepspeed.utils.set_log_level_from_string": {
        "custom_logger": held("test_deepspeed_names.py: test_helpers_that_need_no_engine_do_what_deepspeeds_do")
    },
    "deepspeed.utils.timer.ThroughputTimer": of(
        held("test_deepspeed_names.py: test_a_timer_tells_every_so_many_steps"),
        "config", "batch_size", "start_step", "steps_per_output", "monitor_memory", "logging_fn",
    ),
    "ThroughputTimer.stop": of(held("test_deepspeed_names.py: test_a_timer_tells_every_so_many_steps"), "global_step", "report_speed"),
    "deepspeed.runtime.utils.see_memory_usage": {"force": held("test_deepspeed_name.py: test_memory_is_told")},
    "deepspeed.runtime.zero.GatheredParameters": {
        "modifier_rank": held("test_hugging_face.py: test_a_script_for_deepspeed_changes_one_line"),
        "enabled": held("test_parameters_outside.py: test_without_an_optimizer_there_are_no_states"),
        **of(Nothing(), "fwd_module"),
    },
    **dict.fromkeys(
        ("deepspeed.runtime.zero.TiledLinear", "deepspeed.runtime.zero.TiledLinearReturnBias"),
        {
            **of(
                held("test_deepspeed_tiled.py: test_a_linear_layer_in_tiles"),
                "bias", "in_splits", "out_splits", "input_is_already_split", "combine_out_splits", "init_linear",
            ),
            "linear_cls": held("test_deepspeed_tiled.py: test_layers_that_return_their_bias"),
        },
    ),
    "deepspeed.runtime.sequence_parallel.ulysses_sp.sequence_tiled_compute": of(
        held("test_deepspeed_tiled.py: test_a_loss_in_shards"), "compute_params", "output_unshard_dimension", "output_reduction",
    ),
    "CudaRNGStatesTracker.fork": {"name": held("test_deepspeed_tiled.py: test_random_states_have_names")},
    "deepspeed.runtime.zero.Init": {
        **HIDDEN, **of(Nothing(), "mem_efficient_linear", "remote_device", "pin_memory"), **of(default_type, "dtype", "enabled"),
        "config_dict_or_path": held("test_on_disk.py: test_deepspeeds_zero_init_builds_where_its_weights_go"),
        "config": held("test_accelerate.py: test_a_plugin_without_a_path_is_refused"),
    },
    "deepspeed.runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_cold": estimates("estimate_zero3_model_states_mem_needs_all_cold"),
    "deepspeed.runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live": estimates("estimate_zero3_model_states_mem_needs_all_live"),
    "deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold": estimates("estimate_zero2_model_states_mem_needs_all_cold"),
    "deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live": estimates("estimate_zero2_model_states_mem_needs_all_live"),
    "deepspeed.utils.log_dist": of(logged, "ranks", "level"),
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": of(dynamic_scaler, "raise_error_at_min_scale", "dtype"),
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": {"scale": scaler_of_a_scale},
    "deepspeed.init_inference": {"model": held(INFERENCE), "config": held(INFERENCE)},
    "deepspeed.utils.set_z3_leaf_modules": {"raise_if_not_found": held(LEAVES)},
    "deepspeed.utils.set_z3_leaf_modules_by_name": of(held(LEAVES), "flag", "raise_if_not_found"),
    "deepspeed.utils.set_z3_leaf_modules_by_suffix": of(held(LEAVES), "flag", "raise_if_not_found"),
    "deepspeed.utils.unset_z3_leaf_modules": {"raise_if_not_found": held(LEAVES)},
    "deepspeed.utils.groups.initialize": of(elastic_group, "ep_size", "mpu"),
    "deepspeed.utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict": {
        **of(held("test_zero_to_fp32.py: test_files_are_what_transformers_loads"), "max_shard_size", "safe_serialization"),
        **of(converts_one_tag, "tag", "exclude_frozen_parameters"),
    },
    "deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint": {
        "tag": held("test_zero_to_fp32.py: test_a_checkpoint_gives_its_masters"),
        "exclude_frozen_parameters": held("test_zero_to_fp32.py: test_buffers_and_what_is_frozen"),
        **of(Nothing(), "lazy_mode"),
    },
    "deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint": {"tag": converts_one_tag},
    "deepspeed.utils.zero_to_fp32.main": {"arguments": program_of_arguments},
}  # fmt: skip


def keywords_of(call):
    return {name for name, each in inspect.signature(call).parameters.items() if each.default is not inspect.Parameter.empty}


@pytest.mark.parametrize("name", sorted(set(CALLS) - set(MODELS) - set(RESULTS) - REFUSE))
def test_each_keyword_has_a_row_and_each_row_its_keyword(name):
    assert set(KEYWORDS.get(name, ())) == keywords_of(CALLS[name])


@pytest.mark.parametrize("call", [penstock.initialize, penstock.plan])
def test_the_type_of_each_keyword_can_be_asked_for(call):
    hints = typing.get_type_hints(call)
    assert set(hints) == {*inspect.signature(call).parameters, "return"}
    assert hints["zero_quantized_weights"] == typing.Optional[bool]


def test_readers_of_types_are_given_what_the_package_gives():
    """Else penstock.initialize is Any to them, and no keyword of it is known."""
    with open(penstock.__file__, encoding="utf-8") as stream:
        tree = ast.parse(stream.read())
    for_types = next(each for each in tree.body if isinstance(each, ast.If))
    assert ast.unparse(for_types.test) == "TYPE_CHECKING"
    given = {name.name: importlib.import_module("." * each.level + (each.module or ""), "penstock") for each in for_types.body for name in each.names}
    assert set(given) == {*names_in(penstock)} - {*penstock.__all__}
    for name, module in given.items():
        assert getattr(penstock, name) is getattr(module, name)


def test_each_row_is_of_a_call():
    assert set(KEYWORDS) <= set(CALLS)


ROWS = [(name, keyword) for name, rows in KEYWORDS.items() for keyword in rows]
_sources = {}


def source_of(file, test):
    if file not in _sources:
        with open(os.path.join(os.path.dirname(__file__), file), encoding="utf-8") as opened:
            text = opened.read()
        tests = {each.name: each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)}
        _sources[file] = {
            each: "\n".join(text.splitlines()[min([node.lineno, *(mark.lineno for mark in node.decorator_list)]) - 1 : node.end_lineno])
            for each, node in tests.items()
        }
    assert test in _sources[file], f"{file} has no {test}"
    return _sources[file][test]


def test_what_the_source_has_changed_within_gathered_is_written_on_all(tmp_path, on_ranks):
    told = on_ranks(
        """
        import sys
        sys.path.insert(0, sys.argv[2])
        import torch
        from engine_models import batches, make, net, step
        engine = make(net(), sys.argv[1] + "/run")
        step(engine, batches(1)[0])
        weight = engine.module.norm.weight
        with engine.gathered([weight], write_back=True, source=1):
            with torch.no_grad():
                weight.fill_(5.0 + engine.global_rank)
        print(engine.read_state(weight).unique().tolist())
        engine.close()
        """,
        2,
        tmp_path,
        os.path.dirname(__file__),
    )
    assert [(status, out.strip()) for status, out, _ in told] == [(0, "[6.0]")] * 2, told


@pytest.mark.parametrize("name, keyword", sorted(ROWS))
def test_a_keyword_is_obeyed_refused_or_said_to_change_nothing(tmp_path, name, keyword):
    row = KEYWORDS[name][keyword]
    if isinstance(row, tuple):
        for each in row:
            file, test = each.split(": ")
            assert re.search(rf"\b{keyword}\b", source_of(file, test)), f"{test} does not name {keyword}"
    elif isinstance(row, Nothing):
        like = row.like or name
        told = str(penstock._data_loader.DeepSpeedDataLoader.__init__.__doc__ if like.endswith("__init__") else CALLS[like].__doc__)
        assert re.search(rf"\b{keyword}\b", told) or re.search("(?i)nothing to do|of no effect|copies already|DeepSpeed's: there", told), told
    elif isinstance(row, Refused):
        also = row.also(tmp_path) if callable(row.also) else row.also
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=row.told or keyword) as refused:
            CALLS[name](*(row.args(tmp_path) if callable(row.args) else row.args), **{keyword: row.value}, **also)
        assert "\n" not in str(refused.value)
    else:
        row(tmp_path)

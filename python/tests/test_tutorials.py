"""The scripts of DeepSpeed's tutorials, with data of their own: one line of each is changed, the one that names DeepSpeed."""

import json
import math
import os
import re
import textwrap

import pytest

torch = pytest.importorskip("torch")

ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}

# Getting started with CIFAR-10: a convolutional network, arguments of the command line, a loader of initialize's, a warm-up, an accuracy.
CIFAR = """
    import argparse

    import deepspeed
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    from deepspeed.accelerator import get_accelerator
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    def add_argument():
        parser = argparse.ArgumentParser(description="CIFAR")
        parser.add_argument("-e", "--epochs", default=3, type=int)
        parser.add_argument("--local_rank", type=int, default=-1)
        parser.add_argument("--log-interval", type=int, default=4)
        parser.add_argument("--dtype", default="fp16", type=str, choices=["bf16", "fp16", "fp32"])
        parser.add_argument("--stage", default=0, type=int, choices=[0, 1, 2, 3])
        parser.add_argument("--moe", default=False, action="store_true")
        parser = deepspeed.add_config_arguments(parser)
        return parser.parse_args()

    class Net(nn.Module):
        def __init__(self, args):
            super().__init__()
            self.conv1 = nn.Conv2d(3, 6, 5)
            self.pool = nn.MaxPool2d(2, 2)
            self.conv2 = nn.Conv2d(6, 16, 5)
            self.fc1 = nn.Linear(16 * 5 * 5, 120)
            self.fc2 = nn.Linear(120, 84)
            self.fc3 = nn.Linear(84, 10)

        def forward(self, x):
            x = self.pool(F.relu(self.conv1(x)))
            x = self.pool(F.relu(self.conv2(x)))
            x = x.view(-1, 16 * 5 * 5)
            x = F.relu(self.fc1(x))
            return self.fc3(F.relu(self.fc2(x)))

    def pictures(count, seed):
        draw = torch.Generator().manual_seed(seed)
        of_class = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        return [(of_class[number % 10] + 0.3 * torch.randn(3, 32, 32, generator=draw), number % 10) for number in range(count)]

    def get_ds_config(args):
        return {
            "train_batch_size": 16, "steps_per_print": 2000,
            "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.003, "warmup_num_steps": 20}},
            "gradient_clipping": 1.0, "prescale_gradients": False, "bf16": {"enabled": args.dtype == "bf16"},
            "fp16": {
                "enabled": args.dtype == "fp16", "fp16_master_weights_and_grads": False, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2,
                "min_loss_scale": 1, "initial_scale_power": 15,
            },
            "wall_clock_breakdown": False,
            "zero_optimization": {
                "stage": args.stage, "allgather_partitions": True, "reduce_scatter": True, "allgather_bucket_size": 50000000,
                "reduce_bucket_size": 50000000, "overlap_comm": True, "contiguous_gradients": True, "cpu_offload": False,
            },
        }

    def test(model_engine, testset, local_device, target_dtype):
        correct = 0
        model_engine.eval()
        with torch.no_grad():
            for images, labels in torch.utils.data.DataLoader(testset, batch_size=4, shuffle=False, num_workers=0):
                if target_dtype != None:
                    images = images.to(target_dtype)
                outputs = model_engine(images.to(local_device))
                _, predicted = torch.max(outputs.data, 1)
                correct += (predicted == labels.to(local_device)).sum().item()
        print(f"accuracy {correct / len(testset)}")

    def main(args):
        deepspeed.init_distributed()
        get_accelerator().set_device(args.local_rank)
        torch.manual_seed(0)
        net = Net(args)
        parameters = filter(lambda p: p.requires_grad, net.parameters())
        model_engine, optimizer, trainloader, __ = deepspeed.initialize(
            args=args, model=net, model_parameters=parameters, training_data=pictures(160, 1), config=get_ds_config(args)
        )
        local_device = get_accelerator().device_name(model_engine.local_rank)
        target_dtype = None
        if model_engine.bfloat16_enabled():
            target_dtype = torch.bfloat16
        elif model_engine.fp16_enabled():
            target_dtype = torch.half
        criterion = nn.CrossEntropyLoss()
        for epoch in range(args.epochs):
            running_loss = 0.0
            for i, data in enumerate(trainloader):
                inputs, labels = data[0].to(local_device), data[1].to(local_device)
                if target_dtype != None:
                    inputs = inputs.to(target_dtype)
                outputs = model_engine(inputs)
                loss = criterion(outputs, labels)
                model_engine.backward(loss)
                model_engine.step()
                running_loss += loss.item()
                if model_engine.local_rank <= 0 and i % args.log_interval == args.log_interval - 1:
                    print(f"[{epoch + 1: d}, {i + 1: 5d}] loss: {running_loss / args.log_interval : .6f}")
                    running_loss = 0.0
        test(model_engine, pictures(40, 2), local_device, target_dtype)

    main(add_argument())
"""

# ZeRO and ZeRO-Infinity: a model that is built under zero.Init, a file for --deepspeed_config, a checkpoint, weights in 16 and 32 bit.
ZERO = """
    import argparse

    import deepspeed
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out")
    parser.add_argument("--zero-init", action="store_true")
    args = deepspeed.add_config_arguments(parser).parse_args()

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = torch.nn.LayerNorm(32), torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

        def forward(self, x):
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(64, 32)
            self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
            self.head = torch.nn.Linear(32, 64)

        def forward(self, x, y):
            hidden = self.embedding(x)
            for layer in self.layers:
                hidden = layer(hidden)
            return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())

    deepspeed.init_distributed()

    def build():
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config, enabled=args.zero_init):
            model = Model()
        return deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

    draw = torch.Generator().manual_seed(1)
    data = [torch.randint(0, 64, (4, 9), generator=draw).to("cpu") for _ in range(6)]
    engine, _, _, scheduler = build()
    for step, batch in enumerate(data):
        loss = engine(batch[:, :-1], batch[:, 1:])
        engine.backward(loss)
        engine.step()
        print(f"step {step} loss {loss.item():.9f} lr {engine.get_lr()[0]:.9f}")
        if step == 3:
            engine.save_checkpoint(args.out, client_state={"step": step})
    assert engine.save_16bit_model(args.out, "weights.bin")
    with deepspeed.zero.GatheredParameters(engine.module.head.weight, modifier_rank=None):
        print(f"sum {float(engine.module.head.weight.double().sum()):.6f}")
    engine.destroy()

    engine, _, _, _ = build()
    path, client_state = engine.load_checkpoint(args.out)
    assert path is not None and client_state["step"] == 3
    for step, batch in list(enumerate(data))[4:]:
        loss = engine(batch[:, :-1], batch[:, 1:])
        engine.backward(loss)
        engine.step()
        print(f"again {step} loss {loss.item():.9f}")
    kept = get_fp32_state_dict_from_zero_checkpoint(args.out)
    print("kept", len(kept), sorted({str(value.dtype) for value in kept.values()}))
"""

# DeepNVMe: tensors to files and back, one at a time and several at once, from memory of torch's and of the handle's.
NVME = """
    import sys
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    def file_write(out_tensor, path, handle):
        handle.async_pwrite(out_tensor, path)
        handle.wait()

    def file_read(in_tensor, path, handle):
        handle.async_pread(in_tensor, path)
        handle.wait()

    path = sys.argv[1]
    assert AsyncIOBuilder().is_compatible()
    aio_handle = AsyncIOBuilder().load().aio_handle(block_size=1024**2, queue_depth=8, single_submit=False, overlap_events=True, intra_op_parallelism=2)
    app_tensor = torch.randint(0, 255, (4 * 1024**2,), dtype=torch.uint8)
    aio_handle.sync_pwrite(app_tensor, path + "/a.pt")
    again = torch.empty(app_tensor.numel(), dtype=app_tensor.dtype)
    assert aio_handle.sync_pread(again, path + "/a.pt") == 1 and torch.equal(again, app_tensor)

    bounce = aio_handle.new_cpu_locked_tensor(app_tensor.numel(), app_tensor)
    for number in range(3):
        bounce.copy_(app_tensor + number)
        file_write(bounce, f"{path}/{number}.pt", aio_handle)
    for number in range(3):
        file_read(bounce, f"{path}/{number}.pt", aio_handle)
        assert torch.equal(bounce, app_tensor + number)
    assert aio_handle.free_cpu_locked_tensor(bounce)

    several = [torch.empty_like(app_tensor) for _ in range(3)]
    for number, each in enumerate(several):
        aio_handle.async_pread(each, f"{path}/{number}.pt")
    assert aio_handle.wait() == 3 and all(torch.equal(each, app_tensor + number) for number, each in enumerate(several))
    half = torch.empty(app_tensor.numel() // 2, dtype=torch.uint8)
    aio_handle.sync_pread(half, path + "/a.pt", app_tensor.numel() // 2)
    assert torch.equal(half, app_tensor[app_tensor.numel() // 2 :])
    print("done", aio_handle.get_block_size(), aio_handle.get_intra_op_parallelism())
"""


def runs(in_child, text, line, instead, *arguments):
    """What a script prints of which this one line is another."""
    changed = re.sub(rf"^( *){re.escape(line)}$", rf"\g<1>{instead}", text, flags=re.M)
    assert sum(one != other for one, other in zip(text.splitlines(), changed.splitlines())) == 1
    setup = f"    import os\n    os.environ.update({ONE_PROCESS!r}, MASTER_PORT=str(20000 + os.getpid() % 20000))\n"
    status, out, err = in_child(setup + changed, *arguments)
    assert status == 0, err[-3000:]
    return out


def of_deepspeed(in_child, text, *arguments):
    return runs(in_child, text, "import deepspeed", "import penstock.deepspeed as deepspeed", *arguments)


def part_of(text, begin, end):
    """What the script defines from one line up to another, for plain PyTorch."""
    defined = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional}
    exec(textwrap.dedent(text[text.index(begin) : text.index(end)]), defined)
    return defined


def warmed_up(update, steps, most, total=None):
    """The rate of an update, the first of them 1, as DeepSpeed's WarmupLR and WarmupDecayLR give it."""
    done = update - 2
    if done < steps:
        return most * math.log(max(done, 0) + 1) / math.log(steps)
    return most if total is None else most * max(0, total - done) / max(1, total - steps)


def plain_step(model, optimizer, loss, rate):
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return loss.item()


def plain_cifar():
    """The losses that the script prints."""
    defined = part_of(CIFAR, "    class Net(", "    def get_ds_config(")
    torch.manual_seed(0)
    net = defined["Net"](None)
    data = defined["pictures"](160, 1)
    loader = torch.utils.data.DataLoader(data, 16, sampler=torch.utils.data.distributed.DistributedSampler(data, 1, 0))
    optimizer = torch.optim.AdamW(net.parameters(), betas=(0.8, 0.999), eps=1e-8, weight_decay=3e-7)
    told, update = [], 0
    for _ in range(3):
        losses = []
        for inputs, labels in loader:
            update += 1
            losses.append(plain_step(net, optimizer, torch.nn.functional.cross_entropy(net(inputs), labels), warmed_up(update, 20, 0.003)))
        told += [sum(losses[number : number + 4]) / 4 for number in (0, 4)]
    return told


def plain_zero():
    """The losses and rates of the script, and the sum that it prints."""
    defined = part_of(ZERO, "    class Layer(", "    deepspeed.init_distributed()")
    torch.manual_seed(0)
    model = defined["Model"]()
    draw = torch.Generator().manual_seed(1)
    data = [torch.randint(0, 64, (4, 9), generator=draw) for _ in range(6)]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    losses = [plain_step(model, optimizer, model(batch[:, :-1], batch[:, 1:]), warmed_up(number + 1, 2, 1e-2, total=6)) for number, batch in enumerate(data)]
    return losses, [warmed_up(number + 2, 2, 1e-2, total=6) for number in range(6)], float(model.head.weight.detach().double().sum())


def test_the_cifar_tutorial_runs_at_every_stage_and_dtype(in_child, tmp_path):
    told = {}
    halves = [(1, "fp16")] if int(torch.__version__.split(".")[0]) > 1 else []  # torch 1 has no convolution of it on the processor
    for stage, dtype in ((0, "fp32"), (2, "fp32"), (3, "fp32"), (3, "bf16"), *halves):
        out = of_deepspeed(in_child, CIFAR, "--deepspeed", "--stage", stage, "--dtype", dtype)
        losses = [float(each) for each in re.findall(r"loss: +([\d.]+)", out)]
        assert len(losses) == 6 and losses[-1] < losses[0] / 2, out
        assert float(re.search(r"accuracy ([\d.]+)", out)[1]) > 0.8
        told[stage, dtype] = losses
    assert told[0, "fp32"] == told[2, "fp32"] == told[3, "fp32"] == pytest.approx(plain_cifar(), abs=1e-5)
    assert told[3, "bf16"] == pytest.approx(told[3, "fp32"], abs=0.1)


@pytest.mark.parametrize("device", ["nvme", "cpu"])
def test_the_zero_tutorial_runs_with_its_states_on_a_drive(in_child, tmp_path, device):
    offload = {"device": device, "pin_memory": True, **({"nvme_path": str(tmp_path / "nvme")} if device == "nvme" else {})}
    config = {
        "train_batch_size": 4, "gradient_clipping": 1.0, "fp16": {"enabled": False}, "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_max_lr": 1e-2}},
        "zero_optimization": {
            "stage": 3, "contiguous_gradients": True, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
            "stage3_prefetch_bucket_size": 1e7, "stage3_param_persistence_threshold": 1e5, "reduce_bucket_size": 1e7, "sub_group_size": 1e9,
            "offload_optimizer": {**offload, "buffer_count": 4}, "offload_param": {**offload, "buffer_count": 5, "buffer_size": 1e8},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }  # fmt: skip
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    losses, rates, weight = plain_zero()
    told = []
    for more in ([], ["--zero-init"]):
        place = tmp_path / ("out" + "".join(more))
        out = of_deepspeed(in_child, ZERO, "--deepspeed", "--deepspeed_config", tmp_path / "ds_config.json", "--out", place, *more)
        steps = dict(re.findall(r"step (\d) loss ([\d.]+)", out))
        assert list(steps) == list("012345")
        assert [float(each) for each in steps.values()] == pytest.approx(losses, abs=1e-5)
        assert [float(each) for each in re.findall(r"lr ([\d.]+)", out)] == pytest.approx(rates, abs=1e-9)
        assert float(re.search(r"sum (\S+)", out)[1]) == pytest.approx(weight, abs=1e-2)  # of 2048 elements
        assert dict(re.findall(r"again (\d) loss ([\d.]+)", out)) == {each: steps[each] for each in "45"}
        assert "kept 21 ['torch.float32']" in out and "weights.bin" in os.listdir(place)
        told.append((steps, re.search(r"sum (\S+)", out)[1]))
    assert told[0] == told[1]


def test_the_deepnvme_tutorial_moves_tensors(in_child, tmp_path):
    line = "from deepspeed.ops.op_builder import AsyncIOBuilder"
    assert runs(in_child, NVME, line, "from penstock.ops.aio import AsyncIOBuilder", tmp_path) == "done 1048576 2\n"

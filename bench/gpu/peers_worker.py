"""One contestant of bench/gpu/peers, in a process of its own.

    peers_worker.py make MODEL SETTINGS            writes the model that every contestant begins with
    peers_worker.py CONTESTANT MODEL SETTINGS      trains it

SETTINGS is a JSON object: device, layers, width, vocab, batch, seq, steps, device_memory, host_memory, directory. Prints a line of JSON a step: loss,
seconds, and the most bytes of the device and of host memory so far. A contestant that cannot run on the device prints {"skipped": why}.
"""

import json
import os
import pathlib
import sys
import time

import torch

import peers

LEARNING_RATE, CLIP = 1e-4, 1.0


class Skipped(Exception):
    """The contestant cannot run here, for a reason that is no failure."""


def config_of(given):
    import transformers

    heads = max(1, given["width"] // 128)
    return transformers.LlamaConfig(
        vocab_size=given["vocab"], hidden_size=given["width"], intermediate_size=max(256, given["width"] * 8 // 3 // 256 * 256),
        num_hidden_layers=given["layers"], num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=given["seq"],
    )  # fmt: skip


def make(model, given):
    import transformers

    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(config_of(given)).to(torch.bfloat16)
    made.save_pretrained(model)
    print(json.dumps({"parameters": sum(each.numel() for each in made.parameters())}))


def load(model, given, device="cpu", dtype=torch.bfloat16, recomputes=True):
    import transformers

    made = transformers.LlamaForCausalLM.from_pretrained(model, dtype=dtype).to(device)
    if recomputes:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made.config.use_cache = False
    return made.train()


def batches(given):
    generator = torch.Generator().manual_seed(1)
    for _ in range(given["steps"]):  # half of the vocabulary, so that there is something to learn
        yield torch.randint(0, given["vocab"] // 2, (given["batch"], given["seq"]), generator=generator).to(given["device"])


def synchronize(given):
    if given["device"] == "cuda":
        torch.cuda.synchronize()


class Torch:
    """Everything on the device; masters and moments in bf16."""

    def __init__(self, model, given):
        self.model = load(model, given, given["device"])
        self.optimizer = self.make_optimizer(given)

    def make_optimizer(self, given):
        return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(self, ids):
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class TorchAO(Torch):
    """Masters in bf16 and moments in host memory, gradients leave as they come. It cannot clip: gradients are gone when backward ends."""

    def make_optimizer(self, given):
        if given["device"] != "cuda":
            raise Skipped("torchao's CPUOffloadOptimizer wants CUDA")
        from torchao.optim import CPUOffloadOptimizer

        return CPUOffloadOptimizer(self.model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, lr=LEARNING_RATE)

    def step(self, ids):
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class FullyShard(Torch):
    """FSDP2 of one rank: masters in fp32, all states and the update in host memory."""

    def __init__(self, model, given):
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        cuda = given["device"] == "cuda"
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
        mesh = torch.distributed.device_mesh.init_device_mesh(given["device"], (1,))
        self.model = load(model, given, dtype=torch.float32)
        policies = {
            "mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy(pin_memory=cuda),
        }  # fmt: skip
        for layer in self.model.model.layers:
            fully_shard(layer, **policies)
        fully_shard(self.model, **policies)
        self.optimizer = self.make_optimizer(given)


class Optim(Torch):
    """penstock.optim: the model is torch's, the states live in host memory; masters in fp32."""

    def make_optimizer(self, given):
        import penstock.optim

        return penstock.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, nvme_offload_fraction=0.0)


class OptimDrive(Torch):
    """The states live on the drive."""

    def make_optimizer(self, given):
        import penstock.optim

        return penstock.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, state_dir=given["directory"], host_memory=given["host_memory"])


class Penstock:
    """Masters and moments in fp32 (16 bits of a master are the weight's), exact."""

    place = {"offload": "cpu"}
    ratio = None  # the processor's least share of the updates

    def __init__(self, model, given):
        import penstock

        # Recomputation is the engine's own.
        self.model = load(model, given, recomputes=False)
        place = {key: given[value[1:]] if value.startswith("=") else value for key, value in self.place.items()}
        if given["device"] == "cpu":
            place.pop("device_memory", None)
        elif self.ratio is not None:
            offload = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": self.ratio}}
            place["config"] = {"train_micro_batch_size_per_gpu": given["batch"], "zero_optimization": offload}
        self.engine = penstock.initialize(
            model=self.model, optimizer=torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE), dtype=torch.bfloat16,
            gradient_clipping=CLIP, device=given["device"], **place,
        )[0]  # fmt: skip

    def step(self, ids):
        loss = self.engine(input_ids=ids, labels=ids).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss

    largest_norm = 0.0

    def facts(self):
        report, last = self.engine.report(), self.engine.last_step
        self.largest_norm = max(self.largest_norm, last["grad_norm"])
        return {
            "compute_seconds": last["compute_seconds"], "optimizer_seconds": last["optimizer_seconds"], "largest_norm": self.largest_norm,
            "predicted_seconds": report["predicted_step_seconds"],
        }  # fmt: skip


class PenstockBounded(Penstock):
    """All state in host memory, a bounded part of the device."""

    place = {"offload": "cpu", "device_memory": "=device_memory"}


class PenstockFree(Penstock):
    """What is free of the device holds state too, all of it where it fits, and updates it."""

    place = {"offload": "cpu", "device_memory": "=free_device_memory"}
    ratio = 0.0


class PenstockDrive(Penstock):
    place = {"state_dir": "=directory", "host_memory": "=host_memory", "device_memory": "=device_memory"}


class DeepSpeed:
    """ZeRO-3 with its optimizer in host memory; masters and moments in fp32."""

    def __init__(self, model, given):
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000))
        import deepspeed

        deepspeed.init_distributed("nccl" if given["device"] == "cuda" else "gloo")
        config = {
            "train_micro_batch_size_per_gpu": given["batch"], "bf16": {"enabled": True}, "gradient_clipping": CLIP,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
            "zero_optimization": self.zero(given), "aio": {"block_size": 1 << 20, "queue_depth": 16, "overlap_events": True},
        }  # fmt: skip
        self.engine, *_ = deepspeed.initialize(model=load(model, given), config=config)

    def zero(self, given):
        return {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": given["device"] == "cuda"}}

    def step(self, ids):
        loss = self.engine(input_ids=ids, labels=ids).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss


class DeepSpeedParameters(DeepSpeed):
    """The weights too."""

    def zero(self, given):
        return {**super().zero(given), "offload_param": {"device": "cpu", "pin_memory": given["device"] == "cuda"}}


class DeepSpeedDrive(DeepSpeed):
    def zero(self, given):
        largest = max(given["vocab"], 4 * given["width"]) * given["width"]
        swap = {"device": "nvme", "nvme_path": given["directory"], "pin_memory": given["device"] == "cuda"}
        return {
            "stage": 3, "offload_param": {**swap, "buffer_count": 8, "buffer_size": largest},
            "offload_optimizer": {**swap, "buffer_count": 16, "pipeline_read": True, "pipeline_write": True},
            "sub_group_size": max(largest, 1 << 22),
        }  # fmt: skip


class ZenFlow(DeepSpeed):
    """Updates of most weights are some steps late."""

    def zero(self, given):
        if given["device"] != "cuda":
            raise Skipped("DeepSpeed's ZenFlow wants CUDA")
        return {
            "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "zenflow": {"topk_ratio": 0.05, "select_strategy": "auto", "select_interval": "auto", "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": True},
        }  # fmt: skip


class SuperOffload(DeepSpeed):
    """Updates are made before the norm is known, and rolled back where it clips."""

    def zero(self, given):
        if given["device"] != "cuda":
            raise Skipped("DeepSpeed's SuperOffload wants CUDA")
        return {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.9, "super_offload": True, "cpuadam_cores_perc": 0.9},
        }  # fmt: skip


CONTESTANTS = {
    "torch": Torch, "penstock": PenstockBounded, "penstock-free": PenstockFree, "penstock-drive": PenstockDrive, "penstock-optim": Optim, "penstock-optim-drive": OptimDrive,
    "deepspeed": DeepSpeed, "deepspeed-parameters": DeepSpeedParameters, "deepspeed-drive": DeepSpeedDrive, "zenflow": ZenFlow,
    "superoffload": SuperOffload, "fully-shard": FullyShard, "torchao": TorchAO,
}  # fmt: skip


def main():
    what, model, settings = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
    given = json.loads(settings)
    if what == "make":
        make(model, given)
        return
    torch.manual_seed(0)
    try:
        contestant = CONTESTANTS[what](model, given)
    except Skipped as why:
        print(json.dumps({"skipped": str(why)}), flush=True)
        return
    for ids in batches(given):
        synchronize(given)
        begin = time.perf_counter()
        loss = contestant.step(ids)
        synchronize(given)
        seconds = time.perf_counter() - begin
        on_device = torch.cuda.max_memory_reserved() if given["device"] == "cuda" else 0
        line = {"loss": loss.item(), "seconds": seconds, "device": on_device, "host": peers.own_usage()["rss"]}
        facts = getattr(contestant, "facts", None)
        print(json.dumps(line | (facts() if facts else {})), flush=True)
    sys.stdout.flush()
    os._exit(0)  # what contestants do at their end is not asked


if __name__ == "__main__":
    main()

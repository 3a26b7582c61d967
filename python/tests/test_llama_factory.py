"""LLaMA-Factory's DeepSpeed configurations, from files, with "auto" as they have it: transformers' Trainer trains as without them."""

import json

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("its options are those of transformers 5", allow_module_level=True)

COMMON = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
}  # fmt: skip
BUCKETS = {
    "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False, "reduce_scatter": True, "reduce_bucket_size": 5e8,
    "contiguous_gradients": True, "round_robin_gradients": True,
}  # fmt: skip
ZERO_3 = {
    "stage": 3, "overlap_comm": False, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip
CPU = {"device": "cpu", "pin_memory": True}
FILES = {
    "ds_z0_config.json": {"stage": 0, **BUCKETS},
    "ds_z2_config.json": {"stage": 2, **BUCKETS},
    "ds_z2_offload_config.json": {"stage": 2, "offload_optimizer": CPU, **BUCKETS},
    "ds_z3_config.json": ZERO_3,
    "ds_z3_offload_config.json": {**ZERO_3, "offload_optimizer": CPU, "offload_param": CPU},
}

# Without a configuration first: transformers and accelerate remember that there was one.
TRAINS = """
    import os, sys
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000))
    import penstock.deepspeed as deepspeed
    import torch, transformers
    from accelerate.state import AcceleratorState
    transformers.logging.set_verbosity_error()

    def run(configuration, **options):
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        args = transformers.TrainingArguments(
            output_dir=sys.argv[1] + "/out", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, logging_steps=1, save_strategy="no",
            report_to=[], learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=1, use_cpu=True, disable_tqdm=True, deepspeed=configuration, **options
        )
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        data = [{"input_ids": x, "labels": x} for x in torch.randint(3, 99, (16, 16), generator=torch.Generator().manual_seed(1))]
        trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
        trainer.train()
        if configuration:
            assert isinstance(trainer.model_wrapped, deepspeed.DeepSpeedEngine)
        return [(each["loss"], each["grad_norm"], each["learning_rate"]) for each in trainer.state.log_history if "loss" in each]

    plain = run(None)
    for name in sys.argv[2:]:
        told = run(name)
        assert len(told) == len(plain) == 4
        for one, other in zip(told, plain):
            assert all(abs(float(a) - float(b)) <= tolerance for a, b, tolerance in zip(one, other, (1e-5, 1e-4, 1e-12))), (name, told, plain)
        print("trained", os.path.basename(name), flush=True)
    assert all(abs(float(a[0]) - float(b[0])) < 0.05 for a, b in zip(run(sys.argv[2], bf16=True), plain))
"""


def test_each_file_is_accepted_and_trains_as_without_it(in_child, tmp_path):
    drive = {"device": "nvme", "nvme_path": str(tmp_path / "nvme"), "pin_memory": True}
    files = {**FILES, "ds_z3_nvme_config.json": {**ZERO_3, "offload_optimizer": drive, "offload_param": drive}}
    for name, zero in files.items():
        (tmp_path / name).write_text(json.dumps({**COMMON, "zero_optimization": zero}))
    status, out, err = in_child(TRAINS, tmp_path, *(tmp_path / name for name in files), timeout=900)
    assert status == 0, err[-3000:]
    assert [line.split()[1] for line in out.splitlines() if line.startswith("trained")] == list(files)

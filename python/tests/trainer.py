"""A program of Hugging Face's Trainer that knows nothing of Penstock, and how tests run it. It is told what to do in JSON."""

import json
import os
import signal
import subprocess
import sys

DEFAULTS = {
    "deepspeed": None, "out": "", "size": 4, "max_steps": 10, "save_steps": 3, "resume": None, "kill": 0, "accumulate": 1, "evaluates": True,
    "family": "llama", "use_cpu": True, "smoothing": 0.0,
}  # fmt: skip


def config(directory):
    """ZeRO-3 with everything on a drive."""
    offload = {"device": "nvme", "nvme_path": str(directory)}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "offload_optimizer": offload,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


def run(*launcher, status=0, threads=None, **options):
    """By name, what it tells: of each step (loss, norm), of an evaluation, of what it has saved, the number of ranks.

    launcher: arguments of Python before the program. options: others than DEFAULTS.
    """
    settings = {**DEFAULTS, **options, "out": str(options["out"])}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    done = subprocess.run(
        [sys.executable, *launcher, os.path.abspath(__file__), json.dumps(settings)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == status, done.stderr[-4000:]
    return told(done.stdout)


def told(text):
    found = [json.loads(line[len("TOLD ") :]) for line in text.splitlines() if line.startswith("TOLD ")]
    return {step: values for step, *values in found}


def model_of(transformers, family):
    if family == "gemma2":  # with a soft cap of logits
        return transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(
                vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                final_logit_softcapping=3.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            )
        )  # fmt: skip
    if family == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2, n_positions=32))
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    )


def main(options):
    import torch
    import transformers

    transformers.logging.set_verbosity_error()

    def tell(*what):
        print("TOLD", json.dumps(what), flush=True)

    torch.manual_seed(0)
    model = model_of(transformers, options["family"])
    data = [{"input_ids": torch.randint(3, 99, (16,))} for _ in range(64)]
    for each in data:
        each["labels"] = each["input_ids"].clone()

    class Watch(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if "loss" in logs and state.is_world_process_zero:
                tell(state.global_step, float(logs["loss"]), float(logs["grad_norm"]))
            if state.global_step == options["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)

    if options["smoothing"]:
        model.config.pad_token_id = 0
    args = transformers.TrainingArguments(
        label_smoothing_factor=options["smoothing"],
        output_dir=options["out"], per_device_train_batch_size=options["size"], max_steps=options["max_steps"], logging_steps=1,
        save_steps=options["save_steps"], report_to=[], deepspeed=options["deepspeed"], learning_rate=1e-2, lr_scheduler_type="cosine",
        weight_decay=0.1, use_cpu=options["use_cpu"], disable_tqdm=True, gradient_accumulation_steps=options["accumulate"],
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data, callbacks=[Watch()])
    trainer.train(resume_from_checkpoint=options["resume"])
    if options["evaluates"]:
        tell("eval", trainer.evaluate(data[:8])["eval_loss"])
    trainer.save_model(options["out"] + "/final")
    if trainer.is_world_process_zero():
        loaded = type(model).from_pretrained(options["out"] + "/final").eval()
        x = torch.stack([each["input_ids"] for each in data[:8]])
        with torch.no_grad():
            tell("loaded", loaded(input_ids=x, labels=x).loss.item())
        tell("ranks", trainer.args.world_size)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

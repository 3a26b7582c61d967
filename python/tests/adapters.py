"""A program of peft and Hugging Face's Trainer that knows nothing of Penstock: one training for each kind of adapter."""

import json
import sys


def main(methods, out, deepspeed):
    import peft
    import torch
    import transformers
    from accelerate.state import AcceleratorState

    transformers.logging.set_verbosity_error()
    targets = ["q_proj", "v_proj"]
    kinds = {
        "LoRA": lambda: peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"),
        "DoRA": lambda: peft.LoraConfig(r=4, target_modules=targets, use_dora=True, task_type="CAUSAL_LM"),
        "IA3": lambda: peft.IA3Config(target_modules=[*targets, "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
        "VeRA": lambda: peft.VeraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"),
    }
    for method in methods:
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        config = transformers.LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        model = peft.get_peft_model(transformers.LlamaForCausalLM(config), kinds[method]())
        data = [{"input_ids": torch.randint(3, 99, (16,))} for _ in range(32)]
        for each in data:
            each["labels"] = each["input_ids"].clone()

        class Watch(transformers.TrainerCallback):
            def on_log(self, args, state, control, logs=None, **_):
                if "loss" in logs:
                    print("TOLD", json.dumps([f"{method} {state.global_step}", float(logs["loss"]), float(logs["grad_norm"])]), flush=True)  # noqa: B023

        args = transformers.TrainingArguments(
            output_dir=f"{out}/{method}", per_device_train_batch_size=4, max_steps=5, logging_steps=1, save_strategy="no", report_to=[],
            deepspeed=deepspeed, learning_rate=1e-2, weight_decay=0.1, use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=args, train_dataset=data, callbacks=[Watch()])
        trainer.train()
        trainer.save_model(f"{out}/{method}/final")
        saved = peft.utils.load_peft_weights(f"{out}/{method}/final", device="cpu")
        total = sum(float(value.double().abs().sum()) for value in saved.values())
        print("TOLD", json.dumps([f"{method} saved", sorted(saved), total]), flush=True)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))

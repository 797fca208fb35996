"""HF Trainer on mizzen: the script says `deepspeed=`, and nothing of mizzen.

mizzen run --drop-in --no_local_rank --num_gpus 2 examples/clients/trainer.py
"""

import sys

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}


class Counting(Dataset):
    """Rows in which every number is the one before plus one: a small model learns it in a few steps."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        tokens = (index + torch.arange(16)) % 64
        return {"input_ids": tokens, "labels": tokens}


def main(folder):
    torch.manual_seed(1)
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=CONFIG,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=8,
        max_steps=30,
        learning_rate=1e-2,
        logging_steps=10,
        save_steps=15,
        report_to="none",
        disable_tqdm=True,
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2))
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting(), eval_dataset=Counting())
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"loss after {trainer.state.global_step} steps: {loss:.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo-output/trainer")

"""Supervised fine-tuning of an adapter with TRL and PEFT; tokenizer and model are made here, so nothing is downloaded.

mizzen run --drop-in --no_local_rank --num_gpus 2 examples/clients/sft.py
"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}
WORDS = ["<pad>", "<s>", "</s>", *["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]]


def tokenizer():
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def main(folder):
    torch.manual_seed(1)
    arguments = SFTConfig(
        output_dir=folder,
        deepspeed=CONFIG,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        per_device_train_batch_size=8,
        max_steps=20,
        learning_rate=5e-2,
        logging_steps=5,
        max_length=16,
        report_to="none",
        disable_tqdm=True,
    )
    shape = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    texts = [" ".join(WORDS[3 + (start + step) % 10] for step in range(8)) for start in range(10)]
    trainer = SFTTrainer(
        model=LlamaForCausalLM(shape),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": texts * 16}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        print(f"loss: {losses[0]:.3f}, after {trainer.state.global_step} steps {losses[-1]:.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo-output/sft")

"""Tiny models, data and configurations, and what every script of this folder does at its beginning and at its end."""

import gc
import json
import os
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

VOCABULARY, LENGTH, RATE, DECAY = 64, 16, 1e-2, 0.1
STAGE_3 = {
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": 100,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "sub_group_size": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}


def configuration(stage: int, zero: dict | None = None, **more) -> dict:
    """As the guides of the clients tell users to write it."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": stage,
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": "auto",
            "contiguous_gradients": True,
            **(STAGE_3 if stage == 3 else {}),
            **(zero or {}),
        },
        **more,
    }


class Tokens(Dataset):
    """Sequences with labels that are partly masked, so that no two batches count the same number of tokens."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(samples)
        self.tokens = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
        masked = torch.rand((samples, LENGTH), generator=generator) < torch.rand((samples, 1), generator=generator) / 2
        self.labels = self.tokens.masked_fill(masked, -100)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def gpt2(seed: int = 3) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(gpt2_shape())


def gpt2_shape() -> GPT2Config:
    return GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )


def llama(seed: int = 3, **more) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_shape(**more))


def llama_shape(**more) -> LlamaConfig:
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaConfig(**shape | more)


def norms(model: torch.nn.Module, is_sharded: bool) -> dict[str, float]:
    """Of every parameter, read where a user reads parameters at any stage."""
    if not is_sharded:
        return {name: value.double().norm().item() for name, value in model.named_parameters()}
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: value.double().norm().item() for name, value in model.named_parameters()}


def forget() -> None:
    """What is process-wide in the clients, so that one process can hold several runs."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    gc.collect()


def leave(found: dict, folder: Path) -> None:
    """What this rank has found, for the tests to read."""
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()

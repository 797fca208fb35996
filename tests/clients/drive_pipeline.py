"""Models of transformers, and adapters of peft in one, cut into two stages by the configuration alone."""

import json
import os
import sys
from pathlib import Path

import torch
import transformers as hf
from peft import LoraConfig, TaskType, get_peft_model

import mizzen

VOCABULARY, STEPS, RATE = 61, 3, 0.1
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
SHAPE |= {"vocab_size": VOCABULARY, "max_position_embeddings": 64}


def adapted() -> torch.nn.Module:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE))
    lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, lora)


MODELS = {
    "lora": adapted,
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SHAPE, num_key_value_heads=2)),
    "tied": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True)),
    "roberta": lambda: hf.RobertaForMaskedLM(
        hf.RobertaConfig(**SHAPE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0)
    ),
}


def build(kind: str) -> torch.nn.Module:
    torch.manual_seed(3)
    return MODELS[kind]()


def micros(step: int) -> list[dict]:
    tokens = torch.randint(1, VOCABULARY, (4, 2, 9), generator=torch.Generator().manual_seed(step))
    return [{"input_ids": each, "attention_mask": torch.ones_like(each), "labels": each} for each in tokens]


def alone(kind: str) -> tuple[list, dict]:
    """Losses and updates of one process."""
    model, losses = build(kind), []
    start = {name: each.detach().clone() for name, each in model.named_parameters()}
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        found = [model(**micro).loss / 4 for micro in micros(step)]
        sum(found).backward()
        optimizer.step()
        losses.append(sum(each.item() for each in found))
    return losses, {name: each.detach() - start[name] for name, each in model.named_parameters() if each.requires_grad}


def staged(kind: str) -> dict:
    """How far two stages are from one process: the worst loss, and the worst update of a parameter by name."""
    losses, updates = alone(kind)
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "pipeline_parallel_size": 2,
        "progress": {"enabled": False},
    }
    start = dict(build(kind).named_parameters())
    engine, *_ = mizzen.initialize(model=build(kind), config=config)
    found = [engine.train_batch(iter(micros(step))).loss for step in range(STEPS)]
    far, where = 0.0, ""
    for name, each in engine.module.named_parameters():
        master = mizzen.zero.safe_get_full_fp32_param(each)
        if master is None or name not in updates:  # frozen, or tied to what is known by its first name
            continue
        # The bias of keys has no gradient but rounding: softmax does not see it.
        error = (master - start[name] - updates[name]).norm() / updates[name].norm().clamp_min(1e-6)
        far, where = max((far, where), (error.item(), name))
    engine.destroy()
    return {"loss": max(abs(a / b - 1) for a, b in zip(found, losses, strict=True)), "update": far, "where": where}


def main() -> None:
    torch.set_num_threads(1)
    found = {kind: staged(kind) for kind in MODELS}
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(found))


main()

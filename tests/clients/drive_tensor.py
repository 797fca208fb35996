"""Unmodified models of transformers, cut over tensor-parallel ranks by the configuration alone, on four or eight."""

import itertools
import json
import os
import sys
import time
from pathlib import Path

import torch
import transformers as hf
from peft import LoraConfig, TaskType, get_peft_model

import mizzen

SAMPLES, LENGTH, VOCABULARY, STEPS, RATE = 8, 12, 131, 3, 0.1
RANKS = int(os.environ["WORLD_SIZE"])
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": RANKS}
SHAPE |= {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FUSED = {"fused": {"head_loss": True, "rms_norm": True, "rotary": True, "swiglu": True}}
RECOMPUTE = {"activation_checkpointing": {"mode": "full"}}
COMPILE = {"compile": {"enabled": True, "backend": "aot_eager"}}


def adapted() -> torch.nn.Module:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, num_key_value_heads=RANKS))
    layers = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=2, target_modules=layers, lora_dropout=0.0)
    model = get_peft_model(model, lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, num_key_value_heads=2)),
    "one key": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, num_key_value_heads=1, tie_word_embeddings=True)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SHAPE, num_key_value_heads=2)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=32)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=8)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**SHAPE, num_key_value_heads=2, pad_token_id=0)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_embd=32, n_layer=2, n_head=RANKS, vocab_size=VOCABULARY, n_positions=64,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        )
    ),
    "neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SHAPE)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SHAPE, **QUIET)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=RANKS, vocab_size=VOCABULARY, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    ),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(**{key: SHAPE[key] for key in list(SHAPE)[:4]}, image_size=16, patch_size=4)
    ),
    "lora": adapted,
}  # fmt: skip
CASES = (
    ("llama", 2, 0, {}),
    ("llama", 4, 1, {"gradient_clipping": 0.3}),
    ("llama", 2, 3, FUSED),
    ("llama", 2, 2, RECOMPUTE),
    ("llama", 2, 1, COMPILE),
    ("one key", 4, 0, FUSED),
    ("qwen2", 2, 1, {"gradient_accumulation_steps": 2}),
    ("qwen3", 2, 3, RECOMPUTE | FUSED),
    ("mistral", 2, 2, {"gradient_clipping": 0.3}),
    ("gemma2", 2, 3, {}),
    ("phi3", 2, 1, {}),
    ("gpt2", 2, 3, {"gradient_accumulation_steps": 2}),
    ("gpt2", 4, 0, {}),
    ("neox", 2, 0, {}),
    ("bert", 2, 2, {}),
    ("t5", 2, 1, RECOMPUTE),  # its decoder has a configuration of its own, which still asks for a cache
    ("vit", 4, 0, {}),
    ("lora", 2, 1, {}),
    ("lora", 2, 3, {}),
)
EIGHT = tuple(
    (kind, 8, number % 4, {})
    for number, kind in enumerate(("llama", "qwen2", "mistral", "gemma2", "gpt2", "bert", "t5", "vit", "one key"))
)
"""All of the ranks share each matrix; some have fewer heads of keys than ranks."""
OPTIONS = ({}, {"gradient_clipping": 0.3}, {"gradient_accumulation_steps": 2}, RECOMPUTE, COMPILE)


def batch(model: torch.nn.Module, step: int) -> dict:
    generator = torch.Generator().manual_seed(step)
    if model.main_input_name == "pixel_values":
        images = torch.randn(SAMPLES, 3, 16, 16, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(0, 2, (SAMPLES,), generator=generator)}
    tokens = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def built(kind: str) -> torch.nn.Module:
    torch.manual_seed(7)
    model = MODELS[kind]()
    model.config.use_cache = False
    return model


def reference(kind: str, clip: float) -> tuple[list, list, dict]:
    """One process, plain torch: losses, norms, and how far each parameter has moved."""
    model = built(kind)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rule, losses, norms = torch.optim.SGD(trained, lr=RATE), [], []
    for step in range(STEPS):
        rule.zero_grad()
        loss = model(**batch(model, step)).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clip or 1e9)))
        rule.step()
        losses.append(loss.item())
    return losses, norms, {name: value.detach() - before[name] for name, value in model.named_parameters()}


def split(kind: str, tp: int, stage: int, more: dict) -> dict:
    """What a user writes; how far it is from one process."""
    model = built(kind)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    config = {
        "train_batch_size": SAMPLES,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"autotp_size": tp},
        "progress": {"enabled": False},
        "seed": 1,
    }
    engine, *_ = mizzen.initialize(model=model, config=config | more)
    losses, norms = [], []
    for step in range(STEPS):
        ranks, rank, parts = engine.dp_world_size, engine.get_data_parallel_rank(), engine.gradient_accumulation_steps()
        mine = {name: value.chunk(ranks)[rank].chunk(parts) for name, value in batch(model, step).items()}
        report = engine.train_batch(
            iter([dict(zip(mine, part, strict=True)) for part in zip(*mine.values(), strict=True)])
        )
        losses.append(report.loss)
        norms.append(report.grad_norm)
    expected, wanted, moves = reference(kind, more.get("gradient_clipping", 0.0))
    worst = ("", 0.0)
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and moves[name].norm() > 1e-7:
            value = mizzen.zero.safe_get_full_fp32_param(parameter)
            moved = float((value - before[name] - moves[name]).norm() / moves[name].norm())
            worst = max(worst, (name, moved), key=lambda each: each[1])
    engine.destroy()
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)),
        "norm": max(abs(a - b) / abs(b) for a, b in zip(norms, wanted, strict=True)),
        "update": worst[1],
        "where": worst[0],
    }


SPOKEN = (("llama", 2, 0), ("one key", 4, 0), ("gpt2", 2, 1), ("gemma2", 2, 2), ("llama", 2, 3), ("t5", 2, 0))
"""Models that generate, over so many ranks, at a stage."""


def spoken(kind: str, tp: int, stage: int) -> dict:
    """Greedy tokens of a cut model and of one process, with a cache and without."""
    config = {
        "train_batch_size": SAMPLES,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"autotp_size": tp},
        "progress": {"enabled": False},
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
    }
    plain, model = built(kind).eval(), built(kind)
    engine, *_ = mizzen.initialize(model=model, config=config)
    engine.eval()
    prompt = torch.randint(1, VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(5))
    found = {}
    for use_cache in (True, False):
        words = {
            "max_new_tokens": 7,
            "do_sample": False,
            "use_cache": use_cache,
            "pad_token_id": 0,
            "eos_token_id": None,
        }
        mask = torch.ones_like(prompt)
        with torch.no_grad():
            ours = engine.module.generate(input_ids=prompt, attention_mask=mask, **words)
            theirs = plain.generate(input_ids=prompt, attention_mask=mask, **words)
        found["cache" if use_cache else "no cache"] = [ours.tolist(), theirs.tolist()]
    engine.train()
    rank = engine.get_data_parallel_rank()
    mine = {name: value.chunk(engine.dp_world_size)[rank] for name, value in batch(model, 0).items()}
    found["trains on"] = [engine.train_batch(iter([mine])).applied, True]
    engine.destroy()
    return found


def chosen() -> tuple:
    """The cases of this call: all options of the model that it names, or what is always run on so many ranks."""
    if len(sys.argv) > 2:
        return tuple(itertools.product(sys.argv[2:], (2, 4), (0, 1, 2, 3), OPTIONS))
    return EIGHT if RANKS == 8 else CASES


def main() -> None:
    folder, cases = Path(sys.argv[1]), chosen()
    found = {}
    for kind, tp, stage, more in cases:
        case = f"{kind} tp={tp} stage={stage} {json.dumps(more)}"
        began = time.monotonic()
        torch.compiler.reset()  # torch gives up on a function after eight graphs, and runs it as it is
        found[case] = split(kind, tp, stage, more)
        if os.environ["RANK"] == "0":
            print(f"{len(found)} of {len(cases)}: {case}: {found[case]}, {time.monotonic() - began:.1f} s", flush=True)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    spoken_by = SPOKEN if cases is CASES else ()
    words = {f"{kind} tp={tp} stage={stage}": spoken(kind, tp, stage) for kind, tp, stage in spoken_by}
    (folder / f"{os.environ['RANK']}-spoken.json").write_text(json.dumps(words))


if __name__ == "__main__":
    main()

"""A Llama with all fused operations on a GPU: losses and gradients of its own code, and less memory."""

import gc

import pytest
import torch

import mizzen
from groups import Later
from mizzen.accelerator import get_accelerator
from mizzen.rewrite.head import LateLogits

transformers = Later("transformers")

ALL = {"head_loss": True, "rms_norm": True, "rotary": True, "swiglu": True}


def build(dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_hidden_layers=2,
        intermediate_size=704,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=8192,
        max_position_embeddings=256,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config).to(get_accelerator().device(), dtype)


def batch(step: int = 0) -> dict:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 8192, (4, 199), generator=generator).to(get_accelerator().device())
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens % 7 == 0, -100), "use_cache": False}


def start(model, fused: dict, **sections):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "progress": {"enabled": False},
        "fused": fused,
        **sections,
    }
    return mizzen.initialize(model=model, config=config)[0]


def first_gradients(fused: dict, **sections) -> dict[str, torch.Tensor]:
    model = build()
    engine = start(model, fused, **sections)
    engine.backward(engine(**batch()).loss)
    found = {name: mizzen.zero.safe_get_full_grad(p).double() for name, p in model.named_parameters()}
    engine.destroy()
    return found


def error(found, exact) -> float:
    """The mean over parameters of how far a gradient is off."""
    return sum(((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact) / len(exact)


def test_gradients_in_fp32():
    assert error(first_gradients(ALL), first_gradients({})) < 1e-4


@pytest.mark.parametrize("sections", [{"bf16": {"enabled": True}}, {"torch_autocast": {"enabled": True}}], ids=str)
def test_gradients_in_bf16_are_as_good_as_the_models_own(sections):
    exact = first_gradients({})
    assert error(first_gradients(ALL, **sections), exact) < 1.3 * error(first_gradients({}, **sections), exact)


def losses(fused: dict, **sections) -> list[float]:
    engine = start(build(), fused, bf16={"enabled": True}, **sections)
    found = []
    for step in range(4):
        output = engine(**batch(step % 2))
        assert isinstance(output.logits, LateLogits) == bool(fused)
        engine.backward(output.loss)
        found.append(engine.step().loss)
    engine.destroy()
    return found


@pytest.mark.parametrize("recompute", ["off", "full"])
def test_a_few_steps(recompute):
    sections = {"activation_checkpointing": {"mode": recompute}}
    assert losses(ALL, **sections) == pytest.approx(losses({}), rel=1e-2)


def test_compiled_blocks_and_a_fused_head():
    torch.compiler.reset()
    assert losses(ALL, compile={"enabled": True}) == pytest.approx(losses({}), rel=1e-2)


def test_logits_are_the_models_own():
    model = build(torch.bfloat16)
    with torch.no_grad():
        expected = model(**batch()).logits
    engine = start(model, {"head_loss": True}, bf16={"enabled": True})
    with torch.no_grad():
        assert torch.equal(engine(**batch()).logits.float(), expected.float())
    engine.destroy()


def test_the_peak_of_memory_is_lower():
    def peak(fused: dict) -> int:
        engine = start(build(), fused, bf16={"enabled": True})
        accelerator = get_accelerator()
        for step in range(3):
            gc.collect()
            accelerator.synchronize()
            accelerator.reset_peak()
            before = accelerator.memory().allocated
            engine.backward(engine(**batch(step)).loss)
            accelerator.synchronize()
            above = accelerator.memory().peak - before
            engine.step()
        engine.destroy()
        return above

    plain, head, everything = peak({}), peak({"head_loss": True, "head_chunk": 100}), peak(ALL | {"head_chunk": 100})
    assert everything < head < plain


def masked_gradients(fused: dict, **sections) -> dict[str, torch.Tensor]:
    """Those of a BERT, of whose tokens few have a label."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = transformers.BertForPreTraining(transformers.BertConfig(vocab_size=8192, **sizes, **dropout))
    engine = start(model, fused, **sections)
    inputs = batch()
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] % 7 != 0, -100)
    told = torch.tensor([0, 1, 1, 0], device=labels.device)
    output = engine(input_ids=inputs["input_ids"], labels=labels, next_sentence_label=told)
    engine.backward(output.loss)
    found = {name: mizzen.zero.safe_get_full_grad(p).double() for name, p in model.named_parameters()}
    engine.destroy()
    return found


def distance(found, exact) -> float:
    """How far all gradients together are off: those of key biases are 0, but for rounding, and have no size alone."""
    off = sum((found[name] - exact[name]).square().sum() for name in exact)
    return (off / sum(gradient.square().sum() for gradient in exact.values())).sqrt().item()


@pytest.mark.parametrize("keys", [{}, {"head_labelled": False}], ids=str)
def test_a_masked_language_model(keys):
    exact, fused, low = masked_gradients({}), {"head_loss": True} | keys, {"bf16": {"enabled": True}}
    assert distance(masked_gradients(fused), exact) < 1e-4
    assert distance(masked_gradients(fused, **low), exact) < 1.3 * distance(masked_gradients({}, **low), exact)

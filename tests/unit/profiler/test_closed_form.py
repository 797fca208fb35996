"""What is counted of GPT and Llama, against formulas written down here: forward, backward and parameters."""

import pytest
import torch

from groups import Later
from mizzen.profiler.flops import FlopsProfiler

transformers = Later("transformers")

SAMPLES, LENGTH, WIDTH, LAYERS, HEADS, GROUPS, FEED, VOCABULARY = 2, 24, 64, 3, 4, 2, 160, 96
TOKENS = SAMPLES * LENGTH
ATTENTION = 4 * SAMPLES * LENGTH * LENGTH * WIDTH
"""Scores and what they weigh, two operations each for a multiply-add."""


def gpt(kind):
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        attn_pdrop=0.0,  # with dropout there is no fused kernel
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=kind,
    )
    block = 12 * WIDTH * WIDTH  # query, key, value and output, and two matrices of four widths
    forward = 2 * TOKENS * (LAYERS * block + VOCABULARY * WIDTH) + LAYERS * ATTENTION
    parameters = LAYERS * (block + 13 * WIDTH) + (VOCABULARY + LENGTH) * WIDTH + 2 * WIDTH
    return transformers.GPT2LMHeadModel(config), forward, parameters


def llama(kind):
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=FEED,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        attn_implementation=kind,
    )
    block = 2 * WIDTH * WIDTH * (1 + GROUPS / HEADS) + 3 * WIDTH * FEED
    forward = 2 * TOKENS * (LAYERS * block + VOCABULARY * WIDTH) + LAYERS * ATTENTION
    parameters = LAYERS * (block + 2 * WIDTH) + 2 * VOCABULARY * WIDTH + WIDTH
    return transformers.LlamaForCausalLM(config), forward, parameters


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("family", [gpt, llama])
def test_forward_and_backward_are_those_of_the_formula(family, kind):
    model, forward, parameters = family(kind)
    inputs = torch.randint(VOCABULARY, (SAMPLES, LENGTH))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(input_ids=inputs, labels=inputs).loss.backward()
    profiler.stop_profile()
    tree = profiler.tree()
    assert tree.parameters == profiler.get_total_params() == parameters
    assert tree.forward == profiler.get_total_flops() == pytest.approx(forward, rel=0.01)
    # sdpa keeps no scores: its backward computes them once more.
    again = LAYERS * ATTENTION / 2 if kind == "sdpa" else 0
    assert tree.backward == pytest.approx(2 * forward + again, rel=0.01)
    assert tree.recomputed == 0
    layers = [branch for branch in tree.walk() if branch.kind in ("GPT2Block", "LlamaDecoderLayer")]
    assert len(layers) == LAYERS
    assert len({(layer.forward, layer.backward) for layer in layers}) == 1  # each has its own, in backward too
    head = next(branch for branch in tree.walk() if branch.path == "lm_head")
    assert (head.forward, head.backward) == (2 * TOKENS * VOCABULARY * WIDTH, 4 * TOKENS * VOCABULARY * WIDTH)
    assert LAYERS * layers[0].backward + head.backward == tree.backward

"""Where sequences are cut between the layers of a model, and which models are refused, without a rank."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from mizzen.config.load import load
from mizzen.errors import PlanError
from mizzen.model.flow import Argument
from mizzen.model.sketch import Sketch
from mizzen.model.trace import flow_of
from mizzen.order import ORDER
from mizzen.plan.build import build
from parity import transformers_models as models
from parity.decoders import MODELS, Attention, Decoder, Mlp
from unit.parallel.tensor import odd_models
from unit.parallel.tensor.odd_models import SECTIONS, STACKS, adapted


def planned(model: nn.Module, tp: int = 2, more: dict | None = None, **section):
    settings = {"train_batch_size": 8, "tensor_parallel": {"autotp_size": tp, "sequence_parallel": True, **section}}
    plan = build(load(settings | (more or {})), tp, Sketch.of(model).with_flow(flow_of(model)), ORDER)
    (found,) = [step.choice for step in plan.steps if step.transform.name == "tensor"]
    return plan, found


def test_blocks_attention_and_what_stands_beside_it_are_found():
    plan, choice = planned(Decoder())
    (stack,) = choice.sequence.stacks
    assert [(entry.path, entry.argument) for entry in stack] == [
        (f"blocks.{block}", Argument(0, "hidden")) for block in (0, 1)
    ]
    assert {entry.path for entry in choice.sequence.readers} == {
        f"blocks.{block}.{name}" for block in (0, 1) for name in ("attention", "mlp")
    }
    assert choice.sequence.rows == {f"blocks.{b}.{name}" for b in (0, 1) for name in ("attention.out", "mlp.down")}
    assert not choice.sequence.is_random
    assert "sequences are cut between the layers of 2 blocks" in str(choice)
    homes = {p.name: p.home for p in plan.drafts[0].parameters}
    for name in ("first.weight", "second.bias", "attention.out.bias", "mlp.down.bias", "attention.q_norm.weight"):
        assert "tp" in homes[f"blocks.1.{name}"].sums, name
    for name in ("norm.weight", "blocks.1.attention.q.bias", "blocks.0.mlp.scale"):
        assert "tp" not in homes[name].sums, name


def test_behind_attention_a_module_may_have_its_last_layer_alone():
    _, choice = planned(models.built("bert"))
    readers = [entry.path for entry in choice.sequence.readers]
    assert readers == [f"bert.encoder.layer.{n}.{name}" for n in (0, 1) for name in ("attention.self", "intermediate")]


def test_dropout_between_layers_is_seen():
    assert planned(models.gpt2(0.1))[1].sequence.is_random
    assert not planned(models.gpt2(0.0))[1].sequence.is_random


def test_dropout_is_seen_in_a_model_that_comes_in_evaluation_mode():
    model = models.gpt2(0.1).eval()
    model.transformer.h[1].train()
    choice = planned(model)[1]
    assert choice.sequence.is_random and "transformer.h.0.attn.c_attn" in choice.random
    assert [block.training for block in model.transformer.h] == [False, True] and not model.lm_head.training


def test_adapters_before_a_layer_see_whole_sequences_and_behind_it_parts():
    plan, choice = planned(Decoder(**MODELS["adapted"]))
    homes = {p.name: p.home for p in plan.drafts[0].parameters}
    assert "tp" not in homes["blocks.0.attention.q.low.weight"].sums
    assert "tp" in homes["blocks.0.attention.out.high.weight"].sums


def test_latent_attention_works_with_whole_sequences():
    plan, choice = planned(models.built("deepseek2"))
    assert "model.layers.0.self_attn" in {entry.path for entry in choice.sequence.readers}
    homes = {p.name: p.home for p in plan.drafts[0].parameters}
    for name in ("q_a_proj.weight", "q_a_layernorm.weight", "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight"):
        assert "tp" not in homes[f"model.layers.0.self_attn.{name}"].sums, name
    assert "tp" in homes["model.layers.0.input_layernorm.weight"].sums


def test_attention_that_the_user_leaves_whole_has_nothing_that_is_summed():
    specs = [{"patterns": [r"self_attn\.(q_b|kv_b|o)_proj"], "partition_type": "skip"}]
    config = {"partition_config": {"layer_specs": specs}, "sequence_parallel": False}
    _, choice = planned(models.built("deepseek2"), **config)
    assert not [cut.path for cut in choice.layers if "self_attn" in cut.path]


@pytest.mark.parametrize("kind", STACKS)
def test_blocks_hand_parts_on_to_the_next_where_nothing_else_reads_them(kind):
    build_model, stacks = STACKS[kind]
    plan, choice = planned(build_model(), **SECTIONS.get(kind, {}))
    assert [[entry.path for entry in stack] for stack in choice.sequence.stacks] == stacks
    homes = {p.name: p.home for p in plan.drafts[0].parameters}
    inside = tuple(f"{path}." for stack in stacks for path in stack)
    assert not [name for name, home in homes.items() if "tp" in home.sums and not name.startswith(inside)]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gemma2", "gpt2", "bert", "neox", "qwen3"])
def test_all_blocks_of_models_of_transformers_are_one_stack(kind):
    (stack,) = planned(models.built(kind))[1].sequence.stacks
    assert len(stack) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_the_model_computes_again_are_one_stack(reentrant):
    model = models.built("llama")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    (stack,) = planned(model)[1].sequence.stacks
    assert len(stack) == 2


ADAPTED = [
    ("gpt2", "c_attn", "attn"),
    ("gpt2", "c_attn|c_proj|c_fc", "attn"),
    ("gpt2", r"mlp\.c_(fc|proj)", "mlp"),
    ("bert", "dense", "intermediate"),
    ("llama", "_proj", "self_attn"),
    ("neox", "query_key_value", "attention"),
]
"""Models, which layers have adapters, and a module that is given whole sequences."""


@pytest.mark.parametrize(("kind", "pattern", "reader"), ADAPTED)
def test_adapters_leave_the_modules_that_are_given_whole_sequences_as_they_are(kind, pattern, reader):
    plan, choice = planned(adapted(models.built(kind), pattern))
    assert choice.sequence.readers == planned(models.built(kind))[1].sequence.readers
    assert any(entry.path.endswith(f".{reader}") for entry in choice.sequence.readers)
    rows = {cut.path for cut in choice.layers if cut.style == "row"}
    homes = {p.name: p.home for p in plan.drafts[0].parameters}
    for name, home in homes.items():
        if ".lora_B." in name:  # behind a row it meets parts, and elsewhere it is cut
            assert ("tp" in home.sums) == (name.replace("lora_B.default.weight", "base_layer") in rows), name
        if ".lora_A." in name:
            assert "tp" not in home.sums, name


class Straight(nn.Module):
    """A block that adds nothing up: its second half reads what the first gives, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(4, 2), Mlp(24, gated=True)

    def forward(self, hidden):
        return self.mlp(self.attention(hidden))


class NormedAdapter(odd_models.Adapted):
    """Has a norm of its own before its first half."""

    def __init__(self, base) -> None:
        super().__init__(base, 0.0)
        self.lora_dropout["default"] = nn.LayerNorm(16)


def test_the_first_half_of_an_adapter_sees_whole_sequences_whatever_it_reads():
    model = adapted(Stack(Straight), r"mlp\.up")
    for block in model.blocks:
        block.attention.q = NormedAdapter(block.attention.q)
    plan, _ = planned(model)
    homes = {p.name: p.home for p in plan.drafts[0].parameters}
    for name in ("mlp.up.lora_A.default", "attention.q.lora_A.default", "attention.q.lora_dropout.default"):
        assert "tp" not in homes[f"blocks.1.{name}.weight"].sums, name


def test_dropout_of_adapters_is_for_whole_sequences_alone():
    _, choice = planned(adapted(models.built("llama"), "[qv]_proj", 0.1))
    assert not choice.sequence.is_random


def test_dropout_of_whole_sequences_and_of_parts_is_refused():
    message = r"'transformer\.h\.0\.attn\.c_attn\.lora_dropout\.default' is applied to whole .*'transformer\.h\.0\.attn"
    with pytest.raises(PlanError, match=message):
        planned(adapted(models.gpt2(0.1), "c_attn", 0.1))


class Block(nn.Module):
    """Takes what stands between attention and the rest from outside."""

    def __init__(self, between, mlp=None) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), Attention(4, 2)
        self.mlp = mlp or Mlp(24, gated=True)
        self.between = between

    def forward(self, hidden):
        hidden = self.between(hidden + self.attention(self.norm(hidden)))
        return hidden + self.mlp(hidden)


class Stack(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(37, 16), nn.Linear(16, 37)
        self.blocks = nn.ModuleList(make() for _ in range(2))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.last(hidden))

    def last(self, hidden):
        return hidden


class Shift(nn.Module):
    def forward(self, hidden):
        return hidden + functional.pad(hidden, (0, 0, 1, 0))[:, :-1]


class Residual(Mlp):
    def forward(self, hidden):
        return hidden + super().forward(hidden)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, hidden):
        return hidden + self.down(self.up(self.norm(hidden)).relu())


class Gate(nn.Module):
    """A layer that nothing cuts, because a norm looks at all that it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(16, 16)

    def forward(self, hidden):
        return hidden * functional.layer_norm(self.one(hidden), (16,))


class Twice(Stack):
    def forward(self, tokens):
        hidden = self.blocks[1](self.blocks[0](self.blocks[0](self.embed(tokens))))
        return self.head(hidden)


class DroppedAttention(Attention):
    def forward(self, hidden):
        return super().forward(functional.dropout(hidden, 0.1, self.training))


def dropping() -> nn.Module:
    """Dropout of whole sequences in attention, and of parts of them behind it."""
    model = Stack(lambda: Block(nn.Dropout(0.1)))
    for block in model.blocks:
        block.attention = DroppedAttention(4, 2)
    return model


def shifting_first() -> nn.Module:
    model = odd_models.Stack()
    model.blocks[0].first = nn.Sequential(Shift(), nn.LayerNorm(16))
    return model


class Tied(Stack):
    """The norm behind the blocks has a parameter of the first block."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(nn.Identity()))
        self.final = nn.LayerNorm(16)
        self.final.weight = self.blocks[0].norm.weight

    def last(self, hidden):
        return self.final(hidden)


class Borrowed(Stack):
    """The norm behind the blocks is one of theirs."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(nn.Identity()))

    def last(self, hidden):
        return self.blocks[1].norm(hidden)


def tied_inside() -> nn.Module:
    """A norm before the layers of attention, which work on whole sequences, has the parameter of one before it."""
    model = Stack(lambda: Block(nn.Identity()))
    for block in model.blocks:
        block.attention.before = nn.LayerNorm(16)
        block.attention.before.weight = block.norm.weight
        block.attention.parts = lambda hidden, own=block.attention: Attention.parts(own, own.before(hidden))
    return model


class Outside(Stack):
    """Blocks use what belongs to the model."""

    def __init__(self, use) -> None:
        super().__init__(lambda: Block(lambda hidden: use(self, hidden)))
        self.scale, self.table = nn.Parameter(torch.ones(16)), nn.Embedding(3, 16)

    def forward(self, tokens):
        self.condition = self.table(tokens[0, 0] * 0)
        return super().forward(tokens)


class Leaking(Stack):
    """What a block has made, but does not return, is read behind the blocks."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(self.keep))

    def keep(self, hidden):
        self.kept = hidden * 2
        return hidden

    def last(self, hidden):
        return hidden + self.kept


WRONG = {
    "tokens that meet": (
        lambda: Stack(lambda: Block(Shift())),
        r"tokens in 'blocks\.0', and there .* one by one: constant_pad_nd in 'blocks\.0\.between'",
    ),
    "tokens that meet in the first block alone": (
        shifting_first,
        r"tokens in 'blocks\.0', and there .* one by one: constant_pad_nd in 'blocks\.0\.first\.0'",
    ),
    "dropout of whole sequences and of parts": (
        dropping,
        r"dropout in 'blocks\.0\.attention' is applied to whole .* and in 'blocks\.0\.between' to parts",
    ),
    "a parameter inside of blocks and outside": (
        Tied,
        r"'blocks\.0\.norm\.weight' is used in blocks, .* and in 'final', where",
    ),
    "a norm of a block that is called outside": (
        Borrowed,
        r"'blocks\.1\.norm\.weight' is used in blocks, .* and in 'blocks\.1\.norm', where",
    ),
    "a parameter before attention and inside of it": (
        tied_inside,
        r"'blocks\.0\.norm\.weight' is used in blocks, .* and in 'blocks\.0\.attention\.before', where",
    ),
    "a parameter of the model in its blocks": (
        lambda: Outside(lambda model, hidden: hidden * model.scale),
        r"'scale' is used in 'blocks\.0', where .* put it into the block",
    ),
    "an activation of the model in its blocks": (
        lambda: Outside(lambda model, hidden: hidden * model.condition),
        r"'blocks\.0' in the block 'blocks\.0' works with parts .* made outside, in 'table', beside",
    ),
    "what a block does not return": (
        Leaking,
        r"the model itself reads what is made in 'blocks\.1', .* 'blocks\.1' does not return it",
    ),
    "a sum inside of a reader": (
        lambda: Stack(lambda: Block(nn.Identity(), Residual(24, gated=True))),
        r"'blocks\.\d\.mlp' gives more than .* comes from",
    ),
    "layers in the block itself": (lambda: Stack(Flat), r"'blocks\.0\.up' stands in the block 'blocks\.0' itself"),
    "a whole layer in a block": (lambda: Stack(lambda: Block(Gate())), r"no rule cuts 'blocks\.0\.between\.one'"),
    "a block that is called twice": (
        lambda: Twice(lambda: Block(nn.Identity())),
        r"'blocks\.0', a block, is called 2 times",
    ),
    "t5": (lambda: models.built("t5"), r"'decoder\.block\.0', a block, is given 2 activations"),
    "mixtral": (lambda: models.built("mixtral"), r"one by one: view in 'model\.layers\.0\.mlp'"),
    "experts in the last block alone": (
        lambda: models.built("deepseek2, experts"),
        r"some of the tokens in 'model\.layers\.1', .* one by one: view in 'model\.layers\.1\.mlp\.gate'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_model_that_does_not_fit_is_refused_with_the_module_that_does_not(case):
    build_model, message = WRONG[case]
    with pytest.raises(PlanError, match=f"tensor_parallel.sequence_parallel: .*{message}"):
        planned(build_model())


@pytest.mark.parametrize(
    ("section", "more", "message"),
    [
        ({"tp_overlap_comm": True}, {}, "tp_overlap_comm sums whole sequences"),
        ({"autotp_size": 1}, {"tensor_parallel_size": 2}, "one that comes split says it of its own layers"),
    ],
)
def test_what_it_cannot_be_combined_with(section, more, message):
    with pytest.raises(PlanError, match=message):
        planned(Decoder(), 2, more, **section)

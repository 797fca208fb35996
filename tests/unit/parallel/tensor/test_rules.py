"""Which layers are cut, and how, without a rank."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from mizzen.config.load import load
from mizzen.errors import PlanError
from mizzen.model.sketch import Sketch
from mizzen.model.trace import flow_of
from mizzen.order import ORDER
from mizzen.parallel.tensor.cuts import runs_in
from mizzen.parallel.tensor.rules import decide
from mizzen.plan.build import build
from mizzen.plan.explain import explain
from parity import transformers_models as models
from parity.decoders import MODELS, Attention, Block, Decoder, LatentAttention
from unit.parallel.tensor.odd_models import adapted


def choice(model: nn.Module, tp: int, **section):
    settings = load({"train_batch_size": 8, "tensor_parallel": {"autotp_size": tp, **section}})
    return decide(Sketch.of(model).with_flow(flow_of(model)), tp, settings.tensor_parallel)


def styles(found) -> dict[str, str]:
    return {cut.path: cut.style for cut in found.layers}


def test_columns_and_rows_are_found_by_what_reads_what_and_not_by_names():
    found = styles(choice(Decoder(), 2))
    assert found["embed"] == "rows of a table"
    assert found["head"] == "column"
    for block in ("blocks.0", "blocks.1"):
        assert [found[f"{block}.attention.{name}"] for name in "qkv"] == ["column"] * 3
        assert found[f"{block}.attention.out"] == found[f"{block}.mlp.down"] == "row"
        assert found[f"{block}.mlp.up"] == "column"


def test_the_runs_of_fused_layers_are_cut_each():
    cuts = {cut.path: cut for cut in choice(Decoder(**MODELS["runs"]), 2).layers}
    assert cuts["blocks.0.attention.qkv"].runs == ((8, 8), (4, 4), (4, 4))
    assert cuts["blocks.0.mlp.up"].runs == ((12, 12), (12, 12))
    stacked = {cut.path: cut for cut in choice(Decoder(**MODELS["stacked"]), 2).layers}
    assert stacked["blocks.0.attention.qkv"].runs == ((8, 8), (8, 8), (8, 8))
    interleaved = {cut.path: cut for cut in choice(Decoder(**MODELS["interleaved"]), 2).layers}
    assert interleaved["blocks.0.attention.qkv"].runs == ((24, 24),)


def test_heads_that_do_not_divide_are_shared_out_unevenly():
    cuts = {cut.path: cut for cut in choice(Decoder(**MODELS["uneven"]), 2).layers}
    assert cuts["blocks.0.attention.q"].runs == ((16, 8),)
    assert cuts["blocks.0.attention.k"].runs == ((8, 4),)
    assert cuts["blocks.0.attention.out"].runs == ((16, 8),)
    assert cuts["blocks.0.mlp.down"].runs == ((12, 11),)
    assert cuts["head"].runs == ((19, 18),)


def test_norms_of_heads_stay_whole_and_scales_of_features_are_cut():
    found = {cut.name: cut.dim for cut in choice(Decoder(), 2).parameters}
    assert found["blocks.0.attention.q_norm.weight"] is None
    assert found["blocks.1.mlp.scale"] == 0
    assert "blocks.0.first.weight" not in found


def test_numbers_that_modules_compute_with_are_those_of_the_rank():
    sizes = {(each.path, each.name): each.values for each in choice(Decoder(kv=1), 4).sizes}
    assert sizes["blocks.0.attention", "num_heads"] == (1, 1, 1, 1)
    assert sizes["blocks.0.attention", "groups"] == (1, 1, 1, 1)
    assert ("blocks.0.attention", "head_dim") not in sizes


@pytest.mark.parametrize(("kind", "heads"), [("latent", (2, 2)), ("latent, written", (2, 1))])
def test_keys_for_all_heads_stay_whole_and_heads_of_different_sizes_are_cut(kind, heads):
    found = choice(Decoder(**MODELS[kind]), 2)
    cuts = {cut.path.removeprefix("blocks.0.attention."): cut for cut in found.layers if "0.attention" in cut.path}
    assert {name: cut.runs for name, cut in cuts.items() if cut.runs} == {
        "q": (tuple(n * 6 for n in heads),),
        "spread": (tuple(n * 7 for n in heads),),
        "out": (tuple(n * 3 for n in heads),),
    }
    assert str(cuts["squeeze"]) == "whole, its last 2 outputs go where activations are cut"
    sizes = {each.name: each.values for each in found.sizes if each.path == "blocks.0.attention"}
    assert sizes == {"num_heads": heads}


def test_the_layer_with_keys_for_all_heads_is_not_cut_whoever_asks():
    specs = [{"patterns": ["squeeze"], "gather_output": True}]
    with pytest.raises(PlanError, match="squeeze' is to be cut .column., but its last 2 outputs are keys"):
        choice(Decoder(**MODELS["latent"]), 2, partition_config={"layer_specs": specs})
    specs[0] = {"patterns": ["squeeze"], "partition_type": "skip"}
    found = choice(Decoder(**MODELS["latent"]), 2, partition_config={"layer_specs": specs})
    assert styles(found)["blocks.0.attention.squeeze"] == "partly summed"


class Other(LatentAttention):
    """The keys for all heads come first, or keys of all heads stand before all values."""

    def forward(self, hidden):
        few, shape = self.squeeze(hidden), hidden.shape[:2]
        shared, inner = few.split([2, 5], -1) if self.how == "first" else few.split([5, 2], -1)[::-1]
        keys, values = self.spread(self.norm(inner)).split([self.num_heads * 4, self.num_heads * 3], -1)
        keys, values = (each.view(*shape, self.num_heads, -1).transpose(1, 2) for each in (keys, values))
        keys = torch.cat([keys, shared.unsqueeze(1).expand(-1, self.num_heads, -1, -1)], -1)
        queries = self.q(hidden).view(*shape, -1, 6).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def with_other_attention(how: str) -> nn.Module:
    model = Decoder(**MODELS["latent"])
    for block in model.blocks:
        block.attention = Other(4, how)
    return model


def test_latent_attention_of_another_kind_stays_whole_or_is_refused_with_a_way_out():
    assert "blocks.0.attention.q" in choice(with_other_attention("first"), 2).left
    message = r"spread' gives 28 features for heads of 3 and 6, .* 'skip' of all that 'blocks.0.attention.out' reads"
    with pytest.raises(PlanError, match=message):
        choice(with_other_attention("runs"), 2)
    specs = [{"patterns": [r"attention\."], "partition_type": "skip"}]
    found = choice(with_other_attention("runs"), 2, partition_config={"layer_specs": specs})
    assert styles(found)["blocks.0.mlp.up"] == "column"
    with pytest.raises(PlanError, match="4 heads cannot be shared out among 8 tensor-parallel ranks; take 4"):
        choice(Decoder(**MODELS["latent"]), 8)


class WholeNorm(nn.Module):
    """Attention whose queries are normed over all heads at once."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(16, 16), Attention(4, 4)
        self.attention.q_norm = nn.Identity()
        self.all = nn.LayerNorm(16)
        self.attention.q.register_forward_hook(lambda module, args, output: self.all(output))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, tokens):
        hidden = self.attention(self.embed(tokens))
        return self.down(functional.gelu(self.up(hidden)))


def test_what_looks_at_all_features_at_once_is_left_whole_and_said():
    found = choice(WholeNorm(), 2)
    assert "attention.q" not in styles(found)
    assert styles(found)["up"] == "column"
    assert "attention.q" in found.left
    assert "attention.q" in str(found)


class WithRawWeights(nn.Module):
    """Between its layers features are multiplied by weights that no layer has: for each expert, or for all at once."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.raw = nn.Parameter(torch.rand(experts, 16, 16) if experts else torch.rand(16, 16))
        self.last = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 16)])

    def forward(self, tokens):
        hidden = self.up(self.embed(tokens))
        if self.raw.dim() == 3:
            hidden = torch.bmm(hidden.reshape(1, -1, 16).expand(3, -1, -1), self.raw).sum(0).view(*hidden.shape)
        else:
            hidden = functional.linear(hidden, self.raw)
        return self.last[1](self.last[0](self.down(hidden.relu())).relu())


@pytest.mark.parametrize("experts", [0, 3])
def test_what_is_multiplied_by_weights_of_no_layer_is_left_whole(experts):
    found = choice(WithRawWeights(experts), 2)
    assert {"up", "down"} <= set(found.left)
    assert styles(found)["last.0"] == "column"
    assert not found.parameters


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, nothing, that, can, be, guessed):
        return self.two(functional.relu(self.one(nothing)))


def test_a_model_that_no_rule_covers_is_refused_with_a_configuration_that_would():
    message = r"no rule says how to cut one, two \(its forward could not be followed"
    with pytest.raises(PlanError, match=message) as told:
        choice(Opaque(), 2)
    assert styles(choice(Opaque(), 2, partition_config=suggested(told))) == {"one": "column", "two": "column"}


def suggested(told) -> dict:
    """The partition_config at the end of a refusal."""
    return json.loads(str(told.value).partition("out of the other: ")[2])


@pytest.mark.parametrize(
    "config",
    [
        {"layer_specs": [{"patterns": ["."], "partition_type": "skip"}]},
        {"use_default_specs": False},
        {"layer_specs": [{"patterns": ["attention"], "partition_type": "skip"}], "use_default_specs": False},
        {
            "layer_specs": [{"patterns": [r"0\.mlp\.up"]}, {"patterns": [r"0\.mlp\.down"], "partition_type": "row"}],
            "use_default_specs": False,
            "strict_mode": True,
        },
    ],
)
def test_what_a_refusal_suggests_can_be_used_as_it_is(config):
    with pytest.raises(PlanError, match="no rule says how to cut") as told:
        choice(Decoder(), 2, partition_config=config)
    found = choice(Decoder(), 2, partition_config=suggested(told))
    assert styles(found)["blocks.1.mlp.up"] == "column"


SPECS = [{"patterns": ["one"], "partition_type": "column"}, {"patterns": ["two"], "partition_type": "row"}]


def test_the_user_says_it_where_nobody_else_can():
    assert styles(choice(Opaque(), 2, partition_config={"layer_specs": SPECS})) == {"one": "column", "two": "row"}


def test_the_user_overrules_what_is_found():
    specs = [{"patterns": [r"attention\."], "partition_type": "skip"}]
    found = choice(Decoder(), 2, partition_config={"layer_specs": specs})
    assert "blocks.0.attention.q" not in styles(found)
    assert styles(found)["blocks.0.mlp.up"] == "column"


def test_rules_of_the_user_alone_leave_all_else_whole():
    specs = [
        {"patterns": [r"mlp\.up"], "partition_type": "column"},
        {"patterns": [r"mlp\.down"], "partition_type": "row"},
    ]
    found = styles(choice(Decoder(), 2, partition_config={"layer_specs": specs, "use_default_specs": False}))
    assert found == {
        f"blocks.{n}.mlp.{name}": style for n in (0, 1) for name, style in (("up", "column"), ("down", "row"))
    }


def test_strict_mode_refuses_what_stays_whole_unless_the_user_says_so():
    with pytest.raises(PlanError, match="no rule says how to cut attention.q") as told:
        choice(WholeNorm(), 2, partition_config={"strict_mode": True})
    assert styles(choice(WholeNorm(), 2, partition_config=suggested(told)))["attention.q"] == "column"
    skipped = [{"patterns": [r"attention\."], "partition_type": "skip"}]
    found = choice(WholeNorm(), 2, partition_config={"strict_mode": True, "layer_specs": skipped})
    assert "attention.q" in found.left


def test_a_plan_prints_what_is_cut_and_its_bytes_are_those_of_a_rank():
    settings = load({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}, "optimizer": {"type": "AdamW"}})
    model = Decoder(tied=False)
    plan = build(settings, 2, Sketch.of(model).with_flow(flow_of(model)), ORDER)
    assert any("tensor: over tp=2: 1 x rows of a table, 9 x column, 4 x row" in str(step) for step in plan.steps)
    cut = plan.drafts[0].local(plan.resolved.layout, 0).nbytes
    share = next(step.choice.share for step in plan.steps if step.transform.name == "tensor")
    whole = Sketch.of(model).nbytes
    assert cut / whole == pytest.approx(1 - share / 2, rel=0.02)  # a vocabulary of 37 is not cut in half
    assert f"; {share:.0%} of the parameters" in str(plan.steps[0])
    whole = build(load({"train_batch_size": 8, "optimizer": {"type": "AdamW"}}), 2, Sketch.of(model), ORDER)
    assert plan.cost.parameters < 0.6 * whole.cost.parameters


CUTS = """\
     embed                               rows of a table, 10/9/9/9 of 37 rows
     blocks.0-1.attention.q              column, 4 of 16 outputs
     blocks.0-1.attention.k              column, 4 of 8 outputs
     blocks.0-1.attention.v              column, 4 of 8 outputs
     blocks.0-1.attention.out            row, 4 of 16 inputs
     blocks.0-1.mlp.up                   column, 6 + 6 of 24 + 24 outputs
     blocks.0-1.mlp.down                 row, 6 of 24 inputs
     head                                column, 10/9/9/9 of 37 outputs, gathered afterwards
     blocks.0-1.attention.q_norm.weight  whole, gradients summed over the ranks
     blocks.0-1.attention.k_norm.weight  whole, gradients summed over the ranks
     blocks.0-1.mlp.scale                cut along dimension 0, 6 of 24
     blocks.0-1.first                    whole
     blocks.0-1.second                   whole
     norm                                whole
"""


def test_a_plan_prints_the_cut_of_every_module():
    settings = load({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 4}})
    model = Decoder(tied=False)
    assert CUTS in explain(build(settings, 4, Sketch.of(model).with_flow(flow_of(model)), ORDER)) + "\n"


def test_modules_that_differ_by_more_than_their_number_have_lines_of_their_own():
    specs = [{"patterns": [r"blocks\.0\.mlp"], "partition_type": "skip"}]
    lines = choice(Decoder(), 2, partition_config={"layer_specs": specs}).details()
    found = [" ".join(line.split()) for line in lines]
    assert "blocks.1.mlp.up column, 12 + 12 of 24 + 24 outputs" in found
    assert "blocks.0.mlp.up whole" in found


def test_running_a_model_without_values_changes_nothing_of_it():
    model = Decoder()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert not flow_of(model).trouble
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_module_that_is_called_twice_is_read_by_both():
    block = Block(4, 4, 24, "")

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block = nn.Embedding(16, 16), block

        def forward(self, tokens):
            return self.block(self.block(self.embed(tokens)))

    found = styles(choice(Twice(), 2))
    assert found["block.attention.q"] == "column"
    assert found["block.mlp.down"] == "row"


def test_random_numbers_differ_from_the_last_layer_that_brings_something_in_to_the_last_that_sums_up():
    found = choice(adapted(models.built("llama"), "[qo]_proj", 0.1), 2)
    region = [cut for cut in found.layers if cut.region == "model.layers.0.self_attn.q_proj.base_layer"]
    assert region[0].region in found.random
    assert [cut.path.removeprefix("model.layers.0.self_attn.") for cut in region if cut.is_last] == [
        "v_proj",
        "o_proj.lora_A.default",
    ]


class Beside(nn.Module):
    """Dropout of what ranks have alike, an activation or a table, before the layer that sums up is called."""

    def __init__(self, inner: float, *, of_table: bool = False) -> None:
        super().__init__()
        self.of_table, self.table = of_table, nn.Embedding(1, 16)
        self.embed, self.up, self.down = nn.Embedding(37, 16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.inner, self.beside = nn.Dropout(inner), nn.Dropout(0.1)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        found = self.inner(self.up(hidden).relu())
        beside = self.beside(self.table.weight if self.of_table else hidden)
        return self.down(found) + beside


@pytest.mark.parametrize("of_table", [False, True])
def test_dropout_of_what_ranks_have_alike_is_refused_where_random_numbers_differ(of_table):
    with pytest.raises(PlanError, match=r"in 'beside' is applied to what all ranks have alike, .* 'up' gives"):
        choice(Beside(0.1, of_table=of_table), 2)
    assert styles(choice(Beside(0.0, of_table=of_table), 2))["up"] == "column"


@pytest.mark.parametrize(
    ("shape", "place", "by_inputs", "runs"),
    [
        ([3, -1], None, False, (8, 8, 8)),
        ([3, 6], 0, False, (8, 8, 8)),
        ([[16, 4, 4], -1], 0, False, (16, 4, 4)),
        ([-1, -1], 0, False, ()),
        ([2, -1, 6], 1, False, (12, 12)),
        ([2, [8, 4], 6], 1, False, (8, 4, 8, 4)),
        ([2, 4, -1], 0, False, (12, 12)),
        ([-1, [16, 8]], None, True, (16, 8)),
        ([6, 2], 1, True, (12, 12)),
    ],
)
def test_runs_are_read_from_the_shape_in_which_a_weight_is_seen(shape, place, by_inputs, runs):
    assert runs_in(shape, 24, 6, place, by_inputs=by_inputs) == runs


@pytest.mark.parametrize(
    ("shape", "place", "message"),
    [
        (3, None, "it is a list such as"),
        ([3], None, "it is a list such as"),
        ([3, -1], 1, r"at place 1 of it \(partition_dim\) are no outputs"),
        ([3, 7], 0, "its last number is not that of the inputs, 6"),
        ([-1, 3, 6], 1, "what stands beside the runs is a number above 0"),
        ([0, -1], 0, "runs are numbers above 0"),
        ([True, -1], 0, "runs are numbers above 0"),
        ([[16, 4], -1], 0, "its runs are 20 together, not 24"),
        ([5, -1], 0, "its runs are 20 together, not 24"),
    ],
)
def test_a_shape_that_is_none_is_refused(shape, place, message):
    with pytest.raises(ValueError, match=message):
        runs_in(shape, 24, 6, place)

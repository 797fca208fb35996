"""Models that are sharded while they are built have the weights of the plain build, and train alike."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from breadth import choice, chosen
from mizzen import zero
from mizzen.parallel.zero.full.sharded_parameter import is_sharded
from ranks.parallel.zero.full.models import MODELS, Base, Block, config, start, train
from ranks.parallel.zero.programs import at_rest


class Written(Base):
    """Initialises itself in every way that models have, after its parts are there."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 8, padding_idx=1)
        self.bare = nn.Parameter(torch.empty(5, 8))
        nn.init.trunc_normal_(self.bare, std=0.02)
        self.apply(self._init_weights)
        with torch.no_grad():
            self.first.weight.uniform_(-0.3, 0.3)
            self.last.weight.copy_(torch.full((1, 8), 0.1))
            self.blocks[0].up.weight[2:4] = 7.0
            self.blocks[1].up.weight.data[0].zero_()
            self.blocks[2].up.weight.mul_(self.blocks[1].up.weight.std())
        self.blocks[1].down.weight.data = self.blocks[0].down.weight.data.clone() * 2
        self.again = nn.Parameter(torch.randn(3, 3))
        self.again = nn.Parameter(torch.randn(3, 3))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
            module.weight.data[module.padding_idx].zero_()


KINDS = {
    "Written": Written,
    **{name: MODELS[name] for name in ("Base", "TiedBlocks", "Odd", "Lora", "Twice", "Dtypes")},
}


WAYS = ("plain", "context", "module")


def build(kind, how):
    torch.manual_seed(3)
    if how == "plain":
        return KINDS[kind]()
    if how == "module":
        model = KINDS[kind]()
        zero.Init(module=model)
        return model
    with zero.Init(), zero.Init(enabled=True):
        return KINDS[kind]()


def weights(kind, how):
    model = build(kind, how)
    held = sum(p.to_local().numel() if is_sharded(p) else 0 for p in model.parameters())
    torch.manual_seed(3)
    plain = KINDS[kind]()
    differ = [
        name
        for (name, value), other in zip(model.named_parameters(), plain.parameters(), strict=True)
        if not torch.equal(value.detach().clone(), other)
    ]
    ties = [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    return differ, ties, held, nn.Module.__setattr__ is vars(nn.Module)["__setattr__"]


@pytest.mark.parametrize("ranks", choice([1, 2, 3, 4], [1, 3]))
def test_weights_are_those_of_the_plain_build(world, ranks):
    for kind, found in zip(KINDS, world(ranks).each(weights, [(kind, "context") for kind in KINDS]), strict=True):
        for differ, ties, _, _ in found:
            assert differ == [], kind
            assert ties, kind
        cut = sum(p.numel() for p in KINDS[kind]().parameters() if p.dim()) if ranks > 1 else 0
        assert sum(held for _, _, held, _ in found) == cut, kind


def train_early(kind, how, **keys):
    return train(build(kind, how), 3, **keys)


@pytest.mark.in_parts
def test_they_train_as_plain_models_do(world):
    kinds = chosen(["Base", "TiedBlocks", "Odd", "Lora", "Dtypes"], ["TiedBlocks", "Dtypes"])
    cases = [(kind, how) for kind in kinds for how in WAYS]
    results = dict(zip(cases, (ranks[0] for ranks in world(2).each(train_early, cases)), strict=True))
    for (kind, how), (losses, norms, values) in results.items():
        expected = results[kind, "plain"]
        assert losses == expected[0], (kind, how)
        assert norms == expected[1], (kind, how)
        assert all(torch.equal(values[name], expected[2][name]) for name in expected[2]), (kind, how)


def train_at(stage, keys):
    return train(build("Base", "context"), stage, **keys)[0]


@pytest.mark.wide
def test_they_train_at_other_stages_and_in_copies_too(world):
    expected, found = world(2).each(train_at, [(3, {}), (2, {})])
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    halves = {"bf16": {"enabled": False}, "zero": {"mics_shard_size": 2}}
    expected, found = world(4).each(train_at, [(3, {}), (3, halves)])
    assert found[0] == pytest.approx(expected[0], rel=1e-5)


def seeds_differ():
    torch.manual_seed(torch.distributed.get_rank())
    with zero.Init(dtype=torch.bfloat16):
        model = Base()
    kinds = {p.dtype for p in model.parameters()}
    return [p.detach().clone() for p in model.parameters()], kinds


def test_the_first_ranks_values_count_and_dtype_is_obeyed(world):
    (first, kinds), (second, _) = world(2).run(seeds_differ)
    torch.manual_seed(0)
    plain = Base()
    assert kinds == {torch.bfloat16}
    for one, other, value in zip(first, second, plain.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, value.bfloat16())


def live_bytes():
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class Watched(nn.Module):
    """Counts what is alive whenever a block is there."""

    def __init__(self, peaks):
        super().__init__()
        blocks = []
        for _ in range(8):
            blocks.append(Block(64))
            peaks.append(at_rest(live_bytes))
        self.blocks = nn.ModuleList(blocks)
        for block in self.blocks:
            nn.init.normal_(block.up.weight)
            peaks.append(at_rest(live_bytes))


def peak():
    before, peaks = live_bytes(), []
    with zero.Init():
        model = Watched(peaks)
    shard = sum(p.to_local().numel() * 4 for p in model.parameters())
    largest = 4 * (64 * 128 + 128)
    return max(peaks) - before, shard, largest


def test_construction_needs_the_shard_and_one_module(world):
    for most, shard, largest in world(4).run(peak):
        assert most <= 1.3 * shard + largest


def fail_to_build():
    try:
        with zero.Init():
            nn.Linear(4, 4)
            raise ValueError("in the middle")
    except ValueError:
        pass
    model = nn.Sequential(nn.Linear(2, 2))
    return [type(p) for p in model.parameters()]


def test_after_the_context_nothing_is_sharded(world):
    assert world(2).run(fail_to_build) == [[nn.Parameter, nn.Parameter]] * 2


def other_stage():
    with zero.Init(config_dict_or_path=config(2, 2)):
        model = Base()
    return any(is_sharded(p) for p in model.parameters())


def test_a_configuration_of_another_stage_changes_nothing(world):
    assert world(2).run(other_stage) == [False, False]


def gpt2():
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )


def hugging_face(folder):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    plain = AutoModelForCausalLM.from_config(gpt2())
    torch.manual_seed(5)
    with zero.Init():
        built = AutoModelForCausalLM.from_config(gpt2())
        loaded = AutoModelForCausalLM.from_pretrained(folder)
    saved = AutoModelForCausalLM.from_pretrained(folder)
    found = {}
    for what, one, other in (("built", built, plain), ("loaded", loaded, saved)):
        found[what] = [
            name
            for (name, value), theirs in zip(one.named_parameters(), other.parameters(), strict=True)
            if not torch.equal(value.detach().clone(), theirs)
        ]
        found[f"{what} is cut"] = all(is_sharded(p) for p in one.parameters())
    tokens = torch.arange(12).view(2, 6)
    engine = start(loaded, 3)
    found["loss"] = engine(input_ids=tokens, labels=tokens).loss.item() == pytest.approx(
        saved(input_ids=tokens, labels=tokens).loss.item(), rel=1e-5
    )
    keys = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    found["generated"] = torch.equal(engine.module.generate(tokens, **keys), saved.generate(tokens, **keys))
    return found


def test_models_of_transformers_are_built_and_loaded_inside(world, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(gpt2()).save_pretrained(tmp_path)
    for found in world(2).run(hugging_face, str(tmp_path), timeout=120):
        assert found == {
            "built": [], "built is cut": True, "loaded": [], "loaded is cut": True, "loss": True, "generated": True,
        }  # fmt: skip


def written_by_one_rank():
    torch.manual_seed(3)
    with zero.Init():
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    rank, first = torch.distributed.get_rank(), model[0]
    found = {"sharded": [is_sharded(value) for value in model.state_dict().values()]}
    with zero.GatheredParameters([first.weight, first.bias], modifier_rank=1):
        if rank == 1:  # no other rank touches them
            first.weight.data.fill_(2.0)
            with torch.no_grad():
                first.bias.copy_(torch.arange(4.0))
            found["inside"] = first.weight.sum().item()
    found["after"] = first.weight.sum().item(), first.bias.tolist()
    with zero.GatheredParameters(first.weight):
        first.weight.data.zero_()
        found["local"] = first.weight.sum().item()
    found["kept"] = first.weight.sum().item()
    return found


def test_gathered_parameters_may_be_touched_by_one_rank_alone_before_there_is_an_engine(world):
    first, second = world(2).run(written_by_one_rank)
    assert second.pop("inside") == 48.0
    assert first == second == {
        "sharded": [True] * 4, "after": (48.0, [0.0, 1.0, 2.0, 3.0]), "local": 0.0, "kept": 48.0,
    }  # fmt: skip


def build_for_mpu(named: bool) -> torch.Tensor:
    """Two pairs of ranks build different models, as stages of a pipeline do."""
    rank = torch.distributed.get_rank()
    pairs = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    torch.distributed.barrier()  # all have their groups, whoever is refused first
    mpu = SimpleNamespace(get_data_parallel_group=lambda: pairs[rank // 2]) if named else SimpleNamespace()
    torch.manual_seed(rank // 2)
    with zero.Init(mpu=mpu):
        model = nn.Linear(16, 16)
    with zero.GatheredParameters(list(model.parameters())):
        return model.weight.detach().clone()


def test_ranks_of_an_mpu_share_what_they_build_among_themselves(world):
    found = world(4).run(build_for_mpu, True)
    for pair in (0, 1):
        torch.manual_seed(pair)
        expected = nn.Linear(16, 16).weight
        assert all(torch.equal(found[2 * pair + at], expected) for at in (0, 1))


def test_an_mpu_that_knows_no_data_parallel_ranks_is_refused(world):
    for outcome in world(4).run(build_for_mpu, False, expect_failure=True):
        assert outcome.error_type == "UsageError"
        assert "has no get_data_parallel_group()" in outcome.traceback

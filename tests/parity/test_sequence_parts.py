"""Sequences that are cut between the layers of unmodified models: these train as one process does, in less memory."""

from itertools import product

import pytest
import torch

import mizzen
from breadth import FULL, choice, chosen, covering
from parity import transformers_models as models
from parity.decoders import MODELS, Decoder
from parity.test_tensor import STEPS, batch, check, config, values_of, walk
from unit.parallel.tensor.odd_models import SECTIONS, STACKS, adapted

SECTION = {"sequence_parallel": True}
RECOMPUTE = {"activation_checkpointing": {"mode": "full"}}
SELECTIVE = {"activation_checkpointing": {"mode": "selective"}}
FUSED = {"fused": {"head_loss": True, "rms_norm": True, "rotary": True, "swiglu": True}}
COMPILE = {"compile": {"enabled": True, "backend": "aot_eager"}}
PIPELINE = {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2}


def settings(tp: int, stage: int, more: dict, **section) -> dict:
    return {
        "train_batch_size": models.SAMPLES,
        "optimizer": {"type": "SGD", "params": {"lr": models.RATE}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"autotp_size": tp, **SECTION, **section},
        "progress": {"enabled": False},
        "seed": 1,
        **more,
    }


def train(kind: str, tp: int, stage: int, more: dict, length: int = 8) -> tuple:
    """What a user writes: losses, norms, and the values of what this rank knows, by the names of the whole model."""
    model = models.built(kind)
    first = {id(value): name for name, value in model.named_parameters()}
    names = {alias: first[id(value)] for alias, value in model.named_parameters(remove_duplicate=False)}
    engine, *_ = mizzen.initialize(model=model, config=settings(tp, stage, more))
    losses, norms = [], []
    for step in range(models.STEPS):
        own = models.batch(step, length).chunk(engine.dp_world_size)[engine.get_data_parallel_rank()]
        mine = own.chunk(engine.gradient_accumulation_steps())
        report = engine.train_batch(iter([{"input_ids": each, "labels": each} for each in mine]))
        losses.append(report.loss)
        norms.append(report.grad_norm)
    values = {names[name]: mizzen.zero.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    engine.destroy()
    return losses, norms, values


def compare(found: list, kind: str, length: int = 8) -> None:
    losses, norms, before, moves = models.reference(kind, length)
    seen = set()
    for ours, measured, values in found:
        assert ours == pytest.approx(losses, rel=1e-5), kind
        assert measured == pytest.approx(norms, rel=1e-5), kind
        for name, value in values.items():
            wanted = moves[name]
            far = (value - before[name] - wanted).norm()
            assert far <= 2e-3 * wanted.norm() or wanted.norm() < 1e-7, (kind, name)
        seen |= values.keys()
    assert seen == set(before), kind


EVERY = [
    ("llama", 2, 0, {}),
    ("qwen2", 2, 1, {}),
    ("mistral", 2, 2, {}),
    ("gemma2", 2, 3, {}),
    ("gpt2", 2, 3, RECOMPUTE),
    ("bert", 2, 1, SELECTIVE),
    ("llama", 2, 2, RECOMPUTE | FUSED),
    ("llama", 2, 1, COMPILE),
    ("gpt2", 2, 1, {}, 7),
    ("llama", 2, 1, SELECTIVE | {"tensor_parallel": {"autotp_size": 2}}),
]


ON_TWO = chosen(EVERY, [EVERY[at] for at in (0, 3, 6, 8)])


@pytest.mark.in_parts
def test_models_of_transformers_train_as_in_one_process(world):
    for case, found in zip(ON_TWO, world(2).each(train, ON_TWO), strict=True):
        compare(found, case[0], *case[4:])


ON_FOUR = [
    ("llama", 4, 1, {}, 7),
    ("gpt2", 2, 3, {}),
    ("llama", 2, 1, PIPELINE | RECOMPUTE),
]
ON_FOUR = chosen(ON_FOUR, ON_FOUR[2:])
OPTIONS = ({}, RECOMPUTE, PIPELINE, PIPELINE | RECOMPUTE)
KINDS = ("llama", "gpt2", "bert", "neox") + (("qwen2", "mistral", "gemma2", "qwen3") if FULL else ())
"""Those of other families; FULL=1 has their relatives as well, of which two ranks have some."""
ROWS = [row for row in product(KINDS, (2, 4), range(4), range(4)) if row[1] == 2 or row[3] < 2]
"""Model, tensor-parallel ranks of four, ZeRO stage and which of the options: two stages leave two ranks."""


@pytest.mark.in_parts
def test_four_ranks_share_sequences_beside_data_ranks_and_stages(world):
    for case, found in zip(ON_FOUR, world(4).each(train, ON_FOUR), strict=True):
        compare(found, case[0], *case[4:])


@pytest.mark.wide
def test_every_pair_of_models_stages_and_options(world):
    cases = [(kind, tp, stage, OPTIONS[index]) for kind, tp, stage, index in covering(ROWS, 2)]
    for case, found in zip(cases, world(4).each(train, cases, timeout=900), strict=True):
        compare(found, case[0])


def train_own(kind: str, tp: int, stage: int) -> tuple:
    section = {"tensor_parallel": {"autotp_size": tp, **SECTION}}
    engine, *_ = mizzen.initialize(model=Decoder(**MODELS[kind]), config=config(tp, stage, **section))
    return *walk(engine), values_of(engine)


@pytest.mark.parametrize("kind", choice(MODELS, ["uneven"]))
def test_models_of_ones_own_train_as_in_one_process(world, kind):
    check(world(2).run(train_own, kind, 2, 1), kind, "SGD", 0.0)


def train_stack(kind: str, stage: int, more: dict) -> tuple:
    section = {"tensor_parallel": {"autotp_size": 2, **SECTION, **SECTIONS.get(kind, {})}}
    engine, *_ = mizzen.initialize(model=STACKS[kind][0](), config=config(2, stage, **section, **more))
    return *walk(engine), values_of(engine)


def plain_steps(model: torch.nn.Module) -> tuple[list, list, dict]:
    """One process, plain torch: losses, norms and how far each parameter has moved."""
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    rule, losses, norms = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    for step in range(STEPS):
        rule.zero_grad()
        loss = model(batch(step))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        rule.step()
        losses.append(loss.item())
    return losses, norms, {name: value.detach() - before[name] for name, value in model.named_parameters()}


STACK_CASES = [(kind, at % 3, RECOMPUTE if at % 2 else {}) for at, kind in enumerate(STACKS)]
STACK_CASES = chosen(STACK_CASES, STACK_CASES[4:8:3])


@pytest.mark.in_parts
def test_what_stands_between_blocks_gets_whole_sequences(world):
    for (kind, *_), found in zip(STACK_CASES, world(2).each(train_stack, STACK_CASES), strict=True):
        losses, norms, moves = plain_steps(STACKS[kind][0]())
        before = dict(STACKS[kind][0]().named_parameters())
        for ours, measured, values in found:
            assert ours == pytest.approx(losses, rel=1e-5), kind
            assert measured == pytest.approx(norms, rel=1e-5), kind
            for name, value in values.items():
                assert (value - before[name] - moves[name]).norm() <= 2e-3 * moves[name].norm(), (kind, name)


def train_adapted(kind: str, pattern: str, dropout: float, tp: int, more: dict, sequence: bool = True) -> tuple:
    """Losses, and the values of adapters by the names of the whole model."""
    model = adapted(models.built(kind), pattern, dropout)
    chosen = settings(tp, 0, more, sequence_parallel=sequence and tp > 1)
    engine, *_ = mizzen.initialize(model=model, config=chosen)
    losses = []
    for step in range(models.STEPS):
        tokens = models.batch(step, 8)
        losses.append(engine.train_batch(iter([{"input_ids": tokens, "labels": tokens}])).loss)
    values = values_of(engine)
    engine.destroy()
    return losses, values


ADAPTED = [
    ("gpt2", "c_attn|c_proj|c_fc", 0.0, 2, {}),
    ("gpt2", r"attn\.c_attn", 0.1, 2, RECOMPUTE),
    ("bert", "dense", 0.0, 2, {}),
    ("llama", "_proj", 0.0, 2, RECOMPUTE),
    ("llama", "[qv]_proj", 0.1, 2, {}),
    ("neox", "query_key_value", 0.0, 2, {}),
    ("gpt2", "c_attn|c_proj|c_fc", 0.0, 2, {}, False),
    ("llama", "[qv]_proj", 0.1, 2, RECOMPUTE, False),
]
"""Where adapters draw, it is for whole sequences alone: ranks draw what one process draws."""
ADAPTED = chosen(ADAPTED, [ADAPTED[0], ADAPTED[4]])


@pytest.mark.in_parts
def test_adapters_train_as_in_one_process(world):
    alone = world(1).each(train_adapted, [(*case[:3], 1, *case[4:]) for case in ADAPTED])
    for case, found, ((losses, wanted),) in zip(ADAPTED, world(2).each(train_adapted, ADAPTED), alone, strict=True):
        before = dict(adapted(models.built(case[0]), case[1]).named_parameters())
        for ours, values in found:
            assert ours == pytest.approx(losses, rel=1e-5), case
            assert values.keys() == wanted.keys(), case
            for name, value in values.items():
                move = wanted[name] - before[name]
                assert (value - wanted[name]).norm() <= 2e-3 * move.norm() or move.norm() < 1e-7, (case, name)


def drawn(sequence: bool) -> tuple:
    """What dropout of adapters leaves of ones before attention and behind it, and this rank's copy of a whole one."""
    model = models.built("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model = adapted(model, "[qvo]_proj|up_proj", 0.5)
    engine, *_ = mizzen.initialize(model=model, config=settings(2, 0, {}, sequence_parallel=sequence))
    seen: dict[str, torch.Tensor] = {}
    attention = engine.module.model.layers[1].self_attn
    for name in ("q_proj", "v_proj", "o_proj"):
        module = attention.get_submodule(f"{name}.lora_dropout.default")
        module.register_forward_hook(lambda _, args, found, name=name: seen.update({name: found == 0}), prepend=True)
    for step in range(models.STEPS):
        tokens = models.batch(step, 8)
        engine.train_batch(iter([{"input_ids": tokens, "labels": tokens}]))
    copies = {
        n: p.detach().clone() for n, p in engine.module.named_parameters() if n.endswith("q_proj.lora_A.default.weight")
    }
    engine.destroy()
    return seen, copies, float(torch.rand(()))


def test_dropout_of_adapters_is_alike_where_ranks_have_the_same_activations(world):
    for (masks, copies, after), (others, their, later) in world(2).each(drawn, [(False,), (True,)]):
        for name in ("q_proj", "v_proj"):
            assert torch.equal(masks[name], others[name]) and 0.2 < masks[name].float().mean() < 0.8, name
        assert masks["o_proj"].shape == others["o_proj"].shape
        assert not torch.equal(masks["o_proj"], others["o_proj"])
        for name, value in copies.items():
            assert torch.equal(value, their[name]), name
        assert after == later


def kept(sequence: bool) -> tuple[int, int]:
    """Of what autograd keeps of one block beside parameters: all bytes, and those that have all tokens and features."""
    torch.manual_seed(7)
    model = models.gpt2(0.1)
    engine, *_ = mizzen.initialize(model=model, config=settings(2, 1, {}, sequence_parallel=sequence))
    weights = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}
    found: dict[int, tuple[int, int]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            is_whole = tensor.numel() == models.SAMPLES * 16 * 16 and tensor.shape[-1] == 16
            found[storage.data_ptr()] = storage.nbytes(), storage.nbytes() * is_whole
        return tensor

    block = engine.module.transformer.h[1]
    seen = []
    block.register_forward_pre_hook(lambda *_: found.clear())
    block.register_forward_hook(lambda *_: seen.extend(map(sum, zip(*found.values(), strict=True))), prepend=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tokens = models.batch(0, 16)
        loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    engine.destroy()
    return tuple(seen)


def test_less_is_kept_for_backward(world):
    for (every, whole), (part, none) in zip(*world(2).each(kept, [(False,), (True,)]), strict=True):
        # Two norms with what they read and give, and two masks of dropout, each with half of the tokens; there are also
        # the means of the norms, and what lies between the layers that are cut, of which each rank has a part already.
        assert whole >= 4 * models.SAMPLES * 16 * 16 * 4
        assert none == 0
        assert every - part >= whole / 2, (every, part, whole)


def masks(dropout: float) -> tuple:
    """What dropout leaves of ones, in the stream between the layers and in the embedding before it."""
    engine, *_ = mizzen.initialize(model=models.gpt2(dropout), config=settings(2, 0, {}))
    seen = {}
    for name in ("drop", "h.0.mlp.dropout", "h.1.attn.resid_dropout"):
        module = engine.module.transformer.get_submodule(name)
        module.register_forward_pre_hook(lambda _, args: (torch.ones_like(args[0]),))
        module.register_forward_hook(lambda _, args, output, name=name: seen.update({name: output.detach().clone()}))
    tokens = models.batch(0, 8)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    return seen["drop"], seen["h.0.mlp.dropout"], seen["h.1.attn.resid_dropout"], float(torch.rand(()))


def test_dropout_differs_where_sequences_are_cut_and_agrees_elsewhere(world):
    (whole, inner, last, after), (other, *others, later) = world(2).run(masks, 0.5)
    assert torch.equal(whole, other) and whole.shape[1] == 8
    for one, two in zip((inner, last), others, strict=True):
        assert one.shape == two.shape == (models.SAMPLES, 4, 16)
        assert not torch.equal(one, two)
    assert after == later


def looked_at() -> tuple:
    """Without gradients sequences are whole: generating, one token at a time, gives those of one process."""
    plain, model = models.built("llama").eval(), models.built("llama")
    engine, *_ = mizzen.initialize(model=model, config=settings(2, 3, {}))
    prompt = models.batch(5, 5)[:2]
    words = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "eos_token_id": None}
    engine.eval()
    with torch.no_grad():
        ours = engine.module.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **words)
        theirs = plain.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **words)
        losses = engine(input_ids=prompt, labels=prompt).loss, plain(input_ids=prompt, labels=prompt).loss
    return ours.tolist(), theirs.tolist(), *map(float, losses)


def test_without_gradients_nothing_is_cut(world):
    for ours, theirs, loss, wanted in world(2).run(looked_at):
        assert ours == theirs
        assert loss == pytest.approx(wanted, rel=1e-5)


def checkpointed_by_the_model(reentrant: bool) -> list:
    """transformers' own recomputation, in which hooks are called again."""
    model = models.built("llama")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    engine, *_ = mizzen.initialize(model=model, config=settings(2, 1, {}))
    losses = []
    for step in range(models.STEPS):
        tokens = models.batch(step, 8)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def test_the_recomputation_of_transformers_itself(world):
    expected = models.reference("llama", 8)[0]
    for found in world(2).each(checkpointed_by_the_model, [(False,), (True,)]):
        for losses in found:
            assert losses == pytest.approx(expected, rel=1e-5)

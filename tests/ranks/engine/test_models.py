"""Models as they come: mixed dtypes, compiled, with sparse embeddings, loaded late; and their state by name."""

import pytest
import torch
from torch import nn

import mizzen
from breadth import choice
from mizzen.engine.prepare import check_equal
from parity.programs import Case, TinyLanguageModel, build, micro_batches, reference
from ranks.engine.test_training import start

STAGES = [(0,), (1,), (2,), (3,)]


def a_few_steps(engine, case: Case, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        for tokens in micro_batches(case, step, engine.global_rank):
            engine.backward(engine(tokens))
            report = engine.step()
        losses.append(report.loss)
    return losses


class Mixed(nn.Module):
    """fp32, bf16 and fp64 parameters in one model, one of them frozen, and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one = nn.Linear(4, 8)
        self.two = nn.Linear(8, 8).to(torch.bfloat16)
        self.three = nn.Linear(8, 1).double()
        self.frozen = nn.Parameter(torch.ones(8, dtype=torch.float16), requires_grad=False)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def forward(self, rows):
        hidden = self.two(self.one(rows).to(torch.bfloat16)) * self.frozen.to(torch.bfloat16)
        return self.three(hidden.double()).pow(2).mean().float()


def train_mixed(stage: int) -> tuple[list[torch.dtype], dict[str, torch.Tensor]]:
    model = Mixed()
    kinds = [parameter.dtype for parameter in model.parameters()]
    engine = start(Case(stage, 2, samples=4), model, gradient_clipping=1.0)
    for step in range(3):
        rows = torch.randn(2, 4, generator=torch.Generator().manual_seed(step + 10 * engine.global_rank))
        engine.backward(engine(rows))
        assert engine.step().applied
    with mizzen.zero.GatheredParameters(list(model.parameters())):
        assert [parameter.dtype for parameter in model.parameters()] == kinds
    with mizzen.zero.GatheredParameters(list(model.parameters())):
        return kinds, {name: parameter.detach().double() for name, parameter in model.named_parameters()}


def test_parameters_of_several_dtypes_train_together(world):
    runs = [ranks[0] for ranks in world(2).each(train_mixed, STAGES)]
    fresh = {name: parameter.detach().double() for name, parameter in Mixed().named_parameters()}
    for _, values in runs:
        for name, value in values.items():
            torch.testing.assert_close(value, runs[0][1][name], rtol=0, atol=0)
            assert torch.equal(value, fresh[name]) == (name == "frozen"), name


def train_compiled(stage: int, compiled: bool) -> list[float]:
    case = Case(stage, 2)
    model = torch.compile(build(case), backend="eager") if compiled else build(case)
    return a_few_steps(start(case, model), case)


def test_a_model_that_was_compiled_before(world):
    cases = [(stage, compiled) for stage in (0, 2) for compiled in (False, True)]
    plain, found, plain2, found2 = (ranks[0] for ranks in world(2).each(train_compiled, cases, timeout=120))
    assert found == pytest.approx(plain, rel=1e-6)
    assert found2 == pytest.approx(plain2, rel=1e-6)


class Sparse(TinyLanguageModel):
    """The same model with an embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__("plain")
        self.embed.sparse = True


def train_sparse(stage: int, key: bool, sparse_module: bool) -> list[float]:
    torch.manual_seed(7)
    case = Case(stage, 2, 2)
    engine = start(case, Sparse() if sparse_module else TinyLanguageModel("plain"), sparse_gradients=key)
    assert engine.sparse_gradients_enabled() is key
    return a_few_steps(engine, case)


@pytest.mark.parametrize("stage", choice([0, 1, 2, 3], [0, 3]))
def test_sparse_gradients_give_the_same_losses(world, stage):
    kinds = [(False, False), (False, True)] + [(True, False), (True, True)] * (stage < 3)  # at stage 3 it is refused
    expected, *others = (ranks[0] for ranks in world(2).each(train_sparse, [(stage, *kind) for kind in kinds]))
    for kind, losses in zip(kinds[1:], others, strict=True):
        assert losses == pytest.approx(expected, rel=1e-6), kind


def differ_then_agree(stage: int) -> bool:
    torch.manual_seed(torch.distributed.get_rank())  # every rank builds another model
    model = TinyLanguageModel("frozen")
    model.scale.fill_(torch.distributed.get_rank() + 0.5)
    engine = start(Case(stage, 2), model)
    check_equal(engine.module, engine.mesh)
    return float(engine.module.scale) == 0.5


def test_all_ranks_get_the_values_of_rank_0(world):
    assert world(2).each(differ_then_agree, STAGES) == [[True, True]] * 4


def spoil() -> None:
    engine = start(Case(0, 2))
    if engine.global_rank == 1:
        engine.module.head.weight.data[0, 0] += 1
    check_equal(engine.module, engine.mesh)


def test_a_rank_with_other_values_is_named(world):
    for outcome in world(2).run(spoil, expect_failure=True):
        assert outcome.error_type == "CommError"
        assert "head.weight: rank 1 has" in outcome.traceback


def other_model() -> None:
    case = Case(0, 2)
    start(case, TinyLanguageModel("plain", width=16 if torch.distributed.get_rank() == 0 else 32))


def other_config() -> None:
    start(Case(0, 2, clip=0.1 * torch.distributed.get_rank()))


@pytest.mark.parametrize(("program", "field"), [(other_model, "model"), (other_config, "gradient_clipping")])
def test_ranks_that_start_differently_are_told_at_once(world, program, field):
    for outcome in world(2).run(program, expect_failure=True):
        assert outcome.error_type == "CommError"
        assert field in outcome.traceback


def load_late(stage: int, through: str) -> tuple[bool, bool]:
    """Weights that are loaded after `initialize` are what training goes on from."""
    engine = start(Case(stage, 2, dtype="bf16"))
    torch.manual_seed(99)
    fresh = {name: value + 0.1 * torch.randn_like(value) for name, value in build(Case()).state_dict().items()}
    if through == "engine":
        engine.load_module_state_dict({"module": fresh})
    else:
        engine.module.load_state_dict(fresh)
    exact = engine.global_rank >= 0 and all(
        torch.equal(mizzen.zero.safe_get_full_fp32_param(p), fresh[name])
        for name, p in engine.module.named_parameters()
    )
    rounded = all(
        torch.equal(mizzen.zero.safe_get_full_fp32_param(p).bfloat16(), fresh[name].bfloat16())
        for name, p in engine.module.named_parameters()
    )
    return exact, rounded


@pytest.mark.parametrize(("through", "is_exact"), [("engine", True), ("module", False)])
def test_a_state_dict_loaded_late_reaches_the_masters(world, through, is_exact):
    cases = [(stage, through) for (stage,) in STAGES]
    assert world(2).each(load_late, cases) == [[(is_exact, True)] * 2] * 4


def access(stage: int, dtype: str) -> dict[str, bool]:
    """Read and write whole values, gradients and states through the parameter alone."""
    engine = start(Case(stage, 2, dtype=dtype))
    weight, zero = engine.module.blocks[1].up.weight, mizzen.zero
    assert zero.safe_get_full_optimizer_state(weight, "exp_avg") is None
    a_few_steps(engine, Case(stage, 2, dtype=dtype), 2)
    found = {}
    state = zero.safe_get_full_optimizer_state(weight, "exp_avg")
    found["state has the shape"] = state.shape == weight.shape and bool(state.abs().sum() > 0)
    zero.safe_set_full_optimizer_state(weight, torch.full_like(state, 3.0), "exp_avg")
    found["state is set"] = bool((zero.safe_get_full_optimizer_state(weight, "exp_avg") == 3).all())
    found["neighbour is not"] = not bool(
        (zero.safe_get_full_optimizer_state(engine.module.blocks[1].up.bias, "exp_avg") == 3).any()
    )
    value = torch.arange(weight.numel(), dtype=torch.float32).view(weight.shape) / 1000
    zero.safe_set_full_fp32_param(weight, value)
    found["master is set"] = torch.equal(zero.safe_get_full_fp32_param(weight), value)
    with zero.GatheredParameters(weight):
        whole = engine.module.blocks[1].up.weight
        found["parameter follows"] = torch.equal(whole, value.to(whole.dtype))
    (tokens,) = micro_batches(Case(stage, 2), 0, engine.global_rank)
    engine.backward(engine(tokens))
    gradient = zero.safe_get_full_grad(weight)
    zero.safe_set_full_grad(weight, 2 * gradient)
    found["gradient is set"] = torch.equal(zero.safe_get_full_grad(weight), 2 * gradient)
    zero.safe_update_full_grad_vectorized([weight], lambda grad, parameter: grad * 0)
    found["gradient is updated"] = not bool(zero.safe_get_full_grad(weight).any())
    engine.step()
    with zero.GatheredParameters([weight], modifier_rank=1):
        if engine.global_rank == 1:
            engine.module.blocks[1].up.weight.data.fill_(7.0)
    with zero.GatheredParameters([weight]):
        found["what rank 1 wrote is everywhere"] = bool((engine.module.blocks[1].up.weight == 7).all())
    found["and in the masters"] = bool((zero.safe_get_full_fp32_param(weight) == 7).all())
    found["nobody trains a buffer"] = zero.safe_get_full_grad(engine.module.scale) is None
    return found


@pytest.mark.parametrize("dtype", choice(["fp32", "bf16"], ["bf16"]))
def test_state_is_read_and_written_by_the_parameter_alone(world, dtype):
    for stage, ranks in enumerate(world(2).each(access, [(stage, dtype) for (stage,) in STAGES])):
        for found in ranks:
            assert [what for what, holds in found.items() if not holds] == [], stage


def batches_of(seed_of_rank: bool, key: int | None) -> list[list[int]]:
    """The order in which a rank sees a data set, whatever it did with its own seed before."""
    torch.manual_seed(1 + (torch.distributed.get_rank() if seed_of_rank else 0))
    extra = {} if key is None else {"seed": key}
    _, _, loader, _ = mizzen.initialize(
        model=nn.Linear(1, 1), training_data=list(range(32)), config=Case(0, 2, samples=8).config | extra
    )
    return [batch.tolist() for batch in loader]


def test_the_order_of_data_is_rank_0s_whatever_the_others_did(world):
    cases = [(False, None), (True, None), (False, 5), (True, 5)]
    same, other, seeded, others = world(2).each(batches_of, cases)
    assert same == other
    assert sorted(sum(sum(same, []), [])) == list(range(32))
    assert seeded == others != same


class Noise(nn.Module):
    """Shows what dropout dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self):
        return nn.functional.dropout(self.weight)


def noise() -> tuple[list[list[float]], list[float]]:
    torch.manual_seed(5)
    engine = start(Case(0, 2), Noise())
    return [engine().tolist() for _ in range(2)], torch.rand(4).tolist()


def test_dropout_differs_between_ranks_and_leaves_the_users_random_numbers_alone(world):
    (first, mine), (second, others) = world(2).run(noise)
    assert first != second
    assert first[0] != first[1]
    torch.manual_seed(5)
    assert mine == others == torch.rand(4).tolist()
    assert world(2).run(noise) == [(first, mine), (second, others)]


def two_engines(stage: int) -> tuple[list[float], list[float], str]:
    """A model that is given to a second engine trains there, also after the first is destroyed."""
    case = Case(stage, 2)
    old = start(case)
    first = a_few_steps(old, case, 1)
    new = start(case, old.module)
    with pytest.raises(mizzen.UsageError) as caught:
        old.backward(old(micro_batches(case, 0, old.global_rank)[0]))
    old.destroy()
    return first, a_few_steps(new, case, 3), str(caught.value)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_belongs_to_its_latest_engine(world, stage):
    for first, later, message in world(2).run(two_engines, stage):
        assert later[0] != first[0]  # it goes on from where the first engine left it
        assert len(set(later)) == 3
        assert "given to a later engine" in message


VARIANTS = ("plain", "tied", "frozen", "unused")


def side_by_side(stages: list[int]) -> list[list[float]]:
    """Losses of models at these stages, which take turns in one process, step by step."""
    cases = [Case(stage, 2, 1, 0.5, variant) for stage, variant in zip(stages, VARIANTS, strict=True)]
    engines = [mizzen.initialize(model=build(case), config=case.config)[0] for case in cases]
    losses = [[] for _ in cases]
    for step in range(3):
        outputs = [e(micro_batches(case, step, e.global_rank)[0]) for e, case in zip(engines, cases, strict=True)]
        for engine, loss, seen in zip(engines, outputs, losses, strict=True):
            engine.backward(loss)
            seen.append(engine.step().loss)
    for engine in engines:
        engine.destroy()
    return losses


@pytest.mark.wide  # test_training.py has several engines in one process
def test_four_models_at_mixed_stages_in_one_process(world):
    expected = [reference(Case(0, 2, 1, 0.5, variant), steps=3)[0] for variant in VARIANTS]
    for found in world(2).run(side_by_side, [3, 1, 3, 2]):
        assert found == [pytest.approx(losses, rel=1e-5) for losses in expected]

"""Masters, gradients and states below fp32: what is held in which dtype, and that it trains as a plain loop would."""

import pytest
import torch

import mizzen
from parity.programs import LOW, Case, build, micro_batches

STEPS = 4
KINDS = {
    "fp16": {"fp16": {"enabled": True, "loss_scale": 256, "fp16_master_weights_and_grads": True}},
    "bf16": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "bf16 states": {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    },
}


def start(kind: str, stage: int, size: int, accumulation: int = 1, optimizer: str = "AdamW", **extra):
    case = Case(stage, size, accumulation, optimizer="AdamW", samples=8)
    config = case.config | KINDS[kind] | {"gradient_clipping": 0.0} | extra
    config["optimizer"] = {"type": optimizer, "params": {"lr": 1e-2}}
    engine, *_ = mizzen.initialize(model=build(case), config=config)
    return engine, case


def train(kind: str, stage: int, size: int, **extra) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine, case = start(kind, stage, size, **extra)
    losses = []
    for step in range(STEPS):
        for tokens in micro_batches(case, step, engine.global_rank):
            engine.backward(engine(tokens))
            report = engine.step()
        assert report.applied
        losses.append(report.loss)
    return losses, {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def plain(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One process: the parameters are the masters. fp32 states need an fp32 copy of them during the step."""
    low = LOW[kind[:4]]
    model = build(Case()).to(low)
    stepped = [p.detach().to(low if kind == "bf16 states" else torch.float32) for p in model.parameters()]
    optimizer = torch.optim.AdamW(stepped, lr=1e-2, weight_decay=0.0, fused=True)
    scale = 256.0 if kind == "fp16" else 1.0
    losses = []
    for step in range(STEPS):
        (tokens,) = micro_batches(Case(), step, 0)
        loss = model(tokens)
        gradients = torch.autograd.grad(loss * scale, list(model.parameters()))
        with torch.no_grad():
            for copy, parameter, gradient in zip(stepped, model.parameters(), gradients, strict=True):
                copy.copy_(parameter)
                copy.grad = gradient.to(copy.dtype) / scale
            optimizer.step()
            for copy, parameter in zip(stepped, model.parameters(), strict=True):
                parameter.copy_(copy)
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_is_a_plain_loop_to_the_bit(world, kind):
    losses, values = world(1).run(train, kind, 1, 1)[0]
    expected, parameters = world(1).run(plain, kind)[0]
    assert losses == expected
    assert all(torch.equal(values[name], parameters[name]) for name in parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_stages_agree_to_the_bit_and_are_near_one_rank(world, kind):
    runs = [run for ranks in world(2).each(train, [(kind, 1, 2), (kind, 2, 2)]) for run in ranks]
    for losses, values in runs:
        assert losses == runs[0][0]
        assert all(torch.equal(values[name], runs[0][1][name]) for name in values)
    assert runs[0][0] == pytest.approx(world(1).run(plain, kind)[0][0], rel=2e-2)


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "RMSprop"])
def test_other_rules_find_states_of_their_size(world, optimizer):
    losses = [run[0] for run in world(2).run(train, "bf16", 2, 2, optimizer=optimizer)]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] + 0.5


def held(kind: str, stage: int, size: int) -> dict:
    engine, case = start(kind, stage, size)
    (store,) = engine.stores

    def at_rest() -> tuple:
        targets = [(b, target.tensor) for b in store.buckets for target in b.targets]
        separate = [tensor.numel() for b, tensor in targets if tensor.data_ptr() != b.master.data_ptr()]
        return sum(separate), {tensor.grad for _, tensor in targets}

    found = {"at start": at_rest()}
    engine.backward(engine(micro_batches(case, 0, engine.global_rank)[0]))
    engine.step()
    states = engine.basic_optimizer.state.values()
    return found | {
        "after a step": at_rest(),
        "parameters": {p.dtype for p in engine.module.parameters()},
        "masters": {b.master.dtype for b in store.buckets},
        "no master beside the parameters": all(
            b.mine(b.values).data_ptr() == b.master.data_ptr() for b in store.buckets
        ),
        "gradients": {b.gradient.dtype for b in store.buckets},
        "states": {state[key].dtype for state in states for key in ("exp_avg", "exp_avg_sq")},
        "read": {mizzen.zero.safe_get_full_fp32_param(p).dtype for p in engine.module.parameters()},
        "equal": all(
            torch.equal(mizzen.zero.safe_get_full_fp32_param(p), p.detach().float()) for p in engine.module.parameters()
        ),
        "state sizes": all(
            mizzen.zero.safe_get_full_optimizer_state(p, "exp_avg").shape == p.shape for p in engine.module.parameters()
        ),
    }


@pytest.mark.parametrize(("stage", "size"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_in_which_dtype(world, kind, stage, size):
    low = LOW[kind[:4]]
    for found in world(size).run(held, kind, stage, size):
        assert found["parameters"] == found["masters"] == found["gradients"] == {low}
        assert found["no master beside the parameters"]
        assert found["states"] == {low if kind == "bf16 states" else torch.float32}
        assert found["at start"] == found["after a step"] == (0, {None})
        assert found["read"] == {torch.float32}
        assert found["equal"]
        assert found["state sizes"]


def written(kind: str) -> bool:
    """A parameter that is written by name is what the next step starts from."""
    engine, case = start(kind, 2, 2)
    for parameter in engine.module.parameters():
        mizzen.zero.safe_set_full_fp32_param(parameter, torch.full_like(parameter, 0.5, dtype=torch.float32))
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    engine.backward(engine(micro_batches(case, 0, engine.global_rank)[0]))
    assert engine.step().applied
    return all(bool((p == 0.5).all()) for p in engine.module.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_set_stay(world, kind):
    assert world(2).run(written, kind) == [True, True]


def fp32_sums(size: int) -> tuple[set, set]:
    engine, case = start("bf16", 1, size, accumulation=2, data_types={"grad_accum_dtype": "fp32"})
    for tokens in micro_batches(case, 0, engine.global_rank):
        engine.backward(engine(tokens))
        report = engine.step()
    assert report.applied
    buckets = engine.stores[0].buckets
    return {b.gradient.dtype for b in buckets}, {b.master.dtype for b in buckets}


def test_gradients_may_still_add_up_in_fp32(world):
    assert world(2).run(fp32_sums, 2) == [({torch.float32}, {torch.bfloat16})] * 2

"""What a plan says that a rank will hold is what it holds, to the byte."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from breadth import choice
from mizzen.comm import collectives
from mizzen.comm.mesh import Mesh
from mizzen.config.load import load
from mizzen.model.sketch import Sketch
from mizzen.optim.build import build_optimizer
from mizzen.order import ORDER
from mizzen.plan.build import build
from mizzen.plan.cost import Cost
from mizzen.plan.parts import Part
from ranks.parallel.zero.programs import at_rest, bytes_of, live_bytes, load_lots


def perceptron():
    return nn.Sequential(nn.Linear(100, 70), nn.GELU(), nn.LayerNorm(70), nn.Linear(70, 3))


def half_frozen():
    model = perceptron()
    model[0].requires_grad_(False)
    return model


def mixed():
    """Parameters of several dtypes, of no dimension and of no element."""
    model = perceptron()
    model.register_parameter("wide", nn.Parameter(torch.zeros(77, dtype=torch.float64)))
    model.register_parameter("low", nn.Parameter(torch.zeros(33, dtype=torch.float16)))
    model.register_parameter("scalar", nn.Parameter(torch.zeros(())))
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 5)))
    return model


MODELS = {"perceptron": perceptron, "half frozen": half_frozen, "mixed": mixed}
BF16 = {"bf16": {"enabled": True}}
BF16_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True}
CASES = [
    ("perceptron", 0, 2, {}),
    ("perceptron", 1, 2, BF16),
    ("perceptron", 2, 4, BF16),
    ("perceptron", 2, 2, {**BF16, "data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "fp16"}),
    ("perceptron", 1, 4, {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}),
    ("perceptron", 2, 2, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_predivide_factor": 2}),
    ("perceptron", 1, 2, {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}),
    ("perceptron", 2, 2, {"bf16": BF16_MASTERS}),
    ("perceptron", 2, 4, {"bf16": {**BF16_MASTERS, "bf16_optimizer_states": True}}),
    ("half frozen", 2, 2, BF16),
    ("half frozen", 0, 1, BF16),
    ("mixed", 0, 1, {}),
    ("mixed", 0, 2, BF16),
    ("mixed", 1, 2, {}),
    ("mixed", 2, 4, {"optimizer": {"type": "Adagrad", "params": {"lr": 0.1}}}),
]


def configure(stage, ranks, keys):
    return {
        "train_batch_size": 4 * ranks,
        # One that is no multiple of anything; in rank order, so that a CPU exchanges what the plan says.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
        "deterministic": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        **keys,
    }


def watch_sends():
    """The bytes that are alive whenever something is sent to its owner."""
    seen, send = [], collectives.all_to_all_single

    def watched(received, sent, *splits, **keys):
        seen.append(live_bytes())
        return send(received, sent, *splits, **keys)

    collectives.all_to_all_single = watched
    return seen


def train(kind, stage, keys):
    """The plan, what is held after two steps, all that has come to life until then, and the most there was."""
    ranks = dist.get_world_size()
    model = MODELS[kind]()
    config = load(configure(stage, ranks, keys))
    plan = build(config, ranks, Sketch.of(model), ORDER)
    for parameter in model.parameters():
        if not parameter.requires_grad and config.bf16.enabled:
            parameter.data = parameter.data.bfloat16()
    mesh = Mesh.build(plan.resolved.layout, device_type="cpu")
    start = live_bytes() - bytes_of(list(model.parameters()))
    ((store,),) = (part.stores for part in plan.apply((Part(model),), mesh))
    store.stock.is_kept = False  # a CPU holds on to some of what is in use during a step
    masters = [master for _, master in store.contents.masters]
    arguments = dict(config.optimizer.params)
    optimizer = build_optimizer(config.optimizer.type, arguments, [{"params": masters}], device_type="cpu")
    seen, gradients = [], 0
    for step in range(2):
        if step == 1 and stage == 2:
            seen = watch_sends()
        store.begin_backward(True)
        sum((parameter.float() ** 2).sum() for parameter in store.contents.trained.values()).backward()
        store.end_backward()
        gradients = bytes_of([t for bucket in store.buckets for t in (bucket.gradient, bucket.whole) if t is not None])
        load_lots(store)
        optimizer.step()
        store.write_back()
        store.clear_gradients()
    alive = at_rest(live_bytes) - start
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    values = [bucket.values for bucket in store.buckets]
    held = Cost(
        parameters=bytes_of([*frozen, *values]),
        gradients=gradients,
        masters=bytes_of([*values, *masters]) - bytes_of(values),
        states=bytes_of([value for state in optimizer.state.values() for value in state.values() if value.dim()]),
    )
    counters = 4 * len(masters)
    return plan, held, alive - counters, max(seen, default=0) - start - counters


SHORT = [CASES[number] for number in (1, 2, 3, 4, 7, 8, 9, 10, 14)]


@pytest.mark.parametrize(("kind", "stage", "ranks", "keys"), choice(CASES, SHORT), ids=lambda value: str(value)[:60])
def test_predicted_bytes_are_the_bytes_held(world, kind, stage, ranks, keys):
    for plan, held, alive, most in world(ranks).run(train, kind, stage, keys):
        cost = plan.cost
        assert alive <= held.total - held.gradients  # between steps there are none; step counts are not counted
        assert (cost.parameters, cost.masters, cost.states) == (held.parameters, held.masters, held.states)
        if plan.steps[0].choice.flat.stage < 2:
            assert cost.gradients == held.gradients
        else:
            assert held.total < most <= cost.total + 4096  # the loss, and gradients that autograd is handing over

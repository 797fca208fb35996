"""Copies of sharded state, second copies for backward, and quantized messages."""

import pytest
import torch
from torch import nn

from breadth import FULL, choice
from mizzen.comm import collectives
from ranks.parallel.zero.full.models import rows, start, train, values_of

LOCO = {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 64}}


def train_with(kind, keys, **more):
    return train(kind, 3, zero=keys, **more)


@pytest.mark.parametrize("accumulation", choice([1, 2, 4], [2]))
@pytest.mark.parametrize("ordered", choice([False, True], [True]))
def test_copies_train_as_one(world, accumulation, ordered):
    more = {"gradient_accumulation_steps": accumulation, "deterministic": ordered}
    cases = [("TiedBlocks", {"mics_shard_size": 2}), ("TiedBlocks", {})]
    for (losses, norms, values), (their_losses, their_norms, others) in zip(
        *world(4).each(train_with, cases, **more), strict=True
    ):
        assert losses == pytest.approx(their_losses, rel=1e-5)
        assert norms == pytest.approx(their_norms, rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(value, others[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", choice(["Base", "TiedBlocks", "Odd", "Twice"], ["Odd"]))
def test_a_second_copy_changes_no_bit(world, kind):
    cases = [(kind, {"zero_hpz_partition_size": 2}), (kind, {})]
    for found, other in zip(*world(4).each(train_with, cases), strict=True):
        assert found[:2] == other[:2]
        assert all(torch.equal(found[2][name], other[2][name]) for name in other[2])


def counted(keys, more):
    """The bytes of a step that gathers and reductions send, by operation."""
    torch.manual_seed(0)
    engine = start(nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3))), 3, zero=keys, **more)
    sent = {"gather": 0, "reduce": 0}
    gather, exchange = collectives.all_gather_into_tensor, collectives.all_to_all_single

    def gathering(whole, shard, **options):
        sent["gather"] += shard.nbytes
        return gather(whole, shard, **options)

    def exchanging(received, message, incoming=None, outgoing=None, **options):
        sizes = outgoing or [message.numel() // 2] * 2
        sent["reduce"] += sizes[1 - engine.global_rank] * message.element_size()  # what stays here is not sent
        return exchange(received, message, incoming, outgoing, **options)

    dtype = torch.bfloat16 if more else torch.float32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_gather_into_tensor", gathering)
        patch.setattr(collectives, "all_to_all_single", exchanging)
        engine.backward(engine(torch.ones(2, 256, dtype=dtype)).float().mean())
        engine.step()
    return sent


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("keys", "more", "what", "times"),
    [
        ({"zero_quantized_weights": True}, {}, "gather", 3.8),
        ({"zero_quantized_weights": True}, BF16, "gather", 1.9),
        (LOCO, {}, "reduce", 7.5),
        (LOCO, BF16 | {"communication_data_type": "bf16"}, "reduce", 3.7),
    ],
)
def test_fewer_bytes_are_sent(world, keys, more, what, times):
    plain, quantized = (ranks[0] for ranks in world(2).each(counted, [({}, more), (keys, more)]))
    assert plain[what] / quantized[what] == pytest.approx(times, rel=0.03)


def crossing(keys):
    """The bytes of a step's gradients that leave this rank's node, of two ranks."""
    torch.manual_seed(0)
    engine = start(nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3))), 3, zero=keys)
    exchange, node, sent = collectives.all_to_all_single, engine.global_rank // 2, [0, 0]

    def exchanging(received, message, incoming=None, outgoing=None, **options):
        sizes = outgoing or [message.numel() // 4] * 4
        for rank, size in enumerate(sizes):
            sent[rank // 2 != node] += size * message.element_size() if rank != engine.global_rank else 0
        return exchange(received, message, incoming, outgoing, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_to_all_single", exchanging)
        engine.backward(engine(torch.ones(2, 256)).mean())
        engine.step()
    return sent


def test_in_two_hops_half_as_much_leaves_a_node_of_two(world):
    one = {"zero_quantized_gradients": True}
    cases = [({},), (one,), (one | {"zero_hpz_partition_size": 2},)]
    plain, once, twice = (ranks[1] for ranks in world(4).each(crossing, cases))
    assert plain[1] / once[1] == pytest.approx(7.5, rel=0.03)
    assert once[1] / twice[1] == pytest.approx(2, rel=0.01)
    assert twice[0] == pytest.approx(2 * once[0], rel=0.01)  # each neighbour gets the rows of two ranks


def exact(keys):
    """One step whose gradients are the same for all elements of a block, which blocks carry as they are."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(2)))
    with torch.no_grad():
        for layer in model:
            layer.weight.fill_(0.125)
    engine = start(model, 3, zero=keys, optimizer={"type": "SGD", "params": {"lr": 0.5}}, gradient_clipping=0.0)
    engine.backward(engine(torch.full((1, 16), 1.0 + engine.global_rank)).sum())
    engine.step()
    return values_of(engine)


def test_every_row_finds_its_owner_in_two_hops(world):
    keys = {"zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
    for found, expected in zip(*world(4).each(exact, [(keys,), ({},)]), strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


def with_a_broken_step(is_dropped):
    """Whether steps are taken where the second gradient is not finite; it is dropped by the user, or left to us."""
    engine = start("Base", 3, zero=LOCO)
    taken = []
    for step in range(4):
        loss = engine(rows(step, engine.global_rank))
        engine.backward(loss * torch.inf if step == 1 else loss)
        if step == 1 and is_dropped:
            engine.zero_grad()
            assert not engine.stores[0].gradients.reducer.errors
            continue
        taken.append(engine.step().applied)
        engine.zero_grad()  # as many do after each step; what was lost is still owed
        assert bool(engine.stores[0].gradients.reducer.errors) == taken[-1]
    return taken


@pytest.mark.parametrize(("is_dropped", "taken"), [(True, [True] * 3), (False, [True, False, True, True])])
def test_what_was_lost_of_a_broken_gradient_is_not_added_to_the_next(world, is_dropped, taken):
    assert world(2).run(with_a_broken_step, is_dropped) == [taken] * 2


LONG = {
    "weights": {"zero_quantized_weights": True},
    "gradients": {"zero_quantized_gradients": True},
    "all with feedback": LOCO | {"zero_quantized_weights": True},
}


def long_run(keys):
    return train("Base", 3, steps=200, zero=keys)[0]


@pytest.fixture(scope="module")
def plain(world):
    """The losses of a long run without quantization."""
    return world(2).run(long_run, {})[0]


@pytest.mark.wide  # the band of the first steps is in tests/parity
@pytest.mark.parametrize("name", LONG if FULL else ["all with feedback"])
def test_the_loss_stays_in_a_band(world, plain, name):
    """After 200 steps the mean of the last 20 losses is within 10 % of the first loss from that of the plain run."""
    quantized = world(2).run(long_run, LONG[name])[0]
    assert quantized != plain
    ends = [sum(losses[-20:]) / 20 for losses in (plain, quantized)]
    assert abs(ends[1] - ends[0]) < 0.1 * plain[0]
    assert ends[1] < 0.2 * plain[0]

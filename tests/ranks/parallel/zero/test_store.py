"""Values, masters and states in flat buffers: what each rank holds, and what its parameters look like meanwhile."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mizzen.model.piece import assemble, covers
from ranks.parallel.zero.programs import (
    SHAPES,
    STAGES,
    Bag,
    at_rest,
    backward,
    bytes_of,
    hold,
    live_bytes,
    load_lots,
    whole,
)


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


# What is held


def pieces_of_everything(stage, held):
    bag = Bag()
    store = hold(bag, stage, held=held, limit=60, groups={"b": 1, "d": 2})
    masters = [master for _, master in store.contents.masters]
    optimizer = torch.optim.Adam(masters, lr=0.1)
    backward(store, bag.loss(rank(), 0))
    gradients = store.pieces("gradient")
    load_lots(store)
    optimizer.step()
    states = {key: store.pieces(key, optimizer.state) for key in ("exp_avg", "exp_avg_sq", "step", "none")}
    return store.pieces("master"), gradients, states


@pytest.mark.parametrize("held", [None, "bfloat16"])
@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 2), (2, 2), (1, 4), (2, 4)])
def test_pieces_of_the_ranks_hold_every_element_once(world, stage, ranks, held):
    results = world(ranks).run(pieces_of_everything, stage, held)
    holders = results if stage else results[:1]
    kinds = [[masters, gradients, *states.values()] for masters, gradients, states in holders]
    for number in range(4):
        pieces = [piece for kind in kinds for piece in kind[number]]
        assert {piece.name for piece in pieces} == set(SHAPES)
        for name, shape in SHAPES.items():
            mine = [piece for piece in pieces if piece.name == name]
            assert covers(mine).is_exact
            assert mine[0].shape == shape
            assert mine[0].dtype == torch.float32
    for _, _, states in results:
        assert states["step"] == states["none"] == []


def groups_of_masters(stage):
    bag = Bag()
    store = hold(bag, stage, limit=60, groups={"b": 1, "d": 2})
    names = {
        target.tensor: {slot.name for slot in bucket.plan.slots}
        for bucket in store.buckets
        for target in bucket.targets
    }
    return [(group, sorted(names[master])) for group, master in store.contents.masters]


@pytest.mark.parametrize("stage", STAGES)
def test_masters_know_their_group_and_have_their_gradient(world, stage):
    for found in world(2).run(groups_of_masters, stage):
        by_group = {group: sorted(n for g, names in found for n in names if g == group) for group, _ in found}
        assert by_group == {0: ["a", "c", "e", "empty", "scalar"], 1: ["b"], 2: ["d"]}


def starting_values(stage, held):
    """Every rank starts with values of its own."""
    bag = Bag(seed=rank())
    store = hold(bag, stage, held=held)
    parameters = {name: parameter.detach().clone() for name, parameter in bag.named_parameters()}
    return parameters, whole(store, "master")


@pytest.mark.parametrize("held", [None, "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("stage", STAGES)
def test_all_start_from_the_first_rank_and_masters_keep_every_bit(world, stage, held):
    expected = dict(Bag(seed=0).named_parameters())
    for parameters, masters in world(2).run(starting_values, stage, held):
        for name, value in expected.items():
            assert torch.equal(masters[name], value)
            assert torch.equal(parameters[name], value.to(getattr(torch, held or "float32")))


# A step


def step_by_hand(stage, held):
    bag = Bag()
    before = {name: parameter.detach().float().clone() for name, parameter in bag.named_parameters()}
    store = hold(bag, stage, held=held, limit=60)
    for _, master in store.contents.masters:
        master += rank() + 1 if stage else 1.5  # each rank changes its own share
    store.write_back()
    after = {name: parameter.detach().float() for name, parameter in bag.named_parameters()}
    masters = whole(store, "master")
    for name in SHAPES:
        assert torch.equal(masters[name].to(bag.get_parameter(name).dtype).float(), after[name])
        assert set((masters[name] - before[name]).round(decimals=3).unique().tolist()) <= {1.0, 1.5, 2.0}
    return after


@pytest.mark.parametrize("held", [None, "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_written_back_masters_are_everybodys_parameters(world, stage, held):
    one, other = world(2).run(step_by_hand, stage, held)
    assert all(torch.equal(one[name], other[name]) for name in one)


def written_by_the_user(stage, held):
    """A few parameters are loaded; the others keep their masters to the bit."""
    bag = Bag()
    exact = {name: parameter.detach().clone() for name, parameter in bag.named_parameters()}
    store = hold(bag, stage, held=held, limit=60)
    new = {"c": torch.full((5, 5, 4), 1.25), "scalar": torch.tensor(2.0)}
    bag.load_state_dict(new, strict=False)
    store.restore_parameters({})
    masters = whole(store, "master")
    assert all(torch.equal(masters[name], new.get(name, exact[name])) for name in exact)
    store.write_back()
    return all(torch.equal(bag.get_parameter(name).detach().float(), value) for name, value in new.items())


@pytest.mark.parametrize("held", [None, "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_values_that_the_user_loads_become_masters(world, stage, held):
    assert all(world(2).run(written_by_the_user, stage, held))


def norms(held):
    return [norm(stage, held) for stage in STAGES]


def norm(stage, held):
    bag = Bag()
    store = hold(bag, stage, held=held, in_rank_order=True)
    backward(store, bag.loss(rank(), 0))
    squares = store.reduce().squares()
    dist.all_reduce(squares)
    load_lots(store, 0.5)
    rescaled = store.reduce().squares()
    dist.all_reduce(rescaled)
    expected = sum(value.double().square().sum().item() for value in whole(store).values()) * 4
    return squares.sqrt().float().item(), rescaled.sqrt().float().item() * 2, expected**0.5


@pytest.mark.parametrize("held", [None, "bfloat16"])
def test_squares_are_counted_once_whatever_the_stage(world, held):
    found = [row for rows in world(4).run(norms, held) for row in rows]
    assert len({row[:2] for row in found}) == 1
    assert found[0][0] == found[0][1] == pytest.approx(found[0][2])


def gradient_dtype_below_the_masters(stage):
    bag = Bag()
    store = hold(bag, stage, held="bfloat16", dtypes={"accumulation": "bfloat16"})
    backward(store, bag.loss(rank(), 0))
    load_lots(store)
    attached = {master.grad.dtype for _, master in store.contents.masters}
    store.write_back()
    return attached, [master.grad for bucket in store.buckets for master in [bucket.master]]


@pytest.mark.parametrize("stage", STAGES)
def test_the_optimizer_sees_gradients_in_the_dtype_of_masters_and_no_copy_stays(world, stage):
    for attached, kept in world(2).run(gradient_dtype_below_the_masters, stage):
        assert attached == {torch.float32}
        assert set(kept) == {None}


def low_masters(stage, held, states):
    """Masters as narrow as the parameters, stepped in wider copies that exist during a step only."""
    bag = Bag()
    store = hold(bag, stage, held=held, dtypes={"masters": held, "states": states}, limit=60)
    masters = [master for _, master in store.contents.masters]
    for lot in store.contents.lots:
        lot.unload()
    resting = sum(master.numel() * master.element_size() for master in masters if states != held)
    optimizer = torch.optim.SGD(masters, lr=1.0, momentum=0.9)
    before = {name: parameter.detach().float().clone() for name, parameter in bag.named_parameters()}
    gradients = []
    for step in range(2):
        backward(store, bag.loss(rank(), step))
        gradients.append(whole(store))
        load_lots(store, 0.5)
        optimizer.step()
        store.write_back()
        store.clear_gradients()
    moments = {piece.name: piece.dtype for piece in store.pieces("momentum_buffer", optimizer.state)}
    for name, value in before.items():
        first, second = gradients[0][name] / 2, gradients[1][name] / 2
        expected = value - first - (0.9 * first + second)
        torch.testing.assert_close(bag.get_parameter(name).detach().float(), expected, rtol=0.03, atol=0.03)
        assert torch.equal(whole(store, "master")[name], bag.get_parameter(name).detach().float())
    shares = all(bucket.mine(bucket.values).data_ptr() == bucket.master.data_ptr() for bucket in store.buckets)
    return resting, set(moments.values()), shares


@pytest.mark.parametrize("states", ["float32", None])
@pytest.mark.parametrize("held", ["bfloat16", "float16"])
@pytest.mark.parametrize("stage", STAGES)
def test_masters_may_be_as_narrow_as_parameters(world, stage, held, states):
    for resting, kinds, shares in world(2).run(low_masters, stage, held, states or held):
        assert resting == 0
        assert kinds == {getattr(torch, states or held)}
        assert shares


# What the parameters look like


def saved(thing):
    stream = io.BytesIO()
    torch.save(thing, stream)
    return len(stream.getvalue())


def sizes_when_saved(stage, held):
    bag = Bag({"large": (300, 300), "small": (8,), "scalar": ()})
    for parameter in bag.parameters():
        parameter.requires_grad_()
    hold(bag, stage, held=held, limit=1 << 20)
    small = saved(bag.small), saved(bag.scalar), saved({"small": bag.state_dict()["small"]})
    elements = sum(parameter.numel() * parameter.element_size() for parameter in bag.parameters())
    return small, saved(bag.state_dict()) - elements


@pytest.mark.parametrize("held", [None, "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_saving_one_parameter_does_not_write_its_buffer(world, stage, held):
    for small, overhead in world(2).run(sizes_when_saved, stage, held):
        assert max(small) < 4000
        assert overhead < 8000


def used_as_a_module(stage):
    """Copies, state dicts and loading, as users do them."""
    bag = Bag()
    store = hold(bag, stage)
    names = list(bag.state_dict())
    twin = copy.deepcopy(bag)
    bag.load_state_dict({name: torch.full(shape, 3.0) for name, shape in SHAPES.items()})
    assert all(bool((bucket.mine(bucket.values).unique() <= 3.0).all()) for bucket in store.buckets)
    assert not any((parameter == 3.0).any() for parameter in twin.parameters())
    masters = whole(store, "master")
    return names, masters


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_stays_a_module(world, stage):
    for names, masters in world(2).run(used_as_a_module, stage):
        assert names == list(SHAPES)
        assert all((masters[name] == 3.0).all() for name in SHAPES)  # fp32 parameters are their own masters


def memory_of_parameters(held):
    """Parameters lie in their bucket's memory: writing one shows in the other."""
    for stage in STAGES:
        bag = Bag()
        store = hold(bag, stage, held=held)
        for bucket in store.buckets:
            bucket.values.fill_(5.0)
        assert all((parameter == 5).all() and parameter.is_leaf for parameter in bag.parameters())
    return True


@pytest.mark.parametrize("held", [None, "bfloat16"])
def test_parameters_share_the_memory_of_their_buffer(world, held):
    assert all(world(2).run(memory_of_parameters, held))


def with_old_gradients(stage, held):
    """A model that has been used before: gradients are left on it, in its old dtype."""
    bag = Bag()
    bag.loss(rank(), 9).backward()
    store = hold(bag, stage, held=held)
    assert not any(value.any() for value in whole(store).values())
    backward(store, bag.loss(rank(), 0))
    return {name: value for name, value in whole(store).items()}


@pytest.mark.parametrize("held", [None, "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_from_before_do_not_count(world, stage, held):
    one, other = world(2).run(with_old_gradients, stage, held)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(value.any() for value in one.values())


class Strided(nn.Module):
    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.arange(12.0).view(3, 4).t())
        self.image = nn.Parameter(torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last))


def test_parameters_that_are_not_contiguous_keep_their_values():
    module = Strided()
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    store = hold(module, 0)
    assert all(torch.equal(parameter, before[name]) for name, parameter in module.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in whole(store, "master").items())


# The end


def detached(stage, held):
    bag = Bag()
    plain = sum(parameter.numel() for parameter in bag.parameters())
    before = live_bytes()
    store = hold(bag, stage, held=held)
    backward(store, bag.loss(rank(), 0))
    hooks = [len(parameter._post_accumulate_grad_hooks or ()) for parameter in bag.parameters()]
    values = {name: parameter.detach().clone() for name, parameter in bag.named_parameters()}
    master = weakref.ref(store.buckets[0].master)
    store.release()
    gc.collect()
    same = all(torch.equal(parameter, values[name]) for name, parameter in bag.named_parameters())
    left = [len(parameter._post_accumulate_grad_hooks or ()) for parameter in bag.parameters()]
    own = bytes_of([p.data for p in bag.parameters()]) == sum(p.numel() * p.element_size() for p in bag.parameters())
    storages = all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in bag.parameters())
    values.clear()
    grown = at_rest(live_bytes) - before - plain * (0 if held is None else -2)
    bag.loss(rank(), 0).backward()
    kinds = {parameter.grad.dtype for parameter in bag.parameters()}
    return hooks, left, same and own and storages, master() is None, grown, kinds


@pytest.mark.parametrize("held", [None, "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_detached_parameters_are_their_modules_own_again(world, stage, held):
    for hooks, left, is_own, is_freed, grown, kinds in world(2).run(detached, stage, held):
        assert set(hooks) == {1}
        assert set(left) == {0}
        assert is_own
        assert is_freed
        assert grown <= 0  # although the store itself still lives
        assert kinds == {getattr(torch, held or "float32")}


def test_pieces_of_one_rank_are_whole():
    bag = Bag()
    store = hold(bag, 2)
    pieces = {piece.name: piece for piece in store.pieces("master")}
    assert all(torch.equal(assemble([pieces[name]]), parameter) for name, parameter in bag.named_parameters())
    assert store.ranks.shard_group is None


def test_values_of_a_moved_parameter_are_new_until_a_step_is_taken():
    bag = Bag()
    store = hold(bag, 0)
    bag.b.data = torch.ones(SHAPES["b"])
    store.restore_parameters()
    assert store.status.has_new_values and torch.equal(whole(store, "master")["b"], bag.b)
    store.clear_gradients()
    assert store.status.has_new_values
    store.clear_gradients(taken=True)
    assert not store.status.has_new_values


def test_a_replaced_parameter_is_trained_in_the_place_of_the_old_one():
    bag = Bag()
    store = hold(bag, 0)
    bag.b = nn.Parameter(torch.ones(SHAPES["b"]))
    store.restore_parameters({"b": bag.b})
    assert store.contents.trained["b"] is bag.b
    assert torch.equal(whole(store, "master")["b"], torch.ones(SHAPES["b"]))

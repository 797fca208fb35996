"""A call that backward repeats: the same gradients, fewer tensors kept, and each of them where it was asked for."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mizzen.ambient import AMBIENT
from mizzen.errors import UsageError
from mizzen.log import LOGGER
from mizzen.rewrite import recompute
from mizzen.rewrite.recompute import CACHES, Checkpointing, Keeping, Recomputed, replayed

KEEPINGS = [Keeping(products, on_host) for products in (False, True) for on_host in (False, True)]


class Block(nn.Module):
    """Linear, dropout, attention and a branch, with a mask and a factor that come by keyword."""

    def __init__(self, width: int = 8, dropout: float = 0.5) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden, mask=None, *, factor=1.0):
        kept = hidden if mask is None else hidden * mask
        wide = self.drop(torch.relu(self.up(kept)))
        attention = nn.functional.scaled_dot_product_attention(wide, wide, wide)
        return hidden + self.drop(self.down(attention)) * factor


def gradients(block, call, *, calls=2):
    """Gradients of several calls that are all forward before the first is backward, and of the input."""
    torch.manual_seed(3)
    inputs = torch.randn(2, 5, 8, requires_grad=True)
    outputs = [call(block, inputs * (number + 1)) for number in range(calls)]
    after = torch.rand(1)
    torch.stack([output.pow(2).sum() for output in outputs]).sum().backward()
    return [inputs.grad, *(parameter.grad for parameter in block.parameters()), after]


def plain(block, inputs):
    return block(inputs, torch.ones(8), factor=torch.full((1,), 2.0))


@pytest.mark.parametrize("keeping", KEEPINGS, ids=str)
@pytest.mark.parametrize("style", ["position", "keyword"])
def test_the_same_gradients_to_the_bit_after_several_calls(keeping, style):
    torch.manual_seed(0)
    block = Block()
    other = copy.deepcopy(block)
    expected = gradients(block, plain)

    def call(block, inputs):
        mask, factor = torch.ones(8), torch.full((1,), 2.0)
        if style == "position":
            return replayed(block, (inputs, mask), {"factor": factor}, keeping)
        return replayed(block, (), {"factor": factor, "hidden": inputs, "mask": mask}, keeping)

    assert all(map(torch.equal, gradients(other, call), expected))


def test_gradients_reach_tensors_inside_of_structures():
    weights = [torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)]

    def function(pair, rest):
        return (pair[0] * rest["x"]).sin().sum()

    replayed(function, ((weights[0], 3),), {"rest": {"x": weights[1]}}, Keeping()).backward()
    assert all(weight.grad is not None for weight in weights)


def test_every_tensor_is_seen_by_position(monkeypatch):
    """torch rewinds the generator of the devices that positional tensors are on, and looks at no others."""
    seen = []
    monkeypatch.setattr(recompute, "checkpoint", lambda call, *tensors, **_: (seen.extend(tensors), call(*tensors))[1])
    first, second = torch.ones(2), torch.zeros(2)
    found = replayed(lambda a, n, *, b, c: (a, n, b, c), (first, 7), {"b": second, "c": "word"}, Keeping())
    assert found == (first, 7, second, "word")
    assert [id(tensor) for tensor in seen] == [id(first), id(second)]


def test_without_gradients_nothing_is_replayed(monkeypatch):
    monkeypatch.setattr(recompute, "checkpoint", None)
    with torch.no_grad():
        assert replayed(lambda x: x + 1, (torch.zeros(1),), {}, Keeping()).item() == 1


class Calls:
    """Counts how often something is called."""

    def __init__(self, function):
        self.function, self.count = function, 0

    def __call__(self, *args):
        self.count += 1
        return self.function(*args)


def test_backward_calls_again_and_only_then():
    function = Calls(lambda x: x.sin().cos())
    result = replayed(function, (torch.ones(2, requires_grad=True),), {}, Keeping())
    assert function.count == 1
    result.sum().backward()
    assert function.count == 2


def test_selected_results_are_not_computed_again():
    products = Calls(torch.mm)

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.mm.default:
                products.count += 1
            return function(*args, **(kwargs or {}))

    def count(keeping):
        products.count = 0
        weight = torch.ones(4, 4, requires_grad=True)
        result = replayed(lambda x: torch.sin(torch.sin(x @ weight) @ weight), (torch.ones(4, 4),), {}, keeping)
        with Counting():
            result.sum().backward()
        return products.count

    assert count(Keeping()) - count(Keeping(products=True)) == 2


def saved(call):
    """How many tensors autograd keeps for a call; torch 2.11 adds an empty one."""
    kept = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda tensor: tensor):
        call()
    return sum(shape.numel() > 0 for shape in kept)


def test_fewer_tensors_are_saved():
    block, inputs = Block(), torch.randn(2, 5, 8, requires_grad=True)
    whole = saved(lambda: plain(block, inputs))
    again = saved(lambda: replayed(plain, (block, inputs), {}, Keeping()))
    assert (again, whole > 10) == (1, True)


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Storages(TorchDispatchMode):
    """Remembers what every operation has made, and knows how much of it is still there: autograd's and ours alike."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        old = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        for storage in (tensor.untyped_storage() for tensor in tensors_in(result)):
            if storage._cdata not in old:
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def held(self):
        return sum(size for reference, size in self.made.values() if not reference.expired())


def held_after(keeping, blocks=4):
    """Bytes that live between forward and backward of several blocks."""
    torch.manual_seed(0)
    layers = [Block(dropout=0.1) for _ in range(blocks)]
    hidden = torch.randn(2, 64, 8, requires_grad=True)
    with Storages() as storages:
        for layer in layers:
            hidden = layer(hidden) if keeping is None else replayed(layer, (hidden,), {}, keeping)
        loss = hidden.sum()
    del hidden
    held = storages.held
    loss.backward()
    return held


def test_memory_between_forward_and_backward():
    everything, products, inputs = (held_after(keeping) for keeping in (None, Keeping(products=True), Keeping()))
    one = 2 * 64 * 8 * 4
    assert inputs == 3 * one + 4, (
        "more is kept than the inputs of three blocks and the loss; the first was there before"
    )
    assert inputs < products < everything
    assert everything > 20 * one


class Moved(saved_tensors_hooks):
    """Stands for torch's save_on_cpu where there is no other device, and notes what would move."""

    moved: list = []

    def __init__(self, **_):
        super().__init__(self.pack, lambda copy: copy)

    @classmethod
    def pack(cls, tensor):
        if tensor.numel():
            cls.moved.append(tuple(tensor.shape))
        return tensor.clone()


def test_inputs_that_carry_gradients_rest_on_the_host_and_masks_stay(monkeypatch):
    monkeypatch.setattr(recompute, "save_on_cpu", Moved)
    monkeypatch.setattr(Moved, "moved", [])
    block, inputs = Block(), torch.randn(2, 5, 8, requires_grad=True)
    for args, kwargs in (((inputs, torch.ones(8)), {}), ((), {"hidden": inputs, "mask": torch.ones(8)})):
        Moved.moved.clear()
        replayed(block, args, kwargs, Keeping(on_host=True)).sum().backward()
        assert Moved.moved == [(2, 5, 8)]


def test_without_gradients_all_inputs_rest_on_the_host(monkeypatch):
    monkeypatch.setattr(recompute, "save_on_cpu", Moved)
    monkeypatch.setattr(Moved, "moved", [])
    replayed(Block(), (torch.randn(2, 5, 8), torch.ones(8)), {}, Keeping(on_host=True)).sum().backward()
    assert Moved.moved == [(2, 5, 8), (8,)]


def test_what_is_moved_comes_back_even_if_the_original_changes(monkeypatch):
    monkeypatch.setattr(recompute, "save_on_cpu", Moved)
    leaf = torch.ones(3, requires_grad=True)
    inputs = leaf * 1
    result = replayed(torch.sin, (inputs,), {}, Keeping(on_host=True))
    with torch.no_grad():
        inputs.zero_()
    result.sum().backward()
    assert torch.equal(leaf.grad, torch.ones(3).cos())


class Streaming(nn.Module):
    """Drops from a named stream and from the default one."""

    def forward(self, inputs):
        with Checkpointing.current().streams.fork("mine"):
            dropped = nn.functional.dropout(inputs, 0.5)
        return nn.functional.dropout(dropped.sin(), 0.5).cos()


@pytest.mark.parametrize("keeping", KEEPINGS, ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_named_streams_are_rewound_too(keeping, compiled):
    torch.compiler.reset()
    found = []
    for call in (None, keeping):
        streams = Checkpointing.current().streams
        streams.reset()
        streams.add("mine", 5)
        block = Streaming()
        if call is not None:
            vars(block)["forward"] = Recomputed(block.forward, call)
        if compiled:
            block.compile(backend="aot_eager")
        torch.manual_seed(0)
        inputs = torch.randn(40, requires_grad=True)
        results = [block(inputs) for _ in range(2)]
        states = streams.get_states()
        torch.stack(results).sum().backward()
        assert torch.equal(streams.get_states()["mine"], states["mine"]), "the repetition has moved the stream"
        found.append(inputs.grad)
    assert torch.equal(*found)


def test_a_graph_can_be_kept_for_a_second_backward():
    streams = Checkpointing.current().streams
    streams.add("mine", 5)
    inputs = torch.randn(9, requires_grad=True)
    result = replayed(Streaming(), (inputs,), {}, Keeping()).sum()
    result.backward(retain_graph=True)
    first, inputs.grad = inputs.grad, None
    result.backward()
    assert torch.equal(inputs.grad, first)


def recomputed(keeping=None, kind=Block):
    block = kind()
    vars(block)["forward"] = Recomputed(block.forward, keeping or Keeping())
    return block


def test_a_block_looks_as_it_did():
    block = recomputed()
    assert [name for name, _ in block.named_parameters()] == [name for name, _ in Block().named_parameters()]
    assert inspect.signature(block.forward) == inspect.signature(Block().forward)
    assert list(block.state_dict()) == list(Block().state_dict())


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))], ids=["copy", "pickle"]
)
def test_a_copy_computes_with_its_own_weights(way):
    block = recomputed()
    other = way(block)
    other(torch.randn(1, 2, 8)).sum().backward()
    assert isinstance(vars(other)["forward"], Recomputed)
    assert other.up.weight.grad is not None and block.up.weight.grad is None


class Caching(nn.Module):
    def forward(self, hidden, past_key_values=None, layer_past=None, **others):
        return hidden * 2


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_would_be_filled_twice(name):
    block, hidden = recomputed(kind=Caching), torch.ones(2, requires_grad=True)
    with pytest.raises(UsageError, match=rf"was given a cache, {name}=.* use_cache=False"):
        block(hidden, **{name: object()})
    with torch.no_grad():
        assert block(hidden, **{name: object()}).sum() == 4
    assert block(hidden, **{name: None}).sum() == 4


def test_a_cache_by_position_too():
    with pytest.raises(UsageError, match="past_key_values="):
        recomputed(kind=Caching)(torch.ones(2), object())


class Keys:
    """A cache as transformers has it, with keys of so many tokens for each layer."""

    def __init__(self, *lengths):
        self.lengths = lengths

    def get_seq_length(self, layer=0):
        return self.lengths[layer]


class Seeing(nn.Module):
    """Tells whether it was given a cache."""

    def forward(self, hidden, past_key_values=None, **others):
        return hidden * (2 if past_key_values is None and others.get("layer_past") is None else 3)


@pytest.mark.parametrize("by_position", [True, False])
def test_an_empty_cache_is_left_out_with_one_warning(by_position, caplog, monkeypatch):
    monkeypatch.setattr(AMBIENT, "warned", set())
    monkeypatch.setattr(LOGGER, "propagate", True)
    block, hidden = recomputed(kind=Seeing), torch.ones(2, requires_grad=True)
    for _ in range(2):
        given = block(hidden, Keys(0)) if by_position else block(hidden, past_key_values=Keys(0))
        assert given.sum() == 4
    said = [record.message for record in caplog.records if "leave out the empty cache" in record.message]
    assert len(said) == 1 and "past_key_values=" in said[0] and "model.decoder.config.use_cache = False" in said[0]
    with torch.no_grad():
        assert block(hidden, Keys(0)).sum() == 6  # generation fills it
    with pytest.raises(UsageError, match="was given a cache, past_key_values="):
        block(hidden, Keys(5))


def test_a_cache_that_other_layers_have_filled_is_empty_for_this_one():
    block = Seeing()
    vars(block)["forward"] = Recomputed(block.forward, Keeping(), layer=1)
    assert block(torch.ones(2, requires_grad=True), Keys(5, 0)).sum() == 4
    with pytest.raises(UsageError, match="was given a cache"):
        block(torch.ones(2, requires_grad=True), Keys(0, 5))

"""Layers of `mizzen.tensor`: the weights, outputs and gradients of one process, for any number of ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import mizzen
import mizzen.errors
from mizzen import tensor
from mizzen.parallel.tensor.exchange import gather_along
from mizzen.parallel.tensor.rng import differing, dropout

VOCABULARY, WIDTH, LENGTH, SAMPLES = 13, 6, 4, 3


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (LENGTH, SAMPLES), generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """Every layer with every way in and out. None of the sizes divides."""

    def __init__(self, group=None, **options) -> None:
        super().__init__()
        torch.manual_seed(3)
        options["tp_group"] = group
        self.group = group
        self.embed = tensor.VocabParallelEmbedding(VOCABULARY, WIDTH, **options)
        self.whole = tensor.ColumnParallelLinear(WIDTH, 7, **options)
        self.back = tensor.RowParallelLinear(7, WIDTH, **options)
        self.cut = tensor.ColumnParallelLinear(WIDTH, 11, gather_output=False, bias=False, **options)
        self.close = tensor.RowParallelLinear(11, WIDTH, input_is_parallel=True, skip_bias_add=True, **options)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.back(torch.tanh(self.whole(x)[0]))[0]
        y, bias = self.close(torch.tanh(self.cut(x)[0]))
        return tensor.parallel_lm_logits(x + y + bias, self.embed.weight, tp_group=self.group)


def passed(model) -> torch.Tensor:
    logits = model(tokens())
    losses = tensor.vocab_parallel_cross_entropy(logits, tokens().flip(0), vocab_size=VOCABULARY, tp_group=model.group)
    losses.mean().backward()
    return losses.detach()


def whole(tensor_, parameter, group):
    """What all ranks have of a parameter together."""
    dim, size = (getattr(parameter, name, None) for name in ("partition_dim", "partition_size"))
    if dim is None:
        return tensor_
    return gather_along(tensor_, dim, group, [len(part) for part in torch.arange(size).chunk(group.size())])


def cut():
    group = dist.group.WORLD
    model = Model(group)
    losses = passed(model)
    named = dict(model.named_parameters())
    weights = {name: whole(p.detach(), p, group) for name, p in named.items()}
    grads = {name: whole(p.grad, p, group) for name, p in named.items()}
    return losses, weights, grads, torch.rand(1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_weights_outputs_and_gradients_are_those_of_one_process(world, ranks):
    model = Model()
    expected = passed(model)
    next_number = torch.rand(1)
    for losses, weights, grads, number in world(ranks).run(cut):
        torch.testing.assert_close(losses, expected)
        assert number == next_number  # what is drawn next does not depend on the number of ranks
        for name, parameter in model.named_parameters():
            assert torch.equal(weights[name], parameter.detach()), name
            torch.testing.assert_close(grads[name], parameter.grad)


def named(order):
    torch.manual_seed(7)
    made = {name: tensor.ColumnParallelLinear(4, 8, name=name, seed=1, tp_group=dist.group.WORLD) for name in order}
    return {name: gather_along(layer.weight.detach(), 0, dist.group.WORLD) for name, layer in made.items()}


def test_a_name_and_a_seed_give_the_weights_wherever_a_layer_is_built(world):
    (ours, _), (theirs, _) = (world(2).run(named, order) for order in (["a", "b", "c"], ["c", "a"]))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not torch.equal(ours["a"], ours["b"])


def test_50257_tokens_are_shared_out_as_torch_chunk_does():
    class Group:
        def size(self):
            return 4

        def rank(self):
            return 3

    made = tensor.VocabParallelEmbedding(50257, 2, tp_group=Group())
    assert (made.vocab_start_index, made.vocab_end_index) == (37695, 50257)
    assert made.weight.shape == (12562, 2)
    assert (made.weight.tensor_model_parallel, made.weight.partition_dim, made.weight.partition_stride) == (True, 0, 1)


def entropies(ranks_cut, dtype, smoothing, compiled):
    group = dist.group.WORLD
    every = torch.randn(LENGTH, SAMPLES, VOCABULARY, generator=torch.Generator().manual_seed(1)).to(dtype)
    every = (every * 3).requires_grad_()
    target = tokens().clone()
    target[0, 0] = -100
    weights = torch.rand(LENGTH, SAMPLES, generator=torch.Generator().manual_seed(2))
    expected = functional.cross_entropy(
        every.float().flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing
    ).view_as(target)
    (expected * weights).sum().backward()
    sizes = [len(part) for part in torch.arange(VOCABULARY).chunk(group.size())]
    own = every.detach().split(sizes, -1)[group.rank()].clone().requires_grad_()
    entropy = tensor.vocab_parallel_cross_entropy
    if compiled:
        entropy = torch.compile(entropy, backend="aot_eager", fullgraph=True)
    losses = entropy(own, target, smoothing, vocab_size=VOCABULARY, tp_group=group)
    (losses * weights).sum().backward()
    assert own.grad.dtype is dtype
    return losses.detach(), expected.detach(), own.grad.float(), every.grad.split(sizes, -1)[group.rank()].float()


@pytest.mark.parametrize(
    ("ranks", "dtype", "smoothing", "compiled"),
    [(2, torch.float32, 0.0, False), (4, torch.bfloat16, 0.1, False), (2, torch.float32, 0.1, True)],
)
def test_cross_entropy_of_cut_logits_is_that_of_whole_ones(world, ranks, dtype, smoothing, compiled):
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for losses, expected, grad, wanted in world(ranks).run(entropies, ranks, dtype, smoothing, compiled, timeout=120):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad, wanted, **close)


def sent(case):
    rank, group = dist.get_rank(), dist.group.WORLD
    data = {"tokens": torch.arange(6).view(2, 3), "labels": torch.ones(4, dtype=torch.int64), "x": torch.ones(2)}
    keys = {"missing": ["tokens", "mask"], "dtype": ["tokens", "x"]}.get(case, ["tokens", "labels"])
    try:
        found = tensor.broadcast_data(keys, data if rank == 0 and case != "none" else None, torch.int64, group)
    except mizzen.errors.UsageError as refusal:
        return str(refusal)
    return found


def test_one_rank_gives_its_batch_to_the_others(world):
    for found in world(2).run(sent, "good"):
        assert list(found) == ["tokens", "labels"]
        assert torch.equal(found["tokens"], torch.arange(6).view(2, 3))
        assert torch.equal(found["labels"], torch.ones(4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing", "has no 'mask'; it has tokens, labels, x"),
        ("dtype", "'x' is of torch.float32, and all of tokens, x were said to be of torch.int64"),
        ("none", "the first tensor-parallel rank has no data"),
    ],
)
def test_a_batch_that_cannot_be_sent_is_refused_on_every_rank(world, case, words):
    for said in world(2).run(sent, case):
        assert words in said


def drawn():
    group = dist.group.WORLD
    torch.manual_seed(11)
    before, ones = torch.rand(3), torch.ones(64)
    cut_mask = dropout(ones, 0.5, group)
    with differing(group):
        inside = torch.rand(3)
    after = torch.rand(3)
    torch.manual_seed(11)
    torch.rand(3)
    again = dropout(ones, 0.5, group)
    return before, cut_mask, inside, after, again


def test_random_numbers_differ_where_activations_are_cut_and_agree_elsewhere(world):
    first, second = world(2).run(drawn)
    for name, ours, theirs in zip(("before", "mask", "inside", "after", "again"), first, second, strict=True):
        assert torch.equal(ours, theirs) == (name in ("before", "after")), name
    for _, mask, *_, again in (first, second):
        assert torch.equal(mask, again)  # they follow from the stream around them


def wrong(kind: str) -> str:
    group = dist.group.WORLD
    calls = {
        "small": lambda: tensor.VocabParallelEmbedding(1, 4, tp_group=group),
        "stride": lambda: tensor.ColumnParallelLinear(4, 8, stride=3, gather_output=False, tp_group=group),
        "gathered": lambda: tensor.ColumnParallelLinear(4, 6, stride=3, tp_group=group),
        "sequence": lambda: tensor.RowParallelLinear(4, 6, sequence_parallel=True, tp_group=group),
        "kept": lambda: tensor.RowParallelLinear(4, 6, keep_master_weight_for_test=True),
        "ids": lambda: tensor.VocabParallelEmbedding(5, 4, tp_group=group)(torch.tensor([2, 5])),
        "logits": lambda: tensor.vocab_parallel_cross_entropy(
            torch.ones(2, 3), torch.ones(2, dtype=torch.int64), vocab_size=8, tp_group=group
        ),
        "uneven": lambda: tensor.vocab_parallel_cross_entropy(
            torch.ones(2, 3 + group.rank()), torch.ones(2, dtype=torch.int64), tp_group=group
        ),
        "targets": lambda: tensor.vocab_parallel_cross_entropy(
            torch.ones(2, 3), torch.ones(3, dtype=torch.int64), tp_group=group
        ),
    }
    with pytest.raises(mizzen.errors.MizzenError) as refusal:
        calls[kind]()
    return str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("small", "num_embeddings=1 leaves some of 2 tensor-parallel ranks without a part"),
        ("stride", "output_size=8 is not 3 runs"),
        ("gathered", "gather_output with stride=3"),
        ("sequence", "let the layer before leave its output cut"),
        ("kept", "the whole weight of a layer that is cut is not kept"),
        ("ids", "token ids from 2 to 5 for an embedding of 5"),
        ("logits", "has 3 logits per token, and of a vocabulary of 8 it should have 4"),
        ("uneven", "'logits of a vocabulary of 8'"),
        ("targets", "are for targets of shape [2], not [3]"),
    ],
)
def test_wrong_uses_say_what_to_do(world, kind, words):
    for said in world(2).run(wrong, kind):
        assert words in said


def refused(kind: str) -> str:
    model = Model(None if kind == "whole" else dist.group.WORLD)
    mpu = tensor.initialize_model_parallel(2)
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "progress": {"enabled": False},
    }
    with pytest.raises(mizzen.errors.MizzenError) as refusal:
        mizzen.initialize(model=model, config=config, **({"mpu": mpu} if kind == "whole" else {}))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "whole",
            "'embed.weight' has 13 of 13 in dimension 0, which is not the part of one of 2 tensor-parallel ranks",
        ),
        ("forgotten", "in dimension 0, which is not the part of one of 1 tensor-parallel ranks (13)"),
    ],
)
def test_a_model_made_for_another_number_of_ranks_is_refused(world, kind, words):
    for said in world(2).run(refused, kind):
        assert words in said


def given_batches(kind: str) -> str:
    mpu = tensor.initialize_model_parallel(2)

    class Lossy(Model):
        def forward(self, ids, targets):
            logits = super().forward(ids)
            return tensor.vocab_parallel_cross_entropy(
                logits, targets, vocab_size=VOCABULARY, tp_group=self.group
            ).mean()

    model = Lossy(mpu.get_tensor_model_parallel_group())
    config = {"train_batch_size": 2 * SAMPLES, "optimizer": {"type": "SGD"}, "progress": {"enabled": False}}
    config["optimizer"]["params"] = {"lr": 0.1}
    engine, *_ = mizzen.initialize(model=model, config=config, mpu=mpu)
    ids = tokens() if kind != "other" or dist.get_rank() != 3 else tokens().flip(1)
    if kind == "later":
        engine(tokens(), targets=tokens())
        ids = tokens() if dist.get_rank() != 3 else tokens().flip(1)
    try:
        engine(ids, targets=tokens())
    except mizzen.errors.UsageError as refusal:
        return str(refusal)
    return "fine"


def test_tensor_parallel_ranks_compare_their_first_batch(world):
    *fine, second, third = world(4).run(given_batches, "other")
    assert fine == ["fine", "fine"]
    for said in (second, third):
        assert "were given different batches" in said
        assert "argument 0: rank 3 (tensor rank 1, data rank 1) has torch.int64 of shape [4, 3] with checksum" in said
        assert "targets" not in said.partition("Give them")[0]
    assert world(4).run(given_batches, "same") == ["fine"] * 4
    assert world(4).run(given_batches, "later") == ["fine"] * 4

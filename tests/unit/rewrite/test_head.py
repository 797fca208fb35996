"""The fused head in models of transformers: the loss of every call, and the logits of whoever asks."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mizzen.errors import UsageError
from mizzen.rewrite.head import LateLogits
from unit.rewrite.llamas import VOCABULARY, batch, build, fuse, transformers


def pair(family="Llama", **keys):
    """A model and its fused twin."""
    return build(family), fuse(build(family), head_loss=True, head_chunk=4, **keys)


def close(found, expected):
    assert torch.allclose(found, expected, rtol=2e-6, atol=1e-7)


ARGUMENTS = {
    "mean": {},
    "items": {"num_items_in_batch": torch.tensor(37)},
    "items as a number": {"num_items_in_batch": 5},
    "shifted": {"shift_labels": batch()["labels"].roll(2, 1)},
    "ignored": {"ignore_index": int(batch()["labels"][1, 4])},
    "positions": {"position_ids": torch.arange(9).repeat(2, 1) * 2},
    "mask": {"attention_mask": torch.ones(2, 9, dtype=torch.long).tril(6)},
    "hidden": {"output_hidden_states": True},
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("training", [True, False])
def test_the_loss_is_the_models(name, training):
    model, fused = pair()
    inputs = batch()
    if name == "ignored":
        inputs["labels"] = inputs["labels"].masked_fill(inputs["labels"] == -100, 0)
    with torch.set_grad_enabled(training):
        expected, found = (each.train(training)(**inputs, **ARGUMENTS[name]) for each in (model, fused))
    close(found.loss, expected.loss)
    assert found.loss.requires_grad == training
    assert isinstance(found.logits, LateLogits) and not found.logits.is_computed
    assert list(found.keys()) == list(expected.keys())
    assert torch.equal(found.logits + 0, expected.logits)
    assert vars(fused.lm_head).get("forward") is None and "_loss_function" not in vars(fused)


def test_hidden_states_do_not_wait_for_the_collector():
    _, fused = pair()
    gc.collect()
    gc.disable()
    try:
        output = fused(**batch())
        hidden = StorageWeakRef(output.logits.hidden.untyped_storage())
        output.loss.backward()
        del output
        assert hidden.expired()
    finally:
        gc.enable()


def test_without_labels_nothing_changes():
    model, fused = pair()
    inputs = {"input_ids": batch()["input_ids"]}
    assert type(fused(**inputs).logits) is torch.Tensor
    assert torch.equal(fused(**inputs).logits, model(**inputs).logits)
    assert torch.equal(fused(**inputs, logits_to_keep=1).logits, model(**inputs, logits_to_keep=1).logits)
    tokens = [each.eval().generate(inputs["input_ids"], max_new_tokens=4, do_sample=False) for each in (model, fused)]
    assert torch.equal(*tokens)


def test_labels_by_position():
    model, fused = pair()
    tokens, labels = batch().values()
    arguments = (tokens, None, None, None, None, labels)
    close(fused(*arguments).loss, model(*arguments).loss)


READS = {
    "attribute": lambda output: output.logits,
    "name": lambda output: output["logits"],
    "place": lambda output: output[1],
    "slice": lambda output: output[1:][0],
    "tuple": lambda output: output.to_tuple()[1],
    "items": lambda output: dict(output.items())["logits"],
    "values": lambda output: list(output.values())[1],
    "get": lambda output: output.get("logits"),
}


@pytest.mark.parametrize("name", READS)
def test_every_way_to_the_logits(name):
    model, fused = pair()
    assert torch.equal(READS[name](fused(**batch())) + 0, READS[name](model(**batch())))


def test_tuples():
    model, fused = pair()
    expected, found = (each(**batch(), return_dict=False) for each in (model, fused))
    assert isinstance(found, tuple) and len(found) == len(expected)
    close(found[0], expected[0])
    assert torch.equal(found[1] + 0, expected[1])


def test_clients_that_walk_over_outputs():
    operations = pytest.importorskip("accelerate.utils.operations")
    model, fused = (each.bfloat16() for each in pair())
    expected, found = (operations.convert_to_fp32(each(**batch(), use_cache=False)) for each in (model, fused))
    assert type(found) is type(expected) and found.logits.dtype is torch.float32
    assert torch.equal(found.logits, expected.logits)
    output = fused(**batch(), use_cache=False)
    detached = operations.recursively_apply(lambda tensor: tensor.detach().clone(), output)
    assert torch.equal(detached.logits, model(**batch(), use_cache=False).logits)
    assert torch.equal(operations.gather(output.logits.detach()), output.logits.detach())


def test_a_loss_of_the_users_own_on_the_logits():
    """Both losses in one backward: distillation, entropy, and the like."""
    model, fused = pair()
    gradients = []
    for each in (model, fused):
        output = each(**batch())
        (output.loss + output.logits.softmax(-1).square().sum()).backward()
        gradients.append([parameter.grad for parameter in each.parameters()])
    for found, expected in zip(*gradients, strict=True):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_a_hook_may_look_at_the_logits_and_change_them():
    def double(module, args, output):
        output.mul_(2)

    model, fused = pair()
    for each in (model, fused):
        each.lm_head.register_forward_hook(double)
    close(fused(**batch()).loss, model(**batch()).loss)


def test_a_model_that_changes_its_logits_in_a_way_nobody_said():
    class Bent(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **keywords):
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state).tanh()
            return self.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY)

    model = fuse(Bent(build().config), head_loss=True)
    with pytest.raises(UsageError, match="Bent does something to its logits before the loss"):
        model(**batch())


def own():
    """A model that computes its loss by itself, in one of several ways."""

    class Own(transformers.LlamaForCausalLM):
        loss = staticmethod(torch.nn.functional.cross_entropy)

        def forward(self, input_ids, labels=None, **keywords):
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
            if labels is None:
                return self.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY)
            return self.loss(logits.flatten(0, 1), labels.flatten())

    return Own(build().config)


def test_a_model_that_takes_the_cross_entropy_by_itself():
    model, fused = own(), own()
    fused.load_state_dict(model.state_dict())
    close(fuse(fused, head_loss=True)(**batch()), model(**batch()))


def smooth(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)


def by_hand(logits, labels):
    return torch.nn.functional.nll_loss(logits.log_softmax(-1), labels)


@pytest.mark.parametrize("loss", [smooth, by_hand])
def test_a_loss_that_needs_all_logits(loss):
    model = fuse(own(), head_loss=True)
    model.loss = loss
    with pytest.raises(UsageError, match="Own was given labels and has taken no cross entropy of its logits"):
        model(**batch())


def test_a_loss_function_that_is_given_later():
    _, fused = pair()
    fused.loss_function = lambda *args, **kwargs: torch.zeros(())
    with pytest.raises(UsageError, match="was given another loss_function since initialize"):
        fused(**batch())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"logits_to_keep": 2}, r"labels of shape \[2, 9\] for logits of shape \[2, 2, 61\]: leave logits_to_keep out"),
        ({"vocab": 60}, "the head gives 61 logits and the loss expects 60"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(more, message):
    _, fused = pair()
    fused.config.vocab_size = more.get("vocab", VOCABULARY)
    with pytest.raises(UsageError, match=message):
        fused(**batch(), **{key: value for key, value in more.items() if key != "vocab"})
    assert vars(fused.lm_head).get("forward") is None, "left on the model after an error"


@pytest.mark.parametrize("family", ["Mixtral", "GPT2", "Gemma"])
def test_relatives(family):
    """A loss with a second term, a head without bias in an older model, norms of another kind."""
    sizes = {"Mixtral": {"num_local_experts": 2, "output_router_logits": True}}.get(family, {})
    if family == "GPT2":
        config = transformers.GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).eval()
    else:
        model = build(family, **sizes)
    expected = model(**batch())
    found = fuse(model, head_loss=True)(**batch())
    close(found.loss, expected.loss)
    assert torch.equal(found.logits + 0, expected.logits)


def test_a_model_inside_of_a_wrapper():
    class Wrapper(torch.nn.Module):
        def __init__(self, inner) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **inputs):
            return self.inner(**inputs)

    model = Wrapper(build())
    expected = model(**batch()).loss
    found = fuse(model, head_loss=True)(**batch())
    close(found.loss, expected)
    assert isinstance(found.logits, LateLogits)

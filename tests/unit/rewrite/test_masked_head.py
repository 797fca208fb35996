"""The fused head in masked language models, which take their loss themselves and have few labels."""

import pytest
import torch

import mizzen.rewrite.head as head_module
from mizzen.kernels.head_loss import LABELLED_STEP, head_loss, plain_head_loss, with_labels
from mizzen.rewrite.head import LateLogits
from unit.rewrite.llamas import batch, build, choose, fuse, transformers

VOCABULARY, LENGTH = 67, 400
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"intermediate_size": 16, "max_position_embeddings": LENGTH + 2},
}
MODELS = {
    "BertForMaskedLM": {},
    "BertForPreTraining": {"next_sentence_label": torch.tensor([0, 1])},
    "RobertaForMaskedLM": {},
    "ElectraForMaskedLM": {},
    "DistilBertForMaskedLM": {},
}


def masked(name):
    torch.manual_seed(0)
    sizes = {"pad_token_id": 0} | SIZES
    if name.startswith("DistilBert"):
        renamed = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
        sizes = {renamed.get(key, key): value for key, value in sizes.items()} | {"hidden_dim": 16}
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**sizes)).eval()
    head = model.get_output_embeddings()
    torch.nn.init.normal_(head.weight)
    torch.nn.init.normal_(head.bias)
    return model


def words(share=0.15):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator)
    chosen = torch.rand(tokens.shape, generator=generator) < share
    return {"input_ids": tokens.masked_fill(chosen, 1), "labels": tokens.masked_fill(~chosen, -100)}


def run(model, inputs):
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return output, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("keys", [{}, {"head_labelled": False}, {"head_chunk": 100}], ids=str)
def test_loss_and_every_gradient(name, keys):
    model, inputs = masked(name), words() | MODELS[name]
    expected, gradients = run(model, inputs)
    found, others = run(fuse(model, head_loss=True, **keys), inputs)
    assert torch.allclose(found.loss, expected.loss, rtol=2e-6)
    for each, gradient in gradients.items():
        assert torch.allclose(others[each], gradient, rtol=1e-4, atol=1e-6), each
    logits = found.prediction_logits if "Pre" in name else found.logits
    assert isinstance(logits, LateLogits) and not logits.is_computed
    assert torch.equal(logits.view(-1) + 0, (expected.prediction_logits if "Pre" in name else expected.logits).view(-1))


def test_only_tokens_with_a_label_reach_the_head(monkeypatch):
    seen = []

    def spy(hidden, *args, labelled, **keys):
        seen.append(labelled)
        return head_loss(hidden, *args, labelled=labelled, **keys)

    monkeypatch.setattr(head_module, "head_loss", spy)
    inputs = words()
    fuse(masked("BertForMaskedLM"), head_loss=True)(**inputs)
    fuse(masked("BertForMaskedLM"), head_loss=True, head_labelled=False)(**inputs)
    fuse(build(), head_loss=True)(**batch())
    fuse(build(), head_loss=True, head_labelled=True)(**batch())
    counts = [int((each["labels"] != -100).sum()) for each in (inputs, batch())]
    assert seen == [counts[0], None, None, counts[1]]


def test_rows_that_are_taken():
    labels = words()["labels"].view(-1)
    hidden = torch.arange(len(labels)).unsqueeze(1)
    count = int((labels != -100).sum())
    rows, taken = with_labels(hidden, labels, count, -100)
    assert len(rows) == len(taken) == LABELLED_STEP and torch.equal(taken, labels[rows.view(-1)])
    assert torch.equal(rows.view(-1)[:count], (labels != -100).nonzero().view(-1))
    assert with_labels(hidden, labels, 700, -100)[0] is hidden, "most of them are not worth a gather"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("share", [0.0, 0.15, 1.0])
def test_any_number_of_labels(share, reduction):
    labels = words(share)["labels"]
    hidden, weight = torch.randn(2, LENGTH, 4), torch.randn(VOCABULARY, 4)
    count = int((labels != -100).sum())
    expected = plain_head_loss(hidden, weight, labels, reduction=reduction)
    found = head_loss(hidden, weight, labels, reduction=reduction, labelled=count)
    assert torch.allclose(found, expected, rtol=2e-6, equal_nan=True)


def test_a_wrong_count_is_no_wrong_loss():
    labels, hidden = words(0.5)["labels"], torch.randn(2, LENGTH, 4)
    assert head_loss(hidden, torch.randn(VOCABULARY, 4), labels, labelled=3).isnan()


def test_labels_of_two_calls_are_not_mixed_up():
    """A loss that the model takes of labels it was not called with is counted anew: here, not at all."""
    model = fuse(masked("BertForMaskedLM"), head_loss=True)
    first, second = words(), words(0.5)
    assert model(**first).loss != model(**second).loss
    count = head_module.LabelCount(first["labels"])
    assert count.of(second["labels"], -100) is None
    assert count.of(first["labels"].view(-1), 0) is None
    assert count.of(first["labels"].view(-1), -100) == int((first["labels"] != -100).sum())


def test_labels_without_a_loss():
    """BertForPreTraining gives none when it is not told which sentence came next."""
    output = fuse(masked("BertForPreTraining"), head_loss=True)(**words())
    assert output.loss is None and isinstance(output.prediction_logits, LateLogits)


def test_the_plan_says_so():
    said = str(choose(masked("BertForMaskedLM"), head_loss=True))
    assert said == "the loss of cls.predictions.decoder over chunks, tokens without a label left out"

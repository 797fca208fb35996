"""Which layer of a model makes its logits, and what the model says it does to them."""

import pytest
import torch
from torch import nn

from groups import Later
from mizzen.model.head import HeadSketch
from mizzen.model.sketch import Sketch

transformers = Later("transformers")
SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 11,
    "head_dim": 4,
}


def made(family, kind="ForCausalLM", **more):
    with torch.device("meta"):
        return getattr(transformers, f"{family}{kind}")(getattr(transformers, f"{family}Config")(**SIZES, **more))


def test_a_causal_model():
    assert Sketch.of(made("Llama")).head == HeadSketch("", "lm_head", "Linear", "ForCausalLMLoss")


def test_a_model_inside_of_others():
    outer = nn.Sequential(nn.Identity(), nn.ModuleDict({"model": made("Llama")}))
    head = Sketch.of(outer).head
    assert (head.model, head.path) == ("1.model", "1.model.lm_head")


@pytest.mark.parametrize(
    ("family", "more", "changes"),
    [
        ("Gemma2", {}, ("final_logit_softcapping=30.0",)),  # its attention has another one, which does not matter
        ("Gemma2", {"final_logit_softcapping": None}, ()),
        ("Cohere", {"logit_scale": 0.5}, ("logit_scale=0.5",)),
        ("Granite", {"logits_scaling": 4.0}, ("logits_scaling=4.0",)),
        ("Granite", {}, ()),
    ],
    ids=str,
)
def test_what_is_done_to_the_logits(family, more, changes):
    assert Sketch.of(made(family, **more)).head.changes == changes


@pytest.mark.parametrize("kind", ["Model", "ForSequenceClassification"])
def test_models_without_such_a_head(kind):
    assert Sketch.of(made("Llama", kind)).head is None


def test_a_loss_that_a_forward_takes_itself():
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=11)
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config)
    assert Sketch.of(model).head.loss == "CrossEntropyLoss"


def test_a_loss_that_the_model_holds():
    config = transformers.DistilBertConfig(dim=8, hidden_dim=8, n_layers=1, n_heads=2, vocab_size=11)
    assert Sketch.of(transformers.DistilBertForMaskedLM(config)).head.loss == "CrossEntropyLoss"


def test_a_loss_that_nothing_is_known_of():
    class Other(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None):
            return self.lm_head(self.model(input_ids).last_hidden_state).logsumexp(-1).sum()

    assert Sketch.of(Other(made("Llama").config)).head.loss == ""


def test_the_settings_of_the_text_of_several_media():
    model = made("Llama")
    model.config.text_config = transformers.Gemma2Config()
    assert Sketch.of(model).head.changes == ("final_logit_softcapping=30.0",)


def test_models_of_nobody():
    assert Sketch.of(nn.Linear(2, 2)).head is None
    assert Sketch.of_shapes({"lm_head.weight": (2, 2)}).head is None


def test_who_turns_queries_and_keys():
    turning = [module.path for module in Sketch.of(made("Llama")).modules if module.is_rotary]
    assert turning == ["model.layers.0.self_attn"]

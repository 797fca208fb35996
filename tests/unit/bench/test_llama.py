"""The work of the GPU bench: its size is the published one, and each system that needs no peer takes the same steps."""

import pytest

from groups import Later

bert, llama, systems = (Later(f"bench.{name}", needs="transformers") for name in ("bert", "llama", "systems"))


def test_the_size_is_counted_right():
    import torch

    with torch.device("meta"):
        model = llama.build(llama.Size())
    assert sum(parameter.numel() for parameter in model.parameters()) == llama.Size().parameters == 1_107_363_840
    assert llama.Size().flops == pytest.approx(115.46e12, rel=1e-3)


SMALL = {
    "hidden": 16,
    "layers": 1,
    "feed": 32,
    "heads": 2,
    "groups": 1,
    "vocabulary": 32,
    "samples": 1,
    "length": 8,
}


def test_plain_and_flat_train_alike():
    runs = {}
    for system in ("plain", "flat"):
        step = llama.prepare(system, SMALL)
        runs[system] = [float(step(number)) for number in range(6)]
    assert runs["flat"] == pytest.approx(runs["plain"], rel=2e-2)
    assert runs["flat"][4] < runs["flat"][0]  # the same batch, four steps later


def test_every_name_is_a_kind_and_a_stage():
    for name in (*llama.EAGER, *llama.FULL, *llama.COMPILED, *llama.FUSED, *bert.SYSTEMS, *bert.OTHERS):
        system, *extras = name.split("+")
        kind, _, stage = system.partition("-")
        assert kind in systems.KINDS and stage in ("", "0", "1", "2", "3")
        assert set(extras) <= {*systems.PRETENDED, "compile", "fused", "told", "whole"}
    assert {"mizzen-2+fused", "mizzen-0+compile+fused"} < set(llama.FUSED)


@pytest.mark.parametrize("system", ["mizzen-0+fused", "mizzen-0+compile+fused"])
def test_the_keys_of_a_fused_system(system, monkeypatch):
    seen = {}
    monkeypatch.setitem(systems.KINDS, "mizzen", lambda work: seen.update(work.config))
    llama.prepare(system, SMALL)
    assert seen["fused"] == dict.fromkeys(("head_loss", "rms_norm", "rotary", "swiglu"), True)
    assert ("compile" in seen) == ("+compile" in system)


TINY = {"hidden": 16, "layers": 1, "heads": 2, "feed": 32, "vocabulary": 64, "samples": 2, "length": 8}


def test_the_flops_of_bert_are_those_of_its_products():
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    size = bert.Size(**TINY | {"vocabulary": 10**6})
    with torch.device("meta"):
        model = bert.build(bert.Size(**TINY))
        inputs = bert.batch(bert.Size(**TINY), 0, torch.device("meta"))
        counter = FlopCounterMode(display=False)
        with counter:
            model(**inputs).loss.backward()
    counted = counter.get_total_flops()
    full = bert.Size(**TINY)
    expected = full.flops + 6 * full.tokens * (1 - bert.LABELLED) * full.vocabulary * full.hidden
    assert counted == pytest.approx(expected, rel=0.03)
    assert size.flops > full.flops


def losses(system):
    step = bert.prepare(system, TINY)
    return [float(step(number)) for number in range(6)]


@pytest.mark.wide
def test_bert_trains_alike_with_and_without_mizzen(world):
    (found,) = world(1).run(losses, "mizzen-2+fused")
    assert found == pytest.approx(losses("plain"), rel=5e-2)
    assert found[4] != found[0]

"""Models that are hard to shard train at stage 3 as they do at stage 2, bit by bit where the order of sums is fixed."""

import pytest
import torch

from ranks.parallel.zero.full.models import MODELS, train


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_stage_3_is_stage_2(world, kind, ranks):
    expected = world(ranks).run(train, kind, 2, deterministic=True)
    assert len(set(expected[0][0])) > 1
    for (losses, norms, values), (their_losses, their_norms, others) in zip(
        world(ranks).run(train, kind, 3, deterministic=True), expected, strict=True
    ):
        assert losses == pytest.approx(their_losses, rel=1e-6)
        assert norms == pytest.approx(their_norms, rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(value, others[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["Base", "TiedBlocks", "Branching", "Lora"])
def test_accumulation_gives_the_bits_of_stage_2(world, kind):
    keys = {"gradient_accumulation_steps": 4, "deterministic": True}
    expected, found = (world(2).run(train, kind, stage, **keys)[0] for stage in (2, 3))
    assert found[0] == expected[0]
    assert found[1] == expected[1]
    assert all(torch.equal(found[2][name], expected[2][name]) for name in expected[2])

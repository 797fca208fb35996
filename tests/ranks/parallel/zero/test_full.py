"""Stage 3 on ranks."""

import pytest

from parity.programs import Case, reference
from parity.test_grid import train


@pytest.mark.parametrize("variant", ["plain", "tied", "frozen", "unused", "groups"])
def test_losses(world, variant):
    case = Case(3, 2, 2, 0.5, variant, samples=16)
    expected, masters = reference(case)
    for losses, values, _ in world(2).run(train, case):
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, value in values.items():
            assert (value - masters[name]).abs().mean() < 1e-5 / 4, name

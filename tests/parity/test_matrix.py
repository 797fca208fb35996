"""What `mizzen plan --matrix` calls a yes trains as one process does."""

import pytest

from breadth import FULL, covering, together
from mizzen.plan.matrix import combinations_of_matrix, ranks_of, refusals_of
from parity.matrix import reference, train

ACCEPTED = [each for each in combinations_of_matrix() if not refusals_of(each)]
FEW = covering([each for each in ACCEPTED if ranks_of(each) <= 4], 2)
"""On two or four ranks: every two options that fit there."""
MANY = [
    ("stage 1", "pp 2", "tp 2", "accumulated", "recomputed", "eager", "fused"),
    ("HSDP", "pp 2", "tp 1", "accumulated", "kept", "compiled", "plain"),
    ("MiCS", "pp 1", "tp 2", "accumulated", "recomputed", "eager", "fused"),
    ("HSDP", "pp 1", "tp 2", "one micro batch", "recomputed from the host", "eager", "plain"),
    ("MiCS", "pp 2", "tp 1", "one micro batch", "recomputed", "eager", "fused"),
    ("stage 3", "pp 2", "tp 2 with cut sequences", "accumulated", "kept", "eager", "plain"),
    ("HSDP", "pp 1", "tp 2 with cut sequences", "accumulated", "recomputed", "eager", "fused"),
    ("MiCS", "pp 1", "tp 2 with cut sequences", "one micro batch", "kept", "eager", "plain"),
]
"""On eight: what needs more ranks."""
SHORT = covering([each for each in ACCEPTED if ranks_of(each) <= 4 and "eager" in each], 1)
"""What every run takes: every option once but for the compiler, which takes long."""
CASES = ACCEPTED if FULL else [*dict.fromkeys((*SHORT, *FEW, *MANY))]
TIED = {"head.weight": "embed.weight"}
AT_ONCE = {2: 24, 4: 16, 8: 8, 16: 4} if FULL else {2: 4, 4: 4, 8: 1, 16: 1}
"""How many cases run one after the other on the same ranks, by the number of these."""
GROUPS = together(CASES, ranks_of, SHORT, AT_ONCE)


def check(found: list) -> None:
    losses, before, updates = reference()
    seen = set()
    for given, values in found:
        assert given == pytest.approx(losses, rel=1e-5)
        for known, value in values.items():
            name = known if known in updates else TIED[known]
            assert (value - before[name] - updates[name]).norm() <= 2e-3 * updates[name].norm(), name
            seen.add(name)
    assert seen == set(updates)


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("cases", GROUPS)
def test_what_goes_together_trains_as_one_process(world, cases):
    limit, ranks = 240 + 60 * len(cases), world(ranks_of(cases[0]))
    for case, found in zip(cases, ranks.each(train, [(case,) for case in cases], timeout=limit), strict=True):
        try:
            check(found)
        except AssertionError as error:
            raise AssertionError(f"{' / '.join(case)}: {error}") from error

"""Which lots rest where, by budgets alone."""

import pytest

from mizzen.config.load import load
from mizzen.errors import PlanError
from mizzen.offload.places import Budget, OffloadSettings, places_for


def test_what_is_completed_last_stays_near():
    budget = Budget(device=25, host=30, nvme=None)
    assert places_for([10] * 8, OffloadSettings(budget)) == ("nvme",) * 3 + ("host",) * 3 + ("device",) * 2


def test_ratio_counts_bytes():
    settings = OffloadSettings.of(load({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}}))
    assert places_for([10] * 10, settings) == ("host",) * 3 + ("device",) * 7
    assert not OffloadSettings.of(load({})).is_on


def test_what_fits_nowhere_is_refused_with_numbers():
    with pytest.raises(PlanError, match=r"do not fit their places \(device .*, host .*, nvme .*\): raise a limit"):
        places_for([1 << 30] * 4, OffloadSettings(Budget(0, 1 << 30, 0)))

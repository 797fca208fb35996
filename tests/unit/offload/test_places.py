"""Which lots rest where, by budgets alone."""

import pytest

from mizzen.config.load import load
from mizzen.errors import PlanError
from mizzen.offload.places import Budget, OffloadSettings, ParameterSettings, parameter_places, places_for


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


def test_parameters_in_host_memory_are_a_part_of_its_budget():
    settings = OffloadSettings(Budget(0, 50, None))
    assert places_for([10] * 6, settings) == ("nvme",) + ("host",) * 5
    assert places_for([10] * 6, settings.beside(30)) == ("nvme",) * 4 + ("host",) * 2
    assert settings.beside(0) == settings
    with pytest.raises(PlanError, match=r"parameters of 51 B .* offload.host_bytes is 50 B: raise it, add ranks"):
        settings.beside(51)
    with pytest.raises(PlanError, match=r"\(device 0 B, host 50 B, nvme 0 B; parameters take 30 B of host\)"):
        places_for([10] * 6, OffloadSettings(Budget(0, 50, 0)).beside(30))
    without = OffloadSettings(Budget(0, None, 0))
    assert places_for([10] * 6, without.beside(1000)) == ("host",) * 6


def test_what_others_have_taken_is_gone():
    settings = OffloadSettings(Budget(25, 30, None))
    rest = settings.after([10, 10, 10], ["device", "host", "host"])
    assert rest.budget == Budget(15, 10, None)
    assert OffloadSettings(place="host").after([10], ["host"]) == OffloadSettings(place="host")


def parameters(**section):
    return ParameterSettings.of(load({"zero_optimization": {"stage": 3, "offload_param": section}}))


def test_parameters_rest_where_they_are_asked_to():
    assert parameter_places([5, 10], ParameterSettings.of(load({}))) == ("device", "device")
    assert parameter_places([5, 10], parameters(device="cpu")) == ("host", "host")
    assert parameter_places([5, 10], parameters(device="nvme", nvme_path="/x")) == ("host", "host")


def test_the_first_units_stay_in_host_memory_as_far_as_they_may():
    settings = parameters(device="nvme", nvme_path="/x", max_in_cpu=15)
    assert parameter_places([5, 10, 1, 0], settings) == ("host", "host", "nvme", "nvme")
    assert parameter_places([16, 1], settings) == ("nvme", "nvme")


def test_a_budget_of_the_host_alone_leaves_nothing_more_on_the_device_than_the_ratio():
    section = {"offload_optimizer": {"device": "cpu"}}
    settings = OffloadSettings.of(load({"zero_optimization": section, "offload": {"host_bytes": 100}}))
    assert places_for([10] * 4, settings) == ("host",) * 4
    section["offload_optimizer"]["ratio"] = 0.5
    settings = OffloadSettings.of(load({"zero_optimization": section, "offload": {"host_bytes": 100}}))
    assert places_for([10] * 4, settings) == ("host",) * 2 + ("device",) * 2
    without = OffloadSettings.of(load({"offload": {"host_bytes": 100}}))
    assert places_for([10] * 4, without) == ("device",) * 4

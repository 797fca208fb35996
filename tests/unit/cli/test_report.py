"""`mizzen report`: for people and for programs."""

import json

import torch


def test_the_report_names_versions_and_devices(mizzen):
    ran = mizzen("report")
    assert ran.code == 0
    assert torch.__version__ in ran.out


def test_the_report_as_json(mizzen):
    found = json.loads(mizzen("report", "--json").out)
    assert found["versions"]["torch"]["value"] == torch.__version__

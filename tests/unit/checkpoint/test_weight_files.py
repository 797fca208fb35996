"""Weights in files, of which a rank reads what it keeps."""

import pytest
import torch
from safetensors.torch import save_file

from mizzen.checkpoint import weight_files
from mizzen.checkpoint.weight_files import WeightFiles
from mizzen.config.layout import Layout
from mizzen.errors import CheckpointError
from mizzen.model.home import Home, Site, evenly

WHOLE = torch.arange(12 * 10, dtype=torch.float32).view(12, 10)
HOMES = {
    "rows": Home().cut("tp", 0, evenly(12, 3)),
    "columns": Home().cut("tp", 1, evenly(10, 3)),
    "fused rows": Home().cut("tp", 0, (2, 2, 2), (1, 1, 1), (1, 1, 1)),
    "whole": Home(),
}


@pytest.fixture(params=["safetensors", "pt"])
def files(request, tmp_path):
    path = tmp_path / f"weights.{request.param}"
    tensors = {"matrix": WHOLE, "number": torch.tensor(3.0)}
    save_file(tensors, path) if request.param == "safetensors" else torch.save(tensors, path)
    return WeightFiles.open(path)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("band", [1, 90, 10**6])
def test_a_rank_reads_what_its_home_keeps(files, monkeypatch, home, band):
    monkeypatch.setattr(weight_files, "BAND", band)
    layout = Layout.fit(3, tp=3)
    for rank in range(3):
        site = Site(tuple(WHOLE.shape), HOMES[home], layout, rank)
        assert torch.equal(files.read_site("matrix", site), site.part_of(WHOLE))


def test_a_tensor_without_dimensions_and_one_of_which_a_rank_has_nothing(files):
    assert files.read("number", ()) == 3
    assert files.read("matrix", (12, 10), [[], [(0, 10)]]).shape == (0, 10)


def test_another_shape_is_refused_with_both(files):
    with pytest.raises(CheckpointError, match=r"'matrix' has shape \[12, 10\]; the model's has \[10, 12\]"):
        files.read("matrix", (10, 12))

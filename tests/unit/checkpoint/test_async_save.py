"""Copies for a save beside training are pinned and waited for as the accelerator says, whichever it is."""

import torch

from mizzen.accelerator.cpu import Cpu
from mizzen.ambient import AMBIENT
from mizzen.checkpoint.save import Staging
from mizzen.checkpoint.write import Item
from mizzen.model.piece import piece_of_whole


class Elsewhere(Cpu):
    """A device whose tensors lie where the host's do, and that says that they do not."""

    shares_host_memory = False

    def __init__(self):
        super().__init__()
        self.calls = []

    def pin_memory(self, tensor):
        self.calls.append(("pin", tuple(tensor.shape)))
        return tensor

    def synchronize(self, index=None):
        self.calls.append(("synchronize", index))


def items():
    return [Item("model", piece_of_whole(name, torch.full((3,), 2.0))) for name in "ab"]


def test_copies_from_any_device_are_pinned_and_waited_for_once(monkeypatch):
    accelerator, staging = Elsewhere(), Staging()
    monkeypatch.setattr(AMBIENT, "accelerator", accelerator)
    first = staging.copies(items())
    assert accelerator.calls == [("pin", (3,)), ("pin", (3,)), ("synchronize", None)]
    second = staging.copies(items())
    assert accelerator.calls[3:] == [("synchronize", None)]
    assert [each.piece.data.tolist() for each in second] == [[2.0] * 3] * 2
    assert [each.piece.data.data_ptr() for each in first] == [each.piece.data.data_ptr() for each in second]


def test_what_lies_on_the_host_is_only_copied(monkeypatch):
    accelerator = Elsewhere()
    accelerator.name = "npu"
    monkeypatch.setattr(AMBIENT, "accelerator", accelerator)
    Staging().copies(items())
    monkeypatch.setattr(AMBIENT, "accelerator", Cpu())
    Staging().copies(items())
    assert accelerator.calls == []

"""What is not in memory is saved without all of it being there at once."""

from weakref import ref

import numpy
import pytest
import torch

from mizzen.checkpoint.rank_group import RankGroup
from mizzen.checkpoint.read import Reader
from mizzen.checkpoint.save import SaveOptions, Staging, begin, commit, write
from mizzen.checkpoint.write import Item, write_items
from mizzen.errors import UsageError
from mizzen.model.box import boxes_of_range
from mizzen.model.piece import Piece, Unread, piece_of_whole


class Tier:
    """Hands out copies, and knows how much of their memory is alive, under whatever tensor."""

    def __init__(self) -> None:
        self.reads = 0
        self.most = 0
        self._memory = []

    def read(self, number: int) -> torch.Tensor:
        self.reads += 1
        memory = numpy.arange(30, dtype=numpy.float32) + numpy.float32(100 * number)
        self._memory.append(ref(memory))
        self.most = max(self.most, sum(each() is not None for each in self._memory))
        return torch.from_numpy(memory)

    def item(self, number: int) -> Item:
        """A range of a matrix, which is three boxes of it."""
        source = Unread((30,), torch.float32, lambda: self.read(number))
        return Item("exp_avg", Piece(f"w{number}", (5, 8), boxes_of_range((5, 8), 5, 35), source))


def in_memory(item: Item) -> Item:
    return Item(item.kind, Piece(item.piece.name, item.piece.shape, item.piece.boxes, item.piece.data))


def test_each_is_read_once_and_let_go_before_the_next(tmp_path):
    tier = Tier()
    items = [tier.item(number) for number in range(4)]
    assert [item.nbytes for item in items] == [120] * 4
    assert tier.reads == 0
    write_items(tmp_path / "unread.safetensors", items)
    assert (tier.reads, tier.most) == (4, 1)
    write_items(tmp_path / "plain.safetensors", [in_memory(item) for item in items])
    assert (tmp_path / "unread.safetensors").read_bytes() == (tmp_path / "plain.safetensors").read_bytes()


def test_a_save_beside_training_copies_each_once():
    tier = Tier()
    copies = Staging().copies([tier.item(number) for number in range(4)])
    assert (tier.reads, tier.most) == (4, 1)
    assert [int(item.piece.data[0]) for item in copies] == [0, 100, 200, 300]


def test_a_checkpoint_is_not_read_into_what_is_not_in_memory(tmp_path):
    tier, team, how = Tier(), RankGroup(), SaveOptions(run="run")
    ticket = begin(tmp_path, "tag", team, how)
    whole = Item("exp_avg", piece_of_whole("w0", torch.zeros(5, 8)))
    commit(ticket, write(ticket, [whole], team), None, {"counters": {"global_steps": 0}}, team, how)
    with Reader(tmp_path / "tag") as reader, pytest.raises(UsageError, match="not in memory"):
        reader.fill("exp_avg", tier.item(0).piece)
    assert tier.reads == 0

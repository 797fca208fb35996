"""Pieces: any way of cutting a tensor can be copied into any other way of cutting it, and nothing is lost."""

import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mizzen.config.layout import Layout
from mizzen.errors import UsageError
from mizzen.model.box import Box, boxes_of_range
from mizzen.model.home import Home, Site
from mizzen.model.piece import Piece, Readers, Unread, assemble, copy_overlap, counted, covers, piece_of_range

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def numbers(shape):
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def piece_of_boxes(tensor, boxes):
    whole = Box.whole(tensor.shape)
    parts = [tensor[box.slices(whole)] for box in boxes]
    data = parts[0].clone() if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts] or [torch.empty(0)])
    return Piece("w", tuple(tensor.shape), tuple(boxes), data)


def split_flat(draw, tensor):
    total = tensor.numel()
    edges = [0, *sorted(draw(st.lists(st.integers(0, total), max_size=5))), total]
    flat = tensor.reshape(-1)
    return [
        piece_of_range("w", tensor.shape, flat[low:high].clone(), low, high)
        for low, high in zip(edges, edges[1:], strict=False)
    ]


def split_boxes(draw, tensor):
    """Cut boxes in two at random places, then deal them out to as many holders as there are."""
    boxes = [] if tensor.numel() == 0 else [Box.whole(tensor.shape)]
    for _ in range(draw(st.integers(0, 6)) if tensor.dim() and boxes else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, tensor.dim() - 1))
        at = draw(st.integers(box.start[dim], box.stop[dim]))
        halves = (
            Box(box.start, (*box.stop[:dim], at, *box.stop[dim + 1 :])),
            Box((*box.start[:dim], at, *box.start[dim + 1 :]), box.stop),
        )
        boxes += [half for half in halves if not half.is_empty]
    holders = [draw(st.integers(0, 3)) for _ in boxes]
    return [
        piece_of_boxes(tensor, [box for box, at in zip(boxes, holders, strict=True) if at == holder])
        for holder in range(4)
    ]


@st.composite
def tensors_cut_twice(draw):
    tensor = numbers(draw(shapes))
    source, target = (draw(st.sampled_from([split_flat, split_boxes])) for _ in range(2))
    return tensor, source(draw, tensor), target(draw, torch.full_like(tensor, -1))


@given(tensors_cut_twice())
def test_any_split_copied_into_any_other_split_gives_the_same_tensor(case):
    tensor, sources, targets = case
    copied = sum(copy_overlap(source, target) for target in targets for source in sources)
    assert copied == tensor.numel()
    assert torch.equal(assemble(targets), tensor)
    assert covers(sources).is_exact and covers(targets).is_exact


@given(tensors_cut_twice(), st.data())
def test_what_one_piece_holds_can_be_read_and_written_box_by_box(case, data):
    tensor, pieces, _ = case
    piece = data.draw(st.sampled_from(pieces))
    for box, part in piece.parts():
        index = box.slices(Box.whole(piece.shape))
        assert torch.equal(part, tensor[index]) and torch.equal(piece.read(box), part)
        piece.write(box, -tensor[index])
        assert torch.equal(piece.read(box), -tensor[index])


def test_reading_spans_the_boxes_of_a_piece():
    flat = numbers((20,))
    piece = piece_of_range("w", (4, 5), flat[3:17], 3, 17)
    assert len(piece.boxes) == 3
    assert piece.read(Box((0, 3), (3, 5))).tolist() == [[3, 4], [8, 9], [13, 14]]
    piece.write(Box((2, 0), (4, 2)), torch.full((2, 2), -1.0))
    assert flat.tolist() == [*range(10), -1, -1, *range(12, 15), -1, -1, *range(17, 20)]


def test_what_was_read_is_a_copy():
    piece = piece_of_range("w", (4,), numbers((4,)), 0, 4)
    piece.read(Box((0,), (2,))).zero_()
    assert piece.data.tolist() == [0, 1, 2, 3]


def test_a_range_in_one_box_has_the_shape_of_the_box_and_shares_memory():
    flat = numbers((12,))
    piece = piece_of_range("w", (4, 3), flat[3:9], 3, 9)
    assert piece.boxes == (Box((1, 0), (3, 3)),) and piece.data.shape == (2, 3)
    piece.data.fill_(-1)
    assert flat.tolist() == [0, 1, 2, *[-1] * 6, 9, 10, 11]


def test_parameters_are_written_without_autograd_noticing():
    parameter = torch.nn.Parameter(numbers((2, 3)))
    target = Piece("w", (2, 3), (Box.whole((2, 3)),), parameter)
    copy_overlap(piece_of_range("w", (2, 3), -numbers((6,)), 0, 6), target)
    assert torch.equal(parameter.detach(), -numbers((2, 3))) and parameter.is_leaf and parameter.grad_fn is None


def test_copying_casts_to_the_dtype_of_the_target():
    source = piece_of_range("w", (3,), torch.tensor([1.0, 1 / 3, 1e-9]), 0, 3)
    target = piece_of_range("w", (3,), torch.zeros(3, dtype=torch.bfloat16), 0, 3)
    assert copy_overlap(source, target) == 3
    assert target.dtype is torch.bfloat16 and torch.equal(target.data, source.data.bfloat16())


def test_a_strided_flat_tensor_is_written_in_place():
    base = torch.zeros(8)
    piece = Piece("w", (2, 4), boxes_of_range((2, 4), 2, 6), base[::2])
    piece.write(Box((1, 0), (2, 2)), torch.tensor([[1.0, 2.0]]))
    assert base.tolist() == [0, 0, 0, 0, 1, 0, 2, 0]


def test_a_scalar_is_one_element():
    source = Piece("scale", (), (Box((), ()),), torch.tensor(7.0))
    target = piece_of_range("scale", (), torch.zeros(1), 0, 1)
    assert copy_overlap(source, target) == 1
    assert target.data.shape == () and target.read(Box((), ())).item() == 7


def test_a_rank_may_hold_nothing():
    nothing = piece_of_range("w", (2, 3), torch.zeros(0), 4, 4)
    assert (nothing.boxes, nothing.numel) == ((), 0)
    assert Piece("w", (1, 3), (), torch.zeros(0, 3)).numel == 0
    assert copy_overlap(nothing, piece_of_range("w", (2, 3), torch.ones(6), 0, 6)) == 0


def test_copies_are_counted_and_holes_refused():
    one, two = piece_of_range("w", (6,), numbers((6,))[:4], 0, 4), piece_of_range("w", (6,), numbers((6,))[3:], 3, 6)
    assert (covers([one, two]).missing, covers([one, two]).overlapping) == (0, 1)
    assert torch.equal(assemble([one, two]), numbers((6,)))
    assert covers([one]).missing == 2
    with pytest.raises(UsageError, match=r"w\[6\]: 2 elements are in none of the 1 pieces"):
        assemble([one])


def test_a_piece_prints_what_is_held():
    assert str(piece_of_range("w", (2, 3), torch.zeros(4), 1, 5)) == "w[2, 3] float32: [0:1, 1:3] [1:2, 0:2]"


BOX = Box((0, 0), (2, 3))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Piece("w", (2, 3), (BOX,), torch.zeros(6)), r"shape \(2, 3\), not \(6,\)"),
        (lambda: Piece("w", (1, 3), (BOX,), torch.zeros(2, 3)), r"not all within the tensor \(1, 3\)"),
        (lambda: Piece("w", (2, 3), (BOX, BOX), torch.zeros(12)), "boxes overlap"),
        (lambda: Piece("w", (2, 3), (Box((0, 0), (0, 3)),), torch.zeros(0, 3)), "some are empty"),
        (lambda: Piece("w", (2, 3), (), torch.zeros(2)), r"no boxes .* shape \(0,\), not \(2,\)"),
        (lambda: piece_of_range("w", (2, 3), torch.zeros(4), 1, 6), r"w: \[1, 6\) needs a flat tensor of 5"),
        (lambda: piece_of_range("w", (2, 3), torch.zeros(2, 2), 1, 5), r"not \[2, 2\]"),
        (lambda: piece_of_range("w", (2, 3), torch.zeros(3), 0, 3).read(BOX), r"3 of the 6 elements of \[0:2, 0:3\]"),
        (lambda: piece_of_range("w", (2, 3), torch.zeros(3), 0, 3).write(BOX, torch.zeros(2, 3)), "3 of the 6"),
        (lambda: piece_of_range("w", (2, 3), torch.zeros(6), 0, 6).write(BOX, torch.zeros(3, 2)), r"not \(3, 2\)"),
        (
            lambda: copy_overlap(piece_of_range("w", (2,), torch.zeros(2), 0, 2), Piece("w", (3,), (), torch.zeros(0))),
            "different shapes",
        ),
        (lambda: covers([]), "of one tensor were expected, not of 0"),
        (lambda: covers([Piece("a", (3,), (), torch.zeros(0)), Piece("b", (3,), (), torch.zeros(0))]), "not of 2"),
    ],
)
def test_what_is_wrong_is_said_with_the_numbers(wrong, message):
    with pytest.raises(UsageError, match=message):
        wrong()


def test_a_refused_write_changes_nothing():
    piece = piece_of_range("w", (2, 3), numbers((3,)), 0, 3)
    with pytest.raises(UsageError):
        piece.write(BOX, torch.full((2, 3), -1.0))
    assert piece.data.tolist() == [[0, 1, 2]]


# Data that is not in memory


def unread(tensor, reads, box=BOX):
    return Piece("w", (2, 3), (box,), Unread(tuple(tensor.shape), torch.float32, lambda: (reads.append(1), tensor)[1]))


def test_what_an_unread_piece_is_like_is_known_without_reading_it():
    reads = []
    piece = unread(numbers((2, 3)), reads)
    assert (piece.numel, piece.nbytes, piece.dtype, piece.device.type) == (6, 24, torch.float32, "cpu")
    assert str(piece) == "w[2, 3] float32: [0:2, 0:3]"
    assert covers([piece]).is_exact
    assert not reads


def test_an_unread_piece_is_read_once_by_whoever_copies_it():
    reads, flat = [], torch.zeros(6)
    piece = unread(numbers((2, 3)), reads)
    assert copy_overlap(piece, piece_of_range("w", (2, 3), flat[1:5], 1, 5)) == 4  # several boxes
    assert flat.tolist() == [0, 1, 2, 3, 4, 0]
    assert len(reads) == 1
    assert piece.read(Box((1, 0), (2, 3))).tolist() == [[3, 4, 5]]
    assert torch.equal(assemble([piece]), numbers((2, 3)))
    assert len(reads) == 3


def test_an_unread_piece_cannot_be_written_to():
    reads = []
    with pytest.raises(UsageError, match="not in memory: what is written to it would be lost"):
        unread(numbers((2, 3)), reads).write(BOX, numbers((2, 3)))
    assert not reads


@pytest.mark.parametrize("found", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64)])
def test_what_is_read_has_to_be_what_was_promised(found):
    piece = Piece("w", (2, 3), (BOX,), Unread((2, 3), torch.float32, lambda: found))
    with pytest.raises(UsageError, match=r"was read where \[2, 3\] torch.float32 should be"):
        piece.data  # noqa: B018
    with pytest.raises(UsageError, match=r"shape \(2, 3\), not \(6,\)"):
        Piece("w", (2, 3), (BOX,), Unread((6,), torch.float32, lambda: found))


def test_parts_of_what_is_not_in_memory_are_not_read_before_they_are_asked_for():
    layout, reads = Layout.fit(2, tp=2), []
    site = Site((4, 6), Home.data_parallel(layout).cut("tp", 0, (4,)), layout, 0)
    assert site.is_shared

    def load():
        reads.append(1)
        return numbers((4, 6))

    source = Unread((4, 6), torch.float32, load, load_beside=load, readers=Readers())
    parts = list(counted(Piece("w", (4, 6), (Box.whole((4, 6)),), source), site))
    assert reads == [] and len(parts) > 0
    assert torch.equal(assemble([part for part, _ in parts]), numbers((4, 6)))
    plain = list(counted(Piece("w", (4, 6), (Box.whole((4, 6)),), numbers((4, 6))), site))
    assert [(part.boxes, is_mine) for part, is_mine in parts] == [(part.boxes, is_mine) for part, is_mine in plain]


def test_who_changes_something_waits_for_those_who_read_it():
    said = []
    readers = Readers(before=lambda: said.append("comes"), after=lambda: said.append("all are gone"))
    source = Unread((2,), torch.float32, lambda: numbers((2,)), lambda: None, load_beside=torch.ones, readers=readers)
    first, second = source.beside(), source.beside()
    assert first.load is torch.ones and first.keep is None
    first.done()
    first.done()
    piece = Piece("w", (2,), (Box.whole((2,)),), source)
    thread = threading.Thread(target=lambda: (piece.check_writable(), said.append("written")))
    thread.start()
    said.append("read")
    second.done()
    thread.join()
    assert said == ["comes", "comes", "read", "all are gone", "written"]
    assert Unread((2,), torch.float32, lambda: numbers((2,))).beside() is None

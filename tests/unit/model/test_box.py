"""Boxes against brute force: every count and every range is checked on arrays small enough to enumerate."""

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen.errors import UsageError
from mizzen.model.box import Box, Coverage, boxes_of_range, chunk, coverage, flat_range_of

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape):
    sides = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return Box(tuple(low for low, _ in sides), tuple(high for _, high in sides))


@st.composite
def shapes_and_ranges(draw):
    shape = draw(shapes)
    start, stop = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, start, stop


@st.composite
def shapes_and_boxes(draw, count):
    shape = draw(shapes)
    return shape, [draw(boxes_in(shape)) for _ in range(count)]


def grid(shape):
    return np.arange(math.prod(shape)).reshape(shape)


def elements(box, shape):
    return grid(shape)[box.slices(Box.whole(shape))].ravel().tolist()


def fewest(shape, start, stop):
    """The smallest number of contiguous boxes that tile a range, by trying every one."""

    @cache
    def tiles(low):
        if low == stop:
            return 0
        return 1 + min(tiles(high) for high in range(low + 1, stop + 1) if is_box(low, high))

    def is_box(low, high):
        points = np.stack(np.unravel_index(np.arange(low, high), shape)) if shape else np.zeros((0, 1), int)
        return math.prod((points.max(1) - points.min(1) + 1).tolist()) == high - low

    return tiles(start)


@given(shapes_and_ranges())
def test_a_range_becomes_boxes_with_its_elements_in_order(case):
    shape, start, stop = case
    boxes = boxes_of_range(shape, start, stop)
    assert [element for box in boxes for element in elements(box, shape)] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(shapes_and_ranges().filter(lambda case: case[2] - case[1] <= 60))
def test_no_smaller_number_of_boxes_would_do(case):
    assert len(boxes_of_range(*case)) == fewest(*case)


@given(shapes_and_ranges())
def test_each_box_of_a_range_knows_its_range(case):
    shape, start, stop = case
    ranges = [flat_range_of(box, shape) for box in boxes_of_range(shape, start, stop)]
    assert [start, *(high for _, high in ranges)] == [*(low for low, _ in ranges), stop]


@given(shapes_and_boxes(1))
def test_a_box_has_a_flat_range_exactly_when_its_elements_have_no_gaps(case):
    shape, (box,) = case
    held = elements(box, shape)
    if not held:
        assert flat_range_of(box, shape) == (0, 0)
    elif held == list(range(held[0], held[-1] + 1)):
        assert flat_range_of(box, shape) == (held[0], held[-1] + 1)
    else:
        assert flat_range_of(box, shape) is None


def test_a_range_of_a_matrix_is_the_end_of_a_row_whole_rows_and_the_beginning_of_a_row():
    assert boxes_of_range((4, 5), 3, 17) == (Box((0, 3), (1, 5)), Box((1, 0), (3, 5)), Box((3, 0), (4, 2)))


def test_a_scalar_has_one_box_without_intervals():
    assert boxes_of_range((), 0, 1) == (Box((), ()),)
    assert boxes_of_range((), 1, 1) == ()
    assert Box((), ()).numel == 1 and not Box((), ()).is_empty
    assert flat_range_of(Box((), ()), ()) == (0, 1)


@given(shapes_and_boxes(2))
def test_intersection_and_containment_are_those_of_the_elements(case):
    shape, (one, other) = case
    mine, theirs = set(elements(one, shape)), set(elements(other, shape))
    assert set(elements(one.intersection(other), shape)) == mine & theirs
    assert one.intersection(other).is_empty == mine.isdisjoint(theirs)
    assert one.contains(other) == (theirs <= mine)


@given(shapes_and_boxes(1))
def test_shape_and_numel_are_those_of_the_elements(case):
    shape, (box,) = case
    assert box.numel == len(elements(box, shape)) == math.prod(box.shape)
    assert box.is_empty == (box.numel == 0)


def test_a_shifted_box_has_the_same_shape():
    assert Box((1, 2), (3, 5)).shift((10, -2)) == Box((11, 0), (13, 3))


@given(shapes_and_boxes(2))
def test_slices_find_a_box_inside_of_another(case):
    shape, (one, other) = case
    inner = one.intersection(other)
    local = grid(shape)[one.slices(Box.whole(shape))]
    if not inner.is_empty:
        assert local[inner.slices(one)].ravel().tolist() == elements(inner, shape)


@given(st.integers(0, 4).flatmap(shapes_and_boxes))
def test_coverage_counts_what_is_missing_and_what_is_there_again(case):
    shape, boxes = case
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.slices(Box.whole(shape))] += 1
    found = coverage(boxes, shape)
    assert found == Coverage(missing=int((counts == 0).sum()), overlapping=int(np.maximum(counts - 1, 0).sum()))
    assert found.is_exact == bool((counts == 1).all())


def test_coverage_does_not_count_elements_one_by_one():
    shape, ranks = (2**20, 2**17), 2048
    each = math.prod(shape) // ranks + 1
    ranges = [(rank * each, min((rank + 1) * each, math.prod(shape))) for rank in range(ranks)]
    boxes = [box for low, high in ranges for box in boxes_of_range(shape, low, high)]
    assert coverage(boxes, shape).is_exact
    assert coverage(boxes[1:], shape) == Coverage(missing=boxes[0].numel, overlapping=0)


@given(st.integers(0, 20), st.integers(1, 6))
def test_chunks_are_those_of_torch(size, parts):
    torch = pytest.importorskip("torch")
    ours = [chunk(size, parts, index) for index in range(parts)]
    theirs = [each.tolist() for each in torch.arange(size).chunk(parts)]
    theirs += [[]] * (parts - len(theirs))
    assert [list(range(low, high)) for low, high in ours] == theirs


def test_a_box_prints_as_an_index():
    assert str(Box((0, 3), (2, 5))) == "[0:2, 3:5]"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Box((0,), (1, 2)), r"from \(0,\) to \(1, 2\)"),
        (lambda: Box((3,), (1,)), r"from \(3,\) to \(1,\)"),
        (lambda: Box((-1,), (1,)), r"from \(-1,\)"),
        (lambda: Box((0,), (1,)).intersection(Box((), ())), "1 and 0 dimensions"),
        (lambda: Box((0,), (1,)).shift((1, 1)), "2 dimensions does not move a box of 1"),
        (lambda: Box((0,), (5,)).slices(Box((1,), (6,))), r"\[0:5\] does not lie within \[1:6\]"),
        (lambda: boxes_of_range((2, 3), 4, 7), r"\[4, 7\) does not lie in a tensor \(2, 3\) of 6 elements"),
        (lambda: boxes_of_range((2, 3), 4, 3), r"\[4, 3\)"),
        (lambda: flat_range_of(Box((0,), (4,)), (3,)), r"\[0:4\] does not lie in a tensor \(3,\)"),
        (lambda: coverage([Box((0,), (4,))], (3,)), r"\[0:4\] does not lie in a tensor \(3,\)"),
    ],
)
def test_what_is_wrong_is_said_with_the_numbers(wrong, message):
    with pytest.raises(UsageError, match=message):
        wrong()


def test_boxes_that_cross_in_many_dimensions_are_not_counted_for_ever(monkeypatch):
    monkeypatch.setattr("mizzen.model.box.STEPS", 100_000)
    nested = [Box((number,) * 9, (60 - number,) * 9) for number in range(20)]
    with pytest.raises(UsageError, match="boxes that cross in so many ways"):
        coverage(nested, (60,) * 9)

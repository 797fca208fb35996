"""Tags in words and digits; the comparison, with a gather that a test provides."""

import pytest
import torch

from mizzen.comm import tags
from mizzen.comm.agreement import digest
from mizzen.comm.backend import Request, Tag
from mizzen.comm.tags import EXCHANGES, TEXT, CallOrder, compare, compare_parts, differ_on_device, parts, words
from mizzen.errors import CommError

TAG = Tag(3, "layers.1", "forward")
GATHER = Request("all_gather_into_tensor", payload=(torch.ones(8),))


def test_words_hold_all_that_must_agree():
    assert words(GATHER, TAG) == ("step 3, unit 'layers.1', phase 'forward': all_gather_into_tensor of 8 torch.float32")
    rooted = Request("broadcast", payload=(torch.ones(2, dtype=torch.int8),), detail="from rank 1")
    assert words(rooted, TAG).endswith("broadcast from rank 1 of 2 torch.int8")
    assert words(Request("barrier"), TAG).endswith("phase 'forward': barrier")


def test_uneven_exchanges_may_differ_in_size():
    exchange = Request("all_to_all_single", payload=(torch.ones(8),))
    assert words(exchange, TAG).endswith(": all_to_all_single")
    assert words(exchange, uneven=EXCHANGES) == "all_to_all_single of torch.float32"


def test_a_gather_by_gloo_takes_equal_sizes_only():
    gather = Request("gather", payload=(torch.ones(8),), detail="to rank 0")
    assert words(gather) == "gather to rank 0"
    assert words(gather, uneven=EXCHANGES) == "gather to rank 0 of 8 torch.float32"


def exchange(received, sent, *splits):
    return Request("all_to_all_single", (torch.ones(received), torch.ones(sent), *splits))


@pytest.mark.parametrize(
    ("request_", "sends", "expects"),
    [
        (exchange((6,), (4,), [2, 4], [1, 3]), [1, 3], [2, 4]),
        (exchange((4, 3), (6, 3), [1, 3], [6, 0]), [18, 0], [3, 9]),
        (exchange((4,), (4,), None, None), [2, 2], [2, 2]),
        (exchange((0,), (2,), [0, 0], [1, 1]), [1, 1], [0, 0]),
        (exchange((4,), (4,), [4], [1, 1, 2]), [-1, -1], [-1, -1]),
        (Request("all_to_all", ([torch.ones(2), torch.ones(3)], [torch.ones(1), torch.ones(4)])), [1, 4], [2, 3]),
    ],
)
def test_the_parts_of_an_exchange(request_, sends, expects):
    assert parts(request_, 2) == [*sends, *expects]


def test_parts_that_do_not_fit_name_both_ranks():
    compare_parts([[1, 2, 1, 3], [3, 9, 2, 9]], (4, 6))
    with pytest.raises(CommError, match=r"Rank 6 sends 3 elements to rank 4, which expects 7"):
        compare_parts([[1, 2, 1, 7], [3, 9, 2, 9]], (4, 6))


@pytest.mark.parametrize("text", ["", "a", "b", "x" * 1000])
def test_a_digest_and_its_negative_fit_a_tensor(text):
    assert 0 <= digest(text) < 2**62
    assert torch.tensor([digest(text), -digest(text)]).dtype == torch.int64


def texts_of(*others):
    """A gather among this rank and others that are at these texts."""

    def gather(row):
        if row.dtype == torch.int64:
            rows = [torch.tensor([digest(text), len(text.encode()[:TEXT])]) for text in others]
        else:
            said = [bytearray(text.encode()[: row.numel()].ljust(row.numel(), b"\0")) for text in others]
            rows = [torch.frombuffer(text, dtype=torch.uint8) for text in said]
        return torch.stack([row, *rows])

    return gather


def test_equal_texts_pass_with_one_exchange():
    calls = []

    def gather(row):
        calls.append(row.numel())
        return torch.stack([row, row])

    assert compare("here", (0, 1), gather, [7, 8]) == [[7, 8], [7, 8]]
    assert calls == [4]


def test_different_texts_name_every_rank_and_its_place():
    with pytest.raises(CommError) as caught:
        compare("step 1: x", (4, 5, 6, 7), texts_of("step 2: y", "step 1: x", "é" * 300))
    said = str(caught.value)
    assert said.startswith(
        "the ranks have parted ways; nothing was exchanged. ranks 4, 6 at step 1: x; rank 5 at step 2: y"
    )
    assert said.endswith("rank 7 at " + "é" * 128)


@pytest.mark.parametrize(("theirs", "differs"), [("here", False), ("there", True)])
def test_the_flag_of_a_device(theirs, differs):
    def reduce_max(values):
        values.copy_(torch.maximum(values, torch.tensor([digest(theirs), -digest(theirs)])))

    flag = differ_on_device(digest("here"), torch.device("cpu"), reduce_max)
    assert flag.dtype == torch.bool
    assert flag.item() is differs


def agreed(order, calls):
    """What the order says of each call, when all ranks make them."""
    said = []
    for step, name in calls:
        said.append(order.expects((name,), step))
        order.agree()
    return said


def test_an_order_that_repeats_is_known():
    order, step = CallOrder(), ["a", "b", "a", "c"]
    calls = [(number, name) for number in range(5) for name in step]
    assert agreed(order, calls[:8]) == [None] * 8
    assert agreed(order, calls[8:12]) == [None, True, True, True]  # the first of all was made at no later step
    assert agreed(order, calls[12:]) == [True] * 8


def test_another_call_is_no_agreed_one_until_all_have_made_it():
    order = CallOrder()
    agreed(order, [(1, "a")] * 6)
    assert order.expects(("b",), 1) is False
    order.agree()
    assert agreed(order, [(1, "a")] * 6) == [None, None, None, None, False, True]


def test_a_step_that_another_rank_has_not_come_to_is_no_agreed_call():
    order = CallOrder()
    agreed(order, [(1, "a")] * 6)
    assert order.expects(("a",), 2) is False


def test_calls_without_a_step_leave_it_as_it_was():
    order = CallOrder()
    calls = [(1, "a"), (None, "x")] * 6
    assert agreed(order, calls)[-1] is True
    assert order.expects(("a",), 1) is True
    assert order.expects(("a",), 2) is False


def test_an_order_of_too_many_different_calls_is_learnt_anew(monkeypatch):
    monkeypatch.setattr(tags, "REMEMBERED", 8)
    order = CallOrder()
    agreed(order, [(1, str(number)) for number in range(8)])
    assert agreed(order, [(1, "a")] * 7)[-1] is True


def test_an_exchange_of_equal_parts_is_told_from_others_by_its_arguments():
    even = exchange((4,), (4,), None, None)._replace(payload=(torch.ones(4),))
    assert words(even, TAG, uneven=EXCHANGES).endswith("all_to_all_single of 4 torch.float32")
    uneven = exchange((4,), (4,), [2, 2], [2, 2])._replace(payload=(torch.ones(4),))
    assert words(uneven, TAG, uneven=EXCHANGES).endswith("all_to_all_single of torch.float32")

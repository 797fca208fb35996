"""How ranks agree, without ranks: gathers and stores that a test provides."""

import threading

import pytest
import torch

from mizzen.comm import agreement
from mizzen.comm.agreement import Ballot, differing_texts, wait_until


def together(*texts, **options):
    """What `differing_texts` returns on each of some ranks, which are threads here; and the sizes of what they send."""
    barrier, sent, sizes, found = threading.Barrier(len(texts)), {}, [], {}

    def rank(place):
        def gather(row):
            sent[place] = row
            barrier.wait()
            rows = torch.stack([sent[each] for each in range(len(texts))])
            if barrier.wait() == 0:
                sizes.append(row.numel())
            return rows

        found[place] = differing_texts(texts[place], gather, **options)

    threads = [threading.Thread(target=rank, args=(place,)) for place in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[place] for place in range(len(texts))], sizes


def test_texts_that_are_alike_cost_one_exchange():
    found, sizes = together("here", "here", numbers=[5])
    assert found == [({}, [[5], [5]])] * 2
    assert sizes == [3]


def test_texts_that_differ_are_known_to_all():
    found, sizes = together("a", "longer é", "a", "")
    assert found == [({0: "a", 1: "longer é", 2: "a", 3: ""}, [[]] * 4)] * 4
    assert sizes == [2, 9]


def test_a_long_text_is_sent_in_parts(monkeypatch):
    monkeypatch.setattr(agreement, "CHUNK", 4)
    found, sizes = together("0123456789", "x")
    assert found[0] == found[1] == ({0: "0123456789", 1: "x"}, [[], []])
    assert sizes == [2, 4, 4, 2]


def test_a_text_is_cut_and_only_some_versions_are_told(monkeypatch):
    monkeypatch.setattr(agreement, "VERSIONS", 2)
    (found, *_), _ = together("aaaa", "bbbb", "cccc", "aaaa", longest=2)
    assert found[0] == {0: "aa", 1: "bb", 3: "aa"}


class Store:
    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value

    def check(self, keys):
        return all(key in self.values for key in keys)

    def get(self, key):
        return self.values[key]


def test_a_ballot_is_complete_when_all_have_said_something():
    store = Store()
    ballot = Ballot(store, "stop/3", [0, 2])
    ballot.cast(2, b"yes")
    assert (ballot.is_complete(), ballot.value(0), ballot.value(2)) == (False, None, b"yes")
    Ballot(store, "stop/4", [0, 2]).cast(0)
    assert not ballot.is_complete(), "another one has another name"
    ballot.cast(0)
    assert ballot.is_complete()


@pytest.mark.parametrize(("answers", "is_met"), [([True], True), ([False, False, True], True)])
def test_a_wait_ends_when_it_is_met(answers, is_met):
    said = iter(answers)
    assert wait_until(lambda: next(said), 60, pause=0) is is_met


def test_a_wait_ends_in_vain():
    assert wait_until(lambda: False, 0.01, pause=0.001) is False

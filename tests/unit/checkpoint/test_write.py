"""A save whose boxes overlap or leave holes is refused before the rename; what makes up every tensor is not."""

import random
from pathlib import Path

import pytest
import torch

from mizzen.checkpoint import save as protocol
from mizzen.checkpoint.folder import data_name
from mizzen.checkpoint.manifest import BoxTable, FileEntry, StoredBox, TensorEntry
from mizzen.checkpoint.rank_group import RankGroup
from mizzen.checkpoint.read import Reader, verify
from mizzen.checkpoint.save import Contribution, SaveOptions
from mizzen.checkpoint.write import Item, Written, flaws, merge_facts, pack_facts, unwritten, write_items
from mizzen.errors import CheckpointError
from mizzen.files import watched
from mizzen.model.box import Box
from mizzen.model.piece import Piece

TERMS = SaveOptions(run="0123456789abcdef")


class Ranks(RankGroup):
    """The first rank of several that are not there, with what the others bring to the vote."""

    def __init__(self, others, node="node"):
        super().__init__(0, 1, node=node)
        self.others = others

    def gather(self, value, call):
        return [value, *self.others]


def cut(rng, box, times):
    """Disjoint boxes that make up a box, by cuts anywhere."""
    boxes = [box]
    for _ in range(times):
        whole = boxes.pop(rng.randrange(len(boxes)))
        dims = [dim for dim, size in enumerate(whole.shape) if size > 1]
        if not dims:
            boxes.append(whole)
            continue
        dim = rng.choice(dims)
        at = rng.randrange(whole.start[dim] + 1, whole.stop[dim])
        low, high = list(whole.stop), list(whole.start)
        low[dim] = high[dim] = at
        boxes += [Box(whole.start, tuple(low)), Box(tuple(high), whole.stop)]
    return boxes


def layout(rng):
    """Some tensors of two kinds, and of each the boxes by rank."""
    tensors = {}
    for number in range(rng.randint(1, 4)):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 3)))
        boxes = cut(rng, Box.whole(shape), rng.randint(0, 6))
        kind = rng.choice(["model", "exp_avg"])
        tensors[kind, f"t{number}"] = [(rng.randrange(4), box) for box in boxes]
    return tensors


def shape_of(boxes):
    return tuple(max(box.stop[dim] for _, box in boxes) for dim in range(len(boxes[0][1].start)))


def spoil(rng, tensors, shapes):
    """Leave a box out, write one twice, or let one grow over its neighbours or shrink."""
    key = rng.choice(list(tensors))
    boxes, number = tensors[key], rng.randrange(len(tensors[key]))
    rank, box = boxes[number]
    grown = [dim for dim in range(len(box.start)) if box.shape[dim] < shapes[key][dim]]
    shrunk = [dim for dim in range(len(box.start)) if box.shape[dim] > 1]
    way = rng.choice(["lost", "twice", *(["grown"] if grown else []), *(["shrunk"] if shrunk else [])])
    if way == "lost":
        del boxes[number]
    elif way == "twice":
        boxes.append((rng.randrange(4), box))
    else:
        start, stop = list(box.start), list(box.stop)
        dim = rng.choice(grown if way == "grown" else shrunk)
        if way == "shrunk":
            stop[dim] -= 1
        elif start[dim]:
            start[dim] -= 1
        else:
            stop[dim] += 1
        boxes[number] = (rank, Box(tuple(start), tuple(stop)))
    return key


def value_of(shape, box):
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    return whole[box.slices(Box.whole(shape))].contiguous()


def save(root, tensors, shapes, tag="tag"):
    """All ranks write, then the first commits."""
    entries = [TensorEntry(*key, shape, "float32") for key, shape in shapes.items()]
    team = RankGroup()
    ticket = protocol.begin(root, tag, team, TERMS)
    written = []
    for rank in range(4):
        items = [
            Item(key[0], Piece(key[1], shapes[key], (box,), value_of(shapes[key], box)))
            for key, boxes in tensors.items()
            for writer, box in boxes
            if writer == rank
        ]
        path = ticket.folder / data_name(ticket.id, rank)
        written.append(write_items(path, _apart(items), entries))
    others = Ranks([Contribution(each, None, pack_facts({})) for each in written[1:]])
    return protocol.commit(ticket, written[0], None, {"counters": {"global_steps": 1}}, others, TERMS)


def _apart(items):
    """Without a box that one rank has twice: a file could not hold it."""
    return list({(item.kind, item.piece.name, item.piece.boxes): item for item in items}.values())


def contents(root):
    return {path.relative_to(root): path.read_bytes() for path in sorted(Path(root).rglob("*")) if path.is_file()}


def is_flawed(tensors, shapes):
    """By counting every element."""
    for key, boxes in tensors.items():
        count = torch.zeros(shapes[key], dtype=torch.int64)
        for _, box in {(rank, box) for rank, box in boxes}:
            count[box.slices(Box.whole(shapes[key]))] += 1
        if not bool((count == 1).all()):
            return True
    return False


@pytest.mark.parametrize("seed", range(10))
def test_boxes_that_overlap_or_leave_holes_are_refused_before_the_rename(tmp_path, seed):
    rng, refused, operations = random.Random(seed), 0, []
    good = layout(rng)
    save(tmp_path, good, {key: shape_of(boxes) for key, boxes in good.items()})
    before = contents(tmp_path)
    while refused < 10:
        tensors = layout(rng)
        shapes = {key: shape_of(boxes) for key, boxes in tensors.items()}
        kind, name = spoil(rng, tensors, shapes)
        if not is_flawed(tensors, shapes):  # what was written twice was written by one rank
            continue
        operations.clear()
        with watched(lambda operation, path: operations.append(operation)), pytest.raises(CheckpointError) as error:
            save(tmp_path, tensors, shapes)
        assert "rename" not in operations
        assert f"{kind} '{name}'" in str(error.value) and "nothing was saved" in str(error.value)
        refused += 1
    assert contents(tmp_path) == before
    with Reader(tmp_path / "tag") as reader:
        assert verify(reader) == []


def test_boxes_that_make_up_every_tensor_are_taken(tmp_path):
    rng = random.Random(7)
    for number in range(20):
        tensors = layout(rng)
        shapes = {key: shape_of(boxes) for key, boxes in tensors.items()}
        save(tmp_path / str(number), tensors, shapes)
        with Reader(tmp_path / str(number) / "tag") as reader:
            for (kind, name), shape in shapes.items():
                assert torch.equal(reader.whole(kind, name), value_of(shape, Box.whole(shape)))


def written(tensors, boxes):
    """What a rank says that has written boxes (tensor, start, stop) of some tensors."""
    entries = [TensorEntry(*key, shape, "float32") for key, shape in tensors.items()]
    parts = [StoredBox(number, 0, Box(start, stop)) for number, start, stop in boxes]
    return Written.of(entries, FileEntry("x.safetensors", 0, (), BoxTable.of(parts)) if parts else None)


MATRIX = {("model", "a"): (4, 3)}


def test_the_error_has_counts_and_ranks():
    found = flaws({2: written(MATRIX, [(0, (0, 0), (2, 3))]), 5: written(MATRIX, [(0, (1, 0), (3, 3))])})
    assert "model 'a' [4, 3]: 3 elements are missing and 3 are there twice (written by ranks 2, 5)" in found


def test_what_every_rank_leaves_to_another_is_missed():
    tensors = MATRIX | {("exp_avg", "a"): (4, 3), ("step", "a"): ()}
    found = flaws({rank: written(tensors, [(0, (0, 0), (4, 3))] if rank else []) for rank in range(2)})
    assert "does not make up 2 of 3 tensors" in found
    assert "exp_avg 'a' [4, 3]: 12 elements are missing (no rank wrote it)" in found
    assert "step 'a' []: 1 elements are missing (no rank wrote it)" in found
    assert "no rank wrote 1 weights of the model: b" in unwritten(["a", "b"], [TensorEntry("model", "a", (1,), "bool")])
    assert unwritten(["a"], [TensorEntry("model", "a", (1,), "bool")]) == ""


def test_a_box_outside_its_tensor_is_refused():
    assert "does not lie in the tensor" in flaws({0: written(MATRIX, [(0, (1, 0), (5, 3))])})


WHOLE = (0, (0, 0), (4, 3))
TOP, BOTTOM = (0, (0, 0), (2, 3)), (0, (2, 0), (4, 3))


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        ([[WHOLE], [], [WHOLE], []], ""),  # a copy on each node
        ([[TOP], [BOTTOM], [TOP], [BOTTOM]], ""),
        ([[TOP], [], [BOTTOM], []], ""),  # each node has a part
        ([[TOP], [TOP], [BOTTOM], [BOTTOM]], ""),  # what two ranks of a node bring is kept once
        ([[WHOLE], [], [TOP], []], ""),
        ([[TOP], [BOTTOM], [(0, (0, 0), (4, 1))], [(0, (0, 1), (4, 3))]], ""),  # cut in another way
        ([[TOP], [], [TOP], []], "6 elements are missing (written by ranks 0, 2)"),
        ([[WHOLE], [TOP], [BOTTOM], []], "6 are there twice (written by ranks 0, 1, 2)"),
    ],
)
def test_nodes_with_filesystems_of_their_own_may_have_copies(boxes, expected):
    found = flaws({rank: written(MATRIX, mine) for rank, mine in enumerate(boxes)}, ["a", "a", "b", "b"])
    assert expected in found and bool(expected) == bool(found)


def test_facts_of_all_ranks_are_merged():
    first = {"aliases": {"head": "embedding"}, "frozen": ["a"], "names": ["a", "embedding"]}
    second = {"aliases": {"head": "other", "b": "c"}, "frozen": ["b", "a"], "names": ["c"], "extra": {"m": 1}}
    assert merge_facts(map(pack_facts, (first, second, first))) == {
        "aliases": {"head": "embedding", "b": "c"}, "frozen": ["a", "b"], "names": ["a", "embedding", "c"],
        "extra": {"m": 1},
    }  # fmt: skip


def test_thousands_of_tensors_of_many_ranks():
    tensors = {("model", f"layer.{number}.weight"): (256, 8) for number in range(2000)}
    ranks = {
        rank: written(tensors, [(number, (rank * 16, 0), (rank * 16 + 16, 8)) for number in range(2000)])
        for rank in range(16)
    }
    assert flaws(ranks) == ""

"""Manifests, data files and the reader, without ranks."""

import errno
import json
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from mizzen.checkpoint import save as protocol
from mizzen.checkpoint import write
from mizzen.checkpoint.choose import candidates
from mizzen.checkpoint.folder import (
    committed,
    delete,
    mark,
    read_latest,
    surplus,
    sweep,
    sweep_all,
    write_latest,
)
from mizzen.checkpoint.manifest import BoxTable, Manifest, StoredBox, tiles
from mizzen.checkpoint.rank_group import RankGroup
from mizzen.checkpoint.read import Reader, compare, read_manifest, verify
from mizzen.checkpoint.save import SaveOptions, SaveThread
from mizzen.checkpoint.tensors import bytes_of
from mizzen.checkpoint.write import ChunkHasher, Item, merge, write_items
from mizzen.errors import CheckpointError, UsageError
from mizzen.files import watched
from mizzen.model.box import Box, boxes_of_range
from mizzen.model.piece import Piece, piece_of_range, piece_of_whole


def save(root, tensors, tag="tag", step=0, run="run", latest=True, **terms):
    team, how = RankGroup(), SaveOptions(run=run, latest=latest, **terms)
    ticket = protocol.begin(root, tag, team, how)
    items = [Item("model", piece_of_whole(name, tensor)) for name, tensor in tensors.items()]
    facts = {"counters": {"global_steps": step}}
    return protocol.commit(ticket, protocol.write(ticket, items, team), None, facts, team, how)


EVERY = {
    "float": torch.randn(5, 7), "half": torch.randn(3).bfloat16(), "count": torch.tensor(3), "none": torch.zeros(0, 4),
    "flags": torch.tensor([True, False]), "eight": torch.randn(4).to(torch.float8_e4m3fn),
    "big": torch.randn(3, 400_000), "transposed": torch.randn(4, 6).T,
}  # fmt: skip


def test_tensors_come_back(tmp_path):
    save(tmp_path, EVERY)
    with Reader(tmp_path / "tag") as reader:
        for name, tensor in EVERY.items():
            found = reader.whole("model", name)
            assert found.dtype == tensor.dtype and found.shape == tensor.shape
            assert [*bytes_of(found)] == [*bytes_of(tensor)]
        assert verify(reader) == []
    assert read_latest(tmp_path) == "tag"


def test_a_data_file_is_a_safetensors_file(tmp_path):
    save(tmp_path, EVERY)
    (path,) = (tmp_path / "tag").glob("*.safetensors")
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("model/float"), EVERY["float"])


@given(
    rows=st.integers(1, 9), columns=st.integers(1, 9), cuts=st.lists(st.integers(0, 81), max_size=4),
    wanted=st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8), st.integers(0, 8)),
)  # fmt: skip
@settings(max_examples=60)
def test_any_box_out_of_any_boxes(tmp_path_factory, rows, columns, cuts, wanted):
    root = tmp_path_factory.mktemp("box")
    tensor = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    edges = sorted({0, tensor.numel(), *(cut for cut in cuts if cut < tensor.numel())})
    items = [
        Item("model", piece_of_range("a", tensor.shape, tensor.view(-1)[low:high], low, high))
        for low, high in zip(edges, edges[1:], strict=False)
    ]
    written = write_items(root / "x.safetensors", items)
    tensors, files = merge([written])
    reader = Reader(root, Manifest("id", "run", "tag", 0, "", tensors, files))
    top, left = min(wanted[0], rows - 1), min(wanted[1], columns - 1)
    box = Box((top, left), (min(rows, top + 1 + wanted[2]), min(columns, left + 1 + wanted[3])))
    for dtype in (torch.float32, torch.float64):
        target = torch.full(box.shape, -1, dtype=dtype)
        reader.fill("model", Piece("a", tuple(tensor.shape), (box,), target))
        assert torch.equal(target, tensor[box.slices(Box.whole(tensor.shape))].to(dtype))
    reader.close()


def test_small_chunks_are_verified_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "ChunkHasher", lambda: ChunkHasher(4096))
    tensor = torch.arange(10_000, dtype=torch.float32)
    tensors, files = merge([write_items(tmp_path / "x.safetensors", [Item("model", piece_of_whole("a", tensor))])])
    manifest = Manifest("id", "run", "tag", 0, "", tensors, files, chunk=4096)
    data = bytearray((tmp_path / "x.safetensors").read_bytes())
    data[20_000] ^= 4
    (tmp_path / "x.safetensors").write_bytes(data)
    target = torch.empty(1000)
    with Reader(tmp_path, manifest) as reader:
        reader.fill("model", Piece("a", (10_000,), (Box((0,), (1000,)),), target))
        assert torch.equal(target, tensor[:1000])
        with pytest.raises(CheckpointError, match=r"damaged: bytes 16,384 to 20,480.*model 'a'"):
            reader.fill("model", Piece("a", (10_000,), (Box((4500,), (5500,)),), target))


def test_a_manifest_comes_back(tmp_path):
    manifest = save(tmp_path, EVERY, step=12)
    assert read_manifest(tmp_path / "tag") == manifest
    assert json.loads((tmp_path / "tag" / "manifest.json").read_bytes())["step"] == 12


def test_a_copied_folder_stays_valid(tmp_path):
    save(tmp_path / "a", EVERY)
    (tmp_path / "a" / "tag").rename(tmp_path / "elsewhere")
    with Reader(tmp_path / "elsewhere") as reader:
        assert verify(reader) == []


@pytest.mark.parametrize(
    ("boxes", "shape", "expected"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (4, 3))], (4, 3), True),
        ([((0, 0), (2, 3)), ((1, 0), (3, 3))], (4, 3), False),
        ([((0, 0), (2, 3))], (4, 3), False),
        ([((0, 0), (4, 1)), ((0, 1), (4, 3))], (4, 3), True),
        ([((0, 0), (1, 3)), ((1, 0), (4, 2)), ((1, 2), (4, 3))], (4, 3), True),
        ([((0, 0), (1, 3)), ((0, 0), (3, 3))], (4, 3), False),
        ([], (0, 3), True),
        ([((), ())], (), True),
    ],
)
def test_tiles(boxes, shape, expected):
    parts = BoxTable.of(StoredBox(0, 0, Box(start, stop)) for start, stop in boxes)
    table = parts.tables.get(len(shape))
    if table is None:
        table = torch.zeros(0, 2 + 2 * len(shape), dtype=torch.int64).numpy()
    assert tiles(table, shape) is expected


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 5), st.integers(1, 8))
def test_packed_parts(start, length, planes, rows):
    shape = (planes, rows, 5)
    total = planes * rows * 5
    boxes = boxes_of_range(shape, min(start, total), min(start + length, total))
    parts = BoxTable.of(StoredBox(3, number, box) for number, box in enumerate(boxes))
    assert list(BoxTable.unpack(parts.pack(), 1 << 20)) == list(parts)


def test_dead_saves_are_swept_and_live_ones_are_not(tmp_path):
    save(tmp_path, EVERY)
    folder = tmp_path / "tag"
    (folder / f"{'a' * 16}-00000.safetensors").write_bytes(b"dead, without a mark")
    (folder / f"{'b' * 16}-00000.safetensors").write_bytes(b"alive")
    mark(folder, "b" * 16)
    (folder / f"{'c' * 16}-00001.safetensors").write_bytes(b"its process is gone")
    gone = json.loads((folder / f"{'b' * 16}.saving").read_text())["process"].rpartition(":")[0] + ":999999999"
    (folder / f"{'c' * 16}.saving").write_text(json.dumps({"process": gone}))
    (folder / "notes.txt").write_text("mine")
    removed = sweep(folder, read_manifest(folder))
    assert {path.name[0] for path in removed} == {"a", "c"}
    names = {path.name for path in folder.iterdir()}
    assert {"notes.txt", "manifest.json", f"{'b' * 16}.saving", f"{'b' * 16}-00000.safetensors"} < names
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / f"{'d' * 16}-00000.safetensors").write_bytes(b"never committed")
    (tmp_path / "half" / f"{'d' * 16}.saving").write_bytes(b"torn")
    sweep_all(tmp_path)
    assert not (tmp_path / "half").exists() and (folder / "notes.txt").exists()


def test_a_save_removes_what_dead_ones_left_under_other_tags(tmp_path):
    save(tmp_path, EVERY, tag="first")
    for tag, name in (("first", "a"), ("dead", "b"), ("alive", "c")):
        (tmp_path / tag).mkdir(exist_ok=True)
        (tmp_path / tag / f"{name * 16}-00000.safetensors").write_bytes(b"not committed")
    (tmp_path / "dead" / f"{'b' * 16}.saving").write_bytes(b"torn")
    mark(tmp_path / "alive", "c" * 16)
    save(tmp_path, EVERY, tag="second")
    assert not (tmp_path / "dead").exists() and len(list((tmp_path / "alive").iterdir())) == 2
    assert not list((tmp_path / "first").glob("aaaaaaaa*"))
    with Reader(tmp_path / "first") as reader:
        assert torch.equal(reader.whole("model", "float"), EVERY["float"])


def test_what_an_attempt_on_another_machine_left_goes_after_a_while(tmp_path):
    for number, (run, process) in enumerate((("run", "far:1"), ("another", "far:1"), ("run", None))):
        mark(tmp_path / "t", save_id := f"{number:016x}", run)
        path = tmp_path / "t" / f"{save_id}.saving"
        if process:
            path.write_text(json.dumps(json.loads(path.read_text()) | {"process": process}))
        (tmp_path / "t" / f"{save_id}-00000.safetensors").write_bytes(b"not committed")
    save(tmp_path, EVERY, tag="second")
    assert len(list((tmp_path / "t").iterdir())) == 6
    for path in (tmp_path / "t").iterdir():
        os.utime(path, (0, 0))
    save(tmp_path, EVERY, tag="third")
    left = sorted(path.name for path in (tmp_path / "t").iterdir())
    assert [name[:16] for name in left] == [f"{number:016x}" for number in (1, 1, 2, 2)]


def test_retention_counts_its_own_run(tmp_path):
    for step in range(1, 6):
        save(tmp_path, {"a": torch.zeros(1)}, tag=f"s{step}", step=step, keep_last=2, keep_every=2)
        save(tmp_path, {"a": torch.zeros(1)}, tag=f"other{step}", step=step, run="another", latest=False)
    names = [each.folder.name for each in committed(tmp_path)]
    assert [name for name in names if name.startswith("s")] == ["s2", "s4", "s5"]
    assert len([name for name in names if name.startswith("other")]) == 5


def test_what_latest_still_names_is_not_removed(tmp_path, caplog):
    save(tmp_path, {"a": torch.zeros(1)}, tag="s1", step=1, keep_last=1)

    def fail(operation, path):
        if path.name.startswith("latest"):
            raise OSError(errno.EIO, "Input/output error")

    with watched(fail):
        save(tmp_path, {"a": torch.zeros(1)}, tag="s2", step=2, keep_last=1)
    assert read_latest(tmp_path) == "s1" and [each.folder.name for each in committed(tmp_path)] == ["s1", "s2"]
    assert "s2 is saved, but 'latest' may not name it" in caplog.text and "load it with tag='s2'" in caplog.text
    save(tmp_path, {"a": torch.zeros(1)}, tag="s3", step=3, keep_last=1)
    assert read_latest(tmp_path) == "s3" and [each.folder.name for each in committed(tmp_path)] == ["s3"]


def save_and_go_back(root, **terms):
    """Four steps, then from the first on two others."""
    for tag, step in (("s1", 1), ("s2", 2), ("s3", 3), ("s4", 4), ("new2", 2), ("new3", 3)):
        save(root, {"a": torch.zeros(1)}, tag=tag, step=step, **terms)


def test_what_was_committed_last_is_kept(tmp_path):
    save_and_go_back(tmp_path, keep_last=2)
    assert [each.folder.name for each in committed(tmp_path)] == ["new2", "new3"]


def test_before_a_checkpoint_are_those_that_its_run_came_by(tmp_path):
    save(tmp_path, {"a": torch.zeros(1)}, tag="other", run="another", step=1)
    save_and_go_back(tmp_path)
    save(tmp_path, {"a": torch.zeros(1)}, tag="later", run="another", step=2, latest=False)
    assert candidates(tmp_path, None, with_older=True) == ["new3", "new2", "s1"]
    write_latest(tmp_path, "s3")
    assert candidates(tmp_path, None, with_older=True) == ["s3", "s2", "s1"]
    assert candidates(tmp_path, None, with_older=False) == ["s3"]


def test_before_a_checkpoint_that_cannot_be_read_is_what_was_committed_last(tmp_path):
    save(tmp_path, {"a": torch.zeros(1)}, tag="other", run="another", step=9)
    save_and_go_back(tmp_path)
    (tmp_path / "new3" / "manifest.json").write_bytes(b"torn")
    assert candidates(tmp_path, None, with_older=True) == ["new3", "new2", "s1"]


def test_before_a_checkpoint_with_a_damaged_manifest_are_those_of_its_run(tmp_path):
    save(tmp_path, {"a": torch.zeros(1)}, tag="alone", run="third", step=1)
    save_and_go_back(tmp_path)
    save(tmp_path, {"a": torch.zeros(1)}, tag="later", run="another", step=2)
    for tag, expected in (("new3", ["new2", "s1"]), ("s3", ["s2", "s1"]), ("alone", [])):
        path = tmp_path / tag / "manifest.json"
        path.write_bytes((good := path.read_bytes())[:-8] + b"damaged\n")
        write_latest(tmp_path, tag)
        assert candidates(tmp_path, None, with_older=True) == [tag, *expected]
        path.write_bytes(good)


def test_the_same_step_twice_is_no_way_back(tmp_path):
    for tag, step in (("s1", 1), ("s2", 2), ("best", 2)):
        save(tmp_path, {"a": torch.zeros(1)}, tag=tag, step=step)
    assert candidates(tmp_path, None, with_older=True) == ["best", "s2", "s1"]


def test_a_clock_that_goes_backwards_does_not_change_the_order(tmp_path):
    manifest = save(tmp_path, {"a": torch.zeros(1)}, tag="z")
    for tag, created in (("z", "2999-01-01T00:00:00+00:00"), ("damaged", "3999-01-01"), ("odd", "9999-12-31T23:59:59")):
        (tmp_path / tag).mkdir(exist_ok=True)
        (tmp_path / tag / "manifest.json").write_bytes(replace(manifest, created=created).to_bytes())
    (tmp_path / "damaged" / "manifest.json").open("ab").write(b"x")
    assert save(tmp_path, {"a": torch.zeros(1)}, tag="a").created == "2999-01-01T00:00:00.000001+00:00"
    assert save(tmp_path, {"a": torch.zeros(1)}, tag="z").created == "2999-01-01T00:00:00.000002+00:00"
    assert [each.folder.name for each in committed(tmp_path)] == ["a", "z", "odd"]


def numbered(root, *numbers):
    for number in numbers:
        save(root, {"a": torch.zeros(1)}, tag=f"step{number}", step=number)


def test_latest_is_a_hint(tmp_path, caplog):
    """Whatever it holds, a committed checkpoint is taken: the one it names, or the newest with one line of log."""
    numbered(tmp_path, 2, 1, 7, 3)
    good = (tmp_path / "latest").read_bytes()
    taken = set()
    for bit in range(8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        (tmp_path / "latest").write_bytes(data)
        caplog.clear()
        (tag,) = candidates(tmp_path, None, with_older=False)
        taken.add(tag)
        is_named = tag == data.decode("latin1").strip()
        assert is_named or tag == "step3"
        assert len(caplog.records) == (not is_named) and candidates(tmp_path, None, with_older=True)[0] == tag
    assert taken == {"step1", "step2", "step7", "step3"}
    (tmp_path / "latest").unlink()
    caplog.clear()
    assert candidates(tmp_path, None, with_older=False) == ["step3"]
    assert "latest is missing: the newest committed one, 'step3', is taken" in caplog.text


def test_a_latest_that_was_edited_is_followed(tmp_path, caplog):
    numbered(tmp_path, 1, 2)
    (tmp_path / "latest").write_text("step1")
    assert candidates(tmp_path, None, with_older=False) == ["step1"] and caplog.text == ""
    (tmp_path / "latest").write_text("step9")
    assert candidates(tmp_path, None, with_older=False) == ["step2"]
    assert "latest names 'step9', which is not committed: the newest committed one, 'step2', is taken" in caplog.text


def test_what_a_save_leaves_of_latest_goes_with_the_next(tmp_path):
    numbered(tmp_path, 1)
    for name in ("latest.0a1b2c3d.new", "latest.mine.new"):
        (tmp_path / name).write_text("step1")
    mark(tmp_path / "alive", "c" * 16)
    numbered(tmp_path, 2)
    assert (tmp_path / "latest.0a1b2c3d.new").exists()
    (tmp_path / "alive" / f"{'c' * 16}.saving").unlink()
    numbered(tmp_path, 3)
    assert {path.name for path in tmp_path.glob("latest*")} == {"latest", "latest.mine.new"}


def test_a_latest_beyond_measure_is_read_in_part(tmp_path):
    numbered(tmp_path, 1)
    with (tmp_path / "latest").open("r+b") as file:
        file.truncate(1 << 40)
    assert read_latest(tmp_path) is None and candidates(tmp_path, None, with_older=False) == ["step1"]


def test_a_deleted_checkpoint_leaves_other_files(tmp_path):
    save(tmp_path, EVERY)
    (tmp_path / "tag" / "mine.txt").write_text("mine")
    delete(committed(tmp_path)[0])
    assert [path.name for path in (tmp_path / "tag").iterdir()] == ["mine.txt"]
    assert surplus(committed(tmp_path), last=1, every=None, spare=()) == []


def test_a_scalar_that_is_no_number_is_equal_to_itself(tmp_path):
    save(tmp_path, {"scale": torch.tensor(float("nan")), "none": torch.zeros(0, 4)})
    with Reader(tmp_path / "tag") as reader:
        assert list(compare(reader, reader)) == []


def test_a_save_beside_training_hides_no_error():
    background = SaveThread()
    background.start(lambda: {}["surprise"])
    with pytest.raises(CheckpointError, match="surprise") as caught:
        background.wait()
    assert isinstance(caught.value.__cause__, KeyError)


def test_comparing(tmp_path):
    save(tmp_path, {"a": torch.zeros(3), "b": torch.ones(2), "c": torch.ones(1)}, tag="one")
    save(tmp_path, {"a": torch.tensor([0.0, 0.5, 0.0]), "b": torch.ones(3), "d": torch.ones(1)}, tag="two", step=3)
    with Reader(tmp_path / "one") as one, Reader(tmp_path / "two") as two:
        found = {each.what: each for each in compare(one, two)}
        assert list(compare(one, one)) == []
    assert set(found) == {"model 'a'", "model 'b'", "model 'c'", "model 'd'", "counters.global_steps"}
    assert "largest difference 0.5" in found["model 'a'"].other


def test_a_manifest_of_a_later_version_is_refused(tmp_path):
    manifest = save(tmp_path, {"a": torch.zeros(1)})
    data = replace(manifest, tag="x").to_bytes()
    with pytest.raises(CheckpointError, match="damaged"):
        Manifest.from_bytes(data.replace(b'"version":1', b'"version":2'), "here")


def test_a_tag_that_is_the_name_of_a_file_beside_it(tmp_path):
    with pytest.raises(UsageError, match="the tag 'latest' cannot be used: a file beside the checkpoints"):
        save(tmp_path, {"a": torch.zeros(1)}, tag="latest")

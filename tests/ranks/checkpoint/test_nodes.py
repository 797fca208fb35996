"""Nodes without a shared filesystem: each keeps its own part, and who lacks what is named."""

import os
import shutil
from pathlib import Path

import pytest

import mizzen
from breadth import chosen
from mizzen.errors import CheckpointError
from mizzen.files import watched
from ranks.checkpoint.programs import Case, build, differences, train, warnings_of, whole


def different_tags_on_nodes(root, validation):
    engine = build(Case(checkpoint={"tag_validation": validation, "use_node_local_storage": True}))
    engine.saving.group.node = node = f"node{engine.global_rank}"
    folder = Path(root) / node
    try:
        engine.save_checkpoint(folder, tag=f"tag{engine.global_rank}")
        found = sorted(path.name for path in folder.rglob("*") if path.suffix != ".safetensors")
        return found, Path(engine.load_checkpoint(folder)[0]).name
    except CheckpointError as error:
        return str(error), list(folder.iterdir())


def test_nodes_that_save_under_different_tags(world, tmp_path):
    files = ["latest", "manifest.json", "tag0"]
    cases = [(str(tmp_path / "a"), "Warn"), (str(tmp_path / "b"), "Fail")]
    taken, refused = world(2).each(different_tags_on_nodes, cases)
    assert taken == [(files, "tag0")] * 2
    for said, left in refused:
        assert "rank 0: tag0" in said and "rank 1: tag1" in said and left == []


def on_nodes(root, stage, lose):
    engine = build(Case(stage=stage, checkpoint={"use_node_local_storage": True}))
    node = f"node{engine.global_rank // 2}"
    engine.saving.group.node = node
    folder = Path(root) / node
    train(engine, 1)
    engine.save_checkpoint(folder)
    held = whole(engine)
    fresh = build(Case(stage=stage, checkpoint={"use_node_local_storage": True}), seed=3)
    fresh.saving.group.node = node
    if lose and engine.global_rank == 2:
        os.unlink(folder / "global_step1" / "manifest.json")
    mizzen.comm.barrier()
    try:
        fresh.load_checkpoint(folder)
    except CheckpointError as error:
        return str(error)
    return differences(held, whole(fresh))


@pytest.mark.in_parts
def test_every_node_keeps_its_own_and_one_without_its_part_is_named(world, tmp_path):
    cases = [(f"{tmp_path}/{stage}", stage, False) for stage in chosen([0, 2, 3], [3])]
    *whole, lost = world(4).each(on_nodes, [*cases, (f"{tmp_path}/lost", 2, True)])
    assert whole == [[[]] * 4] * len(cases)
    for folder, *_ in cases:
        assert {path.name for path in Path(folder).iterdir()} == {"node0", "node1"}
    for said in lost:
        assert "node node1" in said and "no checkpoint is committed here" in said


def node_without_folder(root, lost):
    case = Case(stage=1, checkpoint={"use_node_local_storage": True})
    engine = build(case)
    engine.saving.group.node = node = f"node{engine.global_rank}"
    folder = Path(root) / node
    engine.save_checkpoint(folder)
    if node in lost:
        shutil.rmtree(folder)
    mizzen.comm.barrier()
    try:
        return engine.resume_if_possible(folder)
    except CheckpointError as error:
        return str(error)


def test_a_node_without_its_folder_is_named(world, tmp_path):
    lost = (["node0"], ["node1"], ["node0", "node1"])
    cases = [(f"{tmp_path}/{number}", nodes) for number, nodes in enumerate(lost)]
    first, second, both = world(2).each(node_without_folder, cases)
    for lost, other, ranks in (("node0", "node1", first), ("node1", "node0", second)):
        for said in ranks:
            assert f"node {lost}: no checkpoint is committed here, but there is on node {other}" in said
    assert both == [(None, None)] * 2


def node_without_its_newest(root, lost):
    engine = build(Case(stage=1, checkpoint={"use_node_local_storage": True}))
    engine.saving.group.node = node = f"node{engine.global_rank}"
    folder = Path(root) / node
    engine.save_checkpoint(folder, tag="one")
    engine.save_checkpoint(folder, tag="two")
    if node == lost:
        os.unlink(folder / "two" / "manifest.json")
    mizzen.comm.barrier()
    (path, _), said = warnings_of(lambda: engine.load_checkpoint(folder))
    return Path(path).name, said


def test_a_node_without_its_newest_is_named(world, tmp_path):
    nodes = ("node0", "node1")
    for lost, found in zip(
        nodes, world(2).each(node_without_its_newest, [(f"{tmp_path}/{lost}", lost) for lost in nodes]), strict=True
    ):
        assert [name for name, _ in found] == ["one", "one"]
        newest = {"node0": "two", "node1": "two"} | {lost: "one"}
        words = f"their newest are node node0 '{newest['node0']}', node node1 '{newest['node1']}'. 'one' is taken"
        assert any(words in line for line in found[0][1])


def other_layout(root, stage, turned):
    """Saved by ranks 0 and 1 on one node, 2 and 3 on the other; loaded by 0 and 2, 1 and 3."""
    engine = build(Case(stage=stage, checkpoint={"use_node_local_storage": True}))
    places = [f"node{rank % 2 if turned else rank // 2}" for rank in range(4)]
    engine.saving.group.node = node = places[engine.global_rank]
    if not turned:
        train(engine, 1)
        return engine.save_checkpoint(Path(root) / node)
    try:
        engine.load_checkpoint(Path(root) / node)
    except CheckpointError as error:
        return str(error)


def test_another_layout_without_a_shared_filesystem_is_named(world, tmp_path):
    saved, loaded = world(4).each(other_layout, [(str(tmp_path), 2, False), (str(tmp_path), 2, True)])
    assert saved == [True] * 4
    for said in loaded:
        assert "needs the layout that it was saved with, or a shared filesystem" in said and "on node node0" in said


def commit_fails_on_a_node(root, is_first):
    """On one node the manifest of a save cannot be put into place."""
    engine = build(Case(stage=1, checkpoint={"use_node_local_storage": True, "keep_last": 1}))
    engine.saving.group.node = node = f"node{engine.global_rank}"
    folder, said = Path(root) / node, ""
    train(engine, 1)
    if not is_first:
        engine.save_checkpoint(folder, tag="one")
    held = whole(engine)

    def fail(operation, path):
        if node == "node1" and operation == "rename" and path.name == "manifest.json":
            raise OSError(5, "Input/output error")

    train(engine, 1)
    try:
        with watched(fail):
            engine.save_checkpoint(folder, tag="two")
    except CheckpointError as error:
        said = str(error)
    mizzen.comm.barrier()
    path, _ = engine.resume_if_possible(folder)
    return said, path and differences(held, whole(engine)), sorted(path.name for path in folder.iterdir())


def test_what_is_older_goes_once_a_save_is_on_every_node(world, tmp_path):
    cases = [(str(tmp_path / "a"), False), (str(tmp_path / "b"), True)]
    later, first = world(2).each(commit_fails_on_a_node, cases)
    for said, differing, left in later:
        assert "rank 1: rename" in said and differing == [] and left == ["latest", "one"]
    for said, path, left in first:
        assert "rank 1: rename" in said and path is None and left == []


def one_folder_for_all(root):
    engine = build(Case(stage=1, checkpoint={"use_node_local_storage": True}))
    engine.saving.group.node = f"node{engine.global_rank}"
    try:
        engine.save_checkpoint(root)
    except CheckpointError as error:
        return str(error)


def test_nodes_that_share_a_folder_are_told(world, tmp_path):
    for said in world(2).run(one_folder_for_all, str(tmp_path)):
        assert "another node saves here too" in said and "use_node_local_storage" in said
    assert list(tmp_path.iterdir()) == []

"""Ranks that were given different things: folders and tags go by a rule, all else is refused on every rank."""

import os
import shutil
from pathlib import Path

import pytest
import torch

import mizzen
from mizzen.checkpoint import save as protocol
from mizzen.checkpoint.read import Reader, verify
from mizzen.errors import CheckpointError, MizzenError, UsageError
from ranks.checkpoint.programs import Case, build, differences, train, warnings_of, whole


def save_and_say(engine, *arguments, **options):
    """What a save returns or raises, and what it warns of."""

    def call():
        try:
            return engine.save_checkpoint(*arguments, **options)
        except MizzenError as error:
            return f"{type(error).__name__}: {error}"

    found, said = warnings_of(call)
    engine.finish_saving()
    return found, said


def is_whole(folder):
    with Reader(Path(folder)) as reader:
        return not verify(reader)


def by_the_clock(root, validation, beside):
    engine = build(Case(stage=1, checkpoint={"tag_validation": validation}))
    train(engine, 1)
    place = f"{root}/12:00:0{engine.global_rank}"
    return save_and_say(engine, place, async_save=beside)


@pytest.mark.parametrize("beside", [False, True])
def test_folders_made_from_the_clock_of_each_rank(world, tmp_path, beside):
    (one, said), (other, quiet) = world(2).run(by_the_clock, str(tmp_path), "Warn", beside)
    assert one is other is True and quiet == []
    assert len(said) == 1 and "12:00:00" in said[0] and "12:00:01" in said[0] and "first rank's is taken" in said[0]
    assert [path.name for path in tmp_path.iterdir()] == ["12:00:00"]
    assert is_whole(tmp_path / "12:00:00" / "global_step1")


def test_different_folders_may_be_refused(world, tmp_path):
    for found, _ in world(2).run(by_the_clock, str(tmp_path), "Fail", False):
        assert "rank 0: " in found and "12:00:00" in found and "rank 1: " in found and "12:00:01" in found
    assert [*tmp_path.rglob("*.safetensors"), *tmp_path.rglob("*.json")] == []


def spelled(root, stage):
    rank = torch.distributed.get_rank()
    engine = build(Case(stage=stage, checkpoint={"tag_validation": "Fail"}))
    train(engine, 1)
    os.chdir(Path(root, "there", "deep") if rank == 1 else root)
    names = (f"{root}/real/checkpoints", "../../real/checkpoints/", f"{root}/link/checkpoints", "real//./checkpoints")
    found, said = save_and_say(engine, names[rank])
    other = build(Case(stage=stage), seed=3)
    os.chdir(root)
    other.load_checkpoint(f"{root}/link/checkpoints" if rank % 2 else f"{root}/real/checkpoints")
    return found, said, differences(whole(engine), whole(other))


def test_other_spellings_of_one_folder(world, tmp_path):
    (tmp_path / "there" / "deep").mkdir(parents=True)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert world(4).run(spelled, str(tmp_path), 1) == [(True, [], [])] * 4


def by_another_mount(root):
    """Rank 1 has another name for the same folder, which nothing but the mark in it tells."""
    engine = build(Case(stage=1, checkpoint={"tag_validation": "Fail"}))
    protocol.place_of = lambda folder: f"/mount{engine.global_rank}/checkpoints"
    return save_and_say(engine, root)


def test_another_mount_of_one_filesystem(world, tmp_path):
    assert world(2).run(by_another_mount, str(tmp_path)) == [(True, [])] * 2
    assert is_whole(tmp_path / "global_step0")


def no_shared_filesystem(root, name):
    """One name that means another folder on each rank, as on nodes that share none; or two that nobody else sees."""
    engine = build(Case(stage=1))
    protocol.place_of = lambda folder: name.format(engine.global_rank)
    return save_and_say(engine, f"{root}/disk{engine.global_rank}")


@pytest.mark.parametrize("name", ["/checkpoints", "/checkpoints{}"])
def test_nodes_that_share_no_folder_save_nothing(world, tmp_path, name):
    for found, _ in world(2).run(no_shared_filesystem, str(tmp_path), name):
        assert "use_node_local_storage" in found and "rank 1" in found
    assert [*tmp_path.rglob("*.safetensors"), *tmp_path.rglob("*.json"), *tmp_path.rglob("latest")] == []


def on_one_node(root):
    engine = build(Case(stage=1, checkpoint={"use_node_local_storage": True}))
    engine.saving.group.node = f"node{engine.global_rank // 2}"
    return save_and_say(engine, f"{root}/rank{engine.global_rank}")


def test_ranks_of_one_node_save_to_the_folder_of_its_first(world, tmp_path):
    results = world(4).run(on_one_node, str(tmp_path))
    assert [found for found, _ in results] == [True] * 4 and len(results[0][1]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank2"]
    assert len([*tmp_path.rglob("*.safetensors")]) == 4


def only_on_the_second(root, given):
    engine = build(Case(stage=1))
    folder = given if engine.global_rank == 1 else root
    said = []
    for call in (
        engine.save_checkpoint,
        engine.load_checkpoint,
        engine.resume_if_possible,
        lambda place: engine.save_16bit_model(place, "model.bin"),
    ):
        try:
            call(folder)
        except MizzenError as error:
            said.append((type(error), str(error)))
    return said


@pytest.mark.parametrize("given", ["", 5, None], ids=str)
def test_a_rank_without_a_folder_ends_the_call_on_all(world, tmp_path, given, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, other = world(2).run(only_on_the_second, str(tmp_path / "a"), given)
    assert len(one) == len(other) == 4
    assert all("rank 1" in words for _, words in (*one, *other))
    assert {kind for kind, _ in other} == {UsageError}
    assert [*tmp_path.rglob("*")] in ([], [tmp_path / "a"])


def other_arguments(root):
    """Each call with an argument that the ranks do not agree on."""
    engine = build(Case(stage=1, frozen=True))
    odd = engine.global_rank == 1
    engine.save_checkpoint(f"{root}/good")
    calls = {
        "exclude_frozen_parameters": lambda: engine.save_checkpoint(f"{root}/a", exclude_frozen_parameters=odd),
        "load_module_strict": lambda: engine.load_checkpoint(f"{root}/good", load_module_strict=odd),
        "load_optimizer_states": lambda: engine.load_checkpoint(f"{root}/good", load_optimizer_states=odd),
        "load_lr_scheduler_states": lambda: engine.load_checkpoint(f"{root}/good", load_lr_scheduler_states=odd),
        "load_module_only": lambda: engine.load_checkpoint(f"{root}/good", load_module_only=odd),
        "custom_load_fn": lambda: engine.load_checkpoint(f"{root}/good", custom_load_fn=print if odd else None),
        "frozen parameters": lambda: engine.save_16bit_model(f"{root}/b", exclude_frozen_parameters=odd),
        "which frozen": lambda: engine._consolidated_16bit_state_dict(exclude_frozen_parameters=odd),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except UsageError as error:
            said[name] = str(error)
    return said


def test_other_arguments_have_to_be_the_same(world, tmp_path):
    one, other = world(2).run(other_arguments, str(tmp_path))
    assert one == other and len(one) == 8
    assert all(name in words and "rank 0: " in words and "rank 1: " in words for name, words in one.items())
    assert [path.name for path in tmp_path.iterdir() if path.name != "good"] in ([], ["a"])
    assert [*tmp_path.glob("a/*")] == []


def first_counts(root):
    """What is the first rank's by rule: client state, `save_latest`, a tag that only some ranks name."""
    engine = build(Case(stage=1))
    rank = engine.global_rank
    state = {"from": rank, "array": torch.full((3 + rank,), float(rank)), f"only{rank}": torch.ones(2)}
    engine.save_checkpoint(root, tag=None if rank else "named", client_state=state, save_latest=rank == 1)
    path, client = engine.load_checkpoint(root, tag=None if rank else "named")
    return Path(path).name, client["from"], client["array"].tolist(), sorted(client), (Path(root) / "latest").exists()


def test_what_the_first_rank_says_counts(world, tmp_path):
    expected = ("named", 0, [0.0] * 3, ["array", "from", "only0"], False)
    assert world(2).run(first_counts, str(tmp_path)) == [expected] * 2
    assert is_whole(tmp_path / "named")


def load_from(root, validation, second):
    engine = build(Case(stage=1, checkpoint={"tag_validation": validation}), seed=3)

    def call():
        try:
            return str(engine.load_checkpoint(f"{root}/{second}" if engine.global_rank else f"{root}/here")[0])
        except CheckpointError as error:
            return f"refused: {error}"

    return warnings_of(call)


def save_here(root):
    for number, place in enumerate(("here", "other")):
        engine = build(Case(stage=1), seed=number)
        train(engine, 1)
        engine.save_checkpoint(f"{root}/{place}")
    mizzen.comm.barrier()
    if not engine.global_rank:
        shutil.copytree(f"{root}/here", f"{root}/copy")


def test_loads_from_different_folders(world, tmp_path):
    world(2).run(save_here, str(tmp_path))
    seconds = ("nowhere", "other")
    cases = [(str(tmp_path), validation, second) for second in seconds for validation in ("Warn", "Fail")]
    *found, (one, other) = world(2).each(load_from, [*cases, (str(tmp_path), "Fail", "copy")])
    for second, warned, refused in zip(seconds, found[::2], found[1::2], strict=True):
        (first, said), (taken, quiet) = warned
        assert first == taken == str(tmp_path / "here" / "global_step1") and quiet == []
        assert len(said) == 1 and second in said[0] and "first rank's is taken" in said[0]
        for words, _ in refused:
            assert words.startswith("refused: ") and "here" in words and second in words
    assert one == (str(tmp_path / "here" / "global_step1"), []) and other == (
        str(tmp_path / "copy" / "global_step1"),
        [],
    )


def model_files(root):
    engine = build(Case(stage=1))

    def call():
        return engine.save_16bit_model(f"{root}/rank{engine.global_rank}")

    return warnings_of(call)


def test_a_model_file_is_the_first_ranks(world, tmp_path):
    (one, said), (other, quiet) = world(2).run(model_files, str(tmp_path))
    assert one is other is True and quiet == [] and len(said) == 1 and "rank0" in said[0] and "rank1" in said[0]
    assert [path.name for path in tmp_path.rglob("*")] == ["rank0", "model.safetensors"]

"""`save_checkpoint` and `load_checkpoint` with their arguments, their rules, and their errors."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import mizzen
from breadth import choice
from faults.malice import opened, sealed
from mizzen.checkpoint import convert_zero_checkpoint_to_fp32_state_dict, get_fp32_state_dict_from_zero_checkpoint
from mizzen.checkpoint.folder import committed
from mizzen.errors import CheckpointError, MizzenError, UsageError
from ranks.checkpoint.programs import Case, build, differences, train, warnings_of, whole


def nothing_there(folder):
    engine = build(Case())
    before = whole(engine)
    found, said = warnings_of(lambda: engine.load_checkpoint(folder))
    resumed, quiet = warnings_of(lambda: engine.resume_if_possible(folder))
    wrong, told = warnings_of(lambda: engine.load_checkpoint(folder, tag="no-such-tag"))
    return found, said, resumed, quiet, wrong, told, differences(before, whole(engine))


def test_a_folder_without_a_checkpoint_is_a_warning(world, tmp_path):
    found, said, resumed, quiet, wrong, told, changed = world(1).run(nothing_there, str(tmp_path / "none"))[0]
    assert found == resumed == wrong == (None, None)
    assert len(said) == 1 and "there is no checkpoint in" in said[0]
    assert quiet == [] and changed == []
    assert "no-such-tag" in told[0]


def of_deepspeed(folder):
    engine, said = build(Case()), []
    for root, tag in ((folder, None), (folder, "step3"), (f"{folder}/step3", None)):
        try:
            engine.resume_if_possible(root) if tag is None else engine.load_checkpoint(root, tag=tag)
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_a_folder_of_deepspeed_is_named(world):
    folder = Path(__file__).parents[2] / "fixtures" / "deepspeed" / "zero2"
    for said in world(2).run(of_deepspeed, str(folder)):
        assert len(said) == 3
        assert all("step3 was saved by DeepSpeed" in words and "mizzen checkpoint import" in words for words in said)
        assert "--tag step3" in said[0] and "--tag" not in said[2]


def different_tags(folder, validation):
    engine = build(Case(checkpoint={"tag_validation": validation}))
    try:
        engine.save_checkpoint(folder, tag=f"tag{engine.global_rank}")
    except CheckpointError as error:
        return str(error)
    return sorted(path.name for path in Path(folder).iterdir())


def test_ranks_that_save_under_different_tags(world, tmp_path):
    taken, refused = world(2).each(different_tags, [(str(tmp_path / "a"), "Warn"), (str(tmp_path / "b"), "Fail")])
    assert taken[1] == ["latest", "tag0"]
    for said in refused:
        assert "different tags" in said and "rank 0: tag0" in said and "rank 1: tag1" in said
    assert list((tmp_path / "b").iterdir()) == []


def bad_tags(folder):
    engine, said = build(Case()), []
    for tag in ("../up", "/absolute", "a/b", "", ".", "a\nb"):
        try:
            engine.save_checkpoint(folder, tag=tag)
        except UsageError as error:
            said.append(str(error))
    return said


def test_a_tag_is_a_plain_name(world, tmp_path):
    assert len(world(1).run(bad_tags, str(tmp_path))[0]) == 5  # the empty one means the default
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "global_step0"}


class Other(nn.Module):
    """Shares some names with the model of the other tests."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(10, 13)
        self.down = nn.Linear(13, 9)
        self.extra = nn.Linear(2, 2)


def other_model(folder, strict):
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}}
    engine, *_ = mizzen.initialize(model=Other(), config=config)
    kept = engine.module.extra.weight.clone()
    try:
        engine.load_checkpoint(folder, load_module_strict=strict)
    except CheckpointError as error:
        return str(error)
    report = engine.load_report
    assert torch.equal(kept, engine.module.extra.weight)
    return report.missing, report.misshaped, len(report.unexpected), engine.module.up.weight.detach().clone()


def save_some(folder, case, steps=2, **options):
    engine = build(case)
    train(engine, steps)
    engine.save_checkpoint(folder, **options)
    return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}


def test_names_that_do_not_fit_are_listed(world, tmp_path):
    state = world(2).run(save_some, str(tmp_path), Case())[0]
    for said in world(2).run(other_model, str(tmp_path), True):
        assert "2 missing: extra.weight, extra.bias" in said
        assert "down.weight [7, 13] instead of [9, 13]" in said and "blocks.0.weight" in said
    for missing, misshaped, unexpected, weight in world(2).run(other_model, str(tmp_path), False):
        assert missing == ("extra.weight", "extra.bias") and len(misshaped) == 2 and unexpected == 9
        assert torch.equal(weight, state["up.weight"])


def parts_of_a_checkpoint(folder):
    saver = build(Case(stage=1))
    train(saver, 3)
    saver.save_checkpoint(folder)
    found = {}
    for name, options in {
        "module": {"load_module_only": True},
        "no states": {"load_optimizer_states": False},
        "no schedule": {"load_lr_scheduler_states": False},
    }.items():
        engine = build(Case(stage=1), seed=4)
        engine.load_checkpoint(folder, **options)
        state = next(iter(engine.basic_optimizer.state.values()), {})
        weight = mizzen.zero.safe_get_full_fp32_param(engine.module.up.weight)
        same = torch.equal(weight, mizzen.zero.safe_get_full_fp32_param(saver.module.up.weight))
        found[name] = (
            engine.global_steps,
            float(state["step"]) if state else 0,
            engine.lr_scheduler.last_batch_iteration,
            same,
        )
    return found


def test_parts_of_a_checkpoint(world, tmp_path):
    for found in world(2).run(parts_of_a_checkpoint, str(tmp_path)):
        assert found == {"module": (0, 0, -1, True), "no states": (3, 0, 2, True), "no schedule": (3, 3, -1, True)}


def without_frozen(folder, stage):
    case = Case(stage=stage, frozen=True)
    engine = build(case)
    train(engine, 1)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    fresh = build(case, seed=8)
    kept = mizzen.zero.safe_get_full_fp32_param(fresh.module.up.weight)
    kept = fresh.module.up.weight.detach().clone() if kept is None else kept
    fresh.load_checkpoint(folder)
    now = mizzen.zero.safe_get_full_fp32_param(fresh.module.up.weight)
    now = fresh.module.up.weight.detach().clone() if now is None else now
    names = sorted(get_fp32_state_dict_from_zero_checkpoint(folder))
    return names, torch.equal(kept, now), str(fresh.load_report)


@pytest.mark.parametrize("stage", choice([1, 3], [3]))
def test_frozen_parameters_can_be_left_out(world, tmp_path, stage):
    for names, is_same, report in world(2).run(without_frozen, str(tmp_path), stage):
        assert "up.weight" not in names and "down.weight" in names
        assert is_same and report == ""


def custom(folder):
    engine = build(Case(stage=1, dtype="bf16"))
    engine.save_checkpoint(folder)
    fresh = build(Case(stage=1, dtype="bf16"), seed=3)
    seen = []

    def load(src, dst):
        seen.extend(src)
        dst.up.bias.data.copy_(torch.full((13,), 0.25))

    fresh.load_checkpoint(folder, custom_load_fn=load)
    return len(seen), mizzen.zero.safe_get_full_fp32_param(fresh.module.up.bias).unique().tolist()


def test_a_function_of_the_user_may_load(world, tmp_path):
    for count, values in world(2).run(custom, str(tmp_path)):
        assert count == 13 and values == [0.25]


def client_states(folder):
    engine, said = build(Case()), []
    state = {"args": (1, 2), 3: {"path": Path("a/b")}, "array": torch.arange(3)}
    engine.save_checkpoint(folder, tag="fine", client_state=state)
    try:
        engine.save_checkpoint(folder, tag="bad", client_state={"a": {"b": [1, object()]}})
    except CheckpointError as error:
        said.append(str(error))
    trusting = build(Case(checkpoint={"pickled_client_state": True}))
    trusting.save_checkpoint(folder, tag="pickled", client_state={"kind": complex, "error": ValueError})
    try:
        engine.load_checkpoint(folder, tag="pickled")
    except CheckpointError as error:
        said.append(str(error))
    return engine.load_checkpoint(folder, tag="fine")[1], trusting.load_checkpoint(folder, tag="pickled")[1], said


def test_client_state(world, tmp_path):
    fine, pickled, said = world(1).run(client_states, str(tmp_path))[0]
    assert fine["args"] == (1, 2) and fine[3] == {"path": Path("a/b")} and fine["array"].tolist() == [0, 1, 2]
    assert pickled == {"kind": complex, "error": ValueError}
    assert "client_state.a.b[1] is a builtins.object" in said[0]
    assert "pickled_client_state" in said[1]
    assert not (tmp_path / "bad").exists()


def retained(folder):
    other = build(Case())
    other.save_checkpoint(folder, tag="of-another-run")
    engine = build(Case(checkpoint={"keep_last": 2, "keep_every": 3}))
    for _ in range(7):
        train(engine, 1)
        engine.save_checkpoint(folder)
    return [each.folder.name for each in committed(Path(folder))]


def test_retention(world, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    steps = [f"global_step{step}" for step in (3, 6, 7)]
    assert world(1).run(retained, str(tmp_path))[0] == ["of-another-run", *steps]
    assert {path.name for path in tmp_path.iterdir()} == {"of-another-run", *steps, "latest", "mine.txt"}


def from_other_weights(folder, options):
    other = build(Case())
    for number in range(3):
        train(other, 1)
        other.save_checkpoint(folder, tag=f"other{number}")
    engine = build(Case(checkpoint={"keep_last": 1}))
    engine.load_checkpoint(folder, tag="other2", **options)
    for number in range(2):
        train(engine, 1)
        engine.save_checkpoint(folder, tag=f"own{number}")
    return sorted(each.folder.name for each in committed(Path(folder)))


@pytest.mark.parametrize("option", [{"load_module_only": True}, {"load_optimizer_states": False}, {}])
def test_only_a_run_that_goes_on_deletes_what_it_has_saved(world, tmp_path, option):
    others = ["other0", "other1", "other2"] if option else []
    assert world(1).run(from_other_weights, str(tmp_path), option)[0] == [*others, "own1"]


def not_committed(folder):
    engine = build(Case())
    engine.save_checkpoint(folder, tag="half")
    (Path(folder) / "half" / "manifest.json").unlink()
    return warnings_of(lambda: engine.resume_if_possible(folder))


def test_a_latest_that_is_not_committed_is_a_warning(world, tmp_path):
    found, said = world(1).run(not_committed, str(tmp_path))[0]
    assert found == (None, None) and len(said) == 1 and "latest names 'half', which is not committed" in said[0]


def damaged(folder, policy):
    engine = build(Case(stage=1, checkpoint={"on_corrupt": policy}))
    train(engine, 1)
    engine.save_checkpoint(folder)
    held = whole(engine)
    train(engine, 1)
    engine.save_checkpoint(folder)
    if engine.global_rank == 0:
        path = max((Path(folder) / "global_step2").glob("*.safetensors"))
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    mizzen.comm.barrier()
    fresh = build(Case(stage=1, checkpoint={"on_corrupt": policy}), seed=3)
    try:
        path, _ = fresh.load_checkpoint(folder)
    except CheckpointError as error:
        return str(error)
    return Path(path).name, differences(held, whole(fresh))


def test_a_damaged_checkpoint(world, tmp_path):
    failed, older = world(2).each(damaged, [(str(tmp_path / "a"), "fail"), (str(tmp_path / "b"), "previous")])
    for said in failed:
        assert "damaged" in said and ".safetensors" in said and "it holds" in said
    assert older == [("global_step1", [])] * 2


def own_optimizer(folder):
    torch.manual_seed(0)
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        groups = [
            {"params": model[0].parameters(), "lr": 0.1, "momentum": 0.5},
            {"params": model[1].parameters(), "weight_decay": 0.2},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "seed": 1}
        made.append(mizzen.initialize(model=model, optimizer=optimizer, config=config)[0])
    first, second = made

    def step(engine):
        engine.backward(engine(torch.ones(2, 5)).square().mean())
        engine.step()

    step(first)
    first.set_lr(0.03)
    first.save_checkpoint(folder)
    step(second)
    second.load_checkpoint(folder)
    rates = second.get_lr(), [group["momentum"] for group in second.basic_optimizer.param_groups]
    step(first)
    step(second)
    return rates, [
        torch.equal(a, b) for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True)
    ]


def test_an_optimizer_of_the_user(world, tmp_path):
    for rates, same in world(2).run(own_optimizer, str(tmp_path)):
        assert rates == ([0.03, 0.03], [0.5, 0.9]) and all(same)


class Halving:
    """A schedule with a state that only a pickle keeps."""

    def __init__(self):
        self.steps = slice(1, 2)

    def __call__(self, step):
        return 0.5


class Extra(nn.Linear):
    """A layer with a state that only a pickle keeps."""

    def get_extra_state(self):
        return slice(1, 2)

    def set_extra_state(self, state):
        self.given = state


def engine_with(schedule, trusts, rate=0.1):
    model = Extra(5, 3) if trusts else nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    config = {"train_micro_batch_size_per_gpu": 2, "checkpoint": {"pickled_client_state": trusts}}
    return mizzen.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule(optimizer), config=config)[0]


def own_schedules(folder):
    steps = lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3])  # noqa: E731
    halving = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, Halving())  # noqa: E731
    engine_with(steps, False).save_checkpoint(folder, tag="steps")
    second = engine_with(steps, False)
    second.load_checkpoint(folder, tag="steps")
    engine_with(halving, True, torch.tensor(0.1)).save_checkpoint(folder, tag="5")
    third = engine_with(halving, True, torch.tensor(0.1))
    third.load_checkpoint(folder, tag=5)
    return second.lr_scheduler.milestones, third.module.given, third.lr_scheduler.base_lrs


def test_a_schedule_of_the_user(world, tmp_path):
    milestones, extra, rates = world(1).run(own_schedules, str(tmp_path))[0]
    assert milestones == Counter({1: 1, 3: 2}) and extra == slice(1, 2)
    assert [float(rate) for rate in rates] == pytest.approx([0.1])


FORGED = [
    {"excluded": [[1]]}, {"excluded": 5}, {"aliases": [1]}, {"aliases": {"x": [1]}}, {"batch": {"accumulation": 0}},
    {"counters": {"global_steps": float("inf")}}, {"client": 5}, {"extra": [1]}, {"client": {"$tuple": [1]}},
    {"optimizer": {"groups": 5}}, {"optimizer": {"groups": [{"names": 5}]}}, {"scheduler": 5},
    *({"optimizer": {"groups": [{"names": ["up.weight"], "settings": settings}]}} for settings in (
        {"lr": "fast"}, {"lr": None}, {"lr": True}, {"betas": 5}, {"betas": {"$tuple": [0.9]}}, {"eps": [1e-8]},
        {"betas": {"$tuple": ["a", "b"]}}, {"amsgrad": "yes"}, 5,
    )),
]  # fmt: skip


def wrong_calls(folder):
    engine, said = build(Case()), []
    engine.save_checkpoint(folder, tag="good")
    manifest = Path(folder, "good", "manifest.json")
    body = opened(manifest.parent)

    def load(facts):
        manifest.write_bytes(sealed(body | {"facts": body["facts"] | facts}))
        engine.load_checkpoint(folder, tag="good")

    calls = [lambda facts=facts: load(facts) for facts in FORGED]
    calls += [lambda: engine.save_checkpoint(folder, client_state=[1, 2]), lambda: engine.save_checkpoint(5)]
    for call in calls:
        try:
            call()
        except (CheckpointError, UsageError) as error:
            said.append(str(error))
    return said


def test_forged_facts_and_wrong_arguments_are_our_errors(world, tmp_path):
    *forged, client, path = world(1).run(wrong_calls, str(tmp_path))[0]
    assert len(forged) == len(FORGED) and all("its facts cannot be used" in words for words in forged)
    assert "client_state is a list" in client and "a folder is a text or a path, not 5" in path


def wrong_state_dicts():
    engine, said = build(Case(stage=1)), []
    good = engine.module_state_dict()
    other = {"up.weight": torch.zeros(2, 2)}
    for state in (5, [good], {"module": None}, good | {"up.weight": [1.0]}, good | {3: torch.ones(1)}, other, {}):
        try:
            engine.load_module_state_dict(state)
        except MizzenError as error:
            said.append(str(error))
    engine.load_module_state_dict({"module": {"of_another": 5, "gain": torch.tensor(2.5)}}, strict=False)
    return said, mizzen.zero.safe_get_full_fp32_param(engine.module.gain).item()


def test_a_state_dict_that_is_none_is_our_error(world):
    said, gain = world(1).run(wrong_state_dicts)[0]
    kinds = ("this is a int", "this is a list", "this is a NoneType", "'up.weight' is a list", "'3' is a int")
    assert len(said) == 7 and gain == 2.5 and all(kind in words for kind, words in zip(kinds, said, strict=False))
    assert "size mismatch for up.weight" in said[5] and "Missing key(s)" in said[6]


def half_way(folder):
    """Gradients from before a load must not be in the next step, and the schedule may be moved by a load."""
    engine = build(Case(stage=1))
    train(engine, 2)
    engine.save_checkpoint(folder)
    expected = train(engine, 2)
    batch = next(engine.data_iterator())
    engine.backward(engine(*batch))
    engine.load_checkpoint(folder)
    return expected == train(engine, 2), engine.global_steps


def test_a_load_forgets_what_was_under_way(world, tmp_path):
    assert world(2).run(half_way, str(tmp_path)) == [(True, 4)] * 2


def grown(folder, size):
    engine = build(Case(stage=1, dropout=0.5))
    if size == 1:
        train(engine, 2)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    with engine.run_context.stream.active():
        mine = torch.rand(3).tolist()
    return mine, torch.rand(2).tolist()


def test_ranks_that_did_not_exist_draw_numbers_of_their_own(world, tmp_path):
    ((first, process),) = world(1).run(grown, str(tmp_path), 1)
    ranks, again = world(3).each(grown, [(str(tmp_path), 3)] * 2)
    assert ranks[0][0] == first
    assert len({tuple(mine) for mine, _ in ranks}) == 3
    assert all(own == process for _, own in ranks)
    assert ranks == again


def configured_folder(folder):
    engine = build(Case(checkpoint={"dir": folder}))
    train(engine, 1)
    engine.save_checkpoint()
    try:
        build(Case()).save_checkpoint()
    except UsageError as error:
        return engine.load_checkpoint()[0], str(error)


def test_the_folder_may_come_from_the_configuration(world, tmp_path):
    path, said = world(1).run(configured_folder, str(tmp_path))[0]
    assert Path(path) == tmp_path / "global_step1" and "checkpoint.dir" in said


def whole_units(folder):
    """A model in training whose stage-3 parameters are gathered by others is saved all the same, and loads."""
    engine = build(Case(stage=3))
    train(engine, 1)
    with mizzen.zero.GatheredParameters(list(engine.module.parameters())):
        pass
    engine.save_checkpoint(folder)
    before = engine.module_state_dict()
    engine.load_module_state_dict(get_fp32_state_dict_from_zero_checkpoint(folder))
    after = engine.module_state_dict()
    return [name for name in before if not torch.equal(_local(before[name]), _local(after[name]))]


def _local(tensor):
    return tensor.to_local() if "to_local" in dir(tensor) else tensor


def test_a_state_dict_of_a_checkpoint_fits_the_engine(world, tmp_path):
    assert world(2).run(whole_units, str(tmp_path)) == [[], []]


def convert_at_once(folder, safe):
    engine = build(Case())
    engine.save_checkpoint(f"{folder}/saved")
    for _ in range(4):
        mizzen.comm.barrier()
        convert_zero_checkpoint_to_fp32_state_dict(
            f"{folder}/saved", f"{folder}/out", max_shard_size=600, safe_serialization=safe
        )
    mizzen.comm.barrier()
    return sorted(path.name for path in Path(folder, "out").iterdir())


@pytest.mark.parametrize("safe", choice([True, False], [True]))
def test_all_ranks_convert_to_one_folder_at_once(world, tmp_path, safe):
    one, other, third = world(3).run(convert_at_once, str(tmp_path), safe)
    assert one == other == third and len(one) > 2 and not any(name.endswith(".new") for name in one)

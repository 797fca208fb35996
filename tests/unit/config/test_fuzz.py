"""Thousands of broken configurations: each is accepted with every key accounted for, or refused in our own words.

FULL=1 runs ten times as many. A failure names the seed: `break_one(seed)` makes the same configuration again.
"""

import base64
import copy
import json
import math
import random
import re

import pytest

from breadth import BREADTH, FULL
from mizzen.config import load
from mizzen.config.describe import examine
from mizzen.config.load import read_source
from mizzen.config.migrate import is_auto, name_keys, spread_paths, walk
from mizzen.config.resolve import resolve
from mizzen.config.schema import Config, values
from mizzen.config.section import OpenSection, keys_of, nest_in
from mizzen.errors import ConfigError, MizzenError

SEEDS = {"short": range(1_200), "rest": range(1_200, 5_000)}.get(BREADTH, range(50_000 if FULL else 5_000))
CHUNKS = 10
WORLDS = (8, 1, 64, 512)

BASES = [
    {"train_batch_size": 32, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": True}},
    {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 16,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "nvme", "nvme_path": "/local", "buffer_count": 5},
            "stage3_param_persistence_threshold": 1e5,
            "sub_group_size": 1e9,
        },
        "aio": {"block_size": 262144, "queue_depth": 32},
    },
    {
        "train_batch_size": 1024,
        "train_micro_batch_size_per_gpu": 2,
        "pipeline_parallel_size": 4,
        "sequence_parallel_size": 2,
        "tensor_parallel": {"autotp_size": 8},
        "pipeline": {"activation_checkpoint_interval": 1},
        "zero_optimization": {"stage": 1},
    },
    {
        "elasticity": {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "max_gpus": 600}
        | {"version": 0.1, "min_time": 20, "prefer_larger_batch": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
    },
    {
        "train_batch_size": 64,
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
        },
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3}},
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 1, "cpu_offload": True},
        "bfloat16": {"enabled": True},
        "flops_profiler": {"enabled": True, "profile_step": 5, "output_file": None},
    },
    {
        "train_batch_size": 16,
        "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "first"},
        "csv_monitor": {"enabled": False, "output_path": "logs"},
        "wandb": {"enabled": False, "project": "p"},
        "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"], "verbose": False},
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4},
    },
    {
        "train_batch_size": 16,
        "expert_parallel": {"enabled": True, "autoep_size": 2, "top_k": "auto", "route_scale": 1.5},
        "use_data_before_expert_parallelism": True,
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "bf16",
        "checkpoint": {"tag_validation": "Warn"},
        "compile": {"deepcompile": False},
    },
    {
        "train_batch_size": 16,
        "curriculum_learning": {"enabled": False},
        "data_efficiency": {"enabled": True, "seed": 7, "data_sampling": {"enabled": False, "num_epochs": 2}},
        "compression_training": {},
        "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001},
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
    },
    {},
]

VALUES = [
    *(None, True, False, 0, 1, -1, 2, 7, 0.5, -0.5, 1e-30, 1e30, 5e8, 10**18, 2**63, -(2**70), 10**400, 10**5000),
    *(math.nan, math.inf, -math.inf, "", " ", "auto", "AUTO", "1", "true", "none", "cpu", "fp16", "0.2"),
    *("\u00e9t\u00e9", "\U0001f600", "\ud800", "a\x00b", "x" * 10_000, "../../etc", "${HOME}", "%s", "{shown}"),
    *([], {}, [1], [None], [[]], ["a", 1], [1, 2, 3], {"a": 1}, {"enabled": True}, {"": {}}, {1: 2}, (1, 2), {3}, b"x"),
    *(object(), 1 + 2j, [math.nan], {"stage": 2}, {"enabled": "auto"}, [{"enabled": True}]),
]
JUNK_KEYS = [
    *("", " ", "stage", "enabled", "type", "params", "_origins", "model_fields", "model_config", "__class__", "at"),
    *("a.b", ".", "..", "zero_optimization.", "zero_optimization.stage", "optimizer.params.lr", "bf16.enabled.x"),
    *("\U0001f600", "\ud800", "train_batch_size ", "TRAIN_BATCH_SIZE", "k" * 2000, "\u0442rain_batch_size", "nul\x00"),
]
TOGETHER = [
    {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
    {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 2},
    {"elasticity": {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2]}, "train_batch_size": 4},
    {"elasticity": {"enabled": True}},
    {"elasticity": {"enabled": True, "max_train_batch_size": 10**15, "micro_batch_sizes": [999983, 999979]}},
    {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "cpu_offload": True}},
    {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}},
    {"zero_optimization": True},
    {"zero_optimization": {"mics_shard_size": 3, "stage": 3}},
    {"tensor_parallel": {"autotp_size": 3}, "sequence_parallel_size": 5},
    {"data_parallel_size": 7},
    {"expert_parallel": {"enabled": True, "autoep_size": 7}},
    {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": "auto"}}},
    {"optimizer": {"params": {}}},
    {"optimizer": {"type": "auto", "params": "auto"}},
]


def holders(config):
    """Every dict inside, with the section class that reads it, or None where the keys are the user's own."""
    found, seen = [(config, Config)], set()
    for holder, section in found:
        if id(holder) in seen:  # a configuration that contains itself
            continue
        seen.add(id(holder))
        for key, value in holder.items():
            field = keys_of(section).get(key, (None, None))[1] if section and isinstance(key, str) else None
            nest = nest_in(field.annotation) if field else None
            if isinstance(value, dict):
                found.append((value, nest.section if nest and nest.kind == "one" else None))
            elif isinstance(value, list | tuple):
                found += [(each, None) for each in value if isinstance(each, dict)]
    return found


def has_unknown_key(config):
    """By the schema alone, without the code under test. A top-level key with a dot is a path, judged where it ends."""
    return any(
        not isinstance(key, str) or (key not in keys_of(section) and not (holder is config and "." in key))
        for holder, section in holders(config)
        if section is not None and not issubclass(section, OpenSection)
        for key in holder
    )


def pick(rng, config):
    """A holder with at least one key, its section, and one of its keys."""
    full = [(holder, section) for holder, section in holders(config) if holder]
    if not full:
        config["train_batch_size"] = 8
        full = [(config, Config)]
    holder, section = rng.choice(full)
    return holder, section, rng.choice(list(holder))


def typo(rng, config):
    holder, _, key = pick(rng, config)
    place, word = rng.randrange(len(str(key)) + 1), str(key)
    new = rng.choice(
        [
            word[:place] + word[place + 1 :],
            word[:place] + rng.choice("abcxyz_1 \u00e9") + word[place:],
            word.upper(),
            word.title(),
            word.replace("_", "-"),
            word + rng.choice(["s", " ", "_", "\n"]),
        ]
    )
    holder[new] = holder.pop(key)


def junk_key(rng, config):
    holder, _ = rng.choice(holders(config))
    holder[rng.choice(JUNK_KEYS)] = copy.deepcopy(rng.choice(VALUES))


def other_value(rng, config):
    holder, _, key = pick(rng, config)
    holder[key] = copy.deepcopy(rng.choice(VALUES))


def known_key(rng, config):
    holder, section = rng.choice(holders(config))
    if section is not None:
        holder[rng.choice(list(keys_of(section)))] = copy.deepcopy(rng.choice(VALUES))


def wrapped(rng, config):
    holder, _, key = pick(rng, config)
    for _ in range(rng.choice([1, 2, 900, 5000])):
        holder[key] = rng.choice([{"a": holder[key]}, {key: holder[key]}, [holder[key]]])


def scaled(rng, config):
    holder, _, key = pick(rng, config)
    if isinstance(holder[key], int | float):
        holder[key] = rng.choice(
            [-holder[key], holder[key] * 10**9, holder[key] + 0.5, str(holder[key]), [holder[key]]]
        )


def swapped(rng, config):
    (one, _, first), (other, _, second) = pick(rng, config), pick(rng, config)
    one[first], other[second] = copy.deepcopy(other[second]), copy.deepcopy(one[first])


def cycle(rng, config):
    holder, _, key = pick(rng, config)
    holder[key] = rng.choice([config, [config], {"a": holder}])


def together(rng, config):
    config.update(copy.deepcopy(rng.choice(TOGETHER)))


def merged(rng, config):
    for key, value in copy.deepcopy(rng.choice(BASES)).items():
        config.setdefault(key, value)


def odd_key(rng, config):
    holder, _ = rng.choice(holders(config))
    holder[rng.choice([1, None, 2.5, True, ("a",), b"k"])] = 1


MUTATIONS = [
    typo,
    typo,
    junk_key,
    other_value,
    other_value,
    known_key,
    known_key,
    wrapped,
    scaled,
    swapped,
    together,
    merged,
]
MUTATIONS += [odd_key, cycle]


def as_text(rng, config):
    """The configuration as a file would hold it, damaged or with a key twice; None where JSON cannot hold it."""
    try:
        text = json.dumps(config)
    except (TypeError, ValueError, RecursionError):
        return None
    match rng.randrange(6):
        case 0:
            return text[: rng.randrange(len(text))]
        case 1:
            place = rng.randrange(len(text))
            return text[:place] + rng.choice('{}[]",:x#\n\\\x00') + text[place + 1 :]
        case 2:
            return '{"train_batch_size": 8, "train_batch_size": 8' + (", " if len(text) > 2 else "") + text[1:]
        case 3:
            return re.sub(r"\d+", "7" * 5000, text, count=1)
        case 4:
            return base64.urlsafe_b64encode(text.encode()).decode()
        case _:
            return text


def break_one(seed):
    """A source for `load`: a valid configuration after one to three accidents, sometimes as text."""
    rng = random.Random(seed)
    config = copy.deepcopy(rng.choice(BASES))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        try:
            rng.choice(MUTATIONS)(rng, config)
        except (RecursionError, ArithmeticError, ValueError):
            break  # two accidents met, such as a copy of what is nested 5,000 deep
    text = as_text(rng, config) if rng.random() < 0.15 else None
    return config if text is None else text


def unaccounted(source, config, shown):
    """Keys that were given but appear nowhere in the resolved values, neither there nor at their new path."""
    raw = read_source(source)
    spread_paths(raw)
    name_keys(raw, Config)
    renamed = {origin.note for origin in shown.values()}
    lost = []
    for found in walk(raw, Config):
        path, value = found.path, found.value
        if is_auto(value) and config.origin(path).note:
            continue
        if found.fate.kind == "moved":
            inert = value in (None, False) or is_auto(value) or not found.fate.moved_to
            fine = inert or f"as {path}" in renamed
        else:
            parents = [path.rsplit(".", cut)[0] for cut in range(1, path.count(".") + 1)]
            seen = (
                path in shown
                or any(parent in shown for parent in parents)
                or any(p.startswith(f"{path}.") for p in shown)
            )
            fine = seen and config.is_given(path)
        if not fine:
            lost.append(path)
    return lost


def judge(source):
    """What is wrong with how a source is treated; None if nothing is."""
    try:
        return _judge(source)
    except Exception as error:  # noqa: BLE001 - that there is none is the point
        return f"foreign error: {type(error).__name__}: {str(error)[:200]}"


def _judge(source):
    try:
        config = load(source)
    except ConfigError as error:
        whole_file = isinstance(source, str) or "nested too deeply" in str(error)
        if not (error.path or whole_file) or not error.message:
            return f"refused without a path: {error}"
        if len(str(error)) > 4000:
            return "a message of more than a screen"
        return None if examine(source).problems else "refused by load, but examine finds no problem"
    if problems := examine(source).problems:
        return f"accepted by load, but examine finds {problems}"
    if has_unknown_key(read_source(source)):
        return "an unknown key was accepted"
    found = list(values(config))
    if lost := unaccounted(source, config, {item.path: item.origin for item in found}):
        return f"given, but not among the resolved values: {lost}"
    if strange := [item.path for item in found if isinstance(item.value, float) and not math.isfinite(item.value)]:
        return f"not a number: {strange}"
    for world in WORLDS:
        try:
            resolve(config, world)
        except MizzenError:
            continue
    return None


def described(source):
    try:
        return repr(source)[:1500]
    except (RecursionError, ValueError) as error:
        return f"not printable: {error}"


@pytest.mark.parametrize("base", range(len(BASES)))
def test_the_unbroken_configurations_are_accepted(base):
    assert judge(BASES[base]) is None
    if BASES[base]:
        world = 512 if "pipeline_parallel_size" in BASES[base] else 8
        assert resolve(load(BASES[base]), world).batch.train >= 8


@pytest.mark.in_parts
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_broken_configuration_gets_through_or_out(chunk):
    bad = []
    for seed in SEEDS[chunk::CHUNKS]:
        source = break_one(seed)
        if problem := judge(source):
            bad.append(f"seed {seed}: {problem}\n    {described(source)}")
    assert not bad, f"{len(bad)} of {len(SEEDS) // CHUNKS}\n" + "\n".join(bad[:10])


def test_the_accidents_are_of_every_kind():
    """The fuzz would prove nothing if nearly all of it were accepted, or nearly all refused for one reason."""
    accepted, refused = 0, set()
    for seed in range(600):
        try:
            load(break_one(seed))
            accepted += 1
        except ConfigError as error:
            refused.add(error.path)
    assert 60 < accepted < 400
    assert len(refused) > 60


@pytest.mark.parametrize(
    "known", ["train_batch_size", "zero_optimization.stage", "optimizer.type", "fp16.loss_scale_window"]
)
def test_a_misspelt_key_is_named_with_the_right_one(known):
    *parents, last = known.split(".")
    for seed in range(200):
        rng = random.Random(seed)
        place = rng.randrange(len(last))
        source = {f"{last[:place]}{rng.choice('qxj')}{last[place + 1 :]}": 1}
        for parent in reversed(parents):
            source = {parent: source}
        with pytest.raises(ConfigError) as caught:
            load(source)
        assert f"did you mean '{last}'?" in str(caught.value)

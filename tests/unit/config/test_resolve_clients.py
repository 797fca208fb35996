"""A file that a client completes: what it leaves open, and what stands in for it until then."""

import pytest

from mizzen.config.load import load
from mizzen.config.resolve import ACCUMULATION, MICRO, TRAIN, check_filled_in, is_batch_open, resolve, with_batch
from mizzen.errors import ConfigError, UsageError

OPEN = {TRAIN: "auto", MICRO: "auto", ACCUMULATION: "auto"}
SCHEDULE = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}


def batch(keys, micro=None, world=8):
    found = resolve(with_batch(load(keys), micro), world)
    return str(found.batch), is_batch_open(found.config)


def test_every_auto_is_known_by_its_path():
    config = load({"scheduler": SCHEDULE, "bf16": {"enabled": "auto"}, "gradient_clipping": 1.0, **OPEN})
    assert config.autos() == (
        *(TRAIN, MICRO, ACCUMULATION),
        *("scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps", "bf16.enabled"),
    )
    assert config.is_auto("bf16.enabled") and not config.is_auto("gradient_clipping")


def test_a_batch_that_only_a_client_knows_is_open():
    assert batch(OPEN) == ("8 = micro 1 * accumulation 1 * dp 8", True)
    assert batch({**OPEN, ACCUMULATION: 4}) == ("32 = micro 1 * accumulation 4 * dp 8", True)
    assert batch(OPEN, 4) == ("32 = micro 4 * accumulation 1 * dp 8", False)


def test_a_batch_that_follows_from_the_file_is_not_open():
    assert batch({**OPEN, TRAIN: 64}) == ("64 = micro 8 * accumulation 1 * dp 8", False)
    assert batch({**OPEN, TRAIN: 64}, 4) == ("64 = micro 4 * accumulation 2 * dp 8", False)
    assert batch({**OPEN, MICRO: 2}) == ("16 = micro 2 * accumulation 1 * dp 8", False)


def test_an_absent_batch_is_no_open_one():
    with pytest.raises(ConfigError, match="no batch size is given"):
        batch({})
    assert batch({}, 4) == ("32 = micro 4 * accumulation 1 * dp 8", False)


def test_a_batch_of_the_file_is_not_replaced():
    with pytest.raises(UsageError, match="--batch 4: the file itself has train_micro_batch_size_per_gpu = 2"):
        batch({**OPEN, MICRO: 2}, 4)
    elastic = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4], "version": 0.1}
    with pytest.raises(UsageError, match="--batch 4: the batch of this file is that of its section elasticity"):
        batch({"elasticity": elastic}, 4)
    assert not batch({**OPEN, "elasticity": elastic})[1]


def test_a_schedule_without_an_end_is_refused_when_it_is_made_not_before():
    config = load({"scheduler": SCHEDULE})
    with pytest.raises(ConfigError, match='scheduler.params.total_num_steps: "auto", and no client has filled it in'):
        check_filled_in(config)
    check_filled_in(load({"scheduler": {**SCHEDULE, "params": {"total_num_steps": 10}}}))

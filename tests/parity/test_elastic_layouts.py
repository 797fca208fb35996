"""A job that goes on with fewer ranks, at the layout that one file gives for them, from the same checkpoint."""

import pytest

import mizzen
from breadth import choice
from mizzen.config.load import load
from mizzen.config.resolve import resolve
from mizzen.errors import ConfigError
from parity.decoders import Decoder
from parity.test_tensor import config, reference, walk

LAYOUTS = {"layouts": [{"ranks": 2, "pipeline_parallel_size": 2}, {"ranks": 1}]}
BEFORE = 2


def start():
    settings = config(2, 1, "AdamW", accumulation=2, pipeline_parallel_size=2, elasticity=LAYOUTS)
    return mizzen.initialize(model=Decoder(), config=settings)[0]


def begin(folder: str) -> list:
    engine = start()
    losses, _ = walk(engine, range(BEFORE))
    assert engine.save_checkpoint(folder)
    return losses


def go_on(folder: str) -> tuple:
    engine = start()
    assert engine.load_checkpoint(folder)[0] is not None and engine.load_report.is_exact
    settings = engine.settings
    degrees = (settings.tensor_parallel.autotp_size, settings.pipeline_parallel_size, engine.dp_world_size)
    return walk(engine, [BEFORE])[0], degrees


@pytest.mark.parametrize(
    ("first", "then", "degrees"),
    choice([(4, 2, (1, 2, 1)), (8, 4, (2, 2, 1)), (8, 1, (1, 1, 1))], [(4, 2, (1, 2, 1))]),
)
def test_half_of_the_ranks_go_on_where_all_of_them_were(world, tmp_path, first, then, degrees):
    losses = world(first).run(begin, str(tmp_path))[0]
    for after, found in world(then).run(go_on, str(tmp_path)):
        assert found == degrees
        assert [*losses, *after] == pytest.approx(reference("grouped", "AdamW", 0.0)[0], rel=1e-5)


def test_the_file_says_which_degrees_a_number_of_ranks_has():
    written = load(config(2, 1, accumulation=2, pipeline_parallel_size=2, elasticity=LAYOUTS))
    found = {ranks: resolve(written, ranks).layout for ranks in (8, 4, 2, 1)}
    assert [(each.tp, each.pp, each.dp) for each in found.values()] == [(2, 2, 2), (2, 2, 1), (1, 2, 1), (1, 1, 1)]
    twice = load({"train_batch_size": 4, "elasticity": {"layouts": [{"ranks": 2}, {"ranks": 2, "autotp_size": 2}]}})
    with pytest.raises(ConfigError, match="elasticity.layouts: there are 2 for 2 ranks"):
        resolve(twice, 2)

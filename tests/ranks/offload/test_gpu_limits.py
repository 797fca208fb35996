"""What `bench.gpu_limits` says of where bytes rest, on a device that lies behind real copies."""

import sys
from pathlib import Path

from behind import use_behind
from ranks.offload.test_step import places, start, train

PARAMETERS = 4 * (8 * 8 + 8) + 8 * 3 + 3
LIMIT = 1500


def rests(folder):
    """Bytes of masters and states by place, where all three have some."""
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from bench.gpu_limits import bytes_at_rest

    use_behind()
    budgets = {"device_bytes": LIMIT, "host_bytes": LIMIT, "nvme_bytes": 1 << 20}
    engine = start(2, "bf16", offload={"device": "nvme", "nvme_path": folder}, budgets=budgets)
    train(engine, "bf16", steps=2)
    found, where = dict(bytes_at_rest(engine)), set(places(engine))
    masters = sum(lot.master.numel() for store in engine.stores for lot in store.contents.lots)
    engine.destroy()
    return found, where, masters


def test_every_byte_has_a_place(world, tmp_path):
    for found, where, masters in world(2).run(rests, str(tmp_path)):
        assert where == set(found) == {"device", "host", "nvme"}
        assert found["device"] <= LIMIT and found["host"] <= LIMIT
        assert sum(found.values()) == 12 * masters >= 12 * PARAMETERS / 2

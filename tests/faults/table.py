"""`make faults-checkpoint`: every fault, all of the tries, as a table. `--most N` tries N of each kind."""

import argparse
import tempfile
from pathlib import Path

from faults import bombs, checks, peers
from faults.checks import Budget, Result, timed
from faults.others import installed
from pool import Pool, World


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, help="tries of each kind; all when absent")
    parser.add_argument("--flips", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    budget = Budget(arguments.most, arguments.seed)
    pool = Pool()

    def world(size: int) -> World:
        return World(pool, size, "gloo")

    print(f"{'fault':58} {'tries':>6} {'failures':>9} {'seconds':>8}   seed {arguments.seed}")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        places = iter(range(1000))

        def place() -> Path:
            found = Path(folder) / str(next(places))
            found.mkdir()
            return found

        runs = [
            *(
                lambda beside=beside, again=again: checks.kill(world, place(), budget, beside=beside, again=again)
                for again in (False, True)
                for beside in (False, True)
            ),
            lambda: checks.power_cut(place(), budget),
            lambda: checks.flips(place(), budget, arguments.flips),
            lambda: checks.shortened(place()),
            lambda: checks.disk_errors(place(), budget),
            lambda: checks.short_writes(place()),
            lambda: checks.malice(place()),
            lambda: bombs.bombs(place()),
            lambda: bombs.strange_files(place()),
            lambda: bombs.folders(world, place(), times=1 if budget.most else 5),
        ]
        for run in runs:
            failed += _show(timed(run))
        for peer in installed():
            print(f"\nthe same done to {peer.title}:")
            for fault in peers.FAULTS:
                _show(timed(lambda fault=fault, peer=peer: fault(peer, place(), budget)))
    pool.close()
    return 1 if failed else 0


def _show(result: Result) -> bool:
    print(f"{result.name:58} {result.tried:6} {len(result.failures):9} {result.seconds:8.1f}", flush=True)
    for failure in result.failures[:3]:
        print(f"    {failure[:200]}")
    return bool(result.failures)


if __name__ == "__main__":
    raise SystemExit(main())

"""Saving and loading beside torch.distributed.checkpoint: the same tensors, the same folder, two CPU ranks, in turns.

    python -m bench.checkpoint                      # 200 M parameters in fp32, both moments of Adam left out
    python -m bench.checkpoint --millions 10        # a quick look
    python -m bench.checkpoint --planning           # what planning costs, by the number of ranks; no ranks are needed

Every rank holds half of each tensor, as an FSDP shard. Ours hashes every byte, when it writes and when it reads.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from mizzen.checkpoint import save as protocol
from mizzen.checkpoint.manifest import BoxTable, FileEntry, Manifest, StoredBox, TensorEntry
from mizzen.checkpoint.rank_group import RankGroup, attempt
from mizzen.checkpoint.read import Reader
from mizzen.checkpoint.save import SaveOptions, SaveThread, merge
from mizzen.checkpoint.write import Item, Written
from mizzen.model.box import Box
from mizzen.model.piece import Piece

TENSORS = 100


class Ours:
    """mizzen's own protocol, hashes on."""

    def __init__(self, folder: Path, shards: dict[str, DTensor], rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.team, self.terms = RankGroup(rank, 2), SaveOptions(run="bench")
        self.background = SaveThread()
        self.items = []
        for name, tensor in shards.items():
            rows = tensor.shape[0] // 2
            box = Box((rank * rows, 0), ((rank + 1) * rows, tensor.shape[1]))
            self.items.append(Item("model", Piece(name, tuple(tensor.shape), (box,), tensor.to_local())))

    def save(self) -> None:
        ticket = protocol.begin(self.folder, "bench", self.team, self.terms)
        self._finish(ticket, self.items)

    def _finish(self, ticket: protocol.PendingSave, items: Sequence[Item]) -> None:
        written, failure = attempt(lambda: protocol.write(ticket, items, self.team))
        protocol.commit(ticket, written, failure, {}, self.team, self.terms)

    def save_beside(self) -> tuple[float, float]:
        """Seconds until training goes on, and until all is committed."""
        started = time.perf_counter()
        ticket = protocol.begin(self.folder, "bench", self.team, self.terms)
        copies = self.background.staging.copies(self.items)
        self.background.start(lambda: self._finish(ticket, copies))
        blocked = time.perf_counter() - started
        self.background.wait()
        return blocked, time.perf_counter() - started

    def load(self) -> None:
        with Reader(self.folder / "bench") as reader:
            for item in self.items:
                reader.fill("model", item.piece)


class Theirs:
    """torch.distributed.checkpoint with its defaults, which flush too."""

    def __init__(self, folder: Path, shards: dict[str, DTensor]) -> None:
        self.folder, self.shards = folder, shards

    def save(self) -> None:
        dcp.save(self.shards, checkpoint_id=self.folder)

    def load(self) -> None:
        dcp.load(self.shards, checkpoint_id=self.folder)


def rank_main(rank: int, folder: str, millions: float, rounds: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    rows = max(2, int(millions * 1e6 / TENSORS / 1000) // 2 * 2)
    shards = {
        f"layer{number}": DTensor.from_local(torch.randn(rows // 2, 1000), mesh, [Shard(0)], run_check=False)
        for number in range(TENSORS)
    }
    size = TENSORS * rows * 1000 * 4
    ours, theirs = Ours(Path(folder) / "ours", shards, rank), Theirs(Path(folder) / "theirs", shards)
    calls: dict[str, Callable[[], object]] = {
        "save mizzen": ours.save, "save dcp": theirs.save, "load mizzen": ours.load, "load dcp": theirs.load,
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in calls}
    beside = []
    for number in range(rounds + 1):
        names = list(calls)[:: 1 if number % 2 else -1] if number else list(calls)
        for name in names:
            dist.barrier()
            started = time.perf_counter()
            calls[name]()
            dist.barrier()
            if number:  # the first round makes files and warms caches
                times[name].append(time.perf_counter() - started)
        dist.barrier()
        beside.append(ours.save_beside())
    if rank == 0:
        found = {
            name: {"seconds": statistics.median(took), "GB/s": size / 1e9 / statistics.median(took)}
            for name, took in times.items()
        }
        blocked, whole = (statistics.median(column) for column in zip(*beside[1:], strict=True))
        found["save beside training"] = {"blocked": blocked, "seconds": whole, "share": blocked / whole}
        (Path(folder) / "found.json").write_text(json.dumps({"bytes": size, "rounds": rounds, "results": found}))
    dist.barrier()
    dist.destroy_process_group()


def measure(millions: float, rounds: int, place: str | None) -> dict:
    """Run both on two ranks."""
    folder = tempfile.mkdtemp(dir=place)
    try:
        port = 20000 + os.getpid() % 20000
        multiprocessing.spawn(rank_main, (folder, millions, rounds, port), nprocs=2)
        return json.loads((Path(folder) / "found.json").read_text())
    finally:
        shutil.rmtree(folder)


def written_by(rank: int, ranks: int, tensors: int, kinds: Sequence[str]) -> Written:
    """What one rank of many would have written, without data: a slab of every tensor."""
    rows = 8 * ranks
    entries = [
        TensorEntry(kind, f"layers.{number}.weight", (rows, 128), "float32")
        for number in range(tensors)
        for kind in kinds
    ]
    box = Box((rank * 8, 0), (rank * 8 + 8, 128))
    size = box.numel * 4
    parts = BoxTable.of(StoredBox(number, 4096 + number * size, box) for number in range(len(entries)))
    end = 4096 + len(entries) * size
    hashes = ("0" * 32,) * -(-end // (1 << 22))
    return Written.of(entries, FileEntry(f"{'0' * 16}-{rank:05d}.safetensors", end, hashes, parts))


def plan(
    ranks: int, tensors: int = 1000, kinds: Sequence[str] = ("model", "exp_avg", "exp_avg_sq")
) -> dict[str, float]:
    """What the first rank does with all votes, and what every rank does to find its own part again."""
    started = time.perf_counter()
    mine = written_by(0, ranks, tensors, kinds)
    local = time.perf_counter() - started
    votes = [mine, *(written_by(rank, ranks, tensors, kinds) for rank in range(1, ranks))]
    started = time.perf_counter()
    merged_tensors, files = merge(votes)
    merged = time.perf_counter() - started
    started = time.perf_counter()
    data = Manifest("0" * 16, "run", "tag", 0, "", merged_tensors, files).to_bytes()
    encoded = time.perf_counter() - started
    del votes, merged_tensors, files
    started = time.perf_counter()
    manifest = Manifest.from_bytes(data, "manifest")
    parsed = time.perf_counter() - started
    started = time.perf_counter()
    reader = Reader(Path("nowhere"), manifest)
    indexed = time.perf_counter() - started
    del reader, manifest
    return {
        "ranks": ranks,
        "local": local,
        "merge": merged,
        "encode": encoded,
        "MB": len(data) / 1e6,
        "parse": parsed,
        "index": indexed,
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=200, help="parameters in fp32 (default: 200)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write; the system's place for temporary files when absent")
    parser.add_argument("--planning", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 512, 4096])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    if options.planning:
        print("seconds to plan 1,000 tensors with both moments, every rank holding a slab of each")
        print("| ranks | own list | merge on the first rank | write manifest | its MB | read it | find parts |")
        print("|--:|--:|--:|--:|--:|--:|--:|")
        for ranks in options.ranks:
            row = plan(ranks)
            cells = [f"{row[key]:.3g}" for key in ("local", "merge", "encode", "MB", "parse", "index")]
            print(f"| {ranks} | {' | '.join(cells)} |", flush=True)
        return 0
    found = measure(options.millions, options.rounds, options.folder)
    print(f"{found['bytes'] / 1e6:.0f} MB, 2 ranks, medians of {found['rounds']} rounds, torch {torch.__version__}")
    for name, row in found["results"].items():
        print(f"{name:22} " + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Small saves that can be cut short anywhere, and a judge who says what is left of them."""

import os
import signal
from pathlib import Path

import torch

from mizzen.checkpoint import save as protocol
from mizzen.checkpoint.folder import committed
from mizzen.checkpoint.rank_group import RankGroup, attempt
from mizzen.checkpoint.read import Reader, verify
from mizzen.checkpoint.save import SaveOptions, SaveThread
from mizzen.checkpoint.write import Item
from mizzen.files import watched
from mizzen.model.piece import piece_of_range, piece_of_whole

TAG = "step"
SHAPE = (67, 31)


def tensors_of(number: int) -> dict[str, torch.Tensor]:
    """What save `number` holds: every tensor tells which save it is of."""
    return {
        f"{kind}.{place}": torch.full(SHAPE, float(number)) + torch.arange(31) / 64
        for kind in ("weight", "moment")
        for place in range(4)
    }


def items_of(number: int, rank: int, size: int) -> list[Item]:
    """One rank's share: a flat range of every tensor, and something small that the first rank writes."""
    items = []
    for name, tensor in tensors_of(number).items():
        each = -(-tensor.numel() // size)
        start, stop = min(rank * each, tensor.numel()), min((rank + 1) * each, tensor.numel())
        items.append(Item("model", piece_of_range(name, tensor.shape, tensor.view(-1)[start:stop], start, stop)))
    if rank == 0:
        items.append(Item("step", piece_of_whole("weight.0", torch.tensor(float(number)))))
    return items


def save(
    root: Path, number: int, *, rank: int = 0, size: int = 1, beside: bool = False, validation: str = "Warn"
) -> None:
    """Save, here or in a thread."""
    team, terms = RankGroup(rank, size), SaveOptions(run="0123456789abcdef", tag_validation=validation)
    facts = {"counters": {"global_steps": number}, "number": number}
    ticket = protocol.begin(root, TAG, team, terms)
    items = items_of(number, rank, size)

    def finish() -> None:
        written, failure = attempt(lambda: protocol.write(ticket, items, team))
        protocol.commit(ticket, written, failure, facts, team, terms)

    background = SaveThread()
    if beside:
        background.start(finish)
        background.wait()
    else:
        finish()


class Cut:
    """A hook that counts operations, and ends the process before one of them."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.seen: list[str] = []

    def __call__(self, operation: str, path: Path) -> None:
        if len(self.seen) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.append(f"{operation} {path.name}")


def cut_short(root: str, number: int, victim: int, at: int | None, beside: bool) -> int:
    """On each rank: a save that ends before operation `at` of rank `victim`. Returns how many operations there were."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    cut = Cut(at if rank == victim else None)
    with watched(cut):
        save(Path(root), number, rank=rank, size=size, beside=beside)
    return len(cut.seen)


def judge(root: Path, allowed: set[int | None]) -> str:
    """Empty when the newest checkpoint is whole and one of those allowed; None among them means that none is fine."""
    found = committed(root)
    if not found:
        return "" if None in allowed else "no checkpoint is left"
    newest = found[-1]
    number = newest.manifest.facts["number"]
    if number not in allowed:
        return f"checkpoint {number} is there, which should not be"
    with Reader(newest.folder) as reader:
        if wrong := verify(reader):
            return f"damaged: {wrong[0]}"
        for name, tensor in tensors_of(number).items():
            if not torch.equal(reader.whole("model", name), tensor):
                return f"'{name}' is not of save {number}: a mixture"
    return ""


def tidy(root: Path) -> str:
    """Empty when nothing lies about in the folder of the tag after one more save by another process."""
    names = sorted(path.name for path in (root / TAG).iterdir())
    expected = {"manifest.json", *(file.name for file in committed(root)[-1].manifest.files)}
    return "" if set(names) == expected else f"left over: {sorted(set(names) - expected)}"

"""A save that goes on beside training: one at a time, on copies, its error raised at the next step."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mizzen.accelerator import Accelerator, get_accelerator
from mizzen.checkpoint.rank_group import RankGroup
from mizzen.checkpoint.write import Item
from mizzen.comm.mesh import Aside
from mizzen.errors import CheckpointError
from mizzen.log import get_logger
from mizzen.model.piece import Piece


class Staging:
    """Memory of the host for copies of what is saved, kept from one save to the next: new pages cost most of a copy."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def copies(self, items: Sequence[Item]) -> list[Item]:
        """Copies in memory that training does not change. That of the save before is used again."""
        kept, self._kept = self._kept, {}
        accelerator = get_accelerator()
        found = [self._copied(number, item, kept.get(number), accelerator) for number, item in enumerate(items)]
        if any(_is_away(item.piece.device, accelerator) for item in items):
            accelerator.synchronize()
        return found

    def _copied(self, number: int, item: Item, place: Tensor | None, accelerator: Accelerator) -> Item:
        piece = item.piece
        data = piece.data.detach()
        is_away = _is_away(piece.device, accelerator)
        if place is None or place.shape != data.shape or place.dtype != data.dtype:
            place = torch.empty(data.shape, dtype=data.dtype)
            place = accelerator.pin_memory(place) if is_away else place
        self._kept[number] = place.copy_(data, non_blocking=is_away)
        return replace(item, piece=Piece(piece.name, piece.shape, piece.boxes, place))


def _is_away(device: torch.device, accelerator: Accelerator) -> bool:
    """Whether tensors there are in memory of the device's own: copies from it need not be waited for one by one."""
    return device.type == accelerator.name and not accelerator.shares_host_memory


class SaveThread:
    """The thread of at most one save. The process does not end before it has.

    Engines of one layout share the group that saves talk on, so a save also waits for those of other engines.
    """

    def __init__(self, aside: Aside | None = None) -> None:
        self._aside = aside or Aside(None)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.staging = Staging()

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def refuse_another(self, group: RankGroup) -> None:
        """Raise on every rank while one is still writing: ranks come to the end of a save at different moments."""
        busy = (
            "a save is still being written, and checkpoint.async_policy is 'refuse': save less often, or let the "
            "second save wait with 'wait'"
        )
        group.on_job_group().raise_failures(busy if self.is_busy else None, "save_checkpoint()")

    def start(self, do: Callable[[], None]) -> None:
        """Let something go on beside training."""
        self._thread = threading.Thread(target=self._run, args=(do,), name="mizzen-save", daemon=False)
        self._aside.thread = self._thread
        self._thread.start()

    def _run(self, do: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            do()
        except Exception as error:  # noqa: BLE001  whatever it is: training would never hear of it
            get_logger().error("a save beside training failed after %.1f s: %s", time.perf_counter() - started, error)
            self._error = error

    def wait(self) -> None:
        """Wait for the save under way, if there is one, and raise its error if it was this engine's."""
        self._aside.wait()
        self._thread = None
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the error of a save that has failed, once."""
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"the last checkpoint was not saved: {error}") from error

"""What this rank holds of a named tensor: boxes of global coordinates and the local data, whoever cut it and how.

Checkpoints, `safe_get_*`, norms and offload speak of Pieces, so none of them asks for a stage. Resharding is
`copy_overlap` and nothing else. DTensors become Pieces in `placement.py`; moving Pieces between ranks is not done here.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mizzen.errors import UsageError
from mizzen.model.box import Box, Coverage, Shape, boxes_of_range, coverage
from mizzen.model.home import Site


class Readers:
    """Those who read something beside training, for a save: whoever wants to change it waits until none is left."""

    def __init__(self, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None) -> None:
        self._before, self._after = before, after
        """Called before a reader comes, and after the last one has gone, by its thread."""
        self._count = 0
        self._changed = threading.Condition()

    def enter(self) -> Callable[[], None]:
        """One reader more, for as long as nobody has called what is returned. To call it again does nothing."""
        self._before()
        with self._changed:
            self._count += 1
        is_here = True

        def leave() -> None:
            nonlocal is_here
            with self._changed:
                self._count -= is_here
                if is_here and not self._count:
                    self._after()
                    self._changed.notify_all()
                is_here = False

        return leave

    def wait(self) -> None:
        """Wait until nobody reads."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count)


@dataclass(frozen=True, slots=True, eq=False)
class Unread:
    """Data that is not in the memory of the device, such as a state that rests in a file: how to get it."""

    shape: Shape
    dtype: torch.dtype
    load: Callable[[], Tensor]
    """Reads it, into memory that nobody else writes to."""
    keep: Callable[[], None] | None = None
    """Called after something was written to what `load` has returned last; None where that would be lost."""
    device: torch.device = torch.device("cpu")
    """Where it is then."""
    load_beside: Callable[[], Tensor] | None = None
    """Reads it in another thread, beside training, among `readers`; None where it has to be copied before."""
    readers: Readers | None = None
    """Who reads it so: it does not change before they are done."""
    done: Callable[[], None] = lambda: None
    """Says that one of them is."""

    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def beside(self) -> "Unread | None":
        """This, to be read in another thread until `done` is called; None where it cannot be."""
        if self.load_beside is None or self.readers is None:
            return None
        return replace(self, load=self.load_beside, keep=None, done=self.readers.enter())

    def part(self, start: int, stop: int, shape: Shape) -> "Unread":
        """A range of it, counted flat."""

        def of(load: Callable[[], Tensor]) -> Callable[[], Tensor]:
            return lambda: load().reshape(-1)[start:stop].view(shape)

        beside = None if self.load_beside is None else of(self.load_beside)
        return replace(self, shape=shape, load=of(self.load), load_beside=beside)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A part of one named tensor. Its data is a view: what is written to a Piece is written where it came from.

    Data that is not in memory is read when it is asked for; who writes to it says so with `changed`.
    """

    name: str
    shape: Shape
    """The global shape."""
    boxes: tuple[Box, ...]
    """What of it is held, disjoint and never empty: none when this rank holds nothing."""
    source: Tensor | Unread
    """With one box, a tensor of its shape; otherwise the elements of the boxes one after another, flat."""

    def __post_init__(self) -> None:
        whole, held = Box.whole(self.shape), sum(box.numel for box in self.boxes)
        if any(box.is_empty or not whole.contains(box) for box in self.boxes):
            raise self._bad(f"its boxes are not all within the tensor {self.shape}, or some are empty")
        if len(self.boxes) > 1 and coverage(self.boxes, self.shape).overlapping:
            raise self._bad("its boxes overlap")
        expected = self.boxes[0].shape if len(self.boxes) == 1 else (held,)
        if tuple(self.source.shape) != expected and not held == self.source.numel() == 0:
            raise self._bad(f"it should be a local tensor of shape {expected}, not {tuple(self.source.shape)}")

    @property
    def data(self) -> Tensor:
        """The local data, which is read now if it is not in memory."""
        if isinstance(self.source, Tensor):
            return self.source
        found = self.source.load()
        if tuple(found.shape) != self.source.shape or found.dtype != self.source.dtype:
            promised = f"{list(self.source.shape)} {self.source.dtype}"
            raise self._bad(f"{list(found.shape)} {found.dtype} was read where {promised} should be")
        return found

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the local data; copying between Pieces of different dtypes casts."""
        return self.source.dtype

    @property
    def device(self) -> torch.device:
        """Where the local data is."""
        return self.source.device

    @property
    def numel(self) -> int:
        """How many elements are held here."""
        return self.source.numel()

    @property
    def nbytes(self) -> int:
        """How many bytes they are."""
        return self.numel * self.dtype.itemsize

    def check_writable(self) -> None:
        """Refuse to be written to, where what is written would be lost; wait for a save that reads it."""
        if isinstance(self.source, Tensor):
            return
        if self.source.keep is None:
            raise UsageError(f"{self} is not in memory: what is written to it would be lost")
        if self.source.readers is not None:
            self.source.readers.wait()

    def done(self) -> None:
        """Nobody asks for the data of this piece again."""
        if isinstance(self.source, Unread):
            self.source.done()

    def changed(self) -> None:
        """Something was written to the data that was asked for last."""
        if isinstance(self.source, Unread) and self.source.keep is not None:
            self.source.keep()

    def parts(self) -> Iterator[tuple[Box, Tensor]]:
        """Each box with its elements, as a view of the data in the shape of the box."""
        if not self.boxes:
            return
        data, offset = self.data.detach(), 0
        if len(self.boxes) == 1:
            yield self.boxes[0], data
            return
        for box in self.boxes:
            yield box, data[offset : offset + box.numel].view(box.shape)
            offset += box.numel

    def read(self, box: Box) -> Tensor:
        """A copy of the elements of a box, all of which must be held here."""
        self._require(box)
        target = _single(self, box, torch.empty(box.shape, dtype=self.dtype, device=self.device))
        copy_overlap(self, target)
        return target.data

    def write(self, box: Box, values: Tensor) -> None:
        """Set the elements of a box, all of which must be held here."""
        self._require(box)
        copy_overlap(_single(self, box, values), self)

    def _require(self, box: Box) -> None:
        found = sum(box.intersection(held).numel for held in self.boxes)
        if found != box.numel:
            held = ", ".join(map(str, self.boxes)) or "nothing"
            raise UsageError(
                f"{self.name}{list(self.shape)}: {found} of the {box.numel} elements of {box} are here: {held}"
            )

    def _bad(self, reason: str) -> UsageError:
        boxes = ", ".join(map(str, self.boxes)) or "no boxes"
        return UsageError(f"{boxes} of {self.name}{list(self.shape)} are no piece: {reason}")

    def __str__(self) -> str:
        held = " ".join(map(str, self.boxes)) or "nothing"
        return f"{self.name}{list(self.shape)} {str(self.dtype).removeprefix('torch.')}: {held}"


def piece_of_range(name: str, shape: Sequence[int], flat: Tensor, start: int, stop: int) -> Piece:
    """The Piece of a flat range [start, stop) of a row-major tensor; `flat` holds exactly these elements."""
    boxes = boxes_of_range(shape, start, stop)
    if flat.numel() != stop - start or flat.dim() != 1:
        raise UsageError(
            f"{name}: [{start}, {stop}) needs a flat tensor of {stop - start} elements, not {list(flat.shape)}"
        )
    return Piece(name, tuple(shape), boxes, flat.detach().view(boxes[0].shape) if len(boxes) == 1 else flat.detach())


def piece_of_boxes(name: str, shape: Sequence[int], data: Tensor, boxes: tuple[Box, ...]) -> Piece:
    """The Piece of a flat tensor that holds the elements of some boxes, one after the other."""
    flat = data.detach().reshape(-1)
    return Piece(name, tuple(shape), boxes, flat.view(boxes[0].shape) if len(boxes) == 1 else flat)


def counted(piece: Piece, site: Site | None) -> Iterator[tuple[Piece, bool]]:
    """A piece in parts, each with whether its rank counts it, or another one of a cut axis, which holds the same."""
    if site is None or not site.is_shared or not piece.boxes:
        yield piece, True
        return
    for each in site.ranges(piece.boxes):
        if isinstance(piece.source, Unread):
            shape = each.boxes[0].shape if len(each.boxes) == 1 else (each.stop - each.start,)
            part = Piece(piece.name, piece.shape, tuple(each.boxes), piece.source.part(each.start, each.stop, shape))
        else:
            flat = piece.source.reshape(-1)
            part = piece_of_boxes(piece.name, piece.shape, flat[each.start : each.stop], each.boxes)
        yield part, each.is_counted


def piece_of_whole(name: str, tensor: Tensor) -> Piece:
    """A plain tensor that is held as a whole, as a Piece that shares its memory."""
    shape = tuple(tensor.shape)
    return Piece(name, shape, (Box.whole(shape),) if tensor.numel() else (), tensor.detach())


def copy_overlap(source: Piece, target: Piece) -> int:
    """Copy the elements that both Pieces hold into the target, cast to its dtype; returns how many they are."""
    if source.shape != target.shape:
        raise UsageError(f"{source} and {target} are parts of tensors of different shapes")
    target.check_writable()
    copied, held = 0, list(source.parts())
    for target_box, target_data in target.parts():
        for source_box, source_data in held:
            overlap = target_box.intersection(source_box)
            if not overlap.is_empty:
                target_data[overlap.slices(target_box)].copy_(source_data[overlap.slices(source_box)])
                copied += overlap.numel
    target.changed()
    return copied


def covers(pieces: Sequence[Piece]) -> Coverage:
    """Whether Pieces of one tensor hold each of its elements exactly once."""
    return coverage((box for piece in pieces for box in piece.boxes), _common_shape(pieces))


def assemble(pieces: Sequence[Piece]) -> Tensor:
    """The whole tensor, with the dtype and device of the first Piece. Copies must agree: the last one is taken."""
    shape = _common_shape(pieces)
    if missing := covers(pieces).missing:
        raise UsageError(f"{pieces[0].name}{list(shape)}: {missing} elements are in none of the {len(pieces)} pieces")
    empty = torch.empty(shape, dtype=pieces[0].dtype, device=pieces[0].device)
    whole = Piece(pieces[0].name, shape, _boxes(Box.whole(shape)), empty)
    for piece in pieces:
        copy_overlap(piece, whole)
    return whole.data


def _common_shape(pieces: Sequence[Piece]) -> Shape:
    kinds = {(piece.name, piece.shape) for piece in pieces}
    if len(kinds) != 1:
        raise UsageError(f"pieces of one tensor were expected, not of {len(kinds)}: {sorted(kinds)[:4]}")
    return pieces[0].shape


def _boxes(box: Box) -> tuple[Box, ...]:
    return () if box.is_empty else (box,)


def _single(piece: Piece, box: Box, data: Tensor) -> Piece:
    return Piece(piece.name, piece.shape, _boxes(box), data)

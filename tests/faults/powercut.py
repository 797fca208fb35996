"""A disk that keeps only what was flushed: the state after a power cut at any point of a save, replayed."""

import os
from pathlib import Path


class Disk:
    """Watches real operations and knows what a power cut right now would leave.

    Contents of a file are kept as of its last flush, names of a folder as of its last flush. `after(...)` gives two
    states that a filesystem may come back with: nothing that was not flushed; or names that were not flushed, too, with
    contents that were.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.contents: dict[int, bytes] = {}
        self.names: dict[Path, dict[str, int | Path]] = {}
        self.states: list[tuple[dict[Path, bytes], dict[Path, bytes]]] = []
        self._before: tuple[str, Path] | None = None

    def __call__(self, operation: str, path: Path) -> None:
        """Before an operation: the one before it is done."""
        self.note()
        self._before = (operation, path)

    def note(self) -> None:
        """Take in what the last operation has made durable, and remember what a cut now would leave."""
        if self._before is not None and self._before[0] == "fsync":
            path = self._before[1]
            if path.is_dir():
                self.names[path] = {
                    entry.name: entry if entry.is_dir() else entry.stat().st_ino for entry in path.iterdir()
                }
            elif path.exists():
                self.contents[path.stat().st_ino] = path.read_bytes()
        flushed = dict(self._walk(self.root))
        visible = {
            Path(folder) / name: self.contents.get(os.stat(os.path.join(folder, name)).st_ino, b"")
            for folder, _, files in os.walk(self.root)
            for name in files
        }
        self.states.append((flushed, visible))

    def _walk(self, folder: Path):
        for name, entry in self.names.get(folder, {}).items():
            if isinstance(entry, Path):
                yield from self._walk(entry)
            else:
                yield folder / name, self.contents.get(entry, b"")


def restore(state: dict[Path, bytes], root: Path, target: Path) -> Path:
    """Write a state to another folder."""
    target.mkdir(parents=True)
    for path, data in state.items():
        place = target / path.relative_to(root)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    return target

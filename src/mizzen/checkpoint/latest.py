"""The file `latest`, which names the tag that a load without one takes, and the record by which damage to it is found.

[Note: a flipped bit, an edit, or a crash]
Others read `latest`, so that it holds a tag and nothing else, and its damage may name another checkpoint. Beside it a
record holds the same tag with a hash. It is written after `latest`: if a save is killed in between, `latest` names what
was committed later than what the record has. Otherwise, when the two differ by one bit, `latest` is damaged, and when
they differ by more somebody has edited it, as people do.
"""

import json
import re
from pathlib import Path
from typing import Final

from mizzen.checkpoint.manifest import digest, is_plain
from mizzen.errors import FileError
from mizzen.files import BESIDE, commit_text, read_head
from mizzen.log import get_logger

LATEST: Final = "latest"
RECORD: Final = "latest.json"
UNFINISHED: Final = re.compile(rf"({re.escape(LATEST)}|{re.escape(RECORD)})\.[0-9a-f]+{re.escape(BESIDE)}")
"""What either is called before it has its name."""
_MOST: Final = 4096
"""Bytes that are read of either."""


def latest(root: Path) -> str | None:
    """The tag that the file `latest` names, if it names one."""
    try:
        tag = read_head(root / LATEST, _MOST).decode().strip()
    except (FileError, UnicodeDecodeError):
        return None
    return tag if is_plain(tag) else None


def recorded(root: Path) -> str | None:
    """The tag that `latest` was last written with; None where that is not known."""
    try:
        data = read_head(root / RECORD, _MOST)
    except FileError:
        return None
    try:
        found = json.loads(data)
        tag = str(found["tag"])
        if is_plain(tag) and found["hash"] == digest(tag.encode()):
            return tag
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    get_logger().warning("%s/%s is damaged: whether %s is as it was written is not known", root, RECORD, LATEST)
    return None


def set_latest(root: Path, tag: str) -> None:
    """Name the tag that a load without one takes."""
    commit_text(root / LATEST, tag + "\n")
    commit_text(root / RECORD, json.dumps({"tag": tag, "hash": digest(tag.encode())}) + "\n")


def is_one_bit_away(one: str, other: str) -> bool:
    """Whether two names differ in a single bit."""
    pairs = zip(one.encode(), other.encode(), strict=False)
    return len(one) == len(other) and sum((a ^ b).bit_count() for a, b in pairs) == 1

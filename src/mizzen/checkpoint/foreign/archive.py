"""The table of contents of a zip file, as torch writes them: stored members only, none of them unpacked.

A compressed member is refused, so the contents are never larger than the file. Names are compared, never opened.
"""

import struct
from dataclasses import dataclass
from typing import Final

from mizzen.checkpoint.foreign.extent import Extent
from mizzen.errors import CheckpointError

TABLE: Final = 64 * 2**20
"""How many bytes a table of contents may have: about 600,000 members."""
END: Final = struct.Struct("<4s4H2IH")
END64: Final = struct.Struct("<4sQ2H2I4Q")
LOCATOR64: Final = struct.Struct("<4sIQI")
MEMBER: Final = struct.Struct("<4s6H3I5H2I")
LOCAL: Final = struct.Struct("<4s5H3I2H")
LARGE: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Member:
    """One file inside: where its bytes are, and its checksum unless the writer left it out."""

    extent: Extent
    crc: int | None


def members(file: Extent) -> dict[str, Member]:
    """Name -> member. Members are checked against the file and each other before any is used."""
    start, length, count = _end(file)
    if length > TABLE:
        raise CheckpointError(f"{file.path}: its table of contents has {length:,} bytes; at most {TABLE:,} are read")
    table = file.part(start, length, "the table of contents").bytes(TABLE, "the table of contents")
    found: dict[str, Member] = {}
    at = 0
    for _ in range(count):
        if at + MEMBER.size > len(table):
            raise CheckpointError(f"{file.path}: its table of contents ends before member {len(found) + 1} of {count}")
        name, member, at = _member(file, table, at)
        if name in found:
            raise CheckpointError(f"{file.path}: has two members named {name!r}")
        found[name] = member
    return found


def _end(file: Extent) -> tuple[int, int, int]:
    """Where the table of contents is, its length, and how many members it has."""
    tail_length = min(file.length, END.size + 65535)
    tail = file.part(file.length - tail_length, tail_length, "the end").bytes(tail_length, "the end")
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < END.size:
        raise CheckpointError(f"{file.path}: begins like a zip file and does not end like one: it is truncated")
    _, _, _, _, count, length, start, _ = END.unpack_from(tail, at)
    if LARGE not in (length, start) and count != 0xFFFF:
        return start, length, count
    place = file.length - tail_length + at - LOCATOR64.size
    locator = file.part(place, LOCATOR64.size, "the end").bytes(LOCATOR64.size, "the end")
    signature, _, where, _ = LOCATOR64.unpack(locator)
    if signature != b"PK\x06\x07":
        return start, length, count
    record = file.part(where, END64.size, "the end").bytes(END64.size, "the end")
    signature, _, _, _, _, _, _, count, length, start = END64.unpack(record)
    if signature != b"PK\x06\x06":
        raise CheckpointError(f"{file.path}: the end of the zip file is damaged")
    return start, length, count


def _member(file: Extent, table: bytes, at: int) -> tuple[str, Member, int]:
    fields = MEMBER.unpack_from(table, at)
    signature, flags, method, crc = fields[0], fields[3], fields[4], fields[7]
    packed, size, name_length, extra_length, comment_length, start = *fields[8:13], fields[16]
    if signature != b"PK\x01\x02":
        raise CheckpointError(f"{file.path}: its table of contents is damaged at byte {at}")
    begin = at + MEMBER.size
    name = table[begin : begin + name_length].decode("utf8", "replace")
    extra = table[begin + name_length : begin + name_length + extra_length]
    packed, size, start = _large(extra, packed, size, start)
    if method or packed != size or flags & 1:
        raise CheckpointError(f"{file.path}: {name!r} is compressed or encrypted, which torch never does")
    parts = name.split("/")
    if name.startswith("/") or "\\" in name or "\0" in name or ".." in parts:
        raise CheckpointError(f"{file.path}: refused: it has a member named {name!r}, which leads out of it")
    local = file.part(start, LOCAL.size, repr(name)).bytes(LOCAL.size, repr(name))
    signature, *_, name_length_here, extra_length_here = LOCAL.unpack(local)
    if signature != b"PK\x03\x04":
        raise CheckpointError(f"{file.path}: {name!r} is not where the table of contents says")
    data = file.part(start + LOCAL.size + name_length_here + extra_length_here, size, repr(name))
    return name, Member(data, crc or None), begin + name_length + extra_length + comment_length


def _large(extra: bytes, packed: int, size: int, start: int) -> tuple[int, int, int]:
    """The numbers that need 64 bits stand in an extra field, in the order size, packed size, start."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            numbers = [number for (number,) in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + length // 8 * 8])]
            size, packed, start = (
                numbers.pop(0) if value == LARGE and numbers else value for value in (size, packed, start)
            )
        at += 4 + length
    return packed, size, start

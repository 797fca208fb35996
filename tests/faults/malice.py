"""Folders made by somebody who means harm, and a process that loads them while it is being watched."""

import base64
import json
import os
import pickle
import resource
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy

from mizzen.checkpoint.manifest import digest

Body = dict[str, Any]


class Bomb:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch CANARY",)


def sealed(body: Body) -> bytes:
    """A manifest whose hash is right."""
    text = json.dumps(body, separators=(",", ":")).encode()[:-1] + b","
    return text + f'\n"hash":"{digest(text)}"}}\n'.encode()


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def opened(folder: Path) -> Body:
    body = json.loads((folder / "manifest.json").read_bytes())
    del body["hash"]
    return body


def changes() -> Iterator[tuple[str, Callable[[Body], None]]]:
    """Ways to change a manifest that stays one."""

    def name(value: Any) -> Callable[[Body], None]:
        return lambda body: body["files"][0].update(name=value)

    outside = [
        "../secret",
        "/etc/passwd",
        "..",
        ".",
        "",
        "a/../../secret",
        "a\x00b",
        "~/x",
        "\\\\host\\x",
        "file:///etc/passwd",
    ]
    yield from ((f"file name {value!r}", name(value)) for value in [*outside, None, 7, "x" * 500])
    for size in (-1, 2**63, 2**70, 1.5, "9", None, True):
        yield f"file size {size!r}", lambda body, size=size: body["files"][0].update(size=size)
    for shape in ([2**62, 2**62], [-1, 4], [2**63], [1] * 5000, ["a"], None, [2**59]):
        yield f"shape {str(shape)[:30]}", lambda body, shape=shape: body["tensors"][0].__setitem__(2, shape)
    for dtype in ("object", "float1024", None, "os.system"):
        yield f"dtype {dtype!r}", lambda body, dtype=dtype: body["tensors"][0].__setitem__(3, dtype)

    def rows(change: Callable[[numpy.ndarray], Any]) -> Callable[[Body], None]:
        def changed(body: Body) -> None:
            parts = body["files"][0]["parts"]
            table = numpy.frombuffer(zlib.decompress(base64.b64decode(parts["2"])), "<i8").reshape(-1, 6).copy()
            found = change(table)
            parts["2"] = packed((table if found is None else found).tobytes())

        return changed

    for place, value in ((0, 10**9), (0, -1), (1, 2**62), (1, -1), (2, -5), (4, 10**9), (4, 0), (5, 2**62)):
        yield f"number {place} of a part is {value}", rows(lambda t, p=place, v=value: t.__setitem__((0, p), v))
    yield "overlapping parts", rows(lambda table: numpy.concatenate([table, table[:1]]))
    yield "a part less", rows(lambda table: table[1:])
    yield "a part of another size", lambda body: body["files"][0]["parts"].update({"2": packed(b"x" * 47)})
    yield "a table that swells", lambda body: body["files"][0]["parts"].update({"2": packed(bytes(48 << 24))})
    for text in ("", "AAAA", "no base64", 7, None):
        yield f"a table that is {text!r}", lambda body, text=text: body["files"][0]["parts"].update({"2": text})
    yield "a thousand dimensions", lambda body: body["files"][0]["parts"].update({"1000": packed(bytes(16))})
    yield "minus one dimensions", lambda body: body["files"][0]["parts"].update({"-1": packed(bytes(16))})
    yield "chunk of one byte", lambda body: body.update(chunk=1)
    yield "chunk of nothing", lambda body: body.update(chunk=0)
    yield "chunk beyond measure", lambda body: body.update(chunk=2**62)
    yield "hashes of another length", lambda body: body["files"][0].update(hashes=["00"])
    yield "hashes beyond number", lambda body: body["files"][0].update(hashes=["0" * 32] * 10000)
    yield "another version", lambda body: body.update(version=99)
    yield "another format", lambda body: body.update(format="pickle")
    yield "no facts", lambda body: body.update(facts=None)
    yield "facts that are a list", lambda body: body.update(facts=[1])
    yield "a step beyond measure", lambda body: body.update(step=2**80)
    yield "a tensor twice", lambda body: body["tensors"].append(body["tensors"][0])
    yield "a file twice", lambda body: body["files"].append(body["files"][0])


def bombs() -> Iterator[tuple[str, Callable[[Body], None]]]:
    """Ways to make a manifest that takes long, or much memory."""
    prime = 2**61 - 1
    numbers = [number * prime for number in range(5_000)]
    client = {
        "set": {"$set": numbers},
        "frozenset": {"$frozenset": numbers},
        "dict": {"$dict": [[number, 0] for number in numbers]},
        "set of tuples": {"$set": [{"$tuple": [number]} for number in numbers]},
    }
    for word, value in client.items():
        yield f"a {word} whose keys have one hash", lambda body, v=value: body["facts"].update(client={"a": v})

    def overlapping(body: Body) -> None:
        size = body["files"][0]["size"] // 4
        body["tensors"] = [["client", f"a{number}", [size, 1], "float32"] for number in range(400)]
        table = numpy.array([[number, 0, 0, 0, size, 1] for number in range(400)], dtype="<i8")
        body["files"][0]["parts"] = {"2": packed(table.tobytes())}

    yield "400 tensors of the same bytes", overlapping


def build(good: Path, place: Path) -> Iterator[tuple[str, Path]]:
    """Every folder, one after the other, made from a good one."""
    number = 0

    def fresh() -> Path:
        nonlocal number
        number += 1
        return Path(shutil.copytree(good, place / f"{number}"))

    for title, change in (*changes(), *bombs()):
        folder = fresh()
        body = opened(folder)
        change(body)
        (folder / "manifest.json").write_bytes(sealed(body))
        yield title, folder
    data = next(path.name for path in good.iterdir() if path.suffix == ".safetensors")
    bomb = pickle.dumps(Bomb())
    for target in ("manifest.json", data):
        folder = fresh()
        (folder / target).write_bytes(bomb)
        yield f"pickle as {target}", folder
    for extra in (".metadata", "latest.pt", "mp_rank_00_model_states.pt", "rng.pkl"):
        folder = fresh()
        (folder / extra).write_bytes(bomb)
        (folder / "manifest.json").unlink()
        yield f"pickle as {extra}", folder
    folder = fresh()
    body = opened(folder)
    body["facts"]["client"] = {"a": {"$pickle": "gASVIQAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAZ0b3VjaCB4lIWUUpQu"}}
    (folder / "manifest.json").write_bytes(sealed(body))
    yield "pickle as client state", folder
    for target in ("manifest.json", data):
        folder = fresh()
        (folder / target).unlink()
        (folder / target).symlink_to("/etc/passwd")
        yield f"link as {target}", folder
        folder = fresh()
        (folder / target).unlink()
        os.mkfifo(folder / target)
        yield f"pipe as {target}", folder
    folder = fresh()
    text = (folder / "manifest.json").read_bytes()
    body_text = text[: text.rindex(b'\n"hash"')]
    twice = body_text + b'"format":"x",'
    (folder / "manifest.json").write_bytes(twice + f'\n"hash":"{digest(twice)}"}}\n'.encode())
    yield "a key twice", folder
    for title, inside in (("deep", b"[" * 200_000), ("long number", b"9" * 100_000), ("not text", b"\xff\xfe" * 50)):
        folder = fresh()
        raw = b'{"format":' + inside + b","
        (folder / "manifest.json").write_bytes(raw + f'\n"hash":"{digest(raw)}"}}\n'.encode())
        yield f"JSON that is {title}", folder
    folder = fresh()
    with (folder / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)
    yield "a manifest of a terabyte", folder
    folder = fresh()
    body, zeros = opened(folder), 60 << 20
    body["tensors"], body["files"] = [], []
    for which in range(20):
        with (folder / f"hole{which}").open("wb") as file:
            file.truncate(zeros)
        hashes = [digest(bytes(1 << 22))] * (zeros >> 22)
        table = numpy.array([which, 0, 0, 0, zeros, 1], dtype="<i8").tobytes()
        body["tensors"].append(["client", f"a{which}", [zeros, 1], "uint8"])
        body["files"].append({"name": f"hole{which}", "size": zeros, "hashes": hashes, "parts": {"2": packed(table)}})
    body["facts"]["client"] = {"all": [{"$array": f"a{which}"} for which in range(20)]}
    (folder / "manifest.json").write_bytes(sealed(body))
    yield "20 files of holes", folder
    folder = fresh()
    body = opened(folder)
    body["files"][0].update(size=1 << 40, hashes=["0" * 32] * (1 << 10), chunk=1 << 30)
    body["chunk"] = 1 << 30
    body["tensors"][0][2] = [1 << 36, 1]
    body["files"][0]["parts"] = {"2": packed(numpy.array([0, 0, 0, 0, 1 << 36, 1], dtype="<i8").tobytes())}
    (folder / "manifest.json").write_bytes(sealed(body))
    yield "a tensor of a quarter terabyte without a file to match", folder
    for chunk, wanted in ((1 << 22, 1 << 28), (1 << 28, 1 << 10)):
        folder = fresh()
        body = opened(folder)
        with (folder / data).open("r+b") as file:
            file.truncate(0)
            file.truncate(1 << 30)
        body["chunk"] = chunk
        body["files"][0].update(size=1 << 30, hashes=[digest(bytes(1 << 22))] * ((1 << 30) // chunk))
        body["tensors"] = [["model", "a", [wanted, 1], "float32"]]
        body["files"][0]["parts"] = {"2": packed(numpy.array([0, 0, 0, 0, wanted, 1], dtype="<i8").tobytes())}
        (folder / "manifest.json").write_bytes(sealed(body))
        yield f"{wanted} numbers that take no room on disk, in chunks of {chunk}", folder


def watch(good: str, place: str) -> tuple[int, list[str], int]:
    """Load every folder; how many there were, what went wrong, and by how many kilobytes memory grew."""
    from mizzen.checkpoint.open import CommittedSource
    from mizzen.checkpoint.read import Reader
    from mizzen.errors import MizzenError

    wrong: list[str] = []
    state = {"inside": Path("/"), "watching": False}

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not state["watching"]:
            return
        if event in ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "ctypes.dlopen"):
            wrong.append(f"{state['title']}: {event} {arguments}")
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path = Path(os.path.abspath(os.fsdecode(arguments[0])))
            if (
                not path.is_relative_to(state["inside"])
                and not path.is_relative_to(sys.prefix)
                and path.suffix != ".py"
            ):
                wrong.append(f"{state['title']}: opened {path}")

    sys.addaudithook(hook)

    def load(folder: Path) -> None:
        with Reader(folder) as reader:
            source = CommittedSource(reader)
            dict(source.facts())
            for entry in source.names():
                source.read(entry)

    load(Path(good))
    before, count = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for title, folder in build(Path(good), Path(place)):
        state |= {"title": title, "inside": folder, "watching": True}
        try:
            load(folder)
            wrong.append(f"{title}: loaded without a word")
        except MizzenError:
            pass
        except BaseException as error:  # noqa: BLE001  whatever it is, it is not ours
            wrong.append(f"{title}: {type(error).__name__}: {error}")
        state["watching"] = False
        count += 1
    if list(Path(place).rglob("CANARY")) or Path("CANARY").exists():
        wrong.append("a command was run")
    return count, wrong, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


if __name__ == "__main__":
    print(json.dumps(watch(sys.argv[1], sys.argv[2])))

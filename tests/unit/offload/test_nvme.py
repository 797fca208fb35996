"""The NVMe tier: what is written comes back, striped or not, aligned or not; a fault is an error, never wrong data."""

import errno
import gc
import itertools
import os
import random
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from mizzen import files
from mizzen.config.execution import AioConfig
from mizzen.errors import FileError, UsageError
from mizzen.offload.nvme import FILE, NvmeTier, Space
from mizzen.offload.swap_folder import PREFIX

BLOCK = 8192
SMALL = AioConfig(block_size=BLOCK, queue_depth=3)


@pytest.fixture(params=[1, 2, 3], ids=lambda count: f"{count} paths")
def tier(request, tmp_path):
    made = NvmeTier([tmp_path / str(number) for number in range(request.param)], SMALL)
    yield made
    made.close()
    assert not any(path.name.startswith(PREFIX) for path in tmp_path.rglob("*"))


def tensor(size, dtype=torch.float32, shift=0):
    whole = torch.randint(0, 256, (shift + size * dtype.itemsize,), dtype=torch.uint8)
    return whole[shift:].clone().view(dtype) if not shift else whole[shift:].view(dtype)


SHAPES = [
    (0, torch.float32),
    (1, torch.bfloat16),
    (2048, torch.float32),
    (2049, torch.float32),
    (9 * 2048, torch.float32),
    (9 * 2048 + 5, torch.float64),
]


def same(left, right):
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize(("size", "dtype"), SHAPES)
@pytest.mark.parametrize("shift", [0, 8])
def test_what_was_written_is_read(tier, size, dtype, shift):
    tier.write("small", torch.arange(3.0)).wait()  # so that the next does not begin where a block does
    value = tensor(size, dtype, shift)
    tier.write("a", value).wait()
    back = torch.empty_like(value)
    tier.read("a", back).wait()
    assert same(back, value)


def test_tensors_of_many_names_and_sizes(tier):
    draw = random.Random(3)
    held = {}
    for turn in range(120):
        name = f"t{draw.randrange(12)}"
        if draw.random() < 0.15:
            tier.drop(name)
            held.pop(name, None)
            continue
        size = draw.choice((5, 100, 2048, 5000, 20000)) if draw.random() < 0.4 or name not in held else len(held[name])
        held[name] = torch.full((size,), float(turn))
        tier.write(name, held[name])
        if draw.random() < 0.5:
            tier.write(name, held[name].mul_(1)).wait()
    for name, value in held.items():
        back = torch.empty_like(value)
        tier.read(name, back).wait()
        assert same(back, value)
    assert tier.used == sum(-(-4 * len(value) // 4096) * 4096 for value in held.values())


def test_what_was_dropped_makes_room(tier):
    for _ in range(5):
        for name in "abc":
            tier.write(name, torch.ones(50_000)).wait()
        for name in "bca":
            tier.drop(name)
    assert tier.used == 0
    assert sum(path.stat().st_size for path in held_files(tier)) <= 3 * 200_000 + 8 * BLOCK


def held_files(tier):
    return [file.path for file in tier._files]


def test_transfers_of_one_name_are_in_order(tier):
    values = [torch.full((30_000,), float(turn)) for turn in range(10)]
    backs = [torch.empty(30_000) for _ in values]
    on_the_way = []
    for value, back in zip(values, backs, strict=True):
        on_the_way += [tier.write("a", value), tier.read("a", back)]
    for transfer in on_the_way:
        transfer.wait()
    assert all(same(value, back) for value, back in zip(values, backs, strict=True))


def test_blocks_lie_on_all_paths_in_turn(tmp_path):
    tier = NvmeTier([tmp_path / "a", tmp_path / "b"], SMALL)
    value = torch.arange(5 * BLOCK // 4, dtype=torch.int32)
    tier.write("x", value).wait()
    one, two = (path.read_bytes() for path in held_files(tier))
    blocks = value.view(torch.uint8).numpy().tobytes()
    parts = [blocks[place : place + BLOCK] for place in range(0, len(blocks), BLOCK)]
    assert one == b"".join(parts[0::2]) and two == b"".join(parts[1::2])
    tier.close()


def test_two_threads_may_use_it_at_once(tier):
    failures = []

    def run(name):
        for turn in range(20):
            value, back = torch.full((9_000,), float(turn)), torch.empty(9_000)
            tier.write(name, value).wait()
            tier.read(name, back).wait()
            if not same(value, back):
                failures.append(name)

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_what_cannot_be_read_is_refused(tier):
    with pytest.raises(UsageError, match="nothing rests on NVMe under 'a'"):
        tier.read("a", torch.empty(3))
    tier.write("a", torch.ones(3)).wait()
    with pytest.raises(UsageError, match="'a' has 12 bytes on NVMe, and the tensor 16"):
        tier.read("a", torch.empty(4))
    with pytest.raises(UsageError, match="not in one piece"):
        tier.write("a", torch.ones(4, 4).t())
    with pytest.raises(UsageError, match="'b' lies on meta"):
        tier.write("b", torch.ones(4, device="meta"))


def test_room_is_looked_for_before_the_start(tmp_path):
    tier = NvmeTier(tmp_path, SMALL)
    tier.reserve([1000, 5 * BLOCK])
    assert held_files(tier)[0].stat().st_size == 6 * BLOCK
    with pytest.raises(
        FileError, match=r"needs 1,152,921,504,606,797,824 bytes on the disk of .*, and [\d,]+ are free"
    ):
        tier.reserve([1 << 60])
    tier.close()


def test_two_paths_on_one_disk_share_its_room(tmp_path, monkeypatch):
    tier = NvmeTier([tmp_path / "a", tmp_path / "b"], SMALL)
    monkeypatch.setattr("mizzen.offload.nvme.free_bytes", lambda path: 3 * BLOCK)
    with pytest.raises(FileError, match="needs 32,768 bytes"):
        tier.reserve([4 * BLOCK])
    tier.reserve([2 * BLOCK])
    tier.close()


class Faults:
    """A hook that fails the call of a given number, counted over all threads."""

    def __init__(self, number=None, code=errno.EIO):
        self.number, self.code, self.count = number, code, itertools.count()
        self.seen = 0

    def __call__(self, operation, path):
        if (place := next(self.count)) == self.number:
            raise OSError(self.code, os.strerror(self.code))
        self.seen = place + 1


def work(folder, aio=SMALL):
    """Two steps over three lots on two paths; what was read, or the error that ended it."""
    values = {name: torch.arange(size, dtype=torch.float32) for name, size in (("a", 5000), ("b", 3), ("c", 9000))}
    found = []
    tier = NvmeTier([folder / "one", folder / "two"], aio)
    try:
        tier.reserve(value.nbytes for value in values.values())
        for name, value in values.items():
            tier.write(name, value).wait()
        for _ in range(2):
            for name, value in values.items():
                back = torch.empty_like(value)
                tier.read(name, back).wait()
                found.append((back, value.clone()))
                tier.write(name, value.add_(1)).wait()
    finally:
        tier.close()
    return found


CALLS = 200


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_a_fault_at_every_call_is_an_error_with_a_name_and_never_wrong_data(tmp_path, code):
    counted = Faults()
    with files.watched(counted):
        work(tmp_path / "all")
    ended = 0
    for number in range(max(CALLS, counted.seen)):
        folder = tmp_path / str(number)
        with files.watched(Faults(number % counted.seen, code)):
            try:
                found = work(folder)
            except FileError as error:
                assert os.strerror(code) in str(error) and str(tmp_path) in str(error)
                ended += 1
                continue
        assert all(same(left, right) for left, right in found)  # the fault was in what is done at the end
    assert counted.seen >= 80 and ended >= 0.8 * max(CALLS, counted.seen)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
@pytest.mark.parametrize("most", [0, 1000, 4096])
def test_short_calls_are_continued_or_are_errors(tmp_path, monkeypatch, call, most):
    real, number = vars(os)[call], itertools.count()

    def short(descriptor, views, offset):
        views = [views[0][:most]] if next(number) % 4 == 3 else views
        return real(descriptor, views, offset) if views[0].nbytes else 0

    monkeypatch.setattr(os, call, short)
    if most:
        assert all(same(left, right) for left, right in work(tmp_path))
    else:
        with pytest.raises(FileError, match=r"(the system took none|the file ends there).*'[abc]' was (written|read)"):
            work(tmp_path)


def damage(path, how):
    if how == "removed":
        path.unlink()
    elif how == "cut off":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "changed":
        with path.open("r+b") as file:
            file.seek(5000)
            file.write(b"!")
    else:
        size = path.stat().st_size
        os.truncate(path, 0)
        os.truncate(path, size)


@pytest.mark.parametrize("how", ["removed", "cut off", "changed", "zeroed"])
def test_a_file_that_somebody_has_damaged_is_an_error_with_its_place(tmp_path, how):
    tier = NvmeTier(tmp_path, SMALL)
    value = torch.arange(20_000.0)
    tier.write("a", value).wait()
    (path,) = held_files(tier)
    damage(path, how)
    with pytest.raises(FileError, match=rf"{FILE}.*'a' was read from NVMe"):
        tier.read("a", torch.empty_like(value)).wait()
    if how in ("removed", "cut off"):
        with pytest.raises(FileError, match=rf"{FILE}.*'b' was written to NVMe"):
            tier.write("b", value).wait()
    tier.close()


def test_without_hashes_bytes_are_taken_as_they_are(tmp_path):
    tier = NvmeTier(tmp_path, AioConfig(block_size=BLOCK, verify=False))
    value, back = torch.arange(20_000.0), torch.empty(20_000)
    tier.write("a", value).wait()
    damage(held_files(tier)[0], "changed")
    tier.read("a", back).wait()
    assert not same(value, back)
    tier.close()


def test_after_a_write_that_failed_nothing_is_read_until_it_is_dropped(tmp_path):
    tier = NvmeTier(tmp_path, SMALL)
    value = torch.arange(20_000.0)
    tier.write("a", value).wait()
    with files.watched(fail_writes), pytest.raises(FileError):
        tier.write("a", value + 1).wait()
    with pytest.raises(FileError, match="Input/output error.*'a' was read"):
        tier.read("a", torch.empty_like(value)).wait()
    tier.drop("a")
    tier.write("a", value).wait()
    tier.close()


def fail_writes(operation, path):
    if operation == "write":
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def open_descriptors(folder):
    """Of files in a folder: other tests of this process leave what garbage has yet to be collected."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists them
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return sum(path.startswith(str(folder)) for path in found)


def workers():
    return sum(thread.name.startswith("mizzen-io") for thread in threading.enumerate())


def mappings(path="/proc/self/maps"):
    return len(Path(path).read_text().splitlines())


@pytest.mark.parametrize("ending", ["close", "forget", "fail"])
def test_nothing_is_left_of_a_tier(tmp_path, ending):
    def once():
        tier = NvmeTier([tmp_path / "a", tmp_path / "b"], SMALL)
        tier.write("a", tensor(20_000, shift=4)).wait()
        back = torch.empty(20_000)
        tier.read("a", back).wait()
        if ending == "fail":
            with files.watched(fail_writes), pytest.raises(FileError):
                tier.write("a", back).wait()
        if ending == "close":
            tier.close()
        del tier
        gc.collect()

    for _ in range(3):
        once()
    before, threads, maps = open_descriptors(tmp_path), workers(), mappings()
    for _ in range(15):
        once()
    assert (open_descriptors(tmp_path), workers()) == (before, threads)
    assert mappings() - maps < 15  # the stacks and buffers of threads are given back
    assert not any(path.name.startswith(PREFIX) for path in tmp_path.rglob("*"))


def test_a_start_that_fails_leaves_nothing(tmp_path):
    gc.collect()
    threads = workers()
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="Not a directory|File exists"):
        NvmeTier([tmp_path / "a", tmp_path / "file" / "b"], SMALL)
    gc.collect()
    assert (open_descriptors(tmp_path), workers()) == (0, threads)
    assert not list((tmp_path / "a").iterdir())
    with pytest.raises(UsageError, match="nvme_path"):
        NvmeTier([])


def test_a_space_has_no_range_twice():
    space, draw, held = Space(), random.Random(5), {}
    for turn in range(2000):
        if held and draw.random() < 0.5:
            space.give_back(*held.pop(draw.choice(list(held))))
        else:
            size = 4096 * draw.randint(1, 9)
            held[turn] = (space.take(size), size)
        ranges = sorted(held.values())
        assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(ranges))
        assert not ranges or sum(ranges[-1]) <= space.end
    for each in held.values():
        space.give_back(*each)
    assert space.take(space.end) == 0

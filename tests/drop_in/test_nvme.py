"""Files of tensors as published scripts handle them: `aio_handle`, `ds_io`, `ds_nvme_tune`."""

import filecmp
import functools
import json
import os
import timeit

import pytest
import torch

from drop_in import programs
from mizzen.errors import FileError, UsageError


@pytest.fixture
def package():
    return programs.deepspeed()


@pytest.fixture
def load(package):
    from deepspeed.ops.op_builder import AsyncIOBuilder

    assert package.ops.__compatible_ops__[AsyncIOBuilder.NAME] and AsyncIOBuilder().is_compatible()
    return AsyncIOBuilder().load


BLOCK, PARALLEL, SIZE = 1024, 2, 4 * 1024


def handle(load, *flags):
    return load().aio_handle(BLOCK, 2, *(flags or (True, True)), PARALLEL)


def reference(folder, index=0, size=SIZE):
    path, content = folder / f"reference_{index}", os.urandom(size)
    path.write_bytes(content)
    return str(path), content


@pytest.mark.parametrize(("single", "overlap"), [(True, False), (False, True)])
def test_what_a_handle_was_made_with(load, single, overlap):
    made = handle(load, single, overlap)
    assert (made.get_single_submit(), made.get_overlap_events()) == (single, overlap)
    assert (made.get_block_size(), made.get_queue_depth(), made.get_intra_op_parallelism()) == (BLOCK, 2, PARALLEL)
    usual = load().aio_handle()
    assert (usual.get_block_size(), usual.get_queue_depth(), usual.get_single_submit()) == (1 << 20, 128, False)


@pytest.mark.parametrize("locked", [True, False])
def test_reading(load, tmp_path, locked):
    made, (path, content) = handle(load), reference(tmp_path)
    buffer = made.new_cpu_locked_tensor(SIZE, torch.empty(0, dtype=torch.uint8)) if locked else None
    buffer = torch.empty(SIZE, dtype=torch.uint8) if buffer is None else buffer
    assert made.sync_pread(buffer, path, 0) == 1
    assert bytes(buffer.tolist()) == content
    buffer.zero_()
    assert made.async_pread(buffer, path) == 0
    assert made.wait() == 1 and bytes(buffer.tolist()) == content
    assert made.wait() == 0
    assert made.free_cpu_locked_tensor(buffer) is locked
    assert not made.free_cpu_locked_tensor(buffer)


@pytest.mark.parametrize("size", [SIZE, SIZE + 513, 1])
def test_writing(load, tmp_path, size):
    made, (path, content) = handle(load), reference(tmp_path, size=size)
    buffer = torch.tensor(list(content), dtype=torch.uint8)
    for name, call, status in (("sync", made.sync_pwrite, 1), ("async", made.async_pwrite, 0)):
        assert call(buffer, str(tmp_path / name), 0) == status
        assert made.wait() == 1 - status
        filecmp.clear_cache()
        assert filecmp.cmp(path, tmp_path / name, shallow=False)


def test_several_on_their_way_at_once(load, tmp_path):
    made = handle(load)
    pairs = [reference(tmp_path, index) for index in range(3)]
    buffers = [torch.empty(SIZE, dtype=torch.uint8) for _ in pairs]
    for buffer, (path, _) in zip(buffers, pairs, strict=True):
        made.async_pread(buffer, path, 0)
    assert made.wait() == 3
    for buffer, (_, content) in zip(buffers, pairs, strict=True):
        assert bytes(buffer.tolist()) == content


@pytest.mark.parametrize("parts", [(1, 1, 1), (2, 1, 1)])
@pytest.mark.parametrize("opened", [False, True])
def test_parts_of_a_file(load, tmp_path, parts, opened):
    made = handle(load)
    data = torch.randint(0, 256, (sum(parts) * BLOCK,), dtype=torch.uint8)
    offset, path = 0, str(tmp_path / "parts")
    for part in parts:
        source = torch.narrow(data, 0, offset, part * BLOCK)
        if opened:
            number = os.open(path, flags=os.O_DIRECT | os.O_CREAT | os.O_WRONLY)
            assert made.async_pwrite(buffer=source, fd=number, file_offset=offset) == 0
        else:
            assert made.async_pwrite(buffer=source, filename=path, file_offset=offset) == 0
        assert made.wait() == 1
        if opened:
            os.close(number)
        offset += part * BLOCK
    assert (tmp_path / "parts").read_bytes() == bytes(data.tolist())
    back = torch.empty(BLOCK, dtype=torch.uint8)
    assert made.sync_pread(back, path, BLOCK) == 1
    assert torch.equal(back, data[BLOCK : 2 * BLOCK])


def test_a_published_program_stores_and_loads(load, tmp_path, capsys):
    """The loop of the examples for storing a tensor through a buffer, and loading it again."""
    made, path = load().aio_handle(1 << 20, 128, True, True, 2), str(tmp_path / "test_1MB.pt")
    tensor = torch.rand(1 << 18)
    buffer = torch.empty_like(tensor)

    def store(out, value, using, through):
        through.copy_(value)
        using.sync_pwrite(through, out)

    assert timeit.Timer(functools.partial(store, path, tensor, made, buffer)).timeit(2) > 0
    assert os.path.getsize(path) == tensor.nbytes
    made.sync_pread(buffer.zero_(), path)
    assert torch.equal(buffer, tensor)


def test_what_goes_wrong_is_an_error(load, tmp_path):
    made, (path, _) = handle(load), reference(tmp_path)
    with pytest.raises(FileError, match="the file ends there"):
        made.sync_pread(torch.empty(2 * SIZE, dtype=torch.uint8), path)
    with pytest.raises(FileError, match="No such file"):
        made.async_pread(torch.empty(4), str(tmp_path / "none"))
    made.async_pread(torch.empty(2 * SIZE, dtype=torch.uint8), path)
    with pytest.raises(FileError, match="the file ends there"):
        made.wait()
    with pytest.raises(UsageError, match="not in one piece"):
        made.sync_pwrite(torch.ones(3, 3).t(), path)
    with pytest.raises(UsageError, match="use 1 or more"):
        load().aio_handle(0)


def test_functions_without_a_handle(load, tmp_path):
    module, path, value, back = load(), str(tmp_path / "f"), torch.rand(5000), torch.empty(5000)
    assert module.aio_write(value, path, BLOCK, 8, False, True, True) == 0
    assert module.aio_read(back, path, BLOCK, 8, False, True, True) == 0
    assert torch.equal(value, back)
    assert module.deepspeed_memcpy(back.zero_(), value) == 0 and torch.equal(value, back)


def test_tuning(package, tmp_path, capsys):
    from deepspeed.faces.commands import ds_nvme_tune

    (tmp_path / "sweep.json").write_text(json.dumps({"block_size": ["64K", "128K"], "queue_depth": 2}))
    words = ["--nvme_dir", str(tmp_path / "a"), str(tmp_path / "b"), "--sweep_config", str(tmp_path / "sweep.json")]
    assert ds_nvme_tune([*words, "--io_size", "1M", "--log_dir", str(tmp_path / "logs"), "--gpu"]) == 0
    said = capsys.readouterr().out
    assert "Best performance (GB/sec): read = " in said and ", write = " in said
    section = json.loads(said[said.index("{") :])["aio"]
    assert section["block_size"] in (1 << 16, 1 << 17) and section["queue_depth"] == 2
    assert section["overlap_events"] is True and section["single_submit"] is False
    from mizzen.config.load import load as read

    assert read({"aio": section}).aio.queue_depth == 2  # what it prints can be pasted
    assert not list((tmp_path / "a").iterdir()) and not list((tmp_path / "b").iterdir())
    assert ds_nvme_tune(["--nvme_dir", str(tmp_path), "--no_read", "--no_write"]) == 2


def test_one_setting(package, tmp_path, capsys):
    from deepspeed.nvme import ds_io_main

    words = ["--io_size", "1M", "--block_size", "64K", "--queue_depth", "2", "--loops", "1", "--engine", "aio_handle"]
    assert ds_io_main(["--folder", str(tmp_path), "--read", *words]) == 0
    said = capsys.readouterr().out
    assert "read GB/s" in said and "write GB/s" not in said
    mapping = [f"{tmp_path / 'a'}:0", f"{tmp_path / 'b'}:1"]
    assert ds_io_main(["--folder_to_device_mapping", *mapping, "--validate", *words]) == 0
    assert "write GB/s" in capsys.readouterr().out

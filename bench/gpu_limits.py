"""What does not fit on one GPU, trained on one: models whose states are in host memory and on NVMe, or capped devices.

    python -m bench.gpu_limits large                            13 B parameters, fp32 masters and both moments
    python -m bench.gpu_limits large --peer                     DeepSpeed with the same job
    python -m bench.gpu_limits large --layers 56 --nvme FOLDER  more of them, with a drive
    python -m bench.gpu_limits nvme FOLDER                      3.02 B parameters, masters and moments in files
    python -m bench.gpu_limits capped FOLDER                    3.02 B parameters on a device of 5 GiB

Each job prints its losses, what a step takes, and where every byte rests.
"""

import argparse
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

from bench.gpu_offload import LARGE
from bench.llama import Size, build
from bench.record import table
from bench.systems import DECAY, MAX_NORM, RATE
from mizzen.accelerator.host import capacity, resident
from mizzen.offload.rest_host import OnHost

GIB: Final = 1 << 30
LARGEST: Final = Size(hidden=5120, layers=40, feed=13824, heads=40, groups=40, samples=4)
"""13.0 B parameters."""
STATES: Final = 12
"""Bytes of an fp32 master and two moments."""
SPARE: Final = 3 * GIB
"""Host memory that has to stay free: below it a job ends itself, before the system ends something else."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one job."""
    parser = argparse.ArgumentParser(description="models that do not fit on one GPU, on one GPU")
    jobs = parser.add_subparsers(required=True)
    large = jobs.add_parser("large", help="as large as device, host memory and drives hold together")
    large.add_argument("--layers", type=int, default=LARGEST.layers, help=f"blocks (default: {LARGEST.layers})")
    large.add_argument("--steps", type=int, default=10, help="steps (default: 10)")
    large.add_argument("--nvme", default=None, metavar="FOLDER", help="let masters and moments rest there, too")
    large.add_argument("--peer", action="store_true", help="by DeepSpeed, with all states in host memory")
    large.set_defaults(
        job=lambda options: train_large(
            replace(LARGEST, layers=options.layers), options.steps, options.nvme, is_peer=options.peer
        )
    )
    nvme = jobs.add_parser("nvme", help="masters and moments in files")
    nvme.add_argument("folder", help="a folder on a drive with 40 GB of room")
    nvme.add_argument("--steps", type=int, default=4, help="steps (default: 4)")
    nvme.set_defaults(job=lambda options: train_from_files(options.folder, options.steps))
    capped = jobs.add_parser("capped", help="a model larger than its device")
    capped.add_argument("folder", type=Path, help="a folder with 60 GB of room, for weights and a checkpoint")
    capped.add_argument("--gib", type=float, default=5.0, help="of the device that may be used (default: 5)")
    capped.set_defaults(job=lambda options: train_capped(options.folder, options.gib))
    options = parser.parse_args(words)
    options.job(options)
    return 0


def config_of(size: Size, stage: int, **more: Any) -> dict[str, Any]:
    """The JSON of all jobs."""
    return {
        "train_micro_batch_size_per_gpu": size.samples,
        "bf16": {"enabled": True},
        "gradient_clipping": MAX_NORM,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY}},
        **more,
        "zero_optimization": {"stage": stage, **more.get("zero_optimization", {})},
    }


def train_large(size: Size, steps: int, nvme: str | None, *, is_peer: bool) -> None:
    """A model of which neither device nor host memory could hold all states."""
    guard_host_memory()
    place: dict[str, Any] = {"device": "nvme", "nvme_path": nvme} if nvme else {"device": "cpu"}
    zero: dict[str, Any] = {"offload_param": {"device": "cpu", "pin_memory": True}, "offload_optimizer": place}
    library = import_module("deepspeed" if is_peer else "mizzen")
    config = config_of(size, 3, zero_optimization=zero)
    if is_peer:
        place["pin_memory"] = True
        config["steps_per_print"] = 10**9
    else:
        config["offload"] = dict.fromkeys(["device_bytes", "host_bytes", *(["nvme_bytes"] if nvme else [])], "auto")
        config |= {"log_level": "info", "progress": {"enabled": False}}
    start = time.perf_counter()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = build(size)
    torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable()
    say(f"{size.parameters / 1e9:.2f} B parameters, built in {time.perf_counter() - start:.1f} s")
    engine, *_ = library.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    say(f"set up after {time.perf_counter() - start:.1f} s")
    run_steps(engine, size, steps)
    if not is_peer:
        print(where_bytes_rest(engine, size))


def train_from_files(folder: str, steps: int) -> None:
    """States on NVMe."""
    import mizzen

    size = LARGE
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = build(size)
    start = time.perf_counter()
    config = config_of(size, 2, zero_optimization=zero, progress={"enabled": False})
    engine, *_ = mizzen.initialize(model=model, config=config)
    say(f"set up after {time.perf_counter() - start:.1f} s")
    run_steps(engine, size, steps)
    print(where_bytes_rest(engine, size))
    engine.destroy()


def train_capped(folder: Path, gib: float) -> None:
    """A model that its device could not hold: weights from safetensors, some steps, a save."""
    import mizzen

    size = replace(LARGE, samples=1)
    torch.manual_seed(0)
    with torch.device("cuda"):
        whole = build(size).bfloat16()
    with torch.no_grad():
        expected = float(whole(**batch_of(size, 0)).loss)
    whole.save_pretrained(folder / "weights")
    del whole
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(gib * GIB / torch.cuda.get_device_properties(0).total_memory)
    torch.cuda.reset_peak_memory_stats()
    with torch.device("meta"):
        model = build(size)
    model.gradient_checkpointing_enable()
    zero = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    config = config_of(
        size,
        3,
        zero_optimization=zero,
        offload={"device_bytes": 0},
        checkpoint={"weights": str(folder / "weights")},
        fused={"head_loss": True},
        progress={"enabled": False},
    )
    start = time.perf_counter()
    engine, *_ = mizzen.initialize(model=model, config=config)
    say(f"set up after {time.perf_counter() - start:.1f} s")
    losses = run_steps(engine, size, 4)
    print(where_bytes_rest(engine, size))
    print(f"loss of the whole model in memory {expected:.4f}, of the first step here {losses[0]:.4f}")
    start = time.perf_counter()
    engine.save_checkpoint(folder / "saved")
    written = sum(file.stat().st_size for file in (folder / "saved").rglob("*") if file.is_file())
    peak = torch.cuda.max_memory_allocated()
    print(f"saved {written / GIB:.1f} GiB in {time.perf_counter() - start:.1f} s; device at most {peak / GIB:.2f} GiB")


def run_steps(engine: Any, size: Size, steps: int) -> list[float]:
    """Train, and say how it goes."""
    losses = []
    for number in range(steps):
        start = time.perf_counter()
        loss = engine(**batch_of(size, number)).loss
        engine.backward(loss)
        report = engine.step()
        torch.cuda.synchronize()
        losses.append(float(loss.detach()))
        waits = {key: round(value) for key, value in getattr(report, "measures", {}).items() if key.startswith("off")}
        say(f"step {number + 1}: {time.perf_counter() - start:.2f} s, loss {losses[-1]:.4f} {waits or ''}")
    return losses


def batch_of(size: Size, number: int) -> dict[str, Any]:
    """One of a few batches that are used in turn."""
    generator = torch.Generator().manual_seed(number % 2)
    tokens = torch.randint(0, size.vocabulary, (size.samples, size.length), generator=generator).cuda()
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def where_bytes_rest(engine: Any, size: Size) -> str:
    """A table of what rests where, beside what was measured."""
    torch.cuda.synchronize()
    used = resident().allocated
    rows = [(f"masters and moments: {place}", f"{count / GIB:.1f}") for place, count in bytes_at_rest(engine).items()]
    rows += [
        ("device after a step", f"{torch.cuda.memory_allocated() / GIB:.1f}"),
        ("device at most", f"{torch.cuda.max_memory_allocated() / GIB:.1f}"),
        ("host memory of the process", f"{used / GIB:.1f}"),
        ("bytes of it for each parameter", f"{used / size.parameters:.1f}"),
    ]
    return table(["what", "GiB"], rows)


def bytes_at_rest(engine: Any) -> Counter[str]:
    """Bytes of masters and of the states of AdamW in each place."""
    found: Counter[str] = Counter()
    for lot in (lot for store in engine.stores for lot in store.contents.lots):
        on_device = STATES * sum(tensor.numel() for tensor in lot.tensors)
        found[lot.rest.place] += lot.rest.resting_bytes if isinstance(lot.rest, OnHost) else on_device
    return found


def guard_host_memory() -> None:
    """End the process, with a line, before host memory is used up."""

    def watch() -> None:
        start = time.perf_counter()
        while (free := capacity().available) > SPARE:
            time.sleep(0.2)
        seconds = time.perf_counter() - start
        used = resident().allocated
        say(f"ended after {seconds:.0f} s: {used / GIB:.1f} GiB of host memory in use, {free / GIB:.1f} GiB left")
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def say(words: str) -> None:
    """Print at once."""
    print(words, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())

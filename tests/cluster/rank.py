"""What a rank of these jobs does: add up the ranks, and write down what it was given."""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from mizzen.errors import LaunchError
from mizzen.launcher.job import Job


def readable():
    """Jobs, and words of theirs, that every user of the machine can read: all hosts of these tests share one /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        for word in words:
            found += [words[:3]] if "PASSWORD" in word else []
            for part in word.replace("'", " ").split() if len(word) > 100 else ():
                with contextlib.suppress(LaunchError):
                    found.append([words[:3], Job.decode(part).id])
    return found


dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
found = {
    "argv": [word for word in sys.argv[1:] if not word.startswith("--local_rank=")],
    "environment": {name: value for name, value in os.environ.items() if "FUZZ" in name},
    "sum": total.item(),
    "world": dist.get_world_size(),
    "local": [os.environ["LOCAL_RANK"], os.environ["LOCAL_SIZE"], os.environ["CROSS_RANK"], os.environ["CROSS_SIZE"]],
    "host": os.uname().nodename,
    "folder": str(Path.cwd()),
    "readable": readable(),
    "password": os.environ.get("WANDB_API_KEY"),
}
Path(os.environ["NCCL_FUZZ_RESULTS"], f"{dist.get_rank()}.json").write_text(json.dumps(found))
dist.destroy_process_group()

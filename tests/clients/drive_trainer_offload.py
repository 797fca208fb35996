"""What one rank of a user's script does with HF Trainer and the file for ZeRO-3 with offload of its documentation.

`python -m torch.distributed.run --nproc-per-node 2 drive_trainer_offload.py FOLDER`; rank r leaves its findings in
FOLDER/r.json.
"""

import sys
from pathlib import Path

from behind import use_behind
from clients.drive_trainer import OFFLOAD, OPTIMIZER, resume, run
from clients.small import forget, leave


def published(**offload: dict) -> dict:
    """The file for ZeRO-3 that the documentation of Trainer shows, with the sections of its offload or without them."""
    return {
        "fp16": {
            "enabled": "auto",
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "initial_scale_power": 16,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "optimizer": OPTIMIZER,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
        "zero_optimization": {
            "stage": 3,
            **offload,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }


BOTH = {"offload_optimizer": OFFLOAD, "offload_param": OFFLOAD}
RUNS = {
    "without": published(),
    "on the host": published(**BOTH),
    # On a device whose memory lies behind copies, from here on.
    "behind": published(**BOTH),
}


def main(folder: Path) -> None:
    found = {}
    for number, (name, config) in enumerate(RUNS.items()):
        if name == "behind":
            use_behind()
        found[name] = run(name, config, folder / f"run-{number}")
        forget()
    found["resumed"] = resume("behind", RUNS["behind"], folder / "run-2")
    leave(found, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

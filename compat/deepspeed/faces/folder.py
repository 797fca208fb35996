"""Small files that clients look for in a folder of checkpoints. They are written and never read back.

What a client finds: `zero_to_fp32.py`, and in the tag's folder the files whose names say that ranks have saved, with
the stage in them and the client's own state. The state of training is in mizzen's files beside them.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from deepspeed.faces import zero_to_fp32
from mizzen.checkpoint.choose import LEFT_FOR_OTHERS
from mizzen.checkpoint.convert import save_torch
from mizzen.checkpoint.folder import remove_if_empty
from mizzen.checkpoint.read import MANIFEST
from mizzen.engine.engine import Engine
from mizzen.files import commit_bytes, commit_text, make_folder, read_head
from mizzen.log import warn_once

SCRIPT: Final = "zero_to_fp32.py"
MODEL: Final = "mp_rank_00_model_states.pt"
MODEL_3: Final = "zero_pp_rank_0_mp_rank_00_model_states.pt"
OPTIMIZER: Final = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
IN_BF16: Final = "bf16_"
"""What the name of such a file begins with where the model computes in bf16."""
OPTIMIZERS: Final = "*_optim_states.pt"
MARK: Final = LEFT_FOR_OTHERS
"""Names the files of a tag's folder that are ours, so that they go when the checkpoint has gone."""
MOST: Final = 4096
"""Bytes that are read of such a list of names."""


def leave_files(engine: Engine, root: Path, tag: str, client_state: Mapping[str, Any]) -> None:
    """Write them, on the first rank. What cannot be written is told and does not fail a save that is committed."""
    if engine.global_rank != 0:
        return
    stage = engine.settings.zero_optimization.stage
    facts = {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "dp_world_size": engine.dp_world_size,
        "mp_world_size": engine.mp_world_size,
    }
    stub = {"optimizer_state_dict": {"zero_stage": stage, "partition_count": engine.dp_world_size}, **facts}
    folder = root / tag
    try:
        make_folder(folder)
        model = MODEL_3 if stage == 3 else MODEL
        optimizer = IN_BF16 + OPTIMIZER if engine.settings.bf16.enabled else OPTIMIZER
        commit_text(folder / MARK, json.dumps([model, optimizer, MARK]))
        save_torch({**facts, **client_state}, folder / model)
        save_torch(stub, folder / optimizer)
        commit_bytes(root / SCRIPT, Path(zero_to_fp32.__file__).read_bytes())
        sweep(root, spared=tag)
    except Exception as error:  # noqa: BLE001  (pickle raises whatever a client's object raises)
        warn_once(f"{folder}: the checkpoint is saved; files for other programs beside it are not: {error}")


def sweep(root: Path, *, spared: str) -> None:
    """Remove such files from folders whose checkpoint was deleted since."""
    for mark in root.glob(f"*/{MARK}"):
        folder = mark.parent
        if folder.name != spared and not (folder / MANIFEST).exists():
            for name in json.loads(read_head(mark, MOST)):
                (folder / Path(name).name).unlink(missing_ok=True)
            remove_if_empty(folder)


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """The file that holds a client's own state."""
    return _existing(Path(checkpoint_dir) / (MODEL_3 if zero_stage == 3 else MODEL))


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """The files that say which stage has saved."""
    return get_checkpoint_files(checkpoint_dir, OPTIMIZERS)


def get_model_state_files(checkpoint_dir: str) -> list[str]:
    """The files that hold models, or a client's own state."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def get_checkpoint_files(checkpoint_dir: str, glob_pattern: str) -> list[str]:
    """Files of a folder by a pattern."""
    found = sorted((str(path) for path in Path(checkpoint_dir).glob(glob_pattern)), key=natural_keys)
    if not found:
        raise FileNotFoundError(f"can't find {glob_pattern} files in directory '{checkpoint_dir}'")
    return found


def atoi(text: str) -> int | str:
    """A number, if a text is one."""
    return int(text) if text.isdigit() else text


def natural_keys(text: str) -> list[int | str]:
    """A key by which rank 2 comes before rank 10."""
    return [atoi(part) for part in re.split(r"(\d+)", text)]


def _existing(path: Path) -> str:
    if not path.exists():
        raise FileNotFoundError(f"can't find model states file at '{path}'")
    return str(path)

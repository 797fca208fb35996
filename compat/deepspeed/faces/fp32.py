"""The weights of checkpoints in fp32, with errors that programs catch. `zero_to_fp32.py` is the script of the same."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

from deepspeed.faces.errors import MissingFolder, also
from mizzen import checkpoint


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    @also(ValueError)
    def call(*args: Any, **kwargs: Any) -> Any:
        folder = Path(signature(function).bind(*args, **kwargs).arguments["checkpoint_dir"])
        if not folder.exists():
            raise MissingFolder(f"{folder} does not exist: give the folder that checkpoints were saved in")
        return function(*args, **kwargs)

    call.__module__ = __name__  # where pickle looks for it
    return call


convert_zero_checkpoint_to_fp32_state_dict = _guarded(checkpoint.convert_zero_checkpoint_to_fp32_state_dict)
get_fp32_state_dict_from_zero_checkpoint = _guarded(checkpoint.get_fp32_state_dict_from_zero_checkpoint)
load_state_dict_from_zero_checkpoint = _guarded(checkpoint.load_state_dict_from_zero_checkpoint)

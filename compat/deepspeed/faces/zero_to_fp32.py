"""Write the weights of the checkpoints in this folder in fp32, for programs that know nothing of who has saved them.

python zero_to_fp32.py FOLDER OUTPUT [--tag TAG] [--safe_serialization] [--max_shard_size 5GB]
"""

import argparse
import logging
from collections.abc import Sequence

from mizzen.checkpoint import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from mizzen.errors import MizzenError
from mizzen.log import set_level

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "main",
]


def main(words: Sequence[str] | None = None) -> int:
    """Convert, as the command line says."""
    parser = argparse.ArgumentParser("zero_to_fp32.py", description="Write the weights of a checkpoint in fp32.")
    parser.add_argument("checkpoint_dir", help="the folder of checkpoints, with the tag's folder in it")
    parser.add_argument("output_dir", help="where to write")
    parser.add_argument("--max_shard_size", default="5GB", help="bytes of one file (default: 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of torch's format")
    parser.add_argument("-t", "--tag", help="which checkpoint; the latest when absent")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="say more")
    given = parser.parse_args(words)
    set_level(logging.DEBUG if given.debug else logging.INFO)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            given.checkpoint_dir,
            given.output_dir,
            max_shard_size=given.max_shard_size,
            safe_serialization=given.safe_serialization,
            tag=given.tag,
            exclude_frozen_parameters=given.exclude_frozen_parameters,
        )
    except MizzenError as error:
        parser.exit(1, f"error: {error}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

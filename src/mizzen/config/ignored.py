"""Keys at the top of published files that DeepSpeed passes over in silence. Here they are errors that say so.

The drop-in passes over those that ask for nothing, with a warning. `migrate.drop_ignored` takes them out.
"""

from typing import Final

_HARMLESS: Final = {
    "comms_config": "what is read is comms_logger",
    "monitor_config": "what is read is tensorboard, wandb, csv_monitor and comet, at the top of the file",
}
_ASKING: Final = {
    "fp8": "the model would not compute in fp8; use bf16",
    "sequence_parallel": "no sequence would be shared; the key for it is sequence_parallel_size",
}
"""Keys whose silence would be a wrong result: whoever wrote them believes to get what he does not."""
_SILENT: Final = "unknown key, which DeepSpeed passes over in silence"


def is_harmless(key: str) -> bool:
    """Whether a key at the top asks for nothing: a comment, or a section that was never read."""
    return key.startswith("_") or key in _HARMLESS


def why_ignored(key: str) -> str | None:
    """What to say of a key that DeepSpeed passes over; None of all others, such as slips of the keyboard."""
    if key in _ASKING:
        return f"{_SILENT}: {_ASKING[key]}"
    if not is_harmless(key):
        return None
    meant = _HARMLESS.get(key, "comments are written as in HJSON, with #")
    return f"{_SILENT}: {meant}. Leave it out; the drop-in (--drop-in) only warns of it"

"""What Accelerate reaches as `deepspeed.runtime.lr_schedules`, without importing it."""

from deepspeed.runtime import lr_schedules

__all__ = ["lr_schedules"]

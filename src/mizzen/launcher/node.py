"""`python -m mizzen.launcher.node`: what runs on each node. It loads `serve.py` once signals can no longer be lost."""

import os
import sys
from importlib import import_module

from mizzen.launcher.stops import hold

if __name__ == "__main__":
    hold()
    code = import_module("mizzen.launcher.serve").main()
    sys.stdout.flush()
    # torch may still be loading in a thread, which nobody needs any more.
    os._exit(code)

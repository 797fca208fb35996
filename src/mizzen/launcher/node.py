"""`python -m mizzen.launcher.node`: what runs on each node. `node_main.py` is loaded once no signal can be lost."""

import os
import sys
from importlib import import_module

from mizzen.launcher.signals import block_signals

if __name__ == "__main__":
    block_signals()
    code = import_module("mizzen.launcher.node_main").main()
    sys.stdout.flush()
    # torch may still be loading in a thread, which nobody needs any more.
    os._exit(code)

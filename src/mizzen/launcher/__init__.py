"""Start a job on this machine or on many, watch it, restart it, and tell how it ended.

`arrange.py` turns what was asked into a `Job`, a frozen value; `backends.py` turns a job into the commands of one
remote program; `start.py` runs them. Each node runs `node.py`, whose `supervisor.py` starts the ranks and watches them.
"""

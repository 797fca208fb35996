"""Start a job on this machine or on many, watch it, restart it, and tell how it ended.

`launch.py` turns the options of the command line into a `Job`, a frozen value. `backends.py` turns a job into the
commands of one remote program, and `start.py` runs them. Each node runs `node.py`, whose `supervisor.py` starts the
ranks (`workers.py`) and watches them; `rendezvous.py` brings the supervisors of several nodes together.
"""

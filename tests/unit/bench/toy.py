"""A workload that players import in place of a real one: a step is a number, or a mishap."""

import os

import torch


def prepare(system, settings):
    """`good` counts, `bad` cannot be built, `late` fails in its second step, `dead` dies in its first."""
    if system == "bad":
        raise ValueError(f"cannot be built with {settings}")
    rank = int(os.environ["RANK"])

    def step(number):
        if system == "late" and number == 1:
            raise RuntimeError("the second step is one too many")
        if system == "dead":
            print("famous last words", flush=True)
            os._exit(3)
        return torch.tensor(10.0 * rank + number)

    return step

"""Messages between the stages of a pipeline by hand, as scripts with a grid of their own send them."""

import pickle
from typing import Any, Final

import torch

from mizzen import comm
from mizzen.accelerator import get_accelerator
from mizzen.comm.communicator import Work
from mizzen.comm.grid import PipelineParallelGrid
from mizzen.errors import UsageError


class StageMessages:
    """The grid that messages go by, and those that nobody has waited for. All functions of a process share one."""

    def __init__(self) -> None:
        self.grid: PipelineParallelGrid | None = None
        self.pending: list[Work] = []

    def rank_of(self, stage: int) -> int:
        """The rank of a neighbouring stage."""
        if self.grid is None:
            raise UsageError("a message to a stage before init_process_groups(grid): it says which rank that is")
        apart = abs(self.grid.get_stage_id() - stage)
        if apart not in (1, self.grid.pipe_parallel_size - 1):
            raise UsageError(
                f"stage {self.grid.get_stage_id()} sends to and receives from the stages beside it, the first and the "
                f"last counted as such; stage {stage} is none of these"
            )
        return self.grid.stage_to_global(stage_id=stage)


MESSAGES: Final = StageMessages()


def can_send_recv() -> bool:
    """Whether single ranks can send to each other: always."""
    return True


def init_process_groups(grid: PipelineParallelGrid) -> None:
    """Say by which grid stages are found."""
    MESSAGES.grid = grid


def send(tensor: torch.Tensor, dest_stage: int, async_op: bool = False) -> Any:
    """Send a tensor to a neighbouring stage; with `async_op`, until `wait()` is called."""
    return _moved(comm.isend(tensor, MESSAGES.rank_of(dest_stage)), async_op)


def recv(tensor: torch.Tensor, src_stage: int, async_op: bool = False) -> Any:
    """Receive a tensor from a neighbouring stage; with `async_op` it is there after `wait()`."""
    return _moved(comm.irecv(tensor, MESSAGES.rank_of(src_stage)), async_op)


def _moved(work: Any, async_op: bool) -> Any:
    if async_op:
        MESSAGES.pending.append(work)
        return work
    return work.wait()


def wait() -> None:
    """Wait for all messages that were started with `async_op`."""
    pending, MESSAGES.pending = MESSAGES.pending, []
    for work in pending:
        work.wait()


def send_obj(msg: Any, dest: int) -> None:
    """Send any object to a rank."""
    device = get_accelerator().device()
    data = torch.frombuffer(bytearray(pickle.dumps(msg)), dtype=torch.uint8).to(device)
    comm.send(torch.tensor([data.numel()], device=device), dst=dest)
    comm.send(data, dst=dest)


def recv_obj(sender: int) -> Any:
    """An object that a rank has sent with `send_obj`."""
    device = get_accelerator().device()
    size = torch.zeros(1, dtype=torch.int64, device=device)
    comm.recv(size, src=sender)
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    comm.recv(data, src=sender)
    return pickle.loads(bytes(data.cpu().numpy()))


def is_even(number: int) -> bool:
    """Whether a number is even."""
    return number % 2 == 0

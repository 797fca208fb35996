"""Numbers as small integers in blocks, each block with one scale: what travels in quantized collectives.

A message holds the integers of all blocks and then their scales, as bytes. The kernels of a GPU give the bits of the
plain functions: both divide and round to the nearest, to the even one of two.
"""

from typing import Final

import torch
from torch import Tensor

from mizzen.kernels.gpu import gpu_code

BLOCK: Final = 128
"""Elements that share a scale of four bytes: 8-bit messages are 3.88 and 4-bit ones 7.53 times smaller than fp32."""


def message_size(count: int, bits: int) -> int:
    """Bytes of a row of so many numbers."""
    return -(-count // BLOCK) * (BLOCK * bits // 8 + 4)


def pack(values: Tensor, bits: int) -> Tensor:
    """Rows of numbers as rows of bytes. What is not finite stays so: its block comes back as NaN."""
    code = gpu_code(values)
    if code is None:
        return plain_pack(values, bits)
    rows, count = values.shape
    messages = torch.empty(rows, message_size(count, bits), dtype=torch.uint8, device=values.device)
    code.pack(values if values.dtype.itemsize <= 4 else values.float(), messages, bits=bits, block=BLOCK)
    return messages


def unpack(messages: Tensor, count: int, bits: int) -> Tensor:
    """The numbers of such rows, in fp32."""
    code = gpu_code(messages)
    if code is None:
        return plain_unpack(messages, count, bits)
    values = torch.empty(len(messages), count, dtype=torch.float32, device=messages.device)
    code.unpack(messages, values, bits=bits, block=BLOCK)
    return values


def plain_pack(values: Tensor, bits: int) -> Tensor:
    """The specification of `pack`."""
    rows, count = values.shape
    blocks = -(-count // BLOCK)
    padded = torch.zeros(rows, blocks * BLOCK, dtype=torch.float32, device=values.device)
    padded[:, :count] = values
    table = padded.view(rows, blocks, BLOCK)
    most = float((1 << (bits - 1)) - 1)
    largest = table.abs().amax(2, keepdim=True)
    scales = largest / torch.full_like(largest, most)  # by a number, a GPU would multiply with its rounded inverse
    whole = torch.round(table / torch.where(scales == 0, 1.0, scales)).nan_to_num_(0).clamp_(-most, most)
    if bits == 8:
        held = whole.to(torch.int8).view(torch.uint8)
    else:
        shifted = (whole + 8).to(torch.uint8)
        held = shifted[..., ::2] | (shifted[..., 1::2] << 4)
    return torch.cat([held.reshape(rows, -1), scales.view(rows, -1).view(torch.uint8)], 1)


def plain_unpack(messages: Tensor, count: int, bits: int) -> Tensor:
    """The specification of `unpack`."""
    rows, blocks = messages.shape[0], -(-count // BLOCK)
    split = blocks * BLOCK * bits // 8
    scales = messages[:, split:].contiguous().view(torch.float32).view(rows, blocks, 1)
    held = messages[:, :split].contiguous()
    whole = held.view(torch.int8).float() if bits == 8 else torch.stack([held & 15, held >> 4], 2).float() - 8
    return (whole.view(rows, blocks, BLOCK) * scales).view(rows, -1)[:, :count]

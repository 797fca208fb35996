"""Every Triton kernel, with the function that launches it. `gpu.py` imports this file when a GPU asks for it.

All of them compute in fp32 and round where plain torch would. They are specified by the plain functions beside the
faces that call them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-3.0e38)
"""Below every logit; not infinite, so that a stretch of infinite ones gives no NaN."""


@triton.jit
def _cross_entropy(
    logits, labels, losses, stride, ignore_index,
    COLUMNS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    start = logits + row * stride
    counts = label != ignore_index
    is_known = (label >= 0) & (label < COLUMNS)
    # Before the loop, whose sums are barriers: no thread may have written yet when another one reads this.
    at_label = tl.load(start + label, mask=counts & is_known, other=0.0).to(tl.float32)
    largest = LOWEST
    total = 0.0
    for first in range(0, COLUMNS, BLOCK):
        places = first + tl.arange(0, BLOCK)
        values = tl.load(start + places, mask=places < COLUMNS, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(values, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(values - larger), 0)
        largest = larger
    whole = largest + tl.log(total)
    loss = tl.where(is_known, whole - at_label, float("nan"))
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    if WRITES:
        for first in range(0, COLUMNS, BLOCK):
            places = first + tl.arange(0, BLOCK)
            values = tl.load(start + places, mask=places < COLUMNS, other=float("-inf")).to(tl.float32)
            slopes = tl.exp(values - whole) - tl.where(places == label, 1.0, 0.0)
            slopes = tl.where(counts, slopes, 0.0)
            tl.store(start + places, slopes.to(logits.dtype.element_ty), mask=places < COLUMNS)


def cross_entropy_(logits: Tensor, labels: Tensor, losses: Tensor, *, ignore_index: int, writes: bool) -> None:
    """Fill in the loss of each row, and write its gradient over the logits. Labels that do not exist give NaN."""
    rows, columns = logits.shape
    if not rows:
        return
    block = min(triton.next_power_of_2(columns), 8192)
    _cross_entropy[(rows,)](
        logits,
        labels.contiguous(),
        losses,
        logits.stride(0),
        ignore_index,
        COLUMNS=columns,
        WRITES=writes,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
    )


@triton.jit
def _swiglu(gate, up, found, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < count
    one = tl.load(gate + places, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(up + places, mask=mask, other=0.0).to(tl.float32)
    silu = (one / (1.0 + tl.exp(-one))).to(found.dtype.element_ty).to(tl.float32)
    tl.store(found + places, (silu * other).to(found.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward(incoming, gate, up, by_gate, by_up, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < count
    slope = tl.load(incoming + places, mask=mask, other=0.0).to(tl.float32)
    one = tl.load(gate + places, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(up + places, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-one))
    silu = (one / (1.0 + tl.exp(-one))).to(by_up.dtype.element_ty).to(tl.float32)
    by_silu = (slope * other).to(by_gate.dtype.element_ty).to(tl.float32)
    tl.store(by_up + places, (slope * silu).to(by_up.dtype.element_ty), mask=mask)
    found = by_silu * sigmoid * (1.0 + one * (1.0 - sigmoid))
    tl.store(by_gate + places, found.to(by_gate.dtype.element_ty), mask=mask)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = gate.contiguous(), up.contiguous()
    found = torch.empty_like(gate)
    if count := found.numel():
        _swiglu[(triton.cdiv(count, 1024),)](gate, up, found, count, BLOCK=1024, num_warps=4)
    return found


def swiglu_backward(incoming: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    incoming, gate, up = incoming.contiguous(), gate.contiguous(), up.contiguous()
    by_gate, by_up = torch.empty_like(gate), torch.empty_like(up)
    if count := gate.numel():
        grid = (triton.cdiv(count, 1024),)
        _swiglu_backward[grid](incoming, gate, up, by_gate, by_up, count, BLOCK=1024, num_warps=4)
    return by_gate, by_up


@triton.jit
def _rotate(
    inputs, found, cosine, sine,
    in_batch, in_head, in_place, out_batch, out_head, out_place, cosine_batch, cosine_place, sine_batch, sine_place,
    heads, length, half,
    BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch, place = token // length, token % length
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF)
    inside = column < half
    mask = (head < heads)[:, None] & inside[None, :]
    row_of_cosine = cosine + batch * cosine_batch + place * cosine_place + column
    row_of_sine = sine + batch * sine_batch + place * sine_place + column
    cosine_1 = tl.load(row_of_cosine, mask=inside, other=0.0).to(tl.float32)[None, :]
    cosine_2 = tl.load(row_of_cosine + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    sine_1 = tl.load(row_of_sine, mask=inside, other=0.0).to(tl.float32)[None, :]
    sine_2 = tl.load(row_of_sine + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    start = inputs + batch * in_batch + place * in_place + head[:, None] * in_head + column[None, :]
    first = tl.load(start, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(start + half, mask=mask, other=0.0).to(tl.float32)
    # Both products are rounded before they are added, as plain torch does. The wider of the two dtypes is that of
    # the result in forward and that of the input in backward.
    if BACK:
        one = (first * cosine_1).to(inputs.dtype.element_ty).to(tl.float32)
        two = (second * sine_2).to(inputs.dtype.element_ty).to(tl.float32)
        three = (second * cosine_2).to(inputs.dtype.element_ty).to(tl.float32)
        four = (first * sine_1).to(inputs.dtype.element_ty).to(tl.float32)
        found_1 = one + two
        found_2 = three - four
    else:
        one = (first * cosine_1).to(found.dtype.element_ty).to(tl.float32)
        two = (second * sine_1).to(found.dtype.element_ty).to(tl.float32)
        three = (second * cosine_2).to(found.dtype.element_ty).to(tl.float32)
        four = (first * sine_2).to(found.dtype.element_ty).to(tl.float32)
        found_1 = one - two
        found_2 = three + four
    target = found + batch * out_batch + place * out_place + head[:, None] * out_head + column[None, :]
    tl.store(target, found_1.to(found.dtype.element_ty), mask=mask)
    tl.store(target + half, found_2.to(found.dtype.element_ty), mask=mask)


def rotate(inputs: Tensor, cosine: Tensor, sine: Tensor, *, dtype: torch.dtype, back: bool) -> Tensor:
    """(batch, heads, length, head) turned by (batch or 1, length, head); with `back`, the gradient of that."""
    inputs, cosine, sine = (each if each.stride(-1) == 1 else each.contiguous() for each in (inputs, cosine, sine))
    found = torch.empty_like(inputs, dtype=dtype)
    if found.stride(-1) != 1:
        found = torch.empty(inputs.shape, dtype=dtype, device=inputs.device)
    batch, heads, length, size = inputs.shape
    if not inputs.numel():
        return found
    half = triton.next_power_of_2(size // 2)
    group = min(triton.next_power_of_2(heads), max(1, 2048 // half))
    _rotate[(batch * length, triton.cdiv(heads, group))](
        inputs,
        found,
        cosine,
        sine,
        *inputs.stride()[:3],
        *found.stride()[:3],
        cosine.stride(0) if cosine.shape[0] > 1 else 0,
        cosine.stride(1),
        sine.stride(0) if sine.shape[0] > 1 else 0,
        sine.stride(1),
        heads,
        length,
        size // 2,
        BACK=back,
        HEADS=group,
        HALF=half,
        num_warps=4,
    )
    return found


BLOCKS = 8
"""Blocks of quantized numbers that one program sees to."""
HALFWAY = tl.constexpr(12582912.0)
"""1.5 x 2^23: the sum of it and a small number has no room for a fraction, and is rounded to the nearest, or even."""


@triton.jit
def _as_integers(values, scales, MOST: tl.constexpr):
    found = (tl.div_rn(values, tl.where(scales == 0, 1.0, scales)[:, None]) + HALFWAY) - HALFWAY
    found = tl.where(found == found, found, 0.0)
    return tl.minimum(tl.maximum(found, -MOST), MOST)


@triton.jit
def _pack(
    values, held, scales, count, blocks, in_stride, held_stride, scale_stride, scale_start,
    BITS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    is_there = block < blocks
    start = values + row * in_stride
    if BITS == 8:
        places = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        first = tl.load(start + places, mask=places < count, other=0.0).to(tl.float32)
        second = first
    else:
        places = block[:, None] * BLOCK + 2 * tl.arange(0, BLOCK // 2)[None, :]
        first = tl.load(start + places, mask=places < count, other=0.0).to(tl.float32)
        second = tl.load(start + places + 1, mask=places + 1 < count, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    # A maximum may leave NaN out.
    strange = tl.maximum(tl.max((first != first).to(tl.int32), 1), tl.max((second != second).to(tl.int32), 1))
    scale = tl.where(strange > 0, float("nan"), tl.div_rn(largest, tl.full([GROUP], MOST, tl.float32)))
    tl.store(scales + row * scale_stride + scale_start + block, scale, mask=is_there)
    if BITS == 8:
        there = held + row * held_stride + places
        tl.store(there, _as_integers(first, scale, MOST).to(tl.int8), mask=is_there[:, None] & (places >= 0))
    else:
        low = (_as_integers(first, scale, MOST) + 8.0).to(tl.int32)
        high = (_as_integers(second, scale, MOST) + 8.0).to(tl.int32)
        there = held + row * held_stride + places // 2
        tl.store(there, (low | (high << 4)).to(tl.uint8), mask=is_there[:, None] & (places >= 0))


@triton.jit
def _unpack(
    held, scales, values, count, blocks, held_stride, scale_stride, scale_start, out_stride,
    BITS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    scale = tl.load(scales + row * scale_stride + scale_start + block, mask=block < blocks, other=0.0)[:, None]
    start = values + row * out_stride
    if BITS == 8:
        places = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        whole = tl.load(held + row * held_stride + places, mask=places < count, other=0).to(tl.float32)
        tl.store(start + places, whole * scale, mask=places < count)
    else:
        places = block[:, None] * BLOCK + 2 * tl.arange(0, BLOCK // 2)[None, :]
        both = tl.load(held + row * held_stride + places // 2, mask=places < count, other=0).to(tl.int32)
        tl.store(start + places, ((both & 15) - 8).to(tl.float32) * scale, mask=places < count)
        tl.store(start + places + 1, ((both >> 4) - 8).to(tl.float32) * scale, mask=places + 1 < count)


def pack(values: Tensor, messages: Tensor, *, bits: int, block: int) -> None:
    """Fill rows of bytes with rows of numbers: the integers of all blocks, then their scales."""
    values = values.contiguous()
    rows, count = values.shape
    if not values.numel():
        return
    blocks = triton.cdiv(count, block)
    scales = messages.view(torch.float32)
    _pack[(rows, triton.cdiv(blocks, BLOCKS))](
        values,
        messages.view(torch.int8) if bits == 8 else messages,
        scales,
        count,
        blocks,
        values.stride(0),
        messages.stride(0),
        scales.stride(0),
        blocks * block * bits // 32,
        BITS=bits,
        MOST=float((1 << (bits - 1)) - 1),
        BLOCK=block,
        GROUP=BLOCKS,
        num_warps=4,
    )


def unpack(messages: Tensor, values: Tensor, *, bits: int, block: int) -> None:
    """The way back, into rows of fp32 numbers."""
    messages = messages.contiguous()
    rows, count = values.shape
    if not values.numel():
        return
    blocks = triton.cdiv(count, block)
    scales = messages.view(torch.float32)
    _unpack[(rows, triton.cdiv(blocks, BLOCKS))](
        messages.view(torch.int8) if bits == 8 else messages,
        scales,
        values,
        count,
        blocks,
        messages.stride(0),
        scales.stride(0),
        blocks * block * bits // 32,
        values.stride(0),
        BITS=bits,
        BLOCK=block,
        GROUP=BLOCKS,
        num_warps=4,
    )


@triton.jit
def _keep_writes(values, masters, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    value = tl.load(values + places, mask=inside, other=0.0).to(tl.float32)
    master = tl.load(masters + places, mask=inside, other=0.0).to(tl.float32)
    rounded = master.to(values.dtype.element_ty).to(tl.float32)
    tl.store(masters + places, value, mask=inside & (value != rounded))


def keep_writes(values: Tensor, masters: Tensor) -> None:
    """Where a value is not its fp32 master rounded, make it the master."""
    if count := values.numel():
        _keep_writes[(triton.cdiv(count, 1024),)](values, masters, count, BLOCK=1024, num_warps=4)


@triton.jit
def _mark(bits, found, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    mixed = tl.load(bits + places, mask=inside, other=0).to(tl.uint64, bitcast=True)
    mixed = mixed ^ ((places + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    mixed = (mixed ^ (mixed >> 31)).to(tl.int64, bitcast=True)
    tl.atomic_add(found, tl.sum(tl.where(inside, mixed, 0), 0))


def mark(bits: Tensor) -> Tensor:
    """The sum of what a scrambler of 64 bits (splitmix64) makes of each number and its place."""
    found = bits.new_zeros(1)
    if count := bits.numel():
        _mark[(triton.cdiv(count, 4096),)](bits, found, count, BLOCK=4096, num_warps=8)
    return found

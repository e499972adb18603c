"""From arrays and lengths to library calls: which rows belong to which sequence.

A batch is one call when its rows can be counted through (one token stride from sequence to
sequence), else one call per sequence; nothing is copied to make it so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from . import _core
from ._arrays import Arrays, adopt, arrays_of, host_ints, where

Segment = tuple[int, int, int, int, int]  # q_start, q_len, kv_start, kv_len, page_row


@dataclass
class Part:
    """One library call: `batch` is the sequence it covers, None for all of them."""

    batch: int | None
    segments: list[Segment]
    implied: bool = False  # the library's own default says the same, so nothing is passed


class View:
    """An array and where it lies; strides count elements."""

    __slots__ = ("a", "address", "shape", "strides")

    def __init__(self, arrays: Arrays, a: Any) -> None:
        self.a, self.shape = a, a.shape
        self.address, self.strides = arrays.layout(a)


@dataclass
class Problem:
    """One public call. q is [batch, q_len, heads, head_dim], or [tokens, heads, head_dim] if varlen."""

    arrays: Arrays
    q: View
    k: View
    v: View
    scale: float
    causal: bool
    block_table: View | None = None
    dtype: int = 0
    parts: list[Part] = field(default_factory=list)
    # Rows that no key precedes, (batch, first, end): out 0, lse -inf, written here.
    blank: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def segments(self) -> list[Segment]:
        return [segment for part in self.parts for segment in part.segments]

    def tensor(self, view: View, batch: int | None) -> _core.Tensor:
        """q, or an array laid out like it, as the library's [tokens, heads, head_dim]."""
        address, shape, strides = view.address, view.shape, view.strides
        if len(shape) == 3:
            tokens, heads, dim = shape
            return _core.Tensor(address, self.dtype, tokens, heads, dim, strides[0], strides[1])
        tokens = shape[1]
        if batch is not None:
            address += batch * strides[0] * _ITEM_BYTES[self.dtype]
        elif shape[0] != 1 and strides[1] != 0:
            tokens += (shape[0] - 1) * (strides[0] // strides[1])
        return _core.Tensor(
            address, self.dtype, tokens, shape[2], shape[3], strides[1], strides[2]
        )

    def key_tensor(self, view: View, batch: int | None) -> _core.Tensor:
        if self.block_table is None:
            return self.tensor(view, batch)
        pages, size, heads, dim = view.shape
        strides = view.strides
        return _core.Tensor(
            view.address, self.dtype, pages * size, heads, dim, strides[1], strides[2], strides[0]
        )

    def call(self, part: Part, num_threads: int) -> _core.Call:
        """The part's library call with everything set that says where and what the inputs are."""
        arrays = self.arrays
        call = _core.Call(arrays.device, arrays.stream(), num_threads, self.scale, self.causal)
        batch = part.batch
        call.set_q(self.tensor(self.q, batch))
        call.set_k(self.key_tensor(self.k, batch))
        call.set_v(self.key_tensor(self.v, batch))
        if not part.implied:
            call.set_segments(part.segments)
        if self.block_table is not None:
            rows, columns = self.block_table.shape
            stride = self.block_table.strides[0] if rows > 1 else columns
            call.set_pages(self.block_table.address, rows, stride, self.k.shape[1])
        return call


_ITEM_BYTES = (4, 2, 2)


def _view(name: str, a: Any, arrays: Arrays, ndim: int, dtype: int) -> View:
    """An adopted array, checked."""
    if arrays_of(a) is not arrays:
        raise TypeError(f"{name} is {where(a)}, expected the same as q")
    if a.ndim != ndim:
        raise ValueError(f"{name} has {a.ndim} dimensions, expected {ndim}")
    if arrays.dtype_code(name, a) != dtype:
        raise TypeError(f"{name}.dtype is {a.dtype}, expected that of q")
    view = View(arrays, a)
    stride = view.strides[-1]
    if stride != 1 and view.shape[-1] > 1 and 0 not in view.shape:
        raise ValueError(
            f"{name} has stride {stride} in head_dim, expected 1: the last dimension must be dense"
        )
    return view


def _output(problem: Problem, out: Any) -> View:
    """An `out` of the caller; it must look like q."""
    view = _view("out", adopt("out", out), problem.arrays, len(problem.q.shape), problem.dtype)
    if view.shape != problem.q.shape:
        raise ValueError(f"out has shape {tuple(view.shape)}, expected {tuple(problem.q.shape)}")
    if not problem.arrays.writable(view.a):
        raise ValueError("out is read-only, expected an array that can be written")
    return view


def _batch_values(name: str, values: Any, batch: int) -> list[int] | None:
    if values is None:
        return None
    result = [int(values)] * batch if isinstance(values, int) else host_ints(name, values)
    if len(result) != batch:
        raise ValueError(f"{name} has {len(result)} entries, expected {batch}, one per sequence")
    return result


def _key_range(
    index: int, starts: list[int] | None, lengths: list[int] | None, limit: int
) -> tuple[int, int]:
    start = 0 if starts is None else starts[index]
    if not 0 <= start <= limit:
        raise ValueError(f"key_starts[{index}] is {start}, expected 0 to {limit}, the number of keys")
    length = limit - start if lengths is None else lengths[index]
    if not 0 <= length <= limit - start:
        raise ValueError(
            f"key_lengths[{index}] is {length}, expected 0 to {limit - start}: k has {limit} tokens "
            f"and key_starts[{index}] is {start}"
        )
    return start, length


def rows_per_sequence(view: View) -> int | None:
    """Rows from one sequence of a batch to the next, None if no whole number of them."""
    batch, tokens = view.shape[:2]
    if batch <= 1:
        return int(tokens)
    step, stride = view.strides[:2]
    if stride <= 0 or step < 0 or step % stride != 0:
        return None
    return int(step // stride)


def _one_call(problem: Problem, out: View | None) -> int | None:
    """Rows of k from sequence to sequence if the batch fits one call, else None."""
    q = problem.q
    if q.shape[0] == 1:
        return int(problem.k.shape[1])
    for view in (q,) if out is None else (q, out):
        if rows_per_sequence(view) != view.shape[1]:
            return None
    if out is not None:
        _, token, head, _ = out.strides
        if token < (out.shape[2] - 1) * head + out.shape[3]:
            return None  # head-major: the library would see rows of one head between another's
    if problem.block_table is not None:
        return 0
    rows = rows_per_sequence(problem.k)
    return rows if rows == rows_per_sequence(problem.v) else None


def _plan_batch(problem: Problem, out: View | None, key_starts: Any, key_lengths: Any) -> None:
    q, k, table = problem.q, problem.k, problem.block_table
    paged = table is not None
    batch, q_len = q.shape[:2]
    if not paged and k.shape[0] != batch:
        raise ValueError(f"k has batch {k.shape[0]}, expected that of q, {batch}")
    limit = k.shape[1] if table is None else table.shape[1] * k.shape[1]
    starts = _batch_values("key_starts", key_starts, batch)
    lengths = _batch_values("key_lengths", key_lengths, batch)
    if paged and lengths is None:
        raise ValueError("key_lengths is None, expected one length per sequence with a block_table")
    if problem.causal and starts is None and lengths is None and limit < q_len:
        raise ValueError(f"k has {limit} tokens, expected at least the {q_len} of q when causal")
    rows = _one_call(problem, out)
    plain = starts is None and lengths is None and not paged
    segments: list[Segment] = []
    for index in range(batch):
        start, length = _key_range(index, starts, lengths, limit)
        # The queries are the last ones of the keys; what is before the first key sees nothing.
        seen = min(q_len, length) if problem.causal else q_len
        if seen < q_len:
            problem.blank.append((index, 0, q_len - seen))
        first_row, first_key = (index * q_len, index * rows) if rows is not None else (0, 0)
        segments.append(
            (first_row + q_len - seen, seen, start + (0 if paged else first_key), length,
             index if paged else 0)
        )
    if batch == 0:
        problem.parts = []  # without segments the library would take all of q for one sequence
    elif rows is not None:
        problem.parts = [Part(None, segments, plain and batch == 1)]
    else:
        problem.parts = [Part(i, [segment], plain) for i, segment in enumerate(segments)]


def _check_cumulative(name: str, cumulative: list[int], end: int) -> None:
    if len(cumulative) < 2 or cumulative[0] != 0:
        raise ValueError(f"{name} is {cumulative[:4]}..., expected at least [0, length]")
    for index in range(1, len(cumulative)):
        if cumulative[index] < cumulative[index - 1]:
            raise ValueError(f"{name}[{index}] is {cumulative[index]}, expected >= the entry before it")
    if cumulative[-1] != end:
        raise ValueError(f"{name}[-1] is {cumulative[-1]}, expected {end}, the number of tokens")


def _plan_varlen(problem: Problem, cu_seqlens: Any, key_starts: Any, key_lengths: Any) -> None:
    table = problem.block_table
    pair = isinstance(cu_seqlens, tuple) and len(cu_seqlens) == 2 and not isinstance(cu_seqlens[0], int)
    cu_q = host_ints("cu_seqlens", cu_seqlens[0] if pair else cu_seqlens)
    _check_cumulative("cu_seqlens", cu_q, problem.q.shape[0])
    count = len(cu_q) - 1
    starts = _batch_values("key_starts", key_starts, count)
    lengths = _batch_values("key_lengths", key_lengths, count)
    if table is not None:
        if lengths is None:
            raise ValueError("key_lengths is None, expected one length per sequence with a block_table")
        limit = table.shape[1] * problem.k.shape[1]
        offsets, limits = [0] * count, [limit] * count
    else:
        cu_k = host_ints("cu_seqlens[1]", cu_seqlens[1]) if pair else cu_q
        if len(cu_k) != len(cu_q):
            raise ValueError(f"cu_seqlens[1] has {len(cu_k)} entries, expected {len(cu_q)} as of q")
        _check_cumulative("cu_seqlens" if not pair else "cu_seqlens[1]", cu_k, problem.k.shape[0])
        offsets, limits = cu_k[:-1], [cu_k[i + 1] - cu_k[i] for i in range(count)]
    segments: list[Segment] = []
    for index in range(count):
        start, length = _key_range(index, starts, lengths, limits[index])
        q_len = cu_q[index + 1] - cu_q[index]
        segments.append(
            (cu_q[index], q_len, offsets[index] + start, length, 0 if table is None else index)
        )
    problem.parts = [Part(None, segments)]


def _adopt_table(problem: Problem, block_table: Any) -> None:
    table = adopt("block_table", block_table)
    if arrays_of(table) is not problem.arrays:
        raise TypeError(f"block_table is {where(table)}, expected the same as q")
    if table.ndim != 2 or str(table.dtype).rpartition(".")[2] != "int32":
        raise ValueError(
            f"block_table is {table.dtype} with {table.ndim} dimensions, expected int32 [rows, pages]"
        )
    if table.shape[1] > 1 and problem.arrays.strides(table)[1] != 1:
        raise ValueError("block_table has gaps within a row, expected dense rows")
    problem.block_table = View(problem.arrays, table)


def make_problem(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None,
    causal: bool,
    key_starts: Any = None,
    key_lengths: Any = None,
    cu_seqlens: Any = None,
    block_table: Any = None,
    out: Any = None,
) -> tuple[Problem, View | None]:
    """Checks arrays and lengths and lays out the calls; returns `out` as well."""
    q = adopt("q", q)
    arrays = arrays_of(q)
    dtype = arrays.dtype_code("q", q)
    varlen = cu_seqlens is not None
    q_view = _view("q", q, arrays, 3 if varlen else 4, dtype)
    key_ndim = 4 if block_table is not None or not varlen else 3
    k_view = v_view = _view("k", adopt("k", k), arrays, key_ndim, dtype)
    if v is not None:
        v_view = _view("v", adopt("v", v), arrays, key_ndim, dtype)
        if v_view.shape != k_view.shape:
            raise ValueError(
                f"v has shape {tuple(v_view.shape)}, expected that of k, {tuple(k_view.shape)}"
            )
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1]) if q.shape[-1] else 0.0
    problem = Problem(arrays, q_view, k_view, v_view, float(scale), bool(causal), dtype=dtype)
    out_view = None if out is None else _output(problem, out)
    if block_table is not None:
        _adopt_table(problem, block_table)
    if varlen:
        _plan_varlen(problem, cu_seqlens, key_starts, key_lengths)
    else:
        _plan_batch(problem, out_view, key_starts, key_lengths)
    return problem, out_view

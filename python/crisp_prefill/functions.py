"""The functions on arrays: attention, select_blocks, attend, merge_states, workspace_bytes.

Arrays are numpy (float32, float16, ml_dtypes.bfloat16), torch on the CPU or CUDA (float32, float16,
bfloat16; CUDA: the last two), or anything with __dlpack__. They are read and written where they lie,
with any strides as long as head_dim is dense; results belong to the library of q. On CUDA everything
is enqueued on torch's current stream of q's device, and only a report waits for it.

What the functions refuse is a ValueError (values, shapes) or TypeError (kinds, dtypes) that names
argument, value and expectation; nothing has been written then.
"""

from __future__ import annotations

from typing import Any

from . import _core, _plain
from ._arrays import adopt, arrays_of
from ._problem import Problem, make_problem
from ._run import Wanted, run, set_policy
from .mask import BlockMask
from .policies import Crisp, Policy


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    policy: Policy = Crisp(),
    scale: float | None = None,
    causal: bool = True,
    key_starts: Any = None,
    key_lengths: Any = None,
    cu_seqlens: Any = None,
    block_table: Any = None,
    out: Any = None,
    workspace: Any = None,
    return_lse: bool = False,
    return_report: bool = False,
    num_threads: int = 0,
) -> Any:
    """Selects blocks by `policy` and attends to them: exact softmax over what is kept.

    q: [batch, q_len, q_heads, head_dim]; k, v: [batch, kv_len, kv_heads, head_dim], kv_heads divides
        q_heads. After RoPE. Causal attention is bottom-right aligned: the queries are the last ones.
    scale: of the logits, default head_dim ** -0.5.
    key_starts, key_lengths: int or one per sequence, tokens: sequence b attends to keys
        [key_starts[b], key_starts[b] + key_lengths[b]), default all from key_starts on. Left padding
        is key_starts; a cache longer than what it holds is key_lengths. Queries before the first key
        give out 0 and lse -inf.
    cu_seqlens: varlen: q is [tokens, q_heads, head_dim], and sequence b its rows
        [cu_seqlens[b], cu_seqlens[b + 1]); a pair (of q, of k) where they differ. On the host.
    block_table: paged keys: k and v are [pages, page_size, kv_heads, head_dim], and token t of
        sequence b lies in page block_table[b, t // page_size] (int32). Needs key_lengths.
    out: where to write, like q; default a new array.
    workspace: uint8 array, 256-byte aligned, of at least workspace_bytes(); default a new one.
    num_threads: CPU: 0 means all cores.

    Returns out, or (out, lse, report) with those asked for, in this order. lse: float32 natural log,
    [batch, q_heads, q_len] or, varlen, [q_heads, tokens]. report: a Report.
    """
    unset = key_starts is key_lengths is cu_seqlens is block_table is None
    if unset and not (return_lse or return_report):
        quick = _plain.attention(q, k, v, policy, scale, causal, out, workspace, num_threads)
        if quick is not None:
            return quick
    problem, view = make_problem(
        q, k, v, scale=scale, causal=causal, key_starts=key_starts, key_lengths=key_lengths,
        cu_seqlens=cu_seqlens, block_table=block_table, out=out,
    )
    result = run(
        problem,
        Wanted(
            "prefill", policy, out=view, lse=return_lse, report=return_report, workspace=workspace,
            num_threads=num_threads,
        ),
    )
    if not (return_lse or return_report):
        return result.out
    extra = [result.lse] * return_lse + [result.report] * return_report
    return (result.out, *extra)


def select_blocks(
    q: Any,
    k: Any,
    *,
    policy: Policy = Crisp(),
    scale: float | None = None,
    causal: bool = True,
    key_starts: Any = None,
    key_lengths: Any = None,
    cu_seqlens: Any = None,
    block_table: Any = None,
    workspace: Any = None,
    return_report: bool = False,
    num_threads: int = 0,
    block_size: int = 128,
) -> Any:
    """The blocks that `policy` keeps: a BlockMask, or (mask, report). Arguments as of attention.

    block_size: 128; Dense and UserMask also take 64.
    """
    problem, _ = make_problem(
        q, k, None, scale=scale, causal=causal, key_starts=key_starts, key_lengths=key_lengths,
        cu_seqlens=cu_seqlens, block_table=block_table,
    )
    result = run(
        problem,
        Wanted(
            "select", policy, report=return_report, workspace=workspace, num_threads=num_threads,
            block_size=block_size,
        ),
    )
    return (result.mask, result.report) if return_report else result.mask


def attend(
    q: Any,
    k: Any,
    v: Any,
    mask: BlockMask,
    *,
    scale: float | None = None,
    causal: bool = True,
    key_starts: Any = None,
    key_lengths: Any = None,
    cu_seqlens: Any = None,
    block_table: Any = None,
    out: Any = None,
    workspace: Any = None,
    return_lse: bool = False,
    num_threads: int = 0,
) -> Any:
    """Exact softmax attention over the blocks of `mask`: out, or (out, lse).

    The mask must be of the same sequences (select_blocks with the same lengths gives one); nothing
    is added to it: a row without blocks gives out 0 and lse -inf. Other arguments as of attention.
    """
    problem, view = make_problem(
        q, k, v, scale=scale, causal=causal, key_starts=key_starts, key_lengths=key_lengths,
        cu_seqlens=cu_seqlens, block_table=block_table, out=out,
    )
    result = run(
        problem,
        Wanted(
            "attend", mask=mask, out=view, lse=return_lse, workspace=workspace,
            num_threads=num_threads,
        ),
    )
    return (result.out, result.lse) if return_lse else result.out


def workspace_bytes(
    q: Any,
    k: Any,
    *,
    policy: Policy = Crisp(),
    causal: bool = True,
    key_starts: Any = None,
    key_lengths: Any = None,
    cu_seqlens: Any = None,
    block_table: Any = None,
    num_threads: int = 0,
) -> int:
    """Bytes of workspace that attention, select_blocks and attend need on such arrays."""
    problem, _ = make_problem(
        q, k, None, scale=None, causal=causal, key_starts=key_starts, key_lengths=key_lengths,
        cu_seqlens=cu_seqlens, block_table=block_table,
    )
    most = 0
    for part in problem.parts:
        call = problem.call(part, num_threads)
        user_mask = set_policy(problem, part, call, policy)
        block_size = user_mask.block_size if user_mask is not None else 128
        call.set_mask(call.mask_shape(block_size))
        most = max(most, call.workspace_bytes())
    return most


def _state(name: str, out: Any, lse: Any) -> tuple[Any, Any]:
    out, lse = adopt(f"out_{name}", out), adopt(f"lse_{name}", lse)
    arrays = arrays_of(out)
    if out.ndim not in (3, 4):
        raise ValueError(f"out_{name} has {out.ndim} dimensions, expected 3 or 4")
    expected = (*out.shape[:-3], out.shape[-2], out.shape[-3])
    if tuple(lse.shape) != expected:
        raise ValueError(f"lse_{name} has shape {tuple(lse.shape)}, expected {expected}")
    if arrays_of(lse) is not arrays or str(lse.dtype).rpartition(".")[2] != "float32":
        raise TypeError(f"lse_{name} is {lse.dtype}, expected float32 next to out_{name}")
    return out, lse


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, num_threads: int = 0
) -> tuple[Any, Any]:
    """Joins two attentions of the same queries over disjoint keys: (out, lse).

    lse = log(exp(lse_a) + exp(lse_b)), out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b. out:
    [batch, q_len, heads, head_dim] or [tokens, heads, head_dim]; lse as attention returns it. A state
    with lse -inf is empty. `out` may be out_a.
    """
    out_a, lse_a = _state("a", out_a, lse_a)
    out_b, lse_b = _state("b", out_b, lse_b)
    arrays = arrays_of(out_a)
    if tuple(out_b.shape) != tuple(out_a.shape):
        raise ValueError(f"out_b has shape {tuple(out_b.shape)}, expected {tuple(out_a.shape)}")
    if arrays_of(out_b) is not arrays:
        raise TypeError("out_b is of another library or device, expected that of out_a")
    result = arrays.empty_like_shape(out_a, tuple(out_a.shape)) if out is None else adopt("out", out)
    if tuple(result.shape) != tuple(out_a.shape) or arrays_of(result) is not arrays:
        raise ValueError(f"out has shape {tuple(result.shape)}, expected one like out_a")
    batched = out_a.ndim == 4
    lse = arrays.float32(tuple(lse_a.shape))
    with arrays.guard():
        for batch in range(out_a.shape[0]) if batched else [None]:
            _merge_one(out_a, lse_a, out_b, lse_b, result, lse, batch, num_threads)
    return result, lse


def _merge_one(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any, lse: Any, batch: int | None,
    num_threads: int,
) -> None:
    arrays = arrays_of(out_a)

    def tensor(name: str, a: Any) -> _core.Tensor:
        a = a if batch is None else a[batch]
        strides = arrays.strides(a)
        if a.shape[-1] > 1 and strides[-1] != 1:
            raise ValueError(f"{name} has stride {strides[-1]} in head_dim, expected 1")
        dtype, (tokens, heads, dim) = arrays.dtype_code(name, a), a.shape
        return _core.Tensor(arrays.pointer(a), dtype, tokens, heads, dim, strides[0], strides[1])

    # The library wants [heads, tokens] without gaps; lse is small, so one with gaps is copied.
    states = [a if batch is None else a[batch] for a in (lse_a, lse_b)]
    states = [_dense_rows(arrays, a) for a in states]
    written = lse if batch is None else lse[batch]
    _core.merge_states(
        tensor("out_a", out_a), arrays.pointer(states[0]), tensor("out_b", out_b),
        arrays.pointer(states[1]), tensor("out", out), arrays.pointer(written), arrays.device,
        arrays.stream(), num_threads,
    )


def _dense_rows(arrays: Any, a: Any) -> Any:
    heads, tokens = a.shape
    strides = arrays.strides(a)
    if (heads <= 1 or strides[0] == tokens) and (tokens <= 1 or strides[1] == 1):
        return a
    dense = arrays.float32((heads, tokens))
    dense[...] = a
    return dense


__all__ = ["Problem", "attend", "attention", "merge_states", "select_blocks", "workspace_bytes"]

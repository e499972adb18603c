"""The oracle: both papers in plain double precision, on the same arguments as `attention`.

Slow (one thread, every product of two vectors written out) and meant for thousands of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _core
from ._problem import Problem, make_problem, rows_per_sequence
from .mask import BlockMask, visible_blocks
from .policies import Crisp, Policy, UserMask, core_policy
from .report import PATTERNS


@dataclass(frozen=True)
class Head:
    """What the reference selects for one head of one sequence; NaN where not computed."""

    sequence: int
    head: int
    pattern: str
    structural_mass: float
    js_distance: float
    num_vertical: int
    num_slash: int
    blocks: np.ndarray
    """bool [q_blocks, kv_blocks]"""


def _double(problem: Problem, a: Any) -> np.ndarray:
    if problem.arrays.library == "torch":
        a = a.double()
    return np.ascontiguousarray(problem.arrays.to_numpy(a).astype(np.float64))


def _sequences(problem: Problem) -> Iterator[tuple[Any, slice, np.ndarray, np.ndarray, np.ndarray]]:
    """(batch or None, rows, q, k, v) of every sequence, as doubles [tokens, heads, head_dim]."""
    q, k, v = (_double(problem, view.a) for view in (problem.q, problem.k, problem.v))
    table = problem.block_table
    page = None if table is None else problem.arrays.to_numpy(table.a)
    per_batch = q.ndim == 4
    for index, (q_start, q_len, kv_start, kv_len, _) in enumerate(problem.segments):
        batch = index if per_batch else None
        rows = slice(q.shape[1] - q_len, q.shape[1]) if per_batch else slice(q_start, q_start + q_len)
        if page is not None:
            ks, vs = (x[page[index]].reshape(-1, *x.shape[2:]) for x in (k, v))
            start = kv_start
        elif per_batch:
            ks, vs = k[index], v[index]
            in_one = problem.parts[0].batch is None
            # One call counts rows through the batch; a sequence's own first row is at index * step.
            step = (rows_per_sequence(problem.k) or 0) if in_one else 0
            start = kv_start - index * step
        else:
            ks, vs, start = k, v, kv_start
        keys = slice(start, start + kv_len)
        yield batch, rows, (q if batch is None else q[batch])[rows], ks[keys], vs[keys]


def _select(problem: Problem, policy: Policy, index: int, head: int, q: Any, k: Any) -> Head:
    if isinstance(policy, UserMask):
        first, end = policy.mask.rows_of(index)
        columns = -(-k.shape[0] // policy.mask.block_size)
        bits = policy.mask.to_dense()[head, first:end, :columns]
        seen = visible_blocks(q.shape[0], k.shape[0], policy.mask.block_size, problem.causal)
        return Head(index, head, "mask", np.nan, np.nan, 0, 0, bits & seen)
    pattern, mass, distance, verticals, slashes, blocks = _core.oracle_select(
        q, k, problem.scale, problem.causal, core_policy(policy)
    )
    return Head(index, head, PATTERNS[pattern], mass, distance, verticals, slashes, blocks)


def select_blocks(q: Any, k: Any, *, policy: Policy = Crisp(), scale: float | None = None,
                  causal: bool = True, **lengths: Any) -> list[Head]:
    """What every head of every sequence keeps, sequences first. Arguments as of attention."""
    problem, _ = make_problem(q, k, None, scale=scale, causal=causal, **lengths)
    found = []
    for index, (_, _, qs, ks, _) in enumerate(_sequences(problem)):
        group = qs.shape[1] // ks.shape[1]
        for head in range(qs.shape[1]):
            one, keys = (np.ascontiguousarray(a) for a in (qs[:, head], ks[:, head // group]))
            found.append(_select(problem, policy, index, head, one, keys))
    return found


def attention(
    q: Any, k: Any, v: Any, *, policy: Policy = Crisp(), scale: float | None = None,
    causal: bool = True, **lengths: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) in float64 on the host, shaped as those of attention. Arguments as there."""
    problem, _ = make_problem(q, k, v, scale=scale, causal=causal, **lengths)
    shape = tuple(problem.q.shape)
    out = np.zeros(shape)
    lse = np.full((*shape[:-3], shape[-2], shape[-3]), -np.inf)
    block_size = policy.mask.block_size if isinstance(policy, UserMask) else 128
    for index, (batch, rows, qs, ks, vs) in enumerate(_sequences(problem)):
        group = qs.shape[1] // ks.shape[1]
        for head in range(qs.shape[1]):
            one, keys, values = (
                np.ascontiguousarray(a)
                for a in (qs[:, head], ks[:, head // group], vs[:, head // group])
            )
            blocks = np.ascontiguousarray(_select(problem, policy, index, head, one, keys).blocks)
            o, s = _core.oracle_attend(
                one, keys, values, problem.scale, problem.causal, blocks, block_size
            )
            (out if batch is None else out[batch])[rows, head] = o
            (lse if batch is None else lse[batch])[head, rows] = s
    return out, lse


def coverage(mask: BlockMask, q: Any, k: Any, *, scale: float | None = None, **lengths: Any) -> float:
    """Share of the dense attention mass in the kept blocks, mean over rows and heads."""
    problem, _ = make_problem(q, k, None, scale=scale, causal=mask.causal, **lengths)
    total, rows_total = 0.0, 0
    for index, (_, _, qs, ks, _) in enumerate(_sequences(problem)):
        group = qs.shape[1] // ks.shape[1]
        for head in range(qs.shape[1]):
            one, keys = (np.ascontiguousarray(a) for a in (qs[:, head], ks[:, head // group]))
            blocks = _select(problem, UserMask(mask), index, head, one, keys).blocks
            share = _core.oracle_coverage(
                one, keys, problem.scale, mask.causal, np.ascontiguousarray(blocks), mask.block_size
            )
            total += share * qs.shape[0]
            rows_total += qs.shape[0]
    return total / rows_total


__all__ = ["Head", "attention", "coverage", "select_blocks"]

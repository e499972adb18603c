"""Inputs that the tests share: drawn from seeds, as different between heads as they can be."""

from __future__ import annotations

import numpy as np
import pytest


def draw(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(dtype)


@pytest.fixture
def qkv():
    """make(batch, q_len, kv_len, q_heads, kv_heads, dim, dtype): q, k, v [batch, tokens, heads, dim].

    The first kv head has a sink (a few keys that every query likes), so its query heads are
    Vertical-Slash; the others are diffuse, hence pooled.
    """

    def make(batch=1, q_len=256, kv_len=None, q_heads=4, kv_heads=2, dim=64, dtype=np.float32, seed=0):
        kv_len = q_len if kv_len is None else kv_len
        q = draw(seed, batch, q_len, q_heads, dim)
        k = draw(seed + 1, batch, kv_len, kv_heads, dim)
        v = draw(seed + 2, batch, kv_len, kv_heads, dim)
        q[:, :, : q_heads // kv_heads, :4] += 4
        k[:, :4, 0, :4] += 4
        return tuple(a.astype(dtype) for a in (q, k, v))

    return make


def naive(q, k, v, *, causal=True, scale=None, dtype=np.float32):
    """Dense attention of one sequence the plain way, in `dtype`: what tolerances are derived from.

    q [q_len, heads, dim], k and v [kv_len, kv_heads, dim]; -> out [q_len, heads, dim].
    """
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = np.zeros(q.shape, np.float64)
    for head in range(q.shape[1]):
        x, y, z = (a.astype(dtype) for a in (q[:, head], k[:, head // group], v[:, head // group]))
        scores = (x @ y.T * dtype(scale)).astype(dtype)
        if causal:
            rows = np.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
            scores = np.where(np.arange(k.shape[0])[None] <= rows, scores, dtype(-np.inf))
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights = (weights / weights.sum(axis=1, keepdims=True)).astype(dtype)
        out[:, head] = (weights @ z).astype(dtype)
    return out


def tolerance(q, k, v, exact, **how):
    """Twice the error of the naive program in the inputs' own dtype (float32 for half types, whose
    sums every program keeps in float32, plus the rounding of the result to the half type)."""
    half = q.dtype.itemsize == 2
    out = naive(q, k, v, **how)
    rounded = out.astype(q.dtype).astype(np.float64) if half else out
    return 2 * np.abs(rounded - exact).max()

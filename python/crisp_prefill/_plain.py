"""The common call, quickly: one sequence of numpy arrays, nothing but out wanted.

A tenth of the general way's work in Python; the library is called with the same arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _core
from ._arrays import CPU, NumpyArrays
from .policies import UserMask, core_policy

_ARRAYS = NumpyArrays()


def attention(
    q: Any, k: Any, v: Any, policy: Any, scale: float | None, causal: bool, out: Any,
    workspace: Any, num_threads: int,
) -> Any:
    """out, or None if the call is not of this kind, for whatever reason: then nothing has happened."""
    if not (type(q) is type(k) is type(v) is np.ndarray) or isinstance(policy, UserMask):
        return None
    dtype, code = q.dtype, NumpyArrays._codes.get(q.dtype)
    if code is None or q.ndim != 4 or k.dtype != dtype or v.dtype != dtype:
        return None
    if out is None:
        out = np.empty(q.shape, dtype)
    elif type(out) is not np.ndarray or out.dtype != dtype:
        return None
    if scale is None:
        scale = q.shape[3] ** -0.5 if q.shape[3] else 0.0
    call = _core.Call(CPU, 0, num_threads, scale, causal)
    structs = q.__array_struct__, k.__array_struct__, v.__array_struct__, out.__array_struct__
    if not call.set_arrays(*structs, code):
        return None
    call.set_policy(core_policy(policy))
    call.set_own_mask(128)
    if workspace is None:
        size = call.workspace_bytes()
        workspace, address = _ARRAYS.bytes(size)
    elif type(workspace) is np.ndarray:
        address, size = _ARRAYS.pointer(workspace), workspace.nbytes
    else:
        return None
    call.set_workspace(address, size)
    call.prefill()
    return out

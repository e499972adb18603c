"""crisp in Python: training-free block-sparse prefill attention on numpy and torch arrays.

    import crisp_prefill as crisp
    out = crisp.attention(q, k, v)                         # [batch, tokens, heads, head_dim]
    mask = crisp.select_blocks(q, k, policy=crisp.Crisp(alpha=1.25))
    out = crisp.attend(q, k, v, mask)

`import crisp_prefill.transformers` registers the attention `crisp` with transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _core, reference
from .functions import attend, attention, merge_states, select_blocks, workspace_bytes
from .mask import BlockMask
from .policies import Crisp, Dense, FlexPrefill, Policy, UserMask
from .report import PATTERNS, Report

if TYPE_CHECKING:
    from .transformers import record, use

__version__ = _core.version()
_LATER = {"use": "transformers", "record": "transformers"}


def cpu_target() -> str:
    """Instruction set that the CPU kernels use on this machine, e.g. "AVX2"."""
    return _core.cpu_target()


def __getattr__(name: str) -> Any:
    # `use` and `record` need transformers, which nothing else here does.
    if name in _LATER:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "PATTERNS",
    "BlockMask",
    "Crisp",
    "Dense",
    "FlexPrefill",
    "Policy",
    "Report",
    "UserMask",
    "__version__",
    "attend",
    "attention",
    "cpu_target",
    "merge_states",
    "reference",
    "select_blocks",
    "workspace_bytes",
]

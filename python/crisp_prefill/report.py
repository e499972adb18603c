"""Report: what a call did to every head, as rows for a dataframe."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _core

PATTERNS = ("dense", "vertical_slash", "pooled", "mask")
STAGES = ("proxy", "route", "select", "mask", "attend")

_LAYOUT = _core.report_layout()
HEAD_DTYPE = np.dtype(
    {
        "names": [
            "pattern", "structural_mass", "js_distance", "num_vertical", "num_slash", "num_blocks",
        ],
        "formats": ["u1", "f4", "f4", "i4", "i4", "i8"],
        "offsets": _LAYOUT[:6],
        "itemsize": _LAYOUT[6],
    }
)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


@dataclass(frozen=True, eq=False)
class Report:
    """What happened to each head of each sequence.

    heads: structured array [sequences, heads]: pattern (index into PATTERNS), structural_mass and
        js_distance (NaN where the policy or its gate did not compute them), num_vertical and
        num_slash (kept columns and diagonals of blocks), num_blocks (selected, all rows).
    visible_blocks: blocks per head that a dense run visits, one entry per sequence.
    stage_ms: wall time of proxy, route, select, mask and attend; on CUDA the time to enqueue them.
    """

    heads: np.ndarray
    visible_blocks: np.ndarray
    stage_ms: dict[str, float]

    @property
    def density(self) -> float:
        """Kept over visible blocks, over all sequences and heads; NaN if none is visible."""
        visible = float(self.visible_blocks.sum()) * self.heads.shape[1]
        return float(self.heads["num_blocks"].sum()) / visible if visible else math.nan

    @property
    def select_ms(self) -> float:
        return sum(ms for stage, ms in self.stage_ms.items() if stage != "attend")

    @property
    def attend_ms(self) -> float:
        return self.stage_ms["attend"]

    def rows(self) -> list[dict[str, Any]]:
        """One dict per sequence and head: `pandas.DataFrame(report.rows())`. None: not computed."""
        result = []
        for sequence in range(self.heads.shape[0]):
            visible = float(self.visible_blocks[sequence])
            for head in range(self.heads.shape[1]):
                entry = self.heads[sequence, head]
                result.append(
                    {
                        "sequence": sequence,
                        "head": head,
                        "pattern": PATTERNS[entry["pattern"]],
                        "density": float(entry["num_blocks"]) / visible if visible else None,
                        "structural_mass": _number(entry["structural_mass"]),
                        "js_distance": _number(entry["js_distance"]),
                        "num_vertical": int(entry["num_vertical"]),
                        "num_slash": int(entry["num_slash"]),
                        "num_blocks": int(entry["num_blocks"]),
                    }
                )
        return result

    def to_json(self) -> str:
        """{"stage_ms": {...}, "heads": [one object per row]}; null: not computed."""
        return json.dumps({"stage_ms": self.stage_ms, "heads": self.rows()}, allow_nan=False)

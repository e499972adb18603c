"""What ran, layer by layer: rows for a dataframe, JSON, and a warning when nothing was sparse."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..report import Report


@dataclass(eq=False)
class Entry:
    """One attention call of one layer. ran: "crisp", "sdpa" or "eager"; reason: why not crisp."""

    layer: int
    ran: str
    q_len: int
    kv_len: int
    reason: str | None = None
    report: Report | None = None
    device_events: Any = None
    host_ms: float = math.nan

    @property
    def ms(self) -> float:
        """Wall time of the call; on CUDA the time on the device, which reading waits for."""
        if self.device_events is None:
            return self.host_ms
        start, end = self.device_events
        end.synchronize()
        return float(start.elapsed_time(end))


@dataclass(eq=False)
class Recording:
    """Everything that ran inside `record()`, in order."""

    entries: list[Entry] = field(default_factory=list)

    @property
    def fallbacks(self) -> Counter[str]:
        """Calls that did not run under the policy, by reason."""
        return Counter(entry.reason for entry in self.entries if entry.reason is not None)

    @property
    def num_sparse(self) -> int:
        """Calls that ran under the policy."""
        return sum(entry.ran == "crisp" for entry in self.entries)

    @property
    def density(self) -> float:
        """Kept over visible blocks of all calls under the policy; NaN without one."""
        reports = [entry.report for entry in self.entries if entry.report is not None]
        visible = sum(float(r.visible_blocks.sum()) * r.heads.shape[1] for r in reports)
        kept = sum(float(r.heads["num_blocks"].sum()) for r in reports)
        return kept / visible if visible else math.nan

    def rows(self) -> list[dict[str, Any]]:
        """One dict per call, sequence and head; one per call where crisp did not run."""
        result = []
        for index, entry in enumerate(self.entries):
            ms = entry.ms
            common = {
                "call": index,
                "layer": entry.layer,
                "ran": entry.ran,
                "reason": entry.reason,
                "q_len": entry.q_len,
                "kv_len": entry.kv_len,
                "ms": None if math.isnan(ms) else ms,
            }
            if entry.report is None:
                result.append(common)
            else:
                result += [{**common, **row} for row in entry.report.rows()]
        return result

    def to_json(self) -> str:
        """{"density", "num_sparse", "fallbacks": {reason: calls}, "rows": [...]}."""
        return json.dumps(
            {
                "density": None if math.isnan(self.density) else self.density,
                "num_sparse": self.num_sparse,
                "fallbacks": dict(self.fallbacks),
                "rows": self.rows(),
            },
            allow_nan=False,
        )


@dataclass(eq=False)
class _Watch:
    """Counts of what ran while it is open."""

    sparse: int = 0
    dense: Counter[str] = field(default_factory=Counter)


_recordings: list[Recording] = []
_watches: list[_Watch] = []
_warned: set[str] = set()
DECODE = "decode"


def recording() -> bool:
    return bool(_recordings)


def note(entry: Entry) -> None:
    """Called by the attention function after every call."""
    for recording_now in _recordings:
        recording_now.entries.append(entry)
    for watching in _watches:
        if entry.ran == "crisp":
            watching.sparse += 1
        elif entry.reason is not None:
            watching.dense[entry.reason] += 1
    if not _watches and entry.reason is not None and entry.reason != DECODE:
        _warn_once(entry)


def _warn_once(entry: Entry) -> None:
    """Outside `use` and `record`, where nobody sums up: each reason once per process."""
    assert entry.reason is not None
    if entry.reason not in _warned:
        _warned.add(entry.reason)
        warnings.warn(
            f"crisp: layer {entry.layer} ran in {entry.ran}, not sparse: {entry.reason} (q_len "
            f"{entry.q_len}, kv_len {entry.kv_len}). Said once per reason",
            RuntimeWarning,
            stacklevel=3,
        )


@contextmanager
def watch(what: str) -> Iterator[None]:
    """Warns at its end if attention ran inside and none of it under the policy."""
    one = _Watch()
    _watches.append(one)
    try:
        yield
    finally:
        _watches.remove(one)
        if one.dense and not one.sparse and not _watches:  # the outermost says it
            reasons = ", ".join(f"{count} x {reason}" for reason, count in one.dense.most_common())
            warnings.warn(
                f"crisp: NOTHING RAN SPARSE in {what}: {reasons}", RuntimeWarning, stacklevel=5
            )


@contextmanager
def record() -> Iterator[Recording]:
    """Collects what every attention call does until the end of the block.

    Costs a report per call (on CUDA a copy of 32 bytes per head that waits for the device). Warns at
    the end if attention ran and none of it was sparse.
    """
    one = Recording()
    _recordings.append(one)
    try:
        with watch("record()"):
            yield one
    finally:
        _recordings.remove(one)

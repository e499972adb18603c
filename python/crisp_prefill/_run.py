"""Runs the calls of a problem: memory, masks, reports, and joining what several calls gave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _core
from ._arrays import CPU, CUDA, adopt, arrays_of, where
from ._problem import Part, Problem, View
from .mask import BlockMask, num_q_blocks, visible_blocks
from .policies import UserMask, core_policy, core_user_mask
from .report import HEAD_DTYPE, STAGES, Report


@dataclass
class Wanted:
    """What a run is to do and to return."""

    stage: str  # "select", "attend" or "prefill"
    policy: Any = None
    mask: BlockMask | None = None  # of attend
    out: View | None = None
    lse: bool = False
    report: bool = False
    workspace: Any = None
    num_threads: int = 0
    block_size: int = 128


@dataclass
class Result:
    out: Any = None
    lse: Any = None
    mask: BlockMask | None = None
    report: Report | None = None


def _check_mask(name: str, mask: BlockMask, problem: Problem) -> None:
    if not isinstance(mask, BlockMask):
        raise TypeError(f"{name} is a {type(mask).__name__}, expected a BlockMask")
    if arrays_of(mask.words) is not problem.arrays:
        raise TypeError(f"{name}.words is {where(mask.words)}, expected the same as q")
    sequences = tuple((segment[1], segment[3]) for segment in problem.segments)
    if mask.sequences != sequences:
        raise ValueError(
            f"{name}.sequences is {mask.sequences}, expected {sequences}: (q_len, kv_len) of the call"
        )


def _mask_of_part(mask: BlockMask, problem: Problem, part: Part) -> BlockMask:
    """The rows of a part; the mask itself when there is one part."""
    if part.batch is None:
        return mask
    first, end = mask.rows_of(part.batch)
    sequence = mask.sequences[part.batch]
    columns = -(-sequence[1] // mask.block_size)
    width = -(-columns // 64) * 2
    words = problem.arrays.words((mask.num_heads, end - first, width))
    words[...] = mask.words[:, first:end, :width]
    return BlockMask(words, columns, (sequence,), mask.causal, mask.block_size)


def _join_masks(problem: Problem, masks: list[BlockMask]) -> BlockMask:
    if len(masks) == 1:
        return masks[0]
    if not masks:
        return BlockMask(problem.arrays.words((problem.q.shape[-2], 0, 0)), 0, (), problem.causal)
    columns = max(mask.num_kv_blocks for mask in masks)
    rows = sum(mask.num_q_blocks for mask in masks)
    words = problem.arrays.words((masks[0].num_heads, rows, -(-columns // 64) * 2))
    words[...] = 0
    first = 0
    for mask in masks:
        end = first + mask.num_q_blocks
        words[:, first:end, : mask.words.shape[2]] = mask.words
        first = end
    sequences = tuple(sequence for mask in masks for sequence in mask.sequences)
    return BlockMask(words, columns, sequences, problem.causal, masks[0].block_size)


def _new_mask(problem: Problem, part: Part, call: _core.Call, block_size: int) -> BlockMask:
    shape = call.mask_shape(block_size)
    words = problem.arrays.words((shape.num_heads, shape.num_q_blocks, shape.words_per_row))
    sequences = tuple((segment[1], segment[3]) for segment in part.segments)
    return BlockMask(words, shape.num_kv_blocks, sequences, problem.causal, block_size)


class _Workspace:
    """The caller's workspace, or one of our own that grows to what the largest part needs."""

    def __init__(self, problem: Problem, given: Any) -> None:
        self.problem, self.memory, self.address, self.size = problem, None, 0, 0
        self.given = given is not None
        if given is not None:
            memory = adopt("workspace", given)
            if arrays_of(memory) is not problem.arrays:
                raise TypeError(f"workspace is {where(memory)}, expected the same as q")
            self.memory, self.address = memory, problem.arrays.pointer(memory)
            self.size = memory.nbytes

    def bind(self, call: _core.Call) -> None:
        needed = 0 if self.given else call.workspace_bytes()
        if not self.given and needed > self.size:
            self.memory, self.address = self.problem.arrays.bytes(needed)
            self.size = needed
        call.set_workspace(self.address, self.size)


class _Lse:
    """float32 lse: one call wants [heads, rows], several [heads, q_len] each."""

    def __init__(self, problem: Problem) -> None:
        q, arrays = problem.q, problem.arrays
        self.arrays = arrays
        if len(q.shape) == 3:
            self.base = self.view = arrays.float32((q.shape[1], q.shape[0]))
        elif not problem.parts or problem.parts[0].batch is None:
            self.base = arrays.float32((q.shape[2], q.shape[0], q.shape[1]))
            self.view = self.base.swapaxes(0, 1)
        else:
            self.base = self.view = arrays.float32((q.shape[0], q.shape[2], q.shape[1]))
        self.step = q.shape[-2] * q.shape[-3] * 4

    def address(self, part: Part) -> int:
        return self.arrays.pointer(self.base) + (part.batch or 0) * int(self.step)


class _Heads:
    """Head reports of all sequences, written next to the data and read on the host at the end."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.shape = (len(problem.segments), problem.q.shape[-2])
        self.step = self.shape[1] * HEAD_DTYPE.itemsize
        self.memory: Any
        if problem.arrays.device == CUDA:
            self.memory, self.address = problem.arrays.bytes(self.shape[0] * self.step)
        else:
            self.memory = np.empty(self.shape, HEAD_DTYPE)
            self.address = _core.array_layout(self.memory.__array_struct__)[0]

    def read(self) -> np.ndarray:
        if self.problem.arrays.device != CUDA:
            heads: np.ndarray = self.memory
            return heads
        offset = self.address - self.problem.arrays.pointer(self.memory)
        raw = self.problem.arrays.to_numpy(self.memory[offset : offset + self.shape[0] * self.step])
        return raw.view(HEAD_DTYPE).reshape(self.shape)


def run(problem: Problem, wanted: Wanted) -> Result:
    """Runs every part; arrays named in `wanted` are written in place."""
    arrays, mask, out = problem.arrays, wanted.mask, wanted.out
    if out is None and wanted.stage != "select":
        out = View(arrays, arrays.empty_like_shape(problem.q.a, tuple(problem.q.shape)))
    if isinstance(wanted.policy, UserMask):
        _check_mask("policy.mask", wanted.policy.mask, problem)
        wanted.block_size = wanted.policy.mask.block_size
    if mask is not None:
        _check_mask("mask", mask, problem)
    lse = _Lse(problem) if wanted.lse else None
    heads = _Heads(problem) if wanted.report else None
    workspace = _Workspace(problem, wanted.workspace)
    masks, stage_ms = [], np.zeros(len(STAGES)) if wanted.report else None
    with arrays.guard():
        for part in problem.parts:
            call = problem.call(part, wanted.num_threads)
            # Memory that the call borrows lives until it returns, and on CUDA until the stream is past it.
            user_mask = set_policy(problem, part, call, wanted.policy)
            kept = _set_mask(problem, part, call, wanted)
            if out is not None:
                call.set_out(problem.tensor(out, part.batch))
            if lse is not None:
                call.set_lse(lse.address(part))
            if heads is not None:
                call.set_report(heads.address + (part.batch or 0) * heads.step)
            workspace.bind(call)
            getattr(call, wanted.stage)()
            del user_mask
            if wanted.stage == "select":
                masks.append(kept)
            if stage_ms is not None:
                stage_ms += call.stage_ms
        _write_blank_rows(problem, out, lse)
        result = Result(None if out is None else out.a, None if lse is None else lse.view)
        if wanted.stage == "select":
            result.mask = _join_masks(problem, masks)
        if heads is not None and stage_ms is not None:
            result.report = _make_report(problem, heads, stage_ms, wanted.block_size)
    return result


def _set_mask(problem: Problem, part: Part, call: _core.Call, wanted: Wanted) -> Any:
    """The mask that a part fills or obeys. One that nobody asks for stays inside the call."""
    if wanted.stage == "prefill" and problem.arrays.device == CPU:
        call.set_own_mask(wanted.block_size)
        return None
    if wanted.mask is None:
        kept = _new_mask(problem, part, call, wanted.block_size)
    else:
        kept = _mask_of_part(wanted.mask, problem, part)
    call.set_mask(kept.core())
    return kept


def set_policy(problem: Problem, part: Part, call: _core.Call, policy: Any) -> Any:
    if policy is None:
        return None
    if not isinstance(policy, UserMask):
        call.set_policy(core_policy(policy))
        return None
    mask = _mask_of_part(policy.mask, problem, part)
    call.set_policy(core_user_mask(mask.core()))
    return mask


def _write_blank_rows(problem: Problem, out: View | None, lse: _Lse | None) -> None:
    for batch, first, end in problem.blank:
        if out is not None:
            out.a[batch, first:end] = 0
        if lse is not None:
            lse.view[batch, :, first:end] = -np.inf


def _make_report(
    problem: Problem, heads: _Heads, stage_ms: np.ndarray, block_size: int
) -> Report:
    visible = np.zeros(heads.shape[0], np.int64)
    for index, (_, q_len, _, kv_len, _) in enumerate(problem.segments):
        if problem.causal:
            rows = num_q_blocks(q_len, kv_len, block_size)
            first = max(kv_len - q_len, 0) // block_size
            visible[index] = rows * first + rows * (rows + 1) // 2 if kv_len else 0
        else:
            visible[index] = visible_blocks(q_len, kv_len, block_size, False).sum()
    times = {stage: float(ms) for stage, ms in zip(STAGES, stage_ms)}
    return Report(heads.read(), visible, times)

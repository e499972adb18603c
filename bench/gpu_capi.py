"""The C interface of crisp on PyTorch's CUDA tensors, for the benchmarks: no build step, no copy."""

import ctypes
import math

import torch

BLOCK = 128
I32, I64, U32, F32, PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_float, ctypes.c_void_p
ON_STAGE = ctypes.CFUNCTYPE(None, I32, PTR)
STAGES = ("proxy", "route", "select", "mask", "attend")


class Tensor(ctypes.Structure):
    _fields_ = [("data", PTR)] + [(name, I64) for name in (
        "num_tokens", "num_heads", "head_dim", "token_stride", "head_stride", "page_stride")] + [
            ("dtype", I32), ("reserved", I32)]


class Segment(ctypes.Structure):
    _fields_ = [(name, I64) for name in ("q_start", "q_len", "kv_start", "kv_len", "page_row")]


class Mask(ctypes.Structure):
    _fields_ = [("words", PTR)] + [(name, I64) for name in (
        "num_heads", "num_q_blocks", "num_kv_blocks", "block_size")]


class Policy(ctypes.Structure):
    _fields_ = [("struct_size", U32), ("kind", I32)] + [(name, F32) for name in (
        "tau_proxy", "alpha", "gamma", "tau_js")] + [(name, I32) for name in (
            "sink_tokens", "recency_tokens", "min_budget_tokens", "dense_below_tokens", "noise_floor",
            "pooled_keeps_budget", "routing", "selection", "variant", "reserved")] + [("mask", Mask)]


class Args(ctypes.Structure):
    _fields_ = [("struct_size", U32), ("device", I32), ("q", Tensor), ("k", Tensor), ("v", Tensor),
                ("out", Tensor), ("lse", PTR), ("softmax_scale", F32), ("causal", I32),
                ("segments", ctypes.POINTER(Segment)), ("num_segments", I64), ("block_table", PTR),
                ("num_page_rows", I64), ("page_row_stride", I64), ("page_size", I64),
                ("policy", ctypes.POINTER(Policy)), ("mask", Mask), ("report", PTR), ("workspace", PTR),
                ("workspace_bytes", ctypes.c_size_t), ("stream", PTR), ("num_threads", I32),
                ("reserved", I32), ("on_stage", ON_STAGE), ("on_stage_user", PTR)]


DTYPES = {torch.float16: 1, torch.bfloat16: 2}
KINDS = {"dense": 0, "crisp": 1, "flexprefill": 2}
library = None


def load(path):
    global library
    library = ctypes.CDLL(str(path))
    library.crisp_last_error.restype = ctypes.c_char_p


def force_sm80(forced):
    """The mma.sync kernels on a Hopper card, for comparison; only libcrisp_bench.so has the switch."""
    library.crisp_bench_force_sm80(I32(int(forced)))


def check(status):
    if status != 0:
        raise RuntimeError(library.crisp_last_error().decode())


def tensor_of(t):
    tokens, heads, dim = t.shape
    return Tensor(t.data_ptr(), tokens, heads, dim, t.stride(0), t.stride(1), 0, DTYPES[t.dtype], 0)


class Call:
    """q [tokens, q heads, dim], k and v [tokens, kv heads, dim] on the device."""

    def __init__(self, q, k, v, kind="dense", segments=None, **parameters):
        self.keep = [q, k, v]
        self.policy = Policy()
        check(library.crisp_policy_init(ctypes.byref(self.policy), ctypes.sizeof(Policy), KINDS[kind]))
        for name, value in parameters.items():
            setattr(self.policy, name, value)
        a = self.args = Args()
        a.struct_size, a.device, a.causal = ctypes.sizeof(Args), 1, 1
        a.q, a.k, a.v = tensor_of(q), tensor_of(k), tensor_of(v)
        a.softmax_scale = 1 / math.sqrt(q.shape[2])
        a.policy = ctypes.pointer(self.policy)
        if segments:
            self.segments = (Segment * len(segments))(*segments)
            a.segments, a.num_segments = self.segments, len(segments)
        check(library.crisp_mask_shape(ctypes.byref(a), BLOCK, ctypes.byref(a.mask)))
        words = (a.mask.num_kv_blocks + 63) // 64
        self.words = torch.full((a.mask.num_heads, a.mask.num_q_blocks, words), -1, dtype=torch.int64,
                                device=q.device)
        a.mask.words = self.words.data_ptr()
        size = ctypes.c_size_t()
        check(library.crisp_workspace_size(ctypes.byref(a), ctypes.byref(size)))
        self.workspace = torch.empty(size.value + 256, dtype=torch.uint8, device=q.device)
        a.workspace = (self.workspace.data_ptr() + 255) // 256 * 256
        a.workspace_bytes = size.value
        self.out = torch.empty_like(q)
        a.out = tensor_of(self.out)

    def run(self, what):
        self.args.stream = torch.cuda.current_stream().cuda_stream
        check(getattr(library, "crisp_" + what)(ctypes.byref(self.args)))

    def attend(self):
        self.run("attend")

    def select(self):
        self.run("select")

    def prefill(self):
        self.run("prefill")

    def visited_blocks(self):
        """Set bits at or below the diagonal; a diagonal block counts one half."""
        heads, rows, words = self.words.shape
        total = 0.0
        for head in range(heads):
            bits = (self.words[head, :, :, None] >> torch.arange(64, device=self.words.device)) & 1
            bits = bits.view(rows, -1)[:, :rows].bool().tril()
            total += bits.sum().item() - bits.diagonal().sum().item() / 2
        return total

    def stage_ms(self):
        """ms of each stage of one prefill, by events between them."""
        marks = []

        def mark(stage, _):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append((STAGES[stage], event))

        begin = torch.cuda.Event(enable_timing=True)
        self.args.on_stage = ON_STAGE(mark)
        begin.record()
        self.prefill()
        self.args.on_stage = ON_STAGE()
        torch.cuda.synchronize()
        out = dict.fromkeys(STAGES, 0.0)
        for stage, event in marks:
            out[stage] += begin.elapsed_time(event)
            begin = event
        return out

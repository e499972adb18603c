#!/usr/bin/env python3
"""Our CUDA attention, and whole layers, against PyTorch's cuDNN and FlashAttention-2, in one process.

    cmake --preset release && cmake --build --preset release --target crisp
    python3 bench/gpu_peers.py [--part I/N] [--library build/release/libcrisp.so]

Needs a CUDA device and PyTorch. Ours runs through the C interface on PyTorch's tensors and stream.
All sides of a case take turns, after a second of running them all warm, and are timed by the same
CUDA events; dense peers get the faster of the layouts [tokens, heads, dim] and [heads, tokens, dim].
Cases whose line is already in the output are skipped, so a run that was stopped is finished by
starting it again; --part 1/4 takes every fourth case, so that a part stays below eight minutes.

Kinds of case:
  attend   dense and masks of set density: random rows that keep the diagonal and block 0, a band, rows
           of very uneven length, and vertical-slash sets
  layer    select and attend of CRISP and FlexPrefill on structured heads, and their stages' times
  chunks   attend of a long prompt in chunks of 8k against one shot

One JSON line per case. TFLOP/s count 4 head_dim per visible pair of visited blocks.
"""

import argparse
import ctypes
import datetime
import json
import math
import pathlib
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/gpu_peers.jsonl"
BLOCK = 128
I32, I64, U32, F32, PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_float, ctypes.c_void_p


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
                ("reserved", I32), ("on_stage", PTR), ("on_stage_user", PTR)]


DTYPES = {torch.float16: 1, torch.bfloat16: 2}
KINDS = {"dense": 0, "crisp": 1, "flexprefill": 2}
library = None


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


def pack(bits):
    heads, rows, blocks = bits.shape
    words = (blocks + 63) // 64
    padded = torch.zeros(heads, rows, words * 64, dtype=torch.bool, device=bits.device)
    padded[..., :blocks] = bits
    shifts = torch.arange(64, device=bits.device)
    return torch.stack([(h.view(rows, words, 64).to(torch.int64) << shifts).sum(-1) for h in padded])


def mask_bits(kind, density, heads, blocks, seed):
    """Causal, with diagonal and block 0; of the rest about `density`."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    draw = lambda *shape: torch.rand(*shape, generator=g, device="cuda")
    row, col = torch.arange(blocks, device="cuda")[:, None], torch.arange(blocks, device="cuda")[None]
    bits = torch.zeros(heads, blocks, blocks, dtype=torch.bool, device="cuda")
    for h in range(heads):
        if kind == "random":
            bits[h] = draw(blocks, blocks) < density
        elif kind == "banded":  # the last part of each row
            bits[h] = (row - col) < torch.ceil((row + 1) * density)
        elif kind == "uneven":  # one full head of each group of eight; rows from two blocks to all
            bits[h] = True if h % 8 == 0 else draw(blocks, blocks) < draw(blocks, 1) ** 4 * 5 * density
        elif kind == "vertical-slash":  # as many columns as diagonals
            each = 1 - math.sqrt(1 - density)
            bits[h] = (draw(blocks) < each)[None] | (draw(blocks) < each)[(row - col).clamp(min=0)]
        bits[h] |= (row == col) | (col == 0)
        bits[h] &= col <= row
    return bits


def structured(n, heads, kv_heads, dim, dtype):
    """Heads with a sink, a local band and a few heavy columns of different strength, and flat ones."""
    g = torch.Generator(device="cuda").manual_seed(n)
    make = lambda h: torch.empty(n, h, dim, dtype=dtype, device="cuda").normal_(generator=g)
    q, k, v = make(heads), make(kv_heads), make(kv_heads)
    angle = torch.arange(n, device="cuda")[:, None] / 600.0 * torch.exp(
        -torch.arange(dim // 4, device="cuda") / 6.0)
    local = torch.cat([angle.cos(), angle.sin()], 1).to(dtype)
    for kv in range(kv_heads):
        k[:, kv, :dim // 2] += 1.5 * local
        k[:4, kv, dim // 2:] += 3
        for at in (n // 5, n // 2, 4 * n // 5):
            k[at, kv, dim // 2:] += 2
    for h in range(heads):
        strength = (1.5, 1.0, 0.6, 0.0)[h % 4]
        q[:, h, :dim // 2] += 1.5 * strength * local
        q[:, h, dim // 2:] += strength
    return q, k, v


def device_state():
    out = subprocess.run(["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu",
                          "--format=csv,noheader,nounits"], capture_output=True, text=True)
    return out.stdout.strip().splitlines()[0] if out.returncode == 0 else None


def take_turns(sides, repeats, warm_seconds=1.0):
    """Median, minimum and maximum ms of each side; they run one after the other, round by round."""
    for side in sides.values():
        side()
    torch.cuda.synchronize()
    start = time.time()
    while time.time() - start < warm_seconds:
        for side in sides.values():
            side()
        torch.cuda.synchronize()
    times = {name: [] for name in sides}
    for _ in range(repeats):
        pairs = []
        for name, side in sides.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            side()
            end.record()
            pairs.append((name, begin, end))
        torch.cuda.synchronize()
        for name, begin, end in pairs:
            times[name].append(begin.elapsed_time(end))
    return {name: {"median": round(statistics.median(ms), 4), "min": round(min(ms), 4),
                   "max": round(max(ms), 4)} for name, ms in times.items()}


def dense_peers(q, k, v, with_fa2):
    """The peers on both layouts; the caller takes the faster."""
    peers = {}
    for layout in ("thd", "htd"):
        qq, kk, vv = [t.transpose(0, 1)[None] for t in (q, k, v)]
        if layout == "htd":
            qq, kk, vv = qq.contiguous(), kk.contiguous(), vv.contiguous()

        def cudnn(qq=qq, kk=kk, vv=vv):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                F.scaled_dot_product_attention(qq, kk, vv, is_causal=True, enable_gqa=True)

        def fa2(qq=qq, kk=kk, vv=vv):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                F.scaled_dot_product_attention(qq, kk, vv, is_causal=True, enable_gqa=True)

        peers["cudnn_" + layout] = cudnn
        if with_fa2:
            peers["fa2_" + layout] = fa2
    return peers


def faster_of(ms, name):
    found = [value for key, value in ms.items() if key.startswith(name)]
    return min(found, key=lambda value: value["median"]) if found else None


def repeats_for(n):
    return 20 if n <= 131072 else 5


def inputs(case):
    g = torch.Generator(device="cuda").manual_seed(1)
    make = lambda h: torch.empty(case["n"], h, case["head_dim"], dtype=torch.bfloat16,
                                 device="cuda").normal_(generator=g)
    return make(32), make(8), make(8)


def run_attend(case, with_fa2):
    q, k, v = inputs(case)
    n, dim, blocks = case["n"], case["head_dim"], -(-case["n"] // BLOCK)
    ours = Call(q, k, v)
    sides = {"dense": ours.attend, **dense_peers(q, k, v, with_fa2)}
    visited, masks = {"dense": 32 * blocks * blocks / 2}, [("dense", 1.0)]
    for kind, density in case["masks"]:
        name = f"{kind} {density}"
        call = Call(q, k, v)
        call.words.copy_(pack(mask_bits(kind, density, 32, blocks, 7)))
        sides[name] = call.attend
        visited[name] = call.visited_blocks()
    ms = take_turns(sides, repeats_for(n))
    tflops = lambda name: visited[name] * 4 * BLOCK * BLOCK * dim / ms[name]["median"] / 1e9
    result = {"dense_ms": ms["dense"], "dense_tflops": round(tflops("dense"), 1),
              "cudnn_ms": faster_of(ms, "cudnn"), "fa2_ms": faster_of(ms, "fa2"), "masks": []}
    result["over_cudnn"] = round(result["cudnn_ms"]["median"] / ms["dense"]["median"], 3)
    if result["fa2_ms"]:
        result["over_fa2"] = round(result["fa2_ms"]["median"] / ms["dense"]["median"], 3)
    for kind, density in case["masks"]:
        name = f"{kind} {density}"
        result["masks"].append({
            "kind": kind, "density": round(visited[name] / visited["dense"], 4), "ms": ms[name],
            "tflops": round(tflops(name), 1), "of_dense": round(tflops(name) / tflops("dense"), 3),
            "over_cudnn": round(result["cudnn_ms"]["median"] / ms[name]["median"], 2)})
    return result


def run_layer(case, with_fa2):
    n, dim = case["n"], case["head_dim"]
    q, k, v = structured(n, 32, 8, dim, torch.bfloat16)
    dense = Call(q, k, v)
    sides = {"dense": dense.attend, **dense_peers(q, k, v, with_fa2)}
    calls = {"crisp 1.0": Call(q, k, v, "crisp"), "crisp 1.25": Call(q, k, v, "crisp", alpha=1.25),
             "flexprefill": Call(q, k, v, "flexprefill")}
    for name, call in calls.items():
        sides[name] = call.prefill
        sides[name + " select"] = call.select
    ms = take_turns(sides, repeats_for(n))
    result = {"dense_ms": ms["dense"], "cudnn_ms": faster_of(ms, "cudnn"),
              "fa2_ms": faster_of(ms, "fa2"), "policies": []}
    blocks = -(-n // BLOCK)
    for name, call in calls.items():
        result["policies"].append({
            "name": name, "density": round(call.visited_blocks() / (32 * blocks * blocks / 2), 4),
            "ms": ms[name], "select_ms": ms[name + " select"],
            "workspace_mib": round(call.args.workspace_bytes / 2**20, 1),
            "over_dense": round(ms["dense"]["median"] / ms[name]["median"], 2),
            "over_cudnn": round(result["cudnn_ms"]["median"] / ms[name]["median"], 2)})
    return result


def run_chunks(case, _):
    q, k, v = inputs(case)
    n, chunk, blocks = case["n"], 8192, -(-case["n"] // BLOCK)
    result = {}
    for kind, density in [("dense", 1.0), ("vertical-slash", 0.15)]:
        whole = Call(q, k, v)
        if kind != "dense":
            whole.words.copy_(pack(mask_bits(kind, density, 32, blocks, 7)))
        parts = []
        for begin in range(0, n, chunk):
            part = Call(q[begin:begin + chunk], k[:begin + chunk], v[:begin + chunk])
            rows = whole.words[:, begin // BLOCK:(begin + chunk) // BLOCK]
            part.words.copy_(rows[..., :part.words.shape[2]])
            parts.append(part)
        ms = take_turns({"whole": whole.attend, "chunks": lambda: [p.attend() for p in parts]},
                        repeats_for(n))
        result[kind] = {**{key + "_ms": value for key, value in ms.items()},
                        "cost": round(ms["chunks"]["median"] / ms["whole"]["median"], 3)}
    return result


def all_cases(lengths):
    random = [("random", d) for d in (0.05, 0.1, 0.15, 0.3, 0.5)]
    shapes = [("vertical-slash", 0.05), ("vertical-slash", 0.1), ("vertical-slash", 0.15),
              ("banded", 0.15), ("uneven", 0.15)]
    for dim, longest in ((128, 524288), (64, 131072)):
        for n in lengths:
            if n <= longest:
                yield {"case": "attend", "n": n, "head_dim": dim, "masks": random + shapes}
    for n in lengths:
        yield {"case": "layer", "n": n, "head_dim": 128}
    if 131072 in lengths:
        yield {"case": "chunks", "n": 131072, "head_dim": 128}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    number = lambda text: int(text[:-1]) * 1024 if text.endswith("k") else int(text)
    parser.add_argument("--lengths", type=lambda text: [number(part) for part in text.split(",")],
                        default=[8192 << i for i in range(7)])
    parser.add_argument("--cases", default="attend,layer,chunks")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th case from the I-th")
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/release/libcrisp.so")
    parser.add_argument("--fa2-up-to", type=number, default=131072, help="FlashAttention-2 is slow")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_peers.py: PyTorch sees no CUDA device")
    global library
    library = ctypes.CDLL(str(options.library))
    library.crisp_last_error.restype = ctypes.c_char_p
    done = set()
    if options.out.is_file():
        for line in options.out.read_text().splitlines():
            done.add(tuple(json.loads(line)[key] for key in ("case", "n", "head_dim")))
    part, parts = (int(text) for text in options.part.split("/"))
    runners = {"attend": run_attend, "layer": run_layer, "chunks": run_chunks}
    cases = [c for c in all_cases(options.lengths) if c["case"] in options.cases.split(",")]
    for case in cases[part - 1::parts]:
        if (case["case"], case["n"], case["head_dim"]) in done:
            continue
        before = device_state()
        result = runners[case["case"]](case, case["n"] <= options.fa2_up_to)
        line = {"bench": "gpu_peers", "case": case["case"], "n": case["n"], "head_dim": case["head_dim"],
                "q_heads": 32, "kv_heads": 8, "dtype": "bfloat16", "repeats": repeats_for(case["n"]),
                **result, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                "cudnn": torch.backends.cudnn.version(),
                "sm_mhz_watt_celsius": [before, device_state()], "commit": options.commit,
                "date": datetime.date.today().isoformat(),
                "command": "bench/gpu_peers.py " + " ".join(a for a in sys.argv[1:] if "/" not in a)}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Our CUDA attention, and whole layers, against PyTorch's cuDNN and FlashAttention-2, in one process.

    cmake --preset release && cmake --build --preset release --target crisp
    python3 bench/gpu_peers.py [--part I/N] [--library build/release/libcrisp.so]

Needs a CUDA device and PyTorch. Ours runs through the C interface on PyTorch's tensors and stream.
All sides of a case take turns, after two seconds of running them all warm, and are timed by the same
CUDA events; dense peers get the faster of the layouts [tokens, heads, dim] and [heads, tokens, dim].
Cases whose line is already in the output are skipped, so a run that was stopped is finished by
starting it again; --part 1/4 takes every fourth case, so that a part stays below eight minutes.

Kinds of case:
  attend   dense and masks of set density: random rows that keep the diagonal and block 0, a band, rows
           of very uneven length, and vertical-slash sets
  layer    select and attend of CRISP and FlexPrefill on structured heads, and their stages' times
  capture  the same on the captured heads of data/code-8k-layer07, repeated up to the length
  fa2      dense and one mask against FlashAttention-2 alone, from 128k tokens, in few repeats
  sm80     the kernels for compute capability 8.x on this card against FlashAttention-2; needs
           --library build/release/libcrisp_bench.so, and to be asked for by --cases
  chunks   attend of a long prompt in chunks of 8k against one shot

One JSON line per case. TFLOP/s count 4 head_dim per visible pair of visited blocks.
"""

import argparse
import datetime
import json
import pathlib
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import gpu_capi
from gpu_capi import BLOCK, STAGES, Call
from gpu_inputs import mask_bits, pack, random_inputs, structured, tiled_capture

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/gpu_peers.jsonl"
def device_state():
    out = subprocess.run(["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu",
                          "--format=csv,noheader,nounits"], capture_output=True, text=True)
    return out.stdout.strip().splitlines()[0] if out.returncode == 0 else None


def take_turns(sides, repeats, warm_seconds=2.0):
    """Median, minimum and maximum ms of each side; they run one after the other, round by round."""
    start = time.time()
    for side in sides.values():
        side()
    torch.cuda.synchronize()
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
    return 20 if n <= 131072 else 5 if n <= 262144 else 3


def run_attend(case, with_fa2):
    n, dim, blocks = case["n"], case["head_dim"], -(-case["n"] // BLOCK)
    q, k, v = random_inputs(n, dim)
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


def median_stages(call, repeats):
    runs = [call.stage_ms() for _ in range(repeats)]
    return {stage: round(statistics.median(run[stage] for run in runs), 4) for stage in STAGES}


def extra_mib(side):
    """Memory that one call takes besides its inputs."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    side()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def run_layer(case, with_fa2):
    n, dim = case["n"], case["head_dim"]
    q, k, v = structured(n, 32, 8, dim, torch.bfloat16) if case["case"] == "layer" else tiled_capture(n)
    heads = q.shape[1]
    dense = Call(q, k, v)
    sides = {"dense": dense.attend, **dense_peers(q, k, v, with_fa2)}
    peers_mib = {name: extra_mib(side) for name, side in sides.items() if name.endswith("thd")}
    calls = {"crisp 1.0": Call(q, k, v, "crisp"), "crisp 1.25": Call(q, k, v, "crisp", alpha=1.25),
             "flexprefill": Call(q, k, v, "flexprefill")}
    for name, call in calls.items():
        sides[name] = call.prefill
        sides[name + " select"] = call.select
    ms = take_turns(sides, repeats_for(n))
    result = {"q_heads": heads, "kv_heads": k.shape[1], "dense_ms": ms["dense"],
              "cudnn_ms": faster_of(ms, "cudnn"), "fa2_ms": faster_of(ms, "fa2"),
              "peers_mib": peers_mib, "policies": []}
    blocks = -(-n // BLOCK)
    for name, call in calls.items():
        result["policies"].append({
            "name": name, "density": round(call.visited_blocks() / (heads * blocks * blocks / 2), 4),
            "ms": ms[name], "select_ms": ms[name + " select"],
            "stage_ms": median_stages(call, repeats_for(n)),
            "workspace_mib": round(call.args.workspace_bytes / 2**20, 1),
            "mask_mib": round(call.words.numel() * 8 / 2**20, 1),
            "out_mib": round(call.out.numel() * 2 / 2**20, 1),
            "over_dense": round(ms["dense"]["median"] / ms[name]["median"], 2),
            "over_cudnn": round(result["cudnn_ms"]["median"] / ms[name]["median"], 2)})
    return result


def run_fa2(case, _):
    """Where FlashAttention-2 is too slow to be in every case: ours against it, in few repeats."""
    n, blocks = case["n"], -(-case["n"] // BLOCK)
    q, k, v = random_inputs(n, case["head_dim"])
    dense, sparse = Call(q, k, v), Call(q, k, v)
    sparse.words.copy_(pack(mask_bits("vertical-slash", 0.15, 32, blocks, 7)))
    peers = {name: side for name, side in dense_peers(q, k, v, True).items() if name.startswith("fa2")}
    ms = take_turns({"dense": dense.attend, "sparse": sparse.attend, **peers}, 3)
    fa2 = faster_of(ms, "fa2")
    return {"dense_ms": ms["dense"], "sparse_ms": ms["sparse"], "fa2_ms": fa2,
            "density": round(sparse.visited_blocks() / (32 * blocks * blocks / 2), 4),
            "over_fa2": round(fa2["median"] / ms["dense"]["median"], 3),
            "sparse_over_fa2": round(fa2["median"] / ms["sparse"]["median"], 2)}


def run_sm80(case, _):
    """The kernels for compute capability 8.x, forced on this card, against FlashAttention-2."""
    n, dim, blocks = case["n"], case["head_dim"], -(-case["n"] // BLOCK)
    q, k, v = random_inputs(n, dim)
    whole, visited, sides = 32 * blocks * blocks / 2, {}, {}
    for density in (1.0, 0.3, 0.1):
        call = Call(q, k, v)
        if density < 1:
            call.words.copy_(pack(mask_bits("random", density, 32, blocks, 7)))
        visited[density] = call.visited_blocks()
        sides[density] = call.attend
    peers = {name: side for name, side in dense_peers(q, k, v, True).items() if name.startswith("fa2")}
    gpu_capi.force_sm80(True)
    try:
        ms = take_turns({**sides, **peers}, 20)
    finally:
        gpu_capi.force_sm80(False)
    fa2 = faster_of({str(name): value for name, value in ms.items()}, "fa2")
    rate = lambda blocks, ms: blocks * 4 * BLOCK * BLOCK * dim / ms["median"] / 1e9
    fa2_tflops = rate(whole, fa2)
    return {"fa2_ms": fa2, "fa2_tflops": round(fa2_tflops, 1), "masks": [
        {"density": round(visited[d] / whole, 4), "ms": ms[d], "tflops": round(rate(visited[d], ms[d]), 1),
         "rate_over_fa2": round(rate(visited[d], ms[d]) / fa2_tflops, 3)} for d in sides]}


def run_chunks(case, _):
    n, chunk, blocks = case["n"], 8192, -(-case["n"] // BLOCK)
    q, k, v = random_inputs(n, case["head_dim"])
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
        yield {"case": "capture", "n": n, "head_dim": 64}
        if n >= 131072:
            yield {"case": "fa2", "n": n, "head_dim": 128}
        if n in (8192, 32768):
            yield from ({"case": "sm80", "n": n, "head_dim": dim} for dim in (64, 96, 128, 256))
    if 131072 in lengths:
        yield {"case": "chunks", "n": 131072, "head_dim": 128}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    number = lambda text: int(text[:-1]) * 1024 if text.endswith("k") else int(text)
    parser.add_argument("--lengths", type=lambda text: [number(part) for part in text.split(",")],
                        default=[8192 << i for i in range(7)])
    parser.add_argument("--cases", default="attend,layer,capture,fa2,chunks")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th case from the I-th")
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/release/libcrisp.so")
    parser.add_argument("--fa2-up-to", type=number, default=131072, help="FlashAttention-2 is slow")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_peers.py: PyTorch sees no CUDA device")
    gpu_capi.load(options.library)
    done = set()
    if options.out.is_file():
        for line in options.out.read_text().splitlines():
            done.add(tuple(json.loads(line)[key] for key in ("case", "n", "head_dim")))
    part, parts = (int(text) for text in options.part.split("/"))
    runners = {"attend": run_attend, "layer": run_layer, "capture": run_layer, "fa2": run_fa2,
               "sm80": run_sm80, "chunks": run_chunks}
    cases = [c for c in all_cases(options.lengths) if c["case"] in options.cases.split(",")]
    for case in cases[part - 1::parts]:
        if (case["case"], case["n"], case["head_dim"]) in done:
            continue
        before = device_state()
        result = runners[case["case"]](case, case["n"] <= options.fa2_up_to)
        line = {"bench": "gpu_peers", "case": case["case"], "n": case["n"], "head_dim": case["head_dim"],
                "dtype": "bfloat16", "repeats": 3 if case["case"] == "fa2" else repeats_for(case["n"]),
                **{"q_heads": 32, "kv_heads": 8, **result}, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                "cudnn": torch.backends.cudnn.version(),
                "sm_mhz_watt_celsius": [before, device_state()], "commit": options.commit,
                "date": datetime.date.today().isoformat(),
                "command": "bench/gpu_peers.py " + " ".join(pathlib.Path(a).name for a in sys.argv[1:])}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

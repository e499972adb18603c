#!/usr/bin/env python3
"""Our dense CPU attention against PyTorch's scaled_dot_product_attention, in the same run.

    python3 -m venv .venv && .venv/bin/pip install torch numpy
    cmake --preset release && cmake --build --preset release --target attend_bench
    .venv/bin/python bench/cpu_peers.py

Ours is build/release/bin/attend_bench, a process per sample (one warm run, one timed run); torch is
called here (one warm call, one timed call). Samples alternate, so both see the same machine, also
when it is noisy. Values are random normal; dense attention takes the same time on any. Writes one
JSON line per case: medians, minima and maxima in ms, GFLOP/s of the causal half,
4 heads head_dim n (n + 1) / 2, and ratio = torch / ours. Exits with 1 if either side fails.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINARY = pathlib.Path("build/release/bin/attend_bench")
RESULTS = pathlib.Path("bench/results/cpu_peers.jsonl")


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]
    parser.add_argument("--lengths", type=numbers, default=[4096, 8192, 16384])
    parser.add_argument("--dims", type=numbers, default=[64, 128])
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float32", "bfloat16"])
    parser.add_argument("--heads", type=int, default=8, help="query heads = kv heads")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7, help="samples per side, at least 5")
    parser.add_argument("--binary", type=pathlib.Path, default=BINARY)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    for dtype in arguments.dtypes:
        if dtype not in ("float32", "bfloat16"):
            parser.error(f"--dtypes has {dtype!r}, expected float32 or bfloat16")
    if arguments.rounds < 5:
        parser.error(f"--rounds is {arguments.rounds}, expected at least 5")
    if not (ROOT / arguments.binary).is_file():
        parser.error(f"{arguments.binary} is missing: build the target attend_bench")
    return arguments


def cpu_model():
    info = pathlib.Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def git(*words):
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True,
                          text=True).stdout.strip()


def commit():
    changed = [line for line in git("status", "--porcelain", "--untracked-files=no").splitlines()
               if "bench/results/" not in line]
    return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")


def our_sample(arguments, case):
    """One line of attend_bench: ms_median of its one timed run, and the peak it measured."""
    words = [str(ROOT / arguments.binary), "--repeat", "1", "--threads", str(arguments.threads),
             "--heads", str(arguments.heads), "--lengths", str(case["n"]),
             "--dims", str(case["head_dim"]), "--dtypes", case["dtype"], "--densities", "1"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"cpu_peers: {arguments.binary} failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def torch_inputs(torch, arguments, case):
    torch.manual_seed(1)
    shape = (1, arguments.heads, case["n"], case["head_dim"])
    return [torch.randn(shape).to(getattr(torch, case["dtype"])) for _ in range(3)]


def torch_sample(torch, inputs):
    attend = torch.nn.functional.scaled_dot_product_attention
    attend(*inputs, is_causal=True)
    started = time.perf_counter()
    attend(*inputs, is_causal=True)
    return 1e3 * (time.perf_counter() - started)


def spread(samples):
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}


def measure(torch, arguments, case):
    inputs = torch_inputs(torch, arguments, case)
    ours, theirs, peaks = [], [], []
    load_before = os.getloadavg()[0]
    for _ in range(arguments.rounds):
        line = our_sample(arguments, case)
        ours.append(line["ms_median"])
        peaks.append(line["peak_gflops"])
        theirs.append(torch_sample(torch, inputs))
    n = case["n"]
    flop = 4 * arguments.heads * case["head_dim"] * n * (n + 1) / 2
    our_gflops = flop / statistics.median(ours) * 1e-6
    peak = statistics.median(peaks)
    return {
        "bench": "cpu_peers", **case, "heads": arguments.heads, "threads": arguments.threads,
        "rounds": arguments.rounds, "ours_ms": spread(ours), "torch_ms": spread(theirs),
        "ours_gflops": our_gflops,
        "torch_gflops": flop / statistics.median(theirs) * 1e-6,
        "ratio": statistics.median(theirs) / statistics.median(ours),
        "peak_gflops": peak, "of_peak": our_gflops / peak, "target": line["target"],
        "load_before": load_before, "torch": torch.__version__, "cpu": cpu_model(),
        "cores": os.cpu_count(), "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["bench/cpu_peers.py", *sys.argv[1:]]),
    }


def rounded(value):
    """Five significant digits: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


def main():
    arguments = parse_arguments()
    try:
        import torch
    except ImportError:
        sys.exit("cpu_peers: torch is not installed here: python3 -m venv .venv && "
                 ".venv/bin/pip install torch numpy")
    torch.set_num_threads(arguments.threads)
    lines = []
    with torch.inference_mode():
        for dtype in arguments.dtypes:
            for head_dim in arguments.dims:
                for n in arguments.lengths:
                    case = {"dtype": dtype, "head_dim": head_dim, "n": n}
                    lines.append(json.dumps(rounded(measure(torch, arguments, case))))
                    print(lines[-1], flush=True)
    out = ROOT / arguments.out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

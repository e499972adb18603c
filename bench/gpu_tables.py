#!/usr/bin/env python3
"""Makes docs/bench-gpu.md and docs/bench-gpu.svg from bench/results/gpu_*.json*.

    bench/gpu_tables.py             writes both
    bench/gpu_tables.py --check     fails if what is there is not what would be written
"""

import argparse
import json
import pathlib
import sys

from make_tables import ROOT, number, table

RESULTS = ROOT / "bench/results/gpu_peers.jsonl"
GATES = ROOT / "bench/results/gpu_gates.jsonl"
PUBLISHED = ROOT / "bench/results/gpu_published.json"
PAGE = ROOT / "docs/bench-gpu.md"

HEAD = """# Speed on a GPU

Made by `bench/gpu_tables.py` from `bench/results/gpu_*`; do not edit. 32 query heads, 8 kv
heads, bfloat16, causal. Times are medians in ms; all sides of a case took turns in one warm process.
TFLOP/s count 4 head_dim per pair of visited blocks, half for a diagonal block. cuDNN and
FlashAttention-2 are PyTorch's, on the faster of two layouts.
"""
MASKS_NOTE = """TFLOP/s per visited block, and in brackets the share of our own dense kernel in the same run.
*random*: independent blocks; *vertical-slash*: columns and block diagonals, as CRISP selects; *banded*:
the last part of each row; *uneven*: one full head in eight, rows from two blocks to all. Every mask
also keeps the diagonal and block 0.
"""
LAYER_NOTE = """Selection and attention together, on structured heads (`structured` in `bench/gpu_peers.py`: sinks, a
local band and heavy columns of four strengths, one head in four flat; seed = tokens). *ideal* is the
speed-up over our dense that density and selection allow, 1 / (density + selection / dense); the last
column is how much of it was reached.
"""


def ms(value):
    return number(value["median"]) if value else "not measured"


def of_case(lines, case, dim=None):
    return [line for line in lines
            if line["case"] == case and (dim is None or line["head_dim"] == dim)]


def dense_section(lines):
    rows = [[str(line["head_dim"]), f"{line['n']:,}", ms(line["dense_ms"]),
             f"{line['dense_tflops']:.0f}", ms(line["cudnn_ms"]), f"{line['over_cudnn']:.2f}",
             ms(line["fa2_ms"]), f"{line['over_fa2']:.2f}" if line["fa2_ms"] else "not measured"]
            for line in of_case(lines, "attend")]
    return "## Dense\n\n" + table(["head_dim", "tokens", "ours", "TFLOP/s", "cuDNN", "over cuDNN",
                                   "FA2", "over FA2"], rows)


def masks_section(lines):
    out = ["## Sparse\n", MASKS_NOTE]
    for dim in sorted({line["head_dim"] for line in of_case(lines, "attend")}, reverse=True):
        chosen = of_case(lines, "attend", dim)
        names = [f"{mask['kind']}" for mask in chosen[0]["masks"]]
        wanted = [5, 10, 15, 30, 50] + [5, 10, 15] + [15, 15]
        header = [f"head_dim {dim}, tokens"] + [f"{a} {b} %" for a, b in zip(names, wanted)]
        rows = [[f"{line['n']:,}"] + [f"{mask['tflops']:.0f} ({100 * mask['of_dense']:.0f} %)"
                                      for mask in line["masks"]] for line in chosen]
        out.append(table(header, rows))
    last = of_case(lines, "attend", 128)[-1]
    out.append(f"At {last['n']:,} tokens a layer takes " + ", ".join(
        f"{mask['ms']['median']:.0f} ms at {100 * mask['density']:.1f} % {mask['kind']} "
        f"({mask['over_cudnn']:.1f} x cuDNN dense)" for mask in last["masks"]) + ".\n")
    return "\n".join(out)


CAPTURE_NOTE = """The same on `data/code-8k-layer07` (SmolLM2-135M, head_dim 64): its 9 query and 3 kv heads four times,
its 8,192 tokens over and over up to the length. A key is as good as its double in every repetition, so
mass spreads over the repetitions, and density falls less than on a prompt of that length.
"""
STAGES_NOTE = """Milliseconds per stage by events between them, which add a few microseconds to each; extra memory
besides q, k and v in MiB: ours is output, mask and workspace, the peers' what PyTorch's allocator
handed out during one call, output included.
"""
SM80_NOTE = """The kernels that run on compute capability 8.x, and on Hopper wherever the wgmma ones do not (head_dim
over 128 or no multiple of 64, odd strides), forced on this card. TFLOP/s per visited block; *rate* is
over FlashAttention-2's dense rate in the same run.
"""
FA2_NOTE = """Against FlashAttention-2 from 128k tokens on, three rounds each.
"""
GATE_NOTE = """`crisp bench --gate`: a whole layer under the policy, selection and attention, over dense attention, on the
`llama-like` preset of `crisp synth`; 1.00 and above pays. The longest gate of a device is its default of
`--dense-below-tokens` (`measured_gate` in `crisp.h`).
"""
PUBLISHED_NOTE = """**Published by others, not measured here**, on other cards and prompts, so to be read next to the tables
above and not divided by them. ms per layer.
"""


def layer_section(lines, case, title, note):
    rows = []
    for line in of_case(lines, case):
        for policy in line["policies"]:
            share = policy["select_ms"]["median"] / line["dense_ms"]["median"]
            ideal = 1 / (policy["density"] + share)
            rows.append([f"{line['n']:,}", policy["name"], f"{100 * policy['density']:.1f} %",
                         ms(policy["select_ms"]), ms(policy["ms"]), ms(line["dense_ms"]),
                         ms(line["cudnn_ms"]), f"{policy['over_dense']:.2f}",
                         f"{policy['over_cudnn']:.2f}", f"{100 * policy['over_dense'] / ideal:.0f} %"])
    return f"## {title}\n\n{note}\n" + table(
        ["tokens", "policy", "density", "select", "layer", "our dense", "cuDNN", "over dense",
         "over cuDNN", "of ideal"], rows)


def stages_section(lines):
    rows = []
    for line in of_case(lines, "layer"):
        for policy in line["policies"]:
            extra = policy["out_mib"] + policy["mask_mib"] + policy["workspace_mib"]
            rows.append([f"{line['n']:,}", policy["name"]] + [number(v) for v in policy["stage_ms"].values()]
                        + [number(policy["workspace_mib"]), number(policy["mask_mib"]), number(extra)]
                        + [number(line["peers_mib"][name]) if name in line["peers_mib"] else "not measured"
                           for name in ("cudnn_thd", "fa2_thd")])
    return "## Stages and memory\n\n" + STAGES_NOTE + "\n" + table(
        ["tokens", "policy", "proxy", "route", "select", "mask", "attend", "workspace", "mask MiB",
         "extra MiB", "cuDNN's", "FA2's"], rows)


def fa2_section(lines):
    rows = [[f"{line['n']:,}", ms(line["dense_ms"]), ms(line["fa2_ms"]), f"{line['over_fa2']:.2f}",
             f"{ms(line['sparse_ms'])} ({100 * line['density']:.1f} %)", f"{line['sparse_over_fa2']:.1f}"]
            for line in of_case(lines, "fa2")]
    return "## Long prompts against FlashAttention-2\n\n" + FA2_NOTE + "\n" + table(
        ["tokens", "our dense", "FA2", "over FA2", "vertical-slash", "over FA2"], rows)


def sm80_section(lines):
    rows = [[str(line["head_dim"]), f"{line['n']:,}", f"{line['fa2_tflops']:.0f}"] +
            [f"{mask['tflops']:.0f} ({mask['rate_over_fa2']:.2f})" for mask in line["masks"]]
            for line in of_case(lines, "sm80")]
    return "## The mma.sync kernels\n\n" + SM80_NOTE + "\n" + table(
        ["head_dim", "tokens", "FA2 dense", "dense (rate)", "random 30 %", "random 10 %"], rows)


def gate_section():
    runs = [json.loads(line) for line in GATES.read_text().splitlines()]
    lengths = [point["tokens"] for point in runs[0]["points"]]
    rows = [[run["gpu"], str(run["shape"]["head_dim"]), run["policy"]] +
            [f"{point['dense_ms'] / point['layer_ms']:.2f}" for point in run["points"]] +
            [f"{run['gate_tokens']:,}"] for run in runs]
    return "## From how many tokens on it pays\n\n" + GATE_NOTE + "\n" + table(
        ["device", "head_dim", "policy"] + [f"{n:,}" for n in lengths] + ["gate"], rows)


def published_section():
    entries = json.loads(PUBLISHED.read_text())
    lengths = sorted({int(n) for entry in entries for n in entry["ms"]})
    rows = [[entry["system"], entry["gpu"], entry["source"]] +
            [number(entry["ms"][str(n)] / entry["layers"]) if str(n) in entry["ms"] else "not published"
             for n in lengths] for entry in entries]
    return "## Published elsewhere\n\n" + PUBLISHED_NOTE + "\n" + table(
        ["system", "card", "source"] + [f"{n:,}" for n in lengths], rows)


def chunks_section(lines):
    rows = [[f"{line['n']:,}", name, ms(line[name]["whole_ms"]), ms(line[name]["chunks_ms"]),
             f"{line[name]['cost']:.3f}"]
            for line in of_case(lines, "chunks") for name in ("dense", "vertical-slash")]
    return "## In chunks of 8,192\n\n" + table(["tokens", "mask", "one shot", "chunks", "ratio"], rows)


def sources_section(lines):
    origins = sorted({(line["gpu"], line["torch"], str(line["cudnn"]), line["commit"], line["date"],
                       line["command"]) for line in lines})
    return "## Where the figures come from\n\n" + "\n".join(
        f"- {gpu}; torch {torch}; cuDNN {cudnn}; commit {commit}; {date}; `{command}`"
        for gpu, torch, cudnn, commit, date, command in origins) + "\n\nClocks, power and temperature " \
        "before and after each case are in the results (`sm_mhz_watt_celsius`).\n"


def plot(lines):
    """TFLOP/s against tokens, head_dim 128: dense of all sides, and two of our masks."""
    chosen = of_case(lines, "attend", 128)
    flop = lambda line: 4 * 32 * 128 * line["n"] ** 2 / 2 / 1e9
    curves = {"crisp dense": ("#1b6ca8", [line["dense_tflops"] for line in chosen]),
              "cuDNN dense": ("#d1495b", [flop(l) / l["cudnn_ms"]["median"] for l in chosen]),
              "FA2 dense": ("#999999", [flop(l) / l["fa2_ms"]["median"] if l["fa2_ms"] else None
                                        for l in chosen]),
              "crisp, vertical-slash 15 %": ("#2a9d60", [l["masks"][7]["tflops"] for l in chosen])}
    left, top, width, height, highest = 50, 30, 560, 240, 900
    x = lambda i: left + width * i / max(len(chosen) - 1, 1)
    y = lambda value: top + height * (1 - value / highest)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 40}" height="{top + height + 70}" '
           'font-family="sans-serif" font-size="11">', '<rect width="100%" height="100%" fill="#fff"/>']
    for value in range(0, highest + 1, 300):
        out.append(f'<line x1="{left}" x2="{left + width}" y1="{y(value)}" y2="{y(value)}" stroke="#ddd"/>'
                   f'<text x="{left - 6}" y="{y(value) + 4}" text-anchor="end">{value}</text>')
    for i, line in enumerate(chosen):
        out.append(f'<text x="{x(i):.0f}" y="{top + height + 16}" text-anchor="middle">{line["n"]:,}</text>')
    for k, (name, (colour, values)) in enumerate(curves.items()):
        points = [(x(i), y(v)) for i, v in enumerate(values) if v is not None]
        out.append('<polyline fill="none" stroke-width="2" stroke="%s" points="%s"/>' % (
            colour, " ".join(f"{a:.1f},{b:.1f}" for a, b in points)))
        out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in points]
        out.append(f'<rect x="{left + 150 * k}" y="{top + height + 34}" width="14" height="4" fill="{colour}"/>'
                   f'<text x="{left + 150 * k + 20}" y="{top + height + 40}">{name}</text>')
    out.append(f'<text x="{left}" y="16">TFLOP/s per visited block against tokens, head_dim 128</text>')
    return "\n".join(out + ["</svg>"]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    lines.sort(key=lambda line: (-line["head_dim"], line["n"]))
    image = PAGE.with_suffix(".svg")
    page = "\n".join([HEAD, dense_section(lines), f"![TFLOP/s against tokens]({image.name})\n",
                      masks_section(lines),
                      layer_section(lines, "layer", "Whole layers", LAYER_NOTE),
                      layer_section(lines, "capture", "Whole layers on captured heads", CAPTURE_NOTE),
                      stages_section(lines), gate_section(), chunks_section(lines), fa2_section(lines),
                      sm80_section(lines), published_section(), sources_section(lines)])
    pages = {PAGE: page, image: plot(lines)}
    for path, text in pages.items():
        if not check:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            sys.exit(f"gpu_tables: {path.relative_to(ROOT)} is not what the results give")


if __name__ == "__main__":
    main()

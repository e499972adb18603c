#!/usr/bin/env python3
"""Makes docs/bench-cpu.md and docs/bench-cpu.svg from bench/results/*.jsonl, but for gpu_*.

    bench/make_tables.py             writes both
    bench/make_tables.py --check     fails if what is there is not what would be written

The results are data, committed with the command that made them; this page is derived and holds no
figure of its own. Lines are those of bench/cpu_peers.py, attend_bench and `crisp bench`.
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

HEAD = """# Speed on the CPU

Made by `bench/make_tables.py` from `bench/results/`; do not edit. Times are medians in ms, with
minimum and maximum where there is room. GFLOP/s count the multiply-adds of the visible pairs as two
operations each, 4 head_dim per pair and head.
"""

PEERS_NOTE = """Dense causal attention, query heads = kv heads, both sides in turn in one run. *ratio* is torch over
ours, so above 1 ours is faster; *of peak* is against a loop of multiply-adds measured before each of
our samples.
"""

ATTEND_NOTE = """`attend` alone under random masks that keep the diagonal and a share of the other causal blocks. *cost*
is its time over density x the dense time; 1 means that skipped blocks cost nothing.
"""

POLICY_NOTE = """Whole policies, selection and attention. *selection* is proxy, route, select and mask, in ms and
as a share of the dense attention of the same run; *speed-up* is that dense attention over both; *cost*
is attend over (share of pairs visited x dense).
"""


def number(value, digits=3):
    """Significant digits, without an exponent; a dash for what was not measured."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    text = f"{value:#.{digits}g}"
    return text.rstrip(".")


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def spread(times):
    return f"{number(times['median'])} ({number(times['min'])} to {number(times['max'])})"


def peers_section(lines):
    rows = [[line["dtype"], str(line["head_dim"]), f"{line['n']:,}", spread(line["ours_ms"]),
             spread(line["torch_ms"]), number(line["ours_gflops"]), number(line["torch_gflops"]),
             f"{line['ratio']:.2f}", f"{100 * line['of_peak']:.0f} %"] for line in lines]
    header = ["dtype", "head_dim", "tokens", "ours ms", "torch ms", "ours GFLOP/s", "torch GFLOP/s",
              "ratio", "of peak"]
    return "## Against PyTorch\n\n" + PEERS_NOTE + "\n" + table(header, rows)


def attend_section(lines):
    rows = [[line["dtype"], str(line["head_dim"]), f"{line['n']:,}", str(line["heads"]),
             f"{100 * line['density']:.1f} %",
             f"{number(line['ms_median'])} ({number(line['ms_min'])} to {number(line['ms_max'])})",
             number(line["gflops"]), f"{100 * line['of_peak']:.0f} %",
             number(line.get("over_density_x_dense"))] for line in lines]
    header = ["dtype", "head_dim", "tokens", "heads", "density", "ms", "GFLOP/s", "of peak", "cost"]
    return "## Sparse attend\n\n" + ATTEND_NOTE + "\n" + table(header, rows)


def selection_ms(ms):
    """Sum of the medians; None if no stage of the selection ran."""
    stages = [ms[stage]["median"] for stage in ("proxy", "route", "select", "mask")
              if ms[stage] is not None]
    return sum(stages) if stages else None


def selection_share(line):
    selection = selection_ms(line["ms"])
    if selection is None or line["dense_ms"] is None:
        return "-"
    return f"{100 * selection / line['dense_ms']:.2f} %"


def policy_section(lines):
    rows = []
    for line in lines:
        shape = line["shape"]
        rows.append([line["input"], shape["dtype"], str(shape["head_dim"]), f"{shape['kv_len']:,}",
                     f"{shape['num_q_heads']} / {shape['num_kv_heads']}", line["policy"],
                     f"{100 * line['density']:.1f} %", number(selection_ms(line["ms"])),
                     selection_share(line), number(line["ms"]["attend"]["median"]),
                     number(line["dense_ms"]),
                     f"{line['speed_up']:.2f}" if line["speed_up"] is not None else "-",
                     number(line["cost_ratio"])])
    header = ["input", "dtype", "head_dim", "tokens", "heads", "policy", "density", "selection ms",
              "selection / dense", "attend ms", "dense ms", "speed-up", "cost"]
    return "## Policies\n\n" + POLICY_NOTE + "\n" + table(header, rows)


def kind_of(line):
    if line.get("bench") == "cpu_peers":
        return "peers"
    if "over_density_x_dense" in line or "ms_median" in line:
        return "attend"
    if "policy" in line and "shape" in line:
        return "policy"
    return None


SECTIONS = {"peers": peers_section, "attend": attend_section, "policy": policy_section}


def read_results(folder):
    """Lines by kind, and per file the machine, commits and commands that its lines name."""
    kinds = {kind: [] for kind in SECTIONS}
    sources = []
    for path in sorted(folder.glob("*.jsonl")):
        if path.name.startswith("gpu_"):  # bench/gpu_tables.py
            continue
        origin = {}
        for at, text in enumerate(path.read_text().splitlines(), 1):
            line = json.loads(text)
            kind = kind_of(line)
            if kind is None:
                sys.exit(f"make_tables: {path.name}:{at}: a line of no known benchmark")
            kinds[kind].append(line)
            for key in ("cpu", "threads", "target", "instruction_set", "torch", "commit", "date",
                        "command"):
                if line.get(key) is not None:
                    origin.setdefault(key, []).append(str(line[key]))
        sources.append((path.name, {key: sorted(set(values)) for key, values in origin.items()}))
    return kinds, sources


def sources_section(sources):
    lines = ["## Where the figures come from\n"]
    for name, origin in sources:
        facts = "; ".join(f"{key.replace('_', ' ')} {', '.join(values)}"
                          for key, values in origin.items() if key != "command")
        lines.append(f"- `{name}`: {facts}")
        lines += [f"  - `{command}`" for command in origin.get("command", [])]
    return "\n".join(lines) + "\n"


# ---- The plot: one panel per dtype and head_dim, GFLOP/s against tokens.

PANEL_WIDTH, PANEL_HEIGHT, MARGIN = 260, 170, 46
COLOURS = {"ours_gflops": "#1b6ca8", "torch_gflops": "#d1495b", "peak_gflops": "#999999"}
NAMES = {"ours_gflops": "crisp", "torch_gflops": "torch", "peak_gflops": "multiply-add peak"}


def panel(lines, left, top, highest):
    """SVG of one panel; tokens are spaced evenly, as they double."""
    lines = sorted(lines, key=lambda line: line["n"])
    step = PANEL_WIDTH / max(len(lines) - 1, 1)
    place = lambda i, value: (left + (i * step if len(lines) > 1 else PANEL_WIDTH / 2),
                              top + PANEL_HEIGHT * (1 - value / highest))
    out = [f'<rect x="{left}" y="{top}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="none" '
           'stroke="#ccc"/>',
           f'<text x="{left}" y="{top - 8}">{lines[0]["dtype"]}, head_dim {lines[0]["head_dim"]}'
           '</text>']
    for value in (0, highest / 2, highest):
        y = place(0, value)[1]
        out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.0f}</text>')
    for i, line in enumerate(lines):
        out.append(f'<text x="{place(i, 0)[0]:.1f}" y="{top + PANEL_HEIGHT + 16}" '
                   f'text-anchor="middle">{line["n"]:,}</text>')
    for key, colour in COLOURS.items():
        points = [place(i, line[key]) for i, line in enumerate(lines)]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        out.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    return out


def plot(lines):
    panels = {}
    for line in lines:
        panels.setdefault((line["dtype"], line["head_dim"]), []).append(line)
    highest = -(-max(line[key] for line in lines for key in COLOURS) // 20) * 20
    columns = 2
    rows = -(-len(panels) // columns)
    width = columns * (PANEL_WIDTH + MARGIN) + 20
    height = rows * (PANEL_HEIGHT + MARGIN) + 50
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
           'font-family="sans-serif" font-size="11">',
           f'<rect width="{width}" height="{height}" fill="#fff"/>']
    for i, (key, colour) in enumerate(COLOURS.items()):
        x = MARGIN + 150 * i
        out.append(f'<rect x="{x}" y="9" width="14" height="4" fill="{colour}"/>'
                   f'<text x="{x + 20}" y="15">{NAMES[key]}, GFLOP/s</text>')
    for i, key in enumerate(panels):
        left = MARGIN + i % columns * (PANEL_WIDTH + MARGIN)
        top = 46 + i // columns * (PANEL_HEIGHT + MARGIN)
        out += panel(panels[key], left, top, highest)
    return "\n".join(out + ["</svg>"]) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "bench/results")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs/bench-cpu.md")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    kinds, sources = read_results(arguments.results)
    if not any(kinds.values()):
        sys.exit(f"make_tables: {arguments.results} holds no results")

    pages = {}
    parts = [HEAD]
    for kind, lines in kinds.items():
        if not lines:
            continue
        parts.append(SECTIONS[kind](lines))
        if kind == "peers":
            image = arguments.out.with_suffix(".svg")
            pages[image] = plot(lines)
            parts.append(f"![GFLOP/s of crisp and torch against tokens]({image.name})\n")
    pages[arguments.out] = "\n".join(parts + [sources_section(sources)])

    for path, text in pages.items():
        if arguments.check and (not path.is_file() or path.read_text() != text):
            sys.exit(f"make_tables: {path.name} is not what bench/make_tables.py makes: run it")
        if not arguments.check:
            path.write_text(text)


if __name__ == "__main__":
    main()

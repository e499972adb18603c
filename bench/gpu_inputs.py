"""Masks and inputs of the GPU benchmarks."""

import json
import math
import pathlib

import torch

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"


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


def random_inputs(n, dim, heads=32, kv_heads=8):
    g = torch.Generator(device="cuda").manual_seed(1)
    make = lambda h: torch.empty(n, h, dim, dtype=torch.bfloat16, device="cuda").normal_(generator=g)
    return make(heads), make(kv_heads), make(kv_heads)


def tiled_capture(n, copies=4):
    """data/code-8k-layer07, 9 query and 3 kv heads: its tokens over and over until there are n, its heads
    `copies` times. A key of one repetition is as good as its double in the next, so mass that lay on one
    block lies on n / 8k of them; what is local or on the sink's copies stays as sharp as it was."""
    raw = (DATA / "code-8k-layer07.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + size])
    out = []
    for name in "qkv":
        begin, end = header[name]["data_offsets"]
        flat = torch.frombuffer(bytearray(raw[8 + size + begin:8 + size + end]), dtype=torch.bfloat16)
        t = flat.view(header[name]["shape"]).cuda().transpose(0, 1)  # [tokens, heads, dim]
        repeats = -(-n // t.shape[0])
        out.append(t.repeat(repeats, copies, 1)[:n].contiguous())
    return out

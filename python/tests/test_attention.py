"""Functions on numpy arrays against the double-precision reference."""

import itertools

import numpy as np
import pytest
from conftest import draw, tolerance

import crisp_prefill as crisp

# Low gates, so that a few hundred tokens are routed and selected like a long prompt.
SPARSE = crisp.Crisp(min_budget_tokens=128, dense_below_tokens=0)
FLEX = crisp.FlexPrefill(min_budget_tokens=128, dense_below_tokens=0)


def bound(q, k, v, **how):
    """Largest error allowed against the reference: derived on the dense problem."""
    exact, _ = crisp.reference.attention(q, k, v, policy=crisp.Dense(), **how)
    return max(
        tolerance(q[b], k[b], v[b], exact[b], **how) for b in range(len(q))
    )


@pytest.mark.parametrize("policy", [crisp.Dense(), SPARSE, FLEX], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("q_len, kv_len", [(256, 256), (300, 300), (130, 517)])
def test_equals_the_reference(qkv, policy, q_len, kv_len):
    q, k, v = qkv(q_len=q_len, kv_len=kv_len)
    out, lse, report = crisp.attention(q, k, v, policy=policy, return_lse=True, return_report=True)
    exact, exact_lse = crisp.reference.attention(q, k, v, policy=policy)
    heads = crisp.reference.select_blocks(q, k, policy=policy)
    assert [row["pattern"] for row in report.rows()] == [head.pattern for head in heads]
    assert [row["num_blocks"] for row in report.rows()] == [head.blocks.sum() for head in heads]
    assert np.abs(out - exact).max() <= bound(q, k, v)
    assert np.abs(lse - exact_lse).max() <= 2 * np.finfo(np.float32).eps * np.abs(exact_lse).max() * 64


def test_default_policy_is_crisp(qkv):
    q, k, v = qkv(q_len=1536)
    np.testing.assert_array_equal(
        crisp.attention(q, k, v), crisp.attention(q, k, v, policy=crisp.Crisp())
    )
    _, report = crisp.attention(q, k, v, return_report=True)
    assert report.rows()[0]["pattern"] == "vertical_slash"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types(qkv, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = qkv(dtype=dtype)
    out = crisp.attention(q, k, v, policy=SPARSE)
    exact, _ = crisp.reference.attention(q, k, v, policy=SPARSE)
    assert out.dtype == q.dtype
    assert np.abs(out.astype(np.float64) - exact).max() <= bound(q, k, v)


def test_not_causal(qkv):
    q, k, v = qkv(q_len=200, kv_len=150)
    out = crisp.attention(q, k, v, policy=crisp.Dense(), causal=False, scale=0.2)
    exact, _ = crisp.reference.attention(q, k, v, policy=crisp.Dense(), causal=False, scale=0.2)
    assert np.abs(out - exact).max() <= bound(q, k, v, causal=False, scale=0.2)


@pytest.mark.parametrize("layout", ["dense", "head-major", "gaps"])
@pytest.mark.parametrize("policy", [crisp.Dense(), SPARSE], ids=lambda p: type(p).__name__)
def test_the_quick_way_gives_the_same_bits(qkv, layout, policy, monkeypatch):
    from crisp_prefill import _plain

    q, k, v = (layouts(a)[layout] for a in qkv(q_len=290, kv_len=400))
    quick = _plain.attention(q, k, v, policy, None, True, None, None, 0)
    assert quick is not None
    monkeypatch.setattr(_plain, "attention", lambda *arguments: None)
    np.testing.assert_array_equal(quick, crisp.attention(q, k, v, policy=policy))


def test_select_then_attend_is_attention(qkv):
    q, k, v = qkv(batch=2, q_len=300)
    mask, report = crisp.select_blocks(q, k, policy=SPARSE, return_report=True)
    out, lse = crisp.attend(q, k, v, mask, return_lse=True)
    one, one_lse, one_report = crisp.attention(
        q, k, v, policy=SPARSE, return_lse=True, return_report=True
    )
    np.testing.assert_array_equal(out, one)
    np.testing.assert_array_equal(lse, one_lse)
    np.testing.assert_array_equal(report.heads["num_blocks"], one_report.heads["num_blocks"])
    assert mask.density() == pytest.approx(one_report.density, abs=0)
    np.testing.assert_array_equal(out, crisp.attention(q, k, v, policy=crisp.UserMask(mask)))


def layouts(a):
    """The same values: dense, head-major, and with gaps between tokens."""
    wide = np.zeros((*a.shape[:3], a.shape[3] + 8), a.dtype)
    wide[..., : a.shape[3]] = a
    return {
        "dense": a,
        "head-major": np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2),
        "gaps": wide[..., : a.shape[3]],
    }


@pytest.mark.parametrize("names", list(itertools.product(["dense", "head-major", "gaps"], repeat=2)))
def test_any_layout_gives_the_same_bits(qkv, names):
    q, k, v = qkv(batch=3, q_len=140)
    starts = [0, 5, 130]
    expected = crisp.attention(
        q, k, v, policy=SPARSE, key_starts=starts, return_lse=True, return_report=True
    )
    ql, kl, vl, ol = (layouts(a) for a in (q, k, v, np.zeros_like(q)))
    out = ol[names[1]]
    out[...] = np.nan
    got = crisp.attention(
        ql[names[0]], kl[names[1]], vl[names[0]], policy=SPARSE, key_starts=starts, out=out,
        return_lse=True, return_report=True,
    )
    assert got[0] is out
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])
    np.testing.assert_array_equal(got[2].heads["num_blocks"], expected[2].heads["num_blocks"])
    mask = crisp.select_blocks(ql[names[0]], kl[names[1]], policy=SPARSE, key_starts=starts)
    np.testing.assert_array_equal(
        crisp.attend(ql[names[0]], kl[names[1]], vl[names[0]], mask, key_starts=starts), expected[0]
    )


def test_left_padding_equals_each_sequence_alone(qkv):
    q, k, v = qkv(batch=3, q_len=290)
    starts = [0, 17, 290]
    out, lse = crisp.attention(q, k, v, policy=SPARSE, key_starts=starts, return_lse=True)
    for b, start in enumerate(starts[:2]):
        alone, alone_lse = crisp.attention(
            *(a[b : b + 1, start:] for a in (q, k, v)), policy=SPARSE, return_lse=True
        )
        np.testing.assert_array_equal(out[b, start:], alone[0])
        np.testing.assert_array_equal(lse[b, :, start:], alone_lse[0])
        assert not out[b, :start].any() and np.isneginf(lse[b, :, :start]).all()
    assert not out[2].any() and np.isneginf(lse[2]).all()


def test_key_lengths_leave_out_the_tail_of_a_cache(qkv):
    q, k, v = qkv(batch=2, q_len=140, kv_len=400)
    lengths = [140, 333]
    poisoned = [a.copy() for a in (k, v)]
    for a in poisoned:
        for b, length in enumerate(lengths):
            a[b, length:] = np.nan
    out = crisp.attention(q, *poisoned, policy=SPARSE, key_lengths=lengths)
    for b, length in enumerate(lengths):
        alone = crisp.attention(
            q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length], policy=SPARSE
        )
        np.testing.assert_array_equal(out[b], alone[0])


def test_varlen_equals_each_sequence_alone(qkv):
    q, k, v = (a[0] for a in qkv(q_len=500))
    cu = [0, 130, 130, 500]
    out, lse, report = crisp.attention(
        q, k, v, policy=SPARSE, cu_seqlens=cu, return_lse=True, return_report=True
    )
    assert report.heads.shape == (3, 4)
    for first, end in [(0, 130), (130, 500)]:
        alone, alone_lse = crisp.attention(
            *(a[None, first:end] for a in (q, k, v)), policy=SPARSE, return_lse=True
        )
        np.testing.assert_array_equal(out[first:end], alone[0])
        np.testing.assert_array_equal(lse[:, first:end], alone_lse[0])


def test_varlen_with_longer_keys(qkv):
    q, k, v = (a[0] for a in qkv(q_len=200, kv_len=450))
    out = crisp.attention(q, k, v, policy=SPARSE, cu_seqlens=([0, 50, 200], np.array([0, 250, 450])))
    alone = crisp.attention(q[None, 50:], k[None, 250:], v[None, 250:], policy=SPARSE)
    np.testing.assert_array_equal(out[50:], alone[0])


@pytest.mark.parametrize("page_size", [1, 16, 24])
def test_pages_equal_contiguous_keys(qkv, page_size):
    q, k, v = qkv(batch=2, q_len=100, kv_len=240)
    lengths = [240, 170]
    per_row = -(-240 // page_size)
    order = np.random.default_rng(3).permutation(2 * per_row).astype(np.int32)
    table = order.reshape(2, per_row)
    pages = []
    for a in (k, v):
        pool = np.full((2 * per_row, page_size, *a.shape[2:]), np.nan, np.float32)
        for b in range(2):
            padded = np.zeros((per_row * page_size, *a.shape[2:]), np.float32)
            padded[:240] = a[b]
            pool[table[b]] = padded.reshape(per_row, page_size, *a.shape[2:])
        pages.append(pool)
    out, lse = crisp.attention(
        q, *pages, policy=SPARSE, block_table=table, key_lengths=lengths, return_lse=True
    )
    expected, expected_lse = crisp.attention(
        q, k, v, policy=SPARSE, key_lengths=lengths, return_lse=True
    )
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)
    exact, _ = crisp.reference.attention(
        q, np.nan_to_num(pages[0]), np.nan_to_num(pages[1]), policy=SPARSE, block_table=table,
        key_lengths=lengths,
    )
    assert np.abs(out - exact).max() <= bound(q, k[:, :170], v[:, :170])


def test_merging_two_halves_of_the_keys_is_all_of_them(qkv):
    q, k, v = qkv(batch=2, q_len=100, kv_len=256)
    dense = crisp.Dense()
    whole, whole_lse = crisp.attention(q, k, v, policy=dense, causal=False, return_lse=True)
    halves = [
        crisp.attention(q, k[:, s], v[:, s], policy=dense, causal=False, return_lse=True)
        for s in (slice(0, 90), slice(90, None))
    ]
    out, lse = crisp.merge_states(*halves[0], *halves[1])
    exact, exact_lse = crisp.reference.attention(q, k, v, policy=dense, causal=False)
    # Each half is within the derived bound, and a merge is a convex combination of the two.
    assert np.abs(out - exact).max() <= 2 * bound(q, k, v, causal=False)
    assert np.abs(lse - exact_lse).max() <= 4 * np.abs(whole_lse - exact_lse).max() + 1e-6
    in_place, _ = crisp.merge_states(*halves[0], *halves[1], out=halves[0][0])
    assert in_place is halves[0][0]
    np.testing.assert_array_equal(in_place, out)
    del whole


def test_given_workspace_is_used(qkv):
    q, k, v = qkv(q_len=300)
    needed = crisp.workspace_bytes(q, k, policy=SPARSE)
    memory = np.zeros(needed + 256, np.uint8)
    start = -memory.__array_interface__["data"][0] % 256
    workspace = memory[start : start + needed]
    out = crisp.attention(q, k, v, policy=SPARSE, workspace=workspace)
    assert workspace.any()
    np.testing.assert_array_equal(out, crisp.attention(q, k, v, policy=SPARSE))
    with pytest.raises(ValueError, match="workspace"):
        crisp.attention(q, k, v, policy=SPARSE, workspace=workspace[:-256])


def test_threads_change_no_bit(qkv):
    q, k, v = qkv(batch=2, q_len=700)
    np.testing.assert_array_equal(
        crisp.attention(q, k, v, policy=SPARSE, num_threads=1),
        crisp.attention(q, k, v, policy=SPARSE, num_threads=2),
    )


def test_report_times_and_json(qkv):
    import json

    q, k, v = qkv(q_len=600)
    _, report = crisp.attention(q, k, v, policy=SPARSE, return_report=True)
    assert report.attend_ms > 0 and report.select_ms > 0
    document = json.loads(report.to_json())
    assert document["heads"] == report.rows()
    visible = 5 * 6 // 2
    assert document["heads"][0]["density"] == document["heads"][0]["num_blocks"] / visible
    _, dense = crisp.attention(q, k, v, policy=crisp.Dense(), return_report=True)
    assert dense.density == 1.0
    assert dense.rows()[0]["structural_mass"] is None


def test_dlpack_of_another_library(qkv):
    class Foreign:
        """What an array of a library we do not know looks like."""

        def __init__(self, a):
            self.a = a

        def __dlpack__(self, **how):
            return self.a.__dlpack__(**how)

        def __dlpack_device__(self):
            return self.a.__dlpack_device__()

    q, k, v = qkv()
    out = crisp.attention(Foreign(q), Foreign(k), Foreign(v), policy=SPARSE)
    np.testing.assert_array_equal(out, crisp.attention(q, k, v, policy=SPARSE))


def test_empty_inputs():
    q = draw(0, 0, 16, 2, 64)
    out, lse = crisp.attention(q, q, q, return_lse=True)
    assert out.shape == q.shape and lse.shape == (0, 2, 16)
    assert crisp.select_blocks(q, q).num_q_blocks == 0
    q = draw(0, 2, 0, 2, 64)
    assert crisp.attention(q, q, q).shape == q.shape

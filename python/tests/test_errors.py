"""Every refusal names argument, value and expectation, and writes nothing."""

import numpy as np
import pytest

import crisp_prefill as crisp


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


GOOD = {"q": zeros(1, 16, 4, 64), "k": zeros(1, 16, 2, 64), "v": zeros(1, 16, 2, 64)}
TABLE = np.zeros((1, 4), np.int32)

CASES = [
    ({"q": [[1.0]]}, TypeError, "q is a list, expected a numpy array, a torch tensor"),
    ({"q": zeros(16, 4, 64)}, ValueError, "q has 3 dimensions, expected 4"),
    ({"cu_seqlens": [0, 16]}, ValueError, "q has 4 dimensions, expected 3"),
    ({"q": zeros(1, 16, 4, 64, dtype=np.float64)}, TypeError, "q.dtype is float64, expected float32"),
    ({"k": zeros(1, 16, 2, 64, dtype=np.float16)}, TypeError, "k.dtype is float16, expected that of q"),
    ({"k": zeros(2, 16, 2, 64), "v": zeros(2, 16, 2, 64)}, ValueError, "k has batch 2, expected that of q, 1"),
    ({"v": zeros(1, 17, 2, 64)}, ValueError, r"v has shape \(1, 17, 2, 64\), expected that of k"),
    ({"k": zeros(1, 15, 2, 64), "v": zeros(1, 15, 2, 64)}, ValueError, "k has 15 tokens, expected at least the 16 of q"),
    ({"k": zeros(1, 16, 3, 64), "v": zeros(1, 16, 3, 64)}, ValueError, "q.num_heads is 4, must be a multiple of k.num_heads, which is 3"),
    ({"k": zeros(1, 16, 2, 56), "v": zeros(1, 16, 2, 56)}, ValueError, "k.head_dim is 56, must equal q.head_dim"),
    ({"q": zeros(1, 16, 4, 128)[..., ::2]}, ValueError, "q has stride 2 in head_dim, expected 1"),
    ({"q": zeros(1, 16, 4, 64)[:, ::-1]}, ValueError, "q.token_stride is -256, must be >= 0"),
    ({"scale": 0.0}, ValueError, "softmax_scale is 0, must be set to a finite number > 0"),
    ({"scale": float("nan")}, ValueError, "softmax_scale is nan"),
    ({"key_starts": [0, 0]}, ValueError, "key_starts has 2 entries, expected 1"),
    ({"key_starts": [17]}, ValueError, r"key_starts\[0\] is 17, expected 0 to 16"),
    ({"key_starts": [-1]}, ValueError, r"key_starts\[0\] is -1, expected 0 to 16"),
    ({"key_starts": [0.5]}, TypeError, "key_starts has 0.5, expected whole numbers"),
    ({"key_starts": [4], "key_lengths": [13]}, ValueError, r"key_lengths\[0\] is 13, expected 0 to 12"),
    ({"out": zeros(1, 16, 4, 32)}, ValueError, r"out has shape \(1, 16, 4, 32\), expected \(1, 16, 4, 64\)"),
    ({"out": zeros(1, 16, 4, 64, dtype=np.float16)}, TypeError, "out.dtype is float16, expected that of q"),
    ({"block_table": TABLE}, ValueError, "key_lengths is None, expected one length per sequence"),
    ({"block_table": TABLE.astype(np.int64), "key_lengths": [16]}, ValueError, "block_table is int64"),
    ({"workspace": zeros(4, dtype=np.uint8)}, ValueError, "workspace"),
    ({"num_threads": -1}, ValueError, "num_threads is -1"),
]


@pytest.mark.parametrize("change, error, message", CASES, ids=[case[2][:40] for case in CASES])
def test_refused(change, error, message):
    out = np.full((1, 16, 4, 64), 7, np.float32)
    arguments = {**GOOD, "out": out, **change}
    if "cu_seqlens" in change:
        del arguments["out"]
    with pytest.raises(error, match=message):
        crisp.attention(**arguments)
    assert (out == 7).all()


@pytest.mark.parametrize(
    "cu_seqlens, message",
    [
        ([0], "expected at least"),
        ([1, 16], "expected at least"),
        ([0, 9, 8, 16], r"cu_seqlens\[2\] is 8, expected >= the entry before it"),
        ([0, 15], r"cu_seqlens\[-1\] is 15, expected 16"),
        (([0, 16], [0, 8, 16]), r"cu_seqlens\[1\] has 3 entries, expected 2"),
    ],
)
def test_refused_cu_seqlens(cu_seqlens, message):
    with pytest.raises(ValueError, match=message):
        crisp.attention(*(a[0] for a in GOOD.values()), cu_seqlens=cu_seqlens)


def test_stride_that_is_no_whole_number_of_elements():
    packed = np.zeros((1, 16, 4), np.dtype([("a", np.float32, 64), ("b", np.uint8)]))["a"]
    assert packed.strides[2] % 4 == 1
    with pytest.raises(ValueError, match="a stride of 257 bytes, expected a multiple of its elements' 4"):
        crisp.attention(packed, packed, packed)


def test_read_only_output():
    out = zeros(1, 16, 4, 64)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        crisp.attention(**GOOD, out=out)


def test_output_that_overlaps_an_input():
    q = GOOD["q"].copy()
    with pytest.raises(ValueError, match="overlap"):
        crisp.attention(q, GOOD["k"], GOOD["v"], out=q)


def test_mask_of_another_call():
    mask = crisp.select_blocks(zeros(1, 300, 4, 64), zeros(1, 300, 2, 64))
    with pytest.raises(ValueError, match=r"mask.sequences is \(\(300, 300\),\), expected \(\(16, 16\),\)"):
        crisp.attend(**GOOD, mask=mask)
    with pytest.raises(TypeError, match="mask is a ndarray, expected a BlockMask"):
        crisp.attend(**GOOD, mask=mask.words)


def test_merge_states():
    out, lse = zeros(2, 8, 4, 64), zeros(2, 4, 8)
    with pytest.raises(ValueError, match=r"lse_a has shape \(2, 8, 4\), expected \(2, 4, 8\)"):
        crisp.merge_states(out, lse.swapaxes(1, 2), out, lse)
    with pytest.raises(ValueError, match=r"out_b has shape \(1, 8, 4, 64\), expected"):
        crisp.merge_states(out, lse, out[:1], lse[:1])
    with pytest.raises(TypeError, match="lse_a is float64, expected float32"):
        crisp.merge_states(out, lse.astype(np.float64), out, lse)


def test_page_that_does_not_exist():
    k = zeros(4, 16, 2, 64)
    table = np.array([[9]], np.int32)
    with pytest.raises(ValueError, match="9"):
        crisp.attention(GOOD["q"], k, k, block_table=table, key_lengths=[16])

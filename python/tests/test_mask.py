"""BlockMask: bits in and out, density, coverage."""

import numpy as np
import pytest

import crisp_prefill as crisp
from crisp_prefill.mask import visible_blocks

SPARSE = crisp.Crisp(min_budget_tokens=128, dense_below_tokens=0)


def random_bits(*shape, seed=0):
    return np.random.default_rng(seed).random(shape) < 0.5


@pytest.mark.parametrize("q_len, kv_len", [(512, 512), (300, 300), (130, 9000), (1, 64)])
@pytest.mark.parametrize("causal", [True, False])
def test_round_trip(q_len, kv_len, causal):
    seen = visible_blocks(q_len, kv_len, 128, causal)
    dense = random_bits(3, *seen.shape)
    mask = crisp.BlockMask.from_dense(dense, q_len=q_len, kv_len=kv_len, causal=causal)
    np.testing.assert_array_equal(mask.to_dense(), dense & seen)
    assert mask.density() == (dense & seen).sum() / (3 * seen.sum())
    np.testing.assert_array_equal(
        mask.density(per_head=True), ((dense & seen).sum(axis=(1, 2)) / seen.sum())[None]
    )


def test_words_are_the_documented_bits():
    dense = np.zeros((1, 3, 3), bool)
    dense[0, 2, 1] = True
    mask = crisp.BlockMask.from_dense(dense, q_len=384, kv_len=384)
    np.testing.assert_array_equal(mask.words, [[[0, 0], [0, 0], [2, 0]]])


def test_several_sequences():
    dense = random_bits(2, 3 + 1, 5)
    mask = crisp.BlockMask.from_dense(dense, q_len=[384, 100], kv_len=[384, 640])
    assert mask.rows_of(1) == (3, 4)
    assert not mask.to_dense()[:, :3, 3:].any()
    np.testing.assert_array_equal(mask.to_dense()[:, 3], dense[:, 3])


def test_a_mask_is_what_attention_obeys(qkv):
    q, k, v = qkv(q_len=384)
    mask = crisp.BlockMask.from_dense(random_bits(4, 3, 3, seed=5), q_len=384, kv_len=384)
    out, lse = crisp.attend(q, k, v, mask, return_lse=True)
    exact, exact_lse = crisp.reference.attention(q, k, v, policy=crisp.UserMask(mask))
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(exact_lse))
    assert np.isneginf(lse).any()
    assert not out[np.isneginf(lse).swapaxes(1, 2)].any()
    # float32 with sums of at most 384 terms; values are at most 5 standard deviations.
    assert np.abs(out - exact).max() <= 384 * np.finfo(np.float32).eps * np.abs(v).max()


def test_blocks_of_64(qkv):
    q, k, v = qkv(q_len=200)
    dense = random_bits(4, 4, 4)
    mask = crisp.BlockMask.from_dense(dense, q_len=200, kv_len=200, block_size=64)
    exact, _ = crisp.reference.attention(q, k, v, policy=crisp.UserMask(mask))
    for out in (crisp.attend(q, k, v, mask), crisp.attention(q, k, v, policy=crisp.UserMask(mask))):
        assert np.abs(out - exact).max() <= 200 * np.finfo(np.float32).eps * np.abs(v).max()
    kept = crisp.select_blocks(q, k, policy=crisp.Dense(), block_size=64)
    assert kept.density() == 1.0 and kept.num_q_blocks == 4


def test_coverage(qkv):
    q, k, _ = qkv(batch=2, q_len=300)
    mask = crisp.select_blocks(q, k, policy=SPARSE, key_starts=[0, 20])
    share = mask.coverage(q, k, key_starts=[0, 20])
    exact = crisp.reference.coverage(mask, q, k, key_starts=[0, 20])
    assert 0 < exact < 1
    # exp of a difference of two float32 numbers of magnitude |lse| <= 16.
    assert abs(share - exact) <= 2 * 16 * np.finfo(np.float32).eps
    full = crisp.select_blocks(q, k, policy=crisp.Dense())
    assert full.coverage(q, k) == 1.0


def test_refusals():
    with pytest.raises(ValueError, match=r"dense has 3 x 3 blocks, expected 4 x 4"):
        crisp.BlockMask.from_dense(np.ones((1, 3, 3), bool), q_len=512, kv_len=512)
    with pytest.raises(ValueError, match="dense is float64"):
        crisp.BlockMask.from_dense(np.ones((1, 4, 4)), q_len=512, kv_len=512)
    with pytest.raises(ValueError, match="block_size is 32"):
        crisp.BlockMask.from_dense(np.ones((1, 4, 4), bool), q_len=128, kv_len=128, block_size=32)
    with pytest.raises(ValueError, match="words has shape"):
        crisp.BlockMask(np.zeros((1, 1, 2), np.uint32), 200, ((128, 128),))

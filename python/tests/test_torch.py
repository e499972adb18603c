"""Tensors of torch, on the CPU and, where there is one, on a GPU; the operator crisp::prefill."""

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import crisp_prefill as crisp
from crisp_prefill.policies import policy_to_json
from crisp_prefill.torch import prefill

SPARSE = crisp.Crisp(min_budget_tokens=128, dense_below_tokens=0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


def tensors(arrays, dtype=torch.float32, device="cpu"):
    return [torch.from_numpy(np.ascontiguousarray(a)).to(device, dtype) for a in arrays]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_same_bits_as_numpy(qkv, dtype):
    q, k, v = tensors(qkv(batch=2, q_len=300), dtype)
    out, lse, report = crisp.attention(
        q, k, v, policy=SPARSE, key_starts=[0, 9], return_lse=True, return_report=True
    )
    assert out.dtype == dtype and out.shape == q.shape and lse.dtype == torch.float32
    if dtype == torch.bfloat16:
        bf16 = pytest.importorskip("ml_dtypes").bfloat16
        arrays = [a.view(torch.int16).numpy().view(bf16) for a in (q, k, v)]
    else:
        arrays = [a.numpy() for a in (q, k, v)]
    expected, expected_lse, expected_report = crisp.attention(
        *arrays, policy=SPARSE, key_starts=[0, 9], return_lse=True, return_report=True
    )
    assert torch.equal(out.float(), torch.from_numpy(expected.astype(np.float32)))
    assert torch.equal(lse, torch.from_numpy(np.ascontiguousarray(expected_lse)))
    np.testing.assert_array_equal(
        report.heads["num_blocks"], expected_report.heads["num_blocks"]
    )


def test_dense_equals_sdpa(qkv):
    q, k, v = tensors(qkv(batch=2, q_len=260))
    out = crisp.attention(q, k, v, policy=crisp.Dense())
    sdpa = torch.nn.functional.scaled_dot_product_attention
    heads = [a.transpose(1, 2) for a in (q, k, v)]
    theirs = sdpa(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)
    exact = sdpa(*(a.double() for a in heads), is_causal=True, enable_gqa=True).transpose(1, 2)
    assert (out - exact).abs().max() <= 2 * (theirs - exact).abs().max()


def test_mask_and_pages(qkv):
    q, k, v = tensors(qkv(batch=2, q_len=140, kv_len=256))
    mask = crisp.select_blocks(q, k, policy=SPARSE)
    out = crisp.attend(q, k, v, mask)
    assert torch.equal(out, crisp.attention(q, k, v, policy=SPARSE))
    again = crisp.BlockMask.from_dense(
        torch.from_numpy(mask.to_dense()), q_len=[140] * 2, kv_len=[256] * 2
    )
    assert torch.equal(again.words, mask.words)
    table = torch.tensor([[3, 1, 0, 2], [7, 6, 5, 4]], dtype=torch.int32)
    pages = [torch.empty(8, 64, 2, 64) for _ in range(2)]
    for pool, a in zip(pages, (k, v)):
        pool[table.long()] = a.reshape(2, 4, 64, 2, 64)
    paged = crisp.attention(q, *pages, policy=SPARSE, block_table=table, key_lengths=[256, 256])
    assert torch.equal(paged, out)


def test_dlpack_without_numpys_dtype(qkv):
    class Foreign:
        def __init__(self, a):
            self.a = a

        def __dlpack__(self, **how):
            return self.a.__dlpack__(**how)

        def __dlpack_device__(self):
            return self.a.__dlpack_device__()

    q, k, v = tensors(qkv(), torch.bfloat16)
    out = crisp.attention(Foreign(q), Foreign(k), Foreign(v), policy=SPARSE)
    assert torch.equal(out, crisp.attention(q, k, v, policy=SPARSE))


def test_no_copy(qkv, monkeypatch):
    from crisp_prefill import _core

    q, k, v = (a.transpose(1, 2).contiguous().transpose(1, 2) for a in tensors(qkv(q_len=200)))
    out = torch.empty(q.shape)
    seen, make = [], _core.Tensor
    monkeypatch.setattr(_core, "Tensor", lambda data, *rest: seen.append(data) or make(data, *rest))
    assert crisp.attention(q, k, v, out=out) is out
    assert set(seen) == {a.data_ptr() for a in (q, k, v, out)}


def test_refusals(qkv):
    q, k, v = tensors(qkv())
    with pytest.raises(TypeError, match="k is numpy, expected the same as q"):
        crisp.attention(q, k.numpy(), v)
    q.requires_grad_()
    for call in (crisp.attention, prefill):
        with pytest.raises(ValueError, match="q requires grad, expected a tensor that does not"):
            call(q, k, v)
    with torch.no_grad():
        crisp.attention(q, k, v)
    with pytest.raises(TypeError, match="v is on meta, expected cpu or cuda"):
        crisp.attention(k, k, v.to("meta"))
    with pytest.raises(TypeError, match="q.dtype is torch.float64"):
        crisp.attention(*(a.double() for a in (k, k, v)))


@pytest.mark.parametrize("lengths", [(None, None), ([0, 7], None), (None, [150, 130])])
def test_opcheck(qkv, lengths):
    q, k, v = tensors(qkv(batch=2, q_len=150))
    arguments = (q, k, v, policy_to_json(SPARSE), 0.125, True, *lengths)
    torch.library.opcheck(torch.ops.crisp.prefill.default, arguments)


def test_compiles_whole_and_gives_the_same_bits(qkv):
    def layer(q, k, v):
        out, lse = prefill(q * 1.0, k, v, policy=SPARSE)
        return out + 1, lse

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for q_len in (150, 200, 333):
        q, k, v = tensors(qkv(batch=2, q_len=q_len))
        for ours, eager in zip(compiled(q, k, v), layer(q, k, v)):
            assert torch.equal(ours, eager)


def test_compiles_with_inductor(qkv):
    q, k, v = tensors(qkv(q_len=150))
    compiled = torch.compile(lambda q, k, v: prefill(q + 1, k, v, policy=SPARSE)[0] * 2, fullgraph=True)
    assert torch.equal(compiled(q, k, v), crisp.attention(q + 1, k, v, policy=SPARSE) * 2)


def test_few_compilations_for_many_lengths(qkv):
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(
        lambda q, k, v: prefill(q, k, v, policy=SPARSE)[0], fullgraph=True, dynamic=True,
        backend=counter,
    )
    for q_len in range(130, 150):
        compiled(*tensors(qkv(q_len=q_len)))
    assert counter.frame_count <= 2


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gpu_equals_the_reference(qkv, dtype):
    q, k, v = tensors(qkv(batch=2, q_len=700), dtype, "cuda")
    out, lse, report = crisp.attention(
        q, k, v, policy=SPARSE, key_starts=[0, 33], return_lse=True, return_report=True
    )
    exact, exact_lse = crisp.reference.attention(q, k, v, policy=SPARSE, key_starts=[0, 33])
    heads = crisp.reference.select_blocks(q, k, policy=SPARSE, key_starts=[0, 33])
    assert [row["num_blocks"] for row in report.rows()] == [h.blocks.sum() for h in heads]
    assert out.device == q.device and lse.device == q.device
    # Weights and results are rounded to the half type once each; |v| bounds every result.
    allowed = 2 * torch.finfo(dtype).eps * v.abs().max().item()
    assert np.abs(out.float().cpu().numpy() - exact).max() <= allowed


@needs_gpu
def test_gpu_current_stream_and_graph(qkv):
    q, k, v = tensors(qkv(q_len=512), torch.bfloat16, "cuda")
    expected = crisp.attention(q, k, v, policy=SPARSE)
    out = torch.zeros_like(q)
    bytes_needed = crisp.workspace_bytes(q, k, policy=SPARSE)
    workspace = torch.empty(bytes_needed, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        crisp.attention(q, k, v, policy=SPARSE, out=out, workspace=workspace)
    assert not out.any()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        q.zero_()
        late = crisp.attention(q, k, v, policy=SPARSE)
    side.synchronize()
    assert torch.equal(late, crisp.attention(torch.zeros_like(q), k, v, policy=SPARSE))


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs on this machine")
def test_second_gpu_while_the_first_is_current(qkv):
    first = tensors(qkv(q_len=300), torch.bfloat16, "cuda:0")
    second = [a.to("cuda:1") for a in first]
    assert torch.equal(
        crisp.attention(*first, policy=SPARSE).cpu(), crisp.attention(*second, policy=SPARSE).cpu()
    )

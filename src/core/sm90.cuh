// sm90.cuh - Hopper building blocks: mbarriers, tensor-map copies, wgmma, named barriers.
// Every wrapper is one PTX instruction, or one tight group; no policy lives here.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#define CRISP_DEVICE __device__ __forceinline__

namespace crisp::sm90 {

CRISP_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarrier

struct Barrier {
  uint64_t word;
};

CRISP_DEVICE void init(Barrier& b, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&b)), "r"(arrivals)
               : "memory");
}
// Makes the inits visible to the copy engine.
CRISP_DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
CRISP_DEVICE void arrive(Barrier& b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&b)) : "memory");
}
CRISP_DEVICE void arrive_expecting(Barrier& b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&b)),
               "r"(bytes)
               : "memory");
}
CRISP_DEVICE bool try_wait(Barrier& b, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(done)
      : "r"(shared_address(&b)), "r"(parity)
      : "memory");
  return done != 0;
}
CRISP_DEVICE void wait(Barrier& b, uint32_t parity) {
  while (!try_wait(b, parity)) {
  }
}

// Position in a ring of shared-memory slots; `parity` flips each time around.
template <int kSlots>
struct Ring {
  int slot = 0;
  uint32_t parity = 0;
  CRISP_DEVICE void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// ---- tensor-map copies (TMA)

CRISP_DEVICE uint64_t keep_in_l2() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
CRISP_DEVICE uint64_t stream_through_l2() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Maps view a tensor as [64 columns, tokens of a page, column halves, heads, pages].
CRISP_DEVICE void load_box(const CUtensorMap& map, Barrier& full, void* to, int token, int half,
                           int head, int page, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&full)), "r"(0), "r"(token), "r"(half), "r"(head), "r"(page),
      "l"(policy)
      : "memory");
}
CRISP_DEVICE void prefetch_box(const CUtensorMap& map, int token, int head) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %1, %3, %1}];" ::"l"(&map),
               "r"(0), "r"(token), "r"(head)
               : "memory");
}
// What ordinary stores wrote to shared memory becomes visible to wgmma and the copy engine.
CRISP_DEVICE void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- dependent launches: the next kernel of the stream may start while this one still runs

// From here on the next kernel may take free multiprocessors.
CRISP_DEVICE void allow_next_kernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Everything the kernels before this one wrote is visible; returns at once after a plain launch.
CRISP_DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- named barriers, register pool

template <int kThreads>
CRISP_DEVICE void named_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
CRISP_DEVICE void named_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kRegisters>
CRISP_DEVICE void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
CRISP_DEVICE void acquire_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- wgmma

// Shared-memory matrix descriptor, 128-byte swizzle. Offsets are added in units of 16 bytes.
CRISP_DEVICE uint64_t matrix_descriptor(uint32_t address, uint32_t leading_bytes,
                                        uint32_t stride_bytes) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) |
         static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32 | 1ull << 62;
}
CRISP_DEVICE constexpr uint64_t descriptor_step(uint32_t bytes) { return bytes >> 4; }

CRISP_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
CRISP_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
CRISP_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// After a wait: the compiler must not move reads of the accumulators above this point.
template <int N>
CRISP_DEVICE void results_ready(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i]));
}

#define CRISP_F8(x, i)                                                                        \
  "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), \
      "+f"(x[i + 6]), "+f"(x[i + 7])
#define CRISP_F32(x) CRISP_F8(x, 0), CRISP_F8(x, 8), CRISP_F8(x, 16), CRISP_F8(x, 24)
#define CRISP_F64(x) \
  CRISP_F32(x), CRISP_F8(x, 32), CRISP_F8(x, 40), CRISP_F8(x, 48), CRISP_F8(x, 56)
#define CRISP_D32                                                                              \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CRISP_D64                                                                           \
  CRISP_D32                                                                                 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define CRISP_WGMMA_SHARED_A(TYPE)                                                \
  asm volatile(                                                                   \
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"                          \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" CRISP_D64 \
      "}, %64, %65, p, 1, 1, 0, 0;\n\t}"                                          \
      : CRISP_F64(d)                                                              \
      : "l"(a), "l"(b), "n"(kAccumulate ? 1 : 0))

// d (64 x 128) = or += A (64 x 16, shared, K-major) * B (16 x 128, shared, K-major)
template <class Element, bool kAccumulate>
CRISP_DEVICE void wgmma_shared_a(float (&d)[64], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<Element, __half>)
    CRISP_WGMMA_SHARED_A("f16");
  else
    CRISP_WGMMA_SHARED_A("bf16");
}

#define CRISP_WGMMA_REGISTER_A(TYPE, N, D, F, A0, A1, A2, A3, B)                               \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" D "}, {" A0 \
               ", " A1 ", " A2 ", " A3 "}, " B ", 1, 1, 1, 1;"                                 \
               : F(d)                                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d (64 x 128 or 64 x 64) += A (64 x 16, registers) * B (16 x N, shared, rows contiguous)
template <class Element>
CRISP_DEVICE void wgmma_register_a(float (&d)[64], const uint32_t* a, uint64_t b) {
  if constexpr (std::is_same_v<Element, __half>)
    CRISP_WGMMA_REGISTER_A("f16", "128", CRISP_D64, CRISP_F64, "%64", "%65", "%66", "%67", "%68");
  else
    CRISP_WGMMA_REGISTER_A("bf16", "128", CRISP_D64, CRISP_F64, "%64", "%65", "%66", "%67", "%68");
}
template <class Element>
CRISP_DEVICE void wgmma_register_a(float (&d)[32], const uint32_t* a, uint64_t b) {
  if constexpr (std::is_same_v<Element, __half>)
    CRISP_WGMMA_REGISTER_A("f16", "64", CRISP_D32, CRISP_F32, "%32", "%33", "%34", "%35", "%36");
  else
    CRISP_WGMMA_REGISTER_A("bf16", "64", CRISP_D32, CRISP_F32, "%32", "%33", "%34", "%35", "%36");
}

#undef CRISP_WGMMA_SHARED_A
#undef CRISP_WGMMA_REGISTER_A

// s (64 x 128) = Q K^T of a 64-row and a 128-row tile in shared memory, each [column half][row][64]
// with 128-byte rows, swizzled; issued and committed, not waited for.
template <class Element, int kDim>
CRISP_DEVICE void issue_scores(float (&s)[64], uint64_t q, uint64_t k) {
  constexpr uint32_t kHalfQuery = 64 * 128, kHalfTile = 128 * 128;  // bytes
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {  // 16 columns at a time
    const uint64_t qi = q + descriptor_step((i & 3) * 32 + (i >> 2) * kHalfQuery);
    const uint64_t ki = k + descriptor_step((i & 3) * 32 + (i >> 2) * kHalfTile);
    if (i == 0)
      wgmma_shared_a<Element, false>(s, qi, ki);
    else
      wgmma_shared_a<Element, true>(s, qi, ki);
  }
  wgmma_commit();
}

// ---- scalar helpers

CRISP_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
template <class Element>
CRISP_DEVICE uint32_t pack(float low, float high) {
  uint32_t r;
  if constexpr (std::is_same_v<Element, __half>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// Over the four lanes that share a row of an accumulator.
CRISP_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
CRISP_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

}  // namespace crisp::sm90

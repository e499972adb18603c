// mask.h - what each head keeps -> the rows of the BlockMask, and the report.
//
// All functions write every word of the batch's rows, also the padding behind the segment's last
// kv_block, and, unless it is null, report[num_heads].
#pragma once

#include <cstdint>

#include "core/head_batch.h"
#include "core/run.h"
#include "crisp/crisp.h"
#include "proxy/proxy.h"
#include "route/route.h"
#include "select/select.h"

namespace crisp {

// Row i (absolute block) = causal(i) & (vertical | (slash >> (num_blocks - 1 - i)) | pooled rows).
// Rows of pooled heads already hold their pooled blocks and are added to; heads routed kDense get
// every causal block. Masses and counts go into the report as they are.
void fill_mask(const HeadBatch& batch, const ProxyMap& map, const Routes& routes, const Kept& kept,
               const BlockMask& mask, HeadReport* report, const Run& run);

// Every block that attend would visit: the causal ones, or all of them. Any block size.
void fill_dense(const HeadBatch& batch, const BlockMask& mask, HeadReport* report, const Run& run);

// The blocks of `source`, a mask of the same shape, that attend would visit. Any block size;
// `source.words` may be mask.words.
void copy_mask(const HeadBatch& batch, const BlockMask& source, const BlockMask& mask,
               HeadReport* report, const Run& run);

// ---- between mask.cc and its kernels

struct MaskJob {
  const HeadBatch& batch;
  const BlockMask& mask;
  HeadReport* report;
  int num_threads;
};

void fill_mask_cpu(const MaskJob& job, const ProxyMap& map, const Routes& routes, const Kept& kept);
void fill_mask_cuda(const MaskJob& job, const ProxyMap& map, const Routes& routes, const Kept& kept,
                    CUstream_st* stream);
void fill_dense_cpu(const MaskJob& job);
void copy_mask_cpu(const MaskJob& job, const BlockMask& source);
void fill_dense_cuda(const MaskJob& job, CUstream_st* stream);
void copy_mask_cuda(const MaskJob& job, const BlockMask& source, CUstream_st* stream);

}  // namespace crisp

/* The C interface from C11: compiles, runs, and returns what the formula says. Every key is the
 * same, so a query attends to its keys evenly and its output is their mean value. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crisp/crisp_c.h"

enum { TOKENS = 300, Q_HEADS = 4, KV_HEADS = 2, HEAD_DIM = 16 };

static int failures = 0;

static void expect(int condition, const char* what) {
  if (condition) return;
  ++failures;
  printf("FAILED: %s (last error: %s)\n", what, crisp_last_error());
}

static crisp_tensor tensor(float* data, int64_t heads) {
  crisp_tensor t;
  memset(&t, 0, sizeof(t));
  t.data = data;
  t.num_tokens = TOKENS;
  t.num_heads = heads;
  t.head_dim = HEAD_DIM;
  t.token_stride = heads * HEAD_DIM;
  t.head_stride = HEAD_DIM;
  t.dtype = CRISP_FLOAT32;
  return t;
}

static void fill(float* q, float* k, float* v) {
  for (int i = 0; i < TOKENS * Q_HEADS * HEAD_DIM; ++i) q[i] = (float)(i % 7) - 3.f;
  for (int i = 0; i < TOKENS * KV_HEADS * HEAD_DIM; ++i) k[i] = 0.5f;
  for (int i = 0; i < TOKENS * KV_HEADS * HEAD_DIM; ++i) v[i] = (float)(i / (KV_HEADS * HEAD_DIM));
}

static void check_outputs(const float* out, const float* lse, const float* q) {
  int wrong = 0;
  for (int t = 0; t < TOKENS; ++t) {
    for (int h = 0; h < Q_HEADS; ++h) {
      const float* row = q + (t * Q_HEADS + h) * HEAD_DIM;
      float logit = 0;
      for (int i = 0; i < HEAD_DIM; ++i) logit += 0.25f * 0.5f * row[i];
      for (int i = 0; i < HEAD_DIM; ++i)
        wrong += !(fabsf(out[(t * Q_HEADS + h) * HEAD_DIM + i] - 0.5f * (float)t) < 1e-3f);
      wrong += !(fabsf(lse[h * TOKENS + t] - (logit + logf((float)t + 1.f))) < 1e-4f);
    }
  }
  if (wrong > 0) printf("%d values differ\n", wrong);
  expect(wrong == 0, "out is the mean of the values so far, lse is logit + log(count)");
}

static void run(float* q, float* k, float* v, float* out, float* lse) {
  crisp_head_report report[Q_HEADS];
  crisp_policy policy = crisp_policy_default(CRISP_CRISP);
  crisp_args args;
  void* memory = NULL;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.q = tensor(q, Q_HEADS);
  args.k = tensor(k, KV_HEADS);
  args.v = tensor(v, KV_HEADS);
  args.out = tensor(out, Q_HEADS);
  args.lse = lse;
  args.softmax_scale = 0.25f;
  args.causal = 1;
  args.policy = &policy;
  args.report = report;
  expect(crisp_mask_shape(&args, 128, &args.mask) == CRISP_OK, "crisp_mask_shape");
  args.mask.words = calloc((size_t)crisp_mask_bytes(&args.mask), 1);
  expect(crisp_why_unsupported(&args) == NULL, "crisp_why_unsupported");
  expect(crisp_workspace_size(&args, &args.workspace_bytes) == CRISP_OK, "crisp_workspace_size");
  memory = malloc(args.workspace_bytes + 256);
  args.workspace = (char*)memory + (256 - (uintptr_t)memory % 256) % 256;
  expect(crisp_prefill(&args) == CRISP_OK, "crisp_prefill");
  check_outputs(out, lse, q);
  expect(report[0].pattern == CRISP_PATTERN_DENSE && report[0].num_blocks == 6,
         "a prompt below the gate is dense: 6 causal blocks");

  memset(out, 0, sizeof(float) * TOKENS * Q_HEADS * HEAD_DIM);
  memset(lse, 0, sizeof(float) * TOKENS * Q_HEADS);
  expect(crisp_select(&args) == CRISP_OK, "crisp_select");
  expect(crisp_attend(&args) == CRISP_OK, "crisp_attend");
  check_outputs(out, lse, q);

  args.q.head_dim = 12;
  expect(crisp_prefill(&args) == CRISP_INVALID_ARGUMENT, "head_dim 12 is refused");
  expect(strstr(crisp_last_error(), "q.head_dim is 12") != NULL, "the error names the value");
  free(memory);
  free(args.mask.words);
}

int main(void) {
  float* q = malloc(sizeof(float) * TOKENS * Q_HEADS * HEAD_DIM);
  float* k = malloc(sizeof(float) * TOKENS * KV_HEADS * HEAD_DIM);
  float* v = malloc(sizeof(float) * TOKENS * KV_HEADS * HEAD_DIM);
  float* out = calloc(TOKENS * Q_HEADS * HEAD_DIM, sizeof(float));
  float* lse = calloc(TOKENS * Q_HEADS, sizeof(float));
  if (q == NULL || k == NULL || v == NULL || out == NULL || lse == NULL) return 1;
  fill(q, k, v);
  run(q, k, v, out, lse);
  free(q);
  free(k);
  free(v);
  free(out);
  free(lse);
  printf("crisp %s (ABI %u), %s: %s\n", crisp_version(), (unsigned)crisp_abi_version(),
         crisp_cpu_target(), failures == 0 ? "ok" : "FAILED");
  return failures == 0 ? 0 : 1;
}

/* Prefill attention of one prompt from C, against an installed crisp:
 *   cc main.c $(pkg-config --cflags --libs crisp) -o consumer && ./consumer */
#include <crisp/crisp_c.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 4096, Q_HEADS = 4, KV_HEADS = 2, HEAD_DIM = 64 };

static float* noise(size_t count, uint32_t seed) {
  float* values = malloc(count * sizeof(float));
  if (values == NULL) exit(1);
  for (size_t i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    values[i] = (float)(seed >> 8) / 8388608.f - 1.f;
  }
  return values;
}

static crisp_tensor tensor(float* data, int64_t heads) {
  crisp_tensor t;
  memset(&t, 0, sizeof(t));
  t.data = data;
  t.dtype = CRISP_FLOAT32;
  t.num_tokens = TOKENS;
  t.num_heads = heads;
  t.head_dim = HEAD_DIM;
  t.token_stride = heads * HEAD_DIM;
  t.head_stride = HEAD_DIM;
  return t;
}

static void check(int status, const char* what) {
  if (status == CRISP_OK) return;
  fprintf(stderr, "%s: %s: %s\n", what, crisp_strerror(status), crisp_last_error());
  exit(1);
}

int main(void) {
  float* q = noise((size_t)TOKENS * Q_HEADS * HEAD_DIM, 1);
  float* k = noise((size_t)TOKENS * KV_HEADS * HEAD_DIM, 2);
  float* v = noise((size_t)TOKENS * KV_HEADS * HEAD_DIM, 3);
  float* out = noise((size_t)TOKENS * Q_HEADS * HEAD_DIM, 4);
  crisp_head_report report[Q_HEADS];
  crisp_policy policy = crisp_policy_default(CRISP_CRISP);
  policy.alpha = 1.25f;

  crisp_args args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.q = tensor(q, Q_HEADS);
  args.k = tensor(k, KV_HEADS);
  args.v = tensor(v, KV_HEADS);
  args.out = tensor(out, Q_HEADS);
  args.softmax_scale = 0.125f;
  args.causal = 1;
  args.policy = &policy;
  args.report = report;
  check(crisp_mask_shape(&args, 128, &args.mask), "crisp_mask_shape");
  args.mask.words = malloc((size_t)crisp_mask_bytes(&args.mask));
  check(crisp_workspace_size(&args, &args.workspace_bytes), "crisp_workspace_size");
  args.workspace = aligned_alloc(256, (args.workspace_bytes + 255) / 256 * 256);
  check(crisp_prefill(&args), "crisp_prefill");

  int64_t causal = 0;
  check(crisp_num_causal_blocks(&args, 128, &causal), "crisp_num_causal_blocks");
  printf("crisp %s on %s\n", crisp_version(), crisp_cpu_target());
  for (int head = 0; head < Q_HEADS; ++head)
    printf("head %d: density %.2f\n", head, (double)report[head].num_blocks / (double)causal);
  free(args.workspace);
  free(args.mask.words);
  free(out);
  free(v);
  free(k);
  free(q);
  return 0;
}

/* crisp_c.h - the C interface: crisp.h with segments, pages and policies as plain structs and
 * errors as codes. Compiles as C11 and as C++. crisp.h says what every field and function means;
 * this file says what C adds.
 *
 * Nothing is thrown across it. A call that returns CRISP_INVALID_ARGUMENT has written nothing.
 * Every function may be called from several threads at once as long as outputs and workspaces
 * differ.
 *
 * Structs that carry struct_size grow at their end only. Set it to sizeof of the struct your
 * program was compiled with: a library newer than the program takes missing fields as their
 * defaults, a library older than the program refuses the call. */
#ifndef CRISP_CRISP_C_H
#define CRISP_CRISP_C_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define CRISP_C_API
#else
#define CRISP_C_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { CRISP_ABI_VERSION = 0 }; /* raised with the soname, when an old program must not load */

enum crisp_status {
  CRISP_OK = 0,
  CRISP_INVALID_ARGUMENT = 1, /* refused at the door, nothing written or enqueued */
  CRISP_DEVICE_ERROR = 2,     /* the device failed after that; outputs are undefined */
  CRISP_OUT_OF_MEMORY = 3,    /* host memory of the threads ran out; outputs are undefined */
  CRISP_INTERNAL_ERROR = 4    /* anything else, a bug of crisp or of a callback */
};

enum crisp_device { CRISP_CPU = 0, CRISP_CUDA = 1 };
enum crisp_dtype { CRISP_FLOAT32 = 0, CRISP_FLOAT16 = 1, CRISP_BFLOAT16 = 2 };
enum crisp_policy_kind {
  CRISP_DENSE = 0,
  CRISP_CRISP = 1,
  CRISP_FLEX_PREFILL = 2,
  CRISP_USER_MASK = 3
};
enum crisp_routing { CRISP_STRUCTURAL_MASS = 0, CRISP_JS_DISTANCE = 1 };
enum crisp_selection { CRISP_NOISE_FLOOR = 0, CRISP_COVERAGE = 1 };
enum crisp_noise_floor { CRISP_MEAN = 0, CRISP_MEDIAN = 1 };
enum crisp_flex_variant { CRISP_OFFICIAL = 0, CRISP_PAPER = 1 };
enum crisp_pattern {
  CRISP_PATTERN_DENSE = 0,
  CRISP_PATTERN_VERTICAL_SLASH = 1,
  CRISP_PATTERN_POOLED = 2,
  CRISP_PATTERN_USER_MASK = 3
};
enum crisp_stage {
  CRISP_STAGE_PROXY = 0,
  CRISP_STAGE_ROUTE = 1,
  CRISP_STAGE_SELECT = 2,
  CRISP_STAGE_MASK = 3,
  CRISP_STAGE_ATTEND = 4
};

/* Borrowed [num_tokens, num_heads, head_dim], strides in elements; data of inputs is only read. */
typedef struct crisp_tensor {
  void* data;
  int64_t num_tokens, num_heads, head_dim;
  int64_t token_stride, head_stride;
  int64_t page_stride; /* paged k and v only */
  int32_t dtype;       /* enum crisp_dtype */
  int32_t reserved;    /* 0 */
} crisp_tensor;

typedef struct crisp_segment {
  int64_t q_start, q_len;   /* rows of q, out and lse */
  int64_t kv_start, kv_len; /* rows of k and v; paged: tokens counted along the page row */
  int64_t page_row;         /* paged: row of the block table */
} crisp_segment;

/* One bit per (head, q_block, kv_block); rows are crisp_mask_words_per_row() words long. */
typedef struct crisp_mask {
  uint32_t* words; /* borrowed, 8-byte aligned */
  int64_t num_heads, num_q_blocks, num_kv_blocks;
  int64_t block_size;
} crisp_mask;

static inline int64_t crisp_mask_words_per_row(const crisp_mask* mask) {
  return (mask->num_kv_blocks + 63) / 64 * 2;
}
static inline int64_t crisp_mask_bytes(const crisp_mask* mask) {
  return 4 * crisp_mask_words_per_row(mask) * mask->num_heads * mask->num_q_blocks;
}

/* How a head chooses its blocks: `kind` and the parameters of every kind; those of other kinds are
 * ignored. Start from crisp_policy_default(kind). */
typedef struct crisp_policy {
  uint32_t struct_size;
  int32_t kind; /* enum crisp_policy_kind */
  float tau_proxy, alpha;
  float gamma;                         /* CRISP_CRISP and CRISP_FLEX_PREFILL */
  float tau_js;                        /* CRISP_CRISP: tau_js; CRISP_FLEX_PREFILL: tau */
  int32_t sink_tokens, recency_tokens; /* CRISP_CRISP */
  int32_t min_budget_tokens;           /* CRISP_CRISP and CRISP_FLEX_PREFILL */
  int32_t dense_below_tokens;          /* CRISP_CRISP and CRISP_FLEX_PREFILL */
  int32_t noise_floor;                 /* enum crisp_noise_floor */
  int32_t pooled_keeps_budget;         /* 0 or 1 */
  int32_t routing, selection;          /* enum crisp_routing, enum crisp_selection */
  int32_t variant;                     /* enum crisp_flex_variant */
  int32_t reserved;                    /* 0 */
  crisp_mask mask;                     /* CRISP_USER_MASK */
} crisp_policy;

typedef struct crisp_head_report {
  uint8_t pattern; /* enum crisp_pattern */
  uint8_t reserved[3];
  float structural_mass, js_distance; /* NaN where not computed */
  int32_t num_vertical, num_slash;
  int64_t num_blocks;
} crisp_head_report;

/* One call. Zero the struct, then set what the call uses; NULL means unwanted or unused. */
typedef struct crisp_args {
  uint32_t struct_size;
  int32_t device;       /* enum crisp_device */
  crisp_tensor q, k, v; /* v: not read by crisp_select, but its shape is */
  crisp_tensor out;     /* crisp_attend and crisp_prefill */
  float* lse;           /* [q.num_heads, q.num_tokens], natural log; may be NULL */
  float softmax_scale;
  int32_t causal;                /* 0 or 1 */
  const crisp_segment* segments; /* host memory; none: one, all of q against all of k */
  int64_t num_segments;
  const int32_t* block_table; /* paged: [num_page_rows, page_row_stride] */
  int64_t num_page_rows, page_row_stride;
  int64_t page_size;          /* tokens per page; 0: contiguous k and v */
  const crisp_policy* policy; /* not read by crisp_attend */
  crisp_mask mask;            /* shape from crisp_mask_shape, words from the caller */
  crisp_head_report* report;  /* [max(num_segments, 1), q.num_heads]; may be NULL */
  void* workspace;            /* 256-byte aligned */
  size_t workspace_bytes;
  void* stream;                                /* CUDA: cudaStream_t */
  int32_t num_threads;                         /* CPU: 0 means all cores */
  int32_t reserved;                            /* 0 */
  void (*on_stage)(int32_t stage, void* user); /* enum crisp_stage; may be NULL */
  void* on_stage_user;
} crisp_args;

/* Merges two attention states over disjoint key sets; out and lse may be the arrays of a. */
typedef struct crisp_merge_args {
  uint32_t struct_size;
  int32_t device;
  crisp_tensor out_a, out_b, out;
  const float *lse_a, *lse_b; /* [num_heads, num_tokens] */
  float* lse;                 /* may be NULL */
  void* stream;
  int32_t num_threads;
  int32_t reserved; /* 0 */
} crisp_merge_args;

/* ---- Shapes: data pointers may be NULL. policy NULL: what crisp_attend alone needs. */

/* Fills `mask` with the shape the call needs, words NULL. Reads no mask and no policy of args. */
CRISP_C_API int crisp_mask_shape(const crisp_args* args, int64_t block_size, crisp_mask* mask);
/* Blocks per head that a dense run visits: the denominator of density. */
CRISP_C_API int crisp_num_causal_blocks(const crisp_args* args, int64_t block_size,
                                        int64_t* blocks);
CRISP_C_API int crisp_workspace_size(const crisp_args* args, size_t* bytes);
/* What dense_below_tokens was measured to be best at on args->device; -1: not measured there. Reads
 * device and policy of args. */
CRISP_C_API int crisp_measured_gate(const crisp_args* args, int32_t* tokens);
/* NULL if the call would be accepted, else the reason, valid until the next call on this thread. */
CRISP_C_API const char* crisp_why_unsupported(const crisp_args* args);

/* ---- Work. */

CRISP_C_API int crisp_select(const crisp_args* args);  /* q, k -> mask, report */
CRISP_C_API int crisp_attend(const crisp_args* args);  /* q, k, v, mask -> out, lse */
CRISP_C_API int crisp_prefill(const crisp_args* args); /* both */
CRISP_C_API int crisp_merge_states(const crisp_merge_args* args);

/* ---- The rest. */

/* Fills the first struct_size bytes of `policy` with the defaults of a kind. */
CRISP_C_API int crisp_policy_init(crisp_policy* policy, uint32_t struct_size, int32_t kind);

static inline crisp_policy crisp_policy_default(int32_t kind) {
  crisp_policy policy;
  policy.struct_size = 0; /* stays 0, which every call refuses, if the kind is unknown */
  crisp_policy_init(&policy, (uint32_t)sizeof(policy), kind);
  return policy;
}

CRISP_C_API const char* crisp_strerror(int status); /* "ok", "invalid argument", ... */
/* What the last call that failed on this thread said; "" before the first. */
CRISP_C_API const char* crisp_last_error(void);
CRISP_C_API uint32_t crisp_abi_version(void);
CRISP_C_API const char* crisp_version(void);    /* "major.minor.patch" */
CRISP_C_API const char* crisp_cpu_target(void); /* instruction set of the CPU kernels */

#ifdef __cplusplus
}
#endif

#endif /* CRISP_CRISP_C_H */

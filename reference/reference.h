// reference.h - the papers in plain double precision: the only oracle. No src/ include, no SIMD, no
// threads, the papers' order and names. All functions work on one query head of one sequence.
//
//   proxy.h    Q, K   -> proxy map: vertical and slash mass, structural mass, JS distance
//   select.h   masses -> kept vertical columns and slash diagonals (noise floor, coverage)
//   pooled.h   Q, K   -> pooled map and its gamma prefix
//   policy.h   Q, K   -> kept blocks: CRISP, FlexPrefill, dense
//   attend.h   Q, K, V and kept blocks -> out, lse; coverage and error of a selection
//
// CRISP = arXiv 2609.01925, FlexPrefill = arXiv 2502.20766 and its published code.
#pragma once

#include "reference/attend.h"
#include "reference/policy.h"
#include "reference/pooled.h"
#include "reference/proxy.h"
#include "reference/select.h"
#include "reference/types.h"

// run.h - what a stage needs besides its data: where to run, scratch, and whom to tell.
//
// A policy's selection is one function that both counts its workspace and does its work: with a
// counting workspace every stage takes its memory and returns.
#pragma once

#include "core/parallel.h"
#include "core/workspace.h"
#include "crisp/crisp.h"

namespace crisp {

struct Run {
  const Context& context;
  Workspace& workspace;

  bool is_counting() const { return workspace.is_counting(); }
  bool is_cuda() const { return context.device == Device::kCuda; }
  int num_threads() const { return resolve_num_threads(context.num_threads); }
  // Tells the caller that a part of `stage` has run.
  void finished(Stage stage) const {
    if (context.on_stage != nullptr) context.on_stage(stage, context.on_stage_user);
  }
  // Guards a dispatch that has CPU kernels only; the door has refused the call before.
  void require_cpu() const {
    CRISP_CHECK(context.device == Device::kCpu,
                "context.device is kCuda, must be kCpu: this build has no CUDA backend");
  }
};

}  // namespace crisp

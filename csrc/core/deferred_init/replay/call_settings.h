#pragma once

// Settings that only some calls depend on: NOTE [Settings that kernels read].

#include <torchext/macros.h>

#include "../graph/op_graph.h"

namespace torchext {

// While it lives, PyTorch's kernels use as many threads as when `node` was recorded, if its result can depend on that.
// Sums do, for example; random fills, copies and additions do not. Raises an error if the number cannot be restored.
class ThreadCountGuard {
 public:
  explicit ThreadCountGuard(const OpNode& node);
  C10_DISABLE_COPY_AND_ASSIGN(ThreadCountGuard);
  ~ThreadCountGuard();

 private:
  int previous_;
};

// Raises an error if `node`, which reads float32 on a CUDA device, was recorded under another precision of matrix
// products. PyTorch's default for this setting cannot be read, so the setting cannot be restored.
void checkCudaPrecision(const OpNode& node);

}  // namespace torchext

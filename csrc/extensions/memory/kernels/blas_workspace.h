#pragma once

// The sizes and lifetimes of the workspaces of cuBLAS and cuBLASLt.

#include <cstdint>

#include <torchext/macros.h>

#include "kernel_call.h"

namespace torchext {

// A workspace that a kernel holds during a cuBLAS call.
class BlasWorkspace {
 public:
  enum class Library : std::uint8_t { kCublas, kCublasLt };

  // Records that the kernel acquires the workspace for `library`.
  BlasWorkspace(KernelCall& call, Library library);
  C10_DISABLE_COPY_AND_ASSIGN(BlasWorkspace);
  // Records that the kernel releases it.
  ~BlasWorkspace();

 private:
  KernelCall& call_;
  KernelCall::BlockNumber block_ = -1;
};

// Returns the size of a workspace for `library`, in bytes.
TORCHEXT_API std::int64_t blasWorkspaceSize(BlasWorkspace::Library library, const GpuDescription& gpu);

// Records one call of `library`.
void callBlas(KernelCall& call, BlasWorkspace::Library library = BlasWorkspace::Library::kCublas);

}  // namespace torchext

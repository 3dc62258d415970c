#pragma once

// The workspaces of cuBLAS and cuBLASLt: how large they are, and how long they live.

#include <cstdint>

#include <torchext/macros.h>

#include "kernel_call.h"

namespace torchext {

// A workspace that a kernel holds while its call of cuBLAS runs.
class BlasWorkspace {
 public:
  enum class Library : std::uint8_t { kCublas, kCublasLt };

  // The kernel gets the workspace for `library`.
  BlasWorkspace(KernelCall& call, Library library);
  C10_DISABLE_COPY_AND_ASSIGN(BlasWorkspace);
  // The kernel gives it back.
  ~BlasWorkspace();

 private:
  KernelCall& call_;
  KernelCall::BlockNumber block_ = -1;
};

// Returns how many bytes a workspace for `library` has.
TORCHEXT_API std::int64_t blasWorkspaceSize(BlasWorkspace::Library library, const GpuDescription& gpu);

// The kernel calls `library` once.
void callBlas(KernelCall& call, BlasWorkspace::Library library = BlasWorkspace::Library::kCublas);

}  // namespace torchext

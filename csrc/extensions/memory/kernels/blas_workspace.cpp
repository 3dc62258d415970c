#include "blas_workspace.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <optional>
#include <regex>
#include <string>

#include <c10/util/env.h>

#include "../../../core/torch_internals/torch_compat.h"

namespace torchext {

namespace {

// Returns true if the first call of a thread on a stream allocates a workspace that is kept
// (`isCUDABlasWorkspaceCachingEnabled` in CublasHandlePool.cpp).
bool keepsWorkspaces() {
  static const bool keeps =
      !compat::applies("freed_workspaces") || c10::utils::check_env("TORCH_CUBLAS_WORKSPACE_CACHE") == true;
  return keeps;
}

// Returns true if a kept workspace serves both libraries (`unified_cublas_and_lt_workspaces`).
bool sharesWorkspaces() {
  static const bool shares =
      c10::utils::check_env("TORCH_CUBLASLT_UNIFIED_WORKSPACE").value_or(compat::applies("shared_workspaces"));
  return keepsWorkspaces() && shares;
}

// As `parseChosenWorkspaceSize()`: the sum of all `:KIB:COUNT` in the variable.
std::optional<std::int64_t> cublasSizeOfEnvironment() {
  const char* value = std::getenv("CUBLAS_WORKSPACE_CONFIG");
  if (value == nullptr) {
    return std::nullopt;
  }
  static const std::regex kPart{":([0-9]+):([0-9]+)"};
  const std::string config{value};
  const std::sregex_iterator end;
  std::sregex_iterator part{config.begin(), config.end(), kPart};
  if (part == end) {
    return std::nullopt;
  }
  std::int64_t bytes = 0;
  for (; part != end; ++part) {
    bytes += (std::stoll((*part)[1]) << 10) * std::stoll((*part)[2]);
  }
  return bytes;
}

bool hasLargeWorkspace(const GpuDescription& gpu) {
  return gpu.major >= 9 && gpu.major <= (compat::applies("workspaces_of_blackwell") ? 12 : 9);
}

std::int64_t cublasSize(const GpuDescription& gpu) {
  static const std::optional<std::int64_t> chosen = cublasSizeOfEnvironment();
  constexpr std::int64_t kLarge = std::int64_t{4096 * 8} << 10;               // :4096:8
  constexpr std::int64_t kSmall = std::int64_t{(4096 * 2) + (16 * 8)} << 10;  // :4096:2:16:8
  return chosen.value_or(hasLargeWorkspace(gpu) ? kLarge : kSmall);
}

// As `parseCUDABlasLtWorkspaceSize()`: the variable is in KiB, and ignored if it is not a number.
std::int64_t cublasLtSizeOfEnvironment() {
  const char* value = std::getenv("CUBLASLT_WORKSPACE_SIZE");
  constexpr std::int64_t kDefault = 1024;
  try {
    return (value == nullptr ? kDefault : std::stoi(value)) << 10;
  } catch (const std::exception&) {
    return kDefault << 10;
  }
}

std::int64_t cublasLtSize(const GpuDescription& gpu) {
  static const std::int64_t chosen = cublasLtSizeOfEnvironment();
  return sharesWorkspaces() ? std::min(chosen, cublasSize(gpu)) : chosen;
}

}  // namespace

std::int64_t blasWorkspaceSize(BlasWorkspace::Library library, const GpuDescription& gpu) {
  return library == BlasWorkspace::Library::kCublasLt ? cublasLtSize(gpu) : cublasSize(gpu);
}

BlasWorkspace::BlasWorkspace(KernelCall& call, Library library) : call_{call} {
  const bool is_lt = library == Library::kCublasLt;
  const std::int64_t bytes = blasWorkspaceSize(library, call.gpu);
  if (!keepsWorkspaces()) {
    block_ = call.allocate(bytes);
    return;
  }
  // `getCurrentCUDABlasLtHandle()` returns the cuBLAS handle, so the cuBLAS workspace is allocated.
  const bool is_shared = is_lt && sharesWorkspaces();
  call.keepWorkspace(kCublasWorkspace, is_shared ? std::max(bytes, cublasSize(call.gpu)) : cublasSize(call.gpu));
  if (is_lt && !is_shared) {
    call.keepWorkspace(kCublasLtWorkspace, bytes);
  }
}

BlasWorkspace::~BlasWorkspace() {
  call_.free(block_);
}

void callBlas(KernelCall& call, BlasWorkspace::Library library) {
  const BlasWorkspace workspace{call, library};
}

}  // namespace torchext

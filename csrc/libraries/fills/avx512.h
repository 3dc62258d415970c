#pragma once

#include <ATen/Version.h>

namespace torchext {

// Returns true if code compiled for AVX-512 can run, and the user has not disabled it in PyTorch
// (`ATEN_CPU_CAPABILITY`).
inline bool hasAvx512() {
#if defined(__x86_64__) && defined(__GNUC__)
  return at::get_cpu_capability() == "AVX512" && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

}  // namespace torchext

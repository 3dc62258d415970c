#pragma once

// Compiles a hot loop for AVX2 as well as for the baseline; the loader picks one at run time. Not with the thread
// sanitizer: it would instrument the function that picks, which runs before the sanitizer is initialized.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define TORCHEXT_SIMD_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define TORCHEXT_SIMD_CLONES
#endif

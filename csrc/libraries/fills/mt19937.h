#pragma once

// MT19937, PyTorch's CPU generator.

#include <cstddef>
#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>

// Compiles a hot loop for AVX2 as well as for the baseline; the loader picks one at run time. Not with the thread
// sanitizer: it would instrument the function that picks, which runs before the sanitizer is initialized.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define TORCHEXT_SIMD_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define TORCHEXT_SIMD_CLONES
#endif

namespace torchext {

// Returns true if PyTorch can leave an engine in this state: after a seed, or after draws. A state that was assembled
// by hand may differ.
bool canDrawFrom(const at::mt19937_data_pod& engine);

// Draws random numbers from an engine, many at once. Leaves the engine in the state after as many calls of
// `at::mt19937::operator()`. Requires `canDrawFrom()`.
void drawNumbers(at::mt19937_data_pod& engine, std::uint32_t* numbers, std::int64_t count);

// Returns true if the states of the engines are equal in all bytes.
bool areSame(const at::mt19937_data_pod& a, const at::mt19937_data_pod& b);

// Whether the same distance is expected again.
enum class Recurs : std::uint8_t { kNo, kYes };

// Advances `state` by `draws` calls of `at::mt19937::operator()`, without making them.
//
// Short distances are computed block by block (624 words), without tempering. For long ones the state is multiplied by
// x^n modulo the generator's characteristic polynomial over GF(2) (Haramoto, Matsumoto, Nishimura, Panneton, L'Ecuyer:
// "Efficient Jump Ahead for F2-Linear Random Number Generators", 2008). The product takes 0.1 ms and its polynomial 1
// ms for any distance. Polynomials of distances that recur are cached; other distances are several products, of cached
// polynomials for powers of two, and a walk over the rest.
void advance(at::mt19937_data_pod& state, std::uint64_t draws, Recurs recurs = Recurs::kYes);

// Returns true if code compiled for AVX-512 can run, and the user has not disabled it in PyTorch
// (`ATEN_CPU_CAPABILITY`).
bool hasAvx512();

// The recurrence, one block of a state at a time.
namespace mt19937 {

// The parameters, named as in Matsumoto and Nishimura, "Mersenne Twister" (1998).
constexpr std::size_t kN = 624;
constexpr std::size_t kM = 397;
constexpr std::uint32_t kA = 0x9908b0dfU;

static_assert(at::MERSENNE_STATE_N == kN && at::MERSENNE_STATE_M == kM);

// Advances the kN words of a state by `count` blocks.
void nextBlocks(std::uint32_t* state, std::size_t count);

// Advances them by one block.
inline void nextBlock(std::uint32_t* state) {
  nextBlocks(state, 1);
}

// `nextBlocks()` by AVX-512. Requires `hasAvx512()`.
void nextBlocksByAvx512(std::uint32_t* state, std::size_t count);

// Computes random numbers from the words of a state. The words stay unchanged and need no alignment.
void temper(const std::uint32_t* words, std::uint32_t* numbers, std::size_t count);

// Returns the word from which temper() computes `number`.
std::uint32_t wordOf(std::uint32_t number);

}  // namespace mt19937

}  // namespace torchext

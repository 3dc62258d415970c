#include "kernel_settings.h"

#include <algorithm>
#include <cfloat>
#include <cstdint>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/util/irange.h>

namespace torchext {

using at::Context;
using at::Float32Backend;
using at::Float32Op;
using at::Float32Precision;

namespace {

// PyTorch has `setFlushDenormal()` but no getter. `volatile` keeps the compiler from evaluating the product.
bool flushesDenormals() {
  const volatile float smallest_normal = FLT_MIN;
  const volatile float half = 0.5F;
  return smallest_normal * half == 0;
}

// ---- Precisions of float32 matrix products ----

int precisionOf(Float32Backend backend, Float32Op op) {
  return static_cast<int>(at::globalContext().float32Precision(backend, op));
}

void setPrecision(Float32Backend backend, Float32Op op, int precision) {
  at::globalContext().setFloat32Precision(backend, op, static_cast<Float32Precision>(precision));
}

// Returns the value that sets the setting to its present state. `float32Precision()` returns the effective precision,
// which may be inherited from the setting for the whole backend, or for all backends. If they are equal, only a change
// of these reveals that: for less than a microsecond, other threads may compute with that change. It is made only if
// this thread is about to replay with another value of the setting, which other threads see for longer
// (docs/reference/limitations.md).
int ownPrecisionOf(Float32Backend backend, Float32Op op) {
  const bool is_root = backend == Float32Backend::GENERIC;
  const auto parent = op == Float32Op::ALL ? Float32Backend::GENERIC : backend;
  const int in_effect = precisionOf(backend, op);
  if (is_root || in_effect != precisionOf(parent, Float32Op::ALL)) {
    return in_effect;
  }
  const int parents_own = ownPrecisionOf(parent, Float32Op::ALL);
  const auto other = static_cast<int>(in_effect == static_cast<int>(Float32Precision::IEEE) ? Float32Precision::TF32
                                                                                            : Float32Precision::IEEE);
  setPrecision(parent, Float32Op::ALL, other);
  const bool inherits = precisionOf(backend, op) == other;
  setPrecision(parent, Float32Op::ALL, parents_own);
  return inherits ? static_cast<int>(Float32Precision::NONE) : in_effect;
}

// ---- The settings ----

struct Setting {
  std::string_view name;
  int (*get)();
  // Null if the setting is compared, or restored by a separate guard.
  void (*set)(int value);
  // Returns the value that restores the present state, where it differs from that of `get`.
  int (*own)() = nullptr;
};

template <Float32Backend Backend, Float32Op Op>
constexpr Setting precisionSetting(std::string_view name) {
  constexpr bool is_put_back = Backend == Float32Backend::MKLDNN;
  return {name, [] { return precisionOf(Backend, Op); },
          is_put_back ? +[](int value) { setPrecision(Backend, Op, value); } : nullptr,
          +[] { return ownPrecisionOf(Backend, Op); }};
}

Context& context() {
  return at::globalContext();
}

// A setting that two functions of the context get and set.
template <auto kGet, auto kSet>
constexpr Setting contextSetting(std::string_view name) {
  using Value = decltype((context().*kGet)());
  return {name, [] { return static_cast<int>((context().*kGet)()); },
          [](int value) { (context().*kSet)(static_cast<Value>(value)); }};
}

constexpr std::size_t kThreads = 0;
constexpr std::size_t kFlushDenormal = 1;
constexpr std::size_t kDeterministic = 2;
constexpr std::size_t kCudaPrecisions = 3;

constexpr std::array kSettings{
    Setting{"threads", at::get_num_threads, nullptr},
    Setting{"flush_denormal", [] { return static_cast<int>(flushesDenormals()); },
            [](int value) { Context::setFlushDenormal(value != 0); }},
    Setting{"deterministic_algorithms",
            [] {
              return static_cast<int>(context().deterministicAlgorithms()) +
                     2 * static_cast<int>(context().deterministicAlgorithmsWarnOnly());
            },
            [](int value) { context().setDeterministicAlgorithms(value % 2 != 0, value / 2 != 0); }},
    precisionSetting<Float32Backend::CUDA, Float32Op::CONV>("cuda.conv.fp32_precision"),
    precisionSetting<Float32Backend::CUDA, Float32Op::RNN>("cuda.rnn.fp32_precision"),
    precisionSetting<Float32Backend::CUDA, Float32Op::MATMUL>("cuda.matmul.fp32_precision"),
    precisionSetting<Float32Backend::MKLDNN, Float32Op::CONV>("mkldnn.conv.fp32_precision"),
    precisionSetting<Float32Backend::MKLDNN, Float32Op::RNN>("mkldnn.rnn.fp32_precision"),
    precisionSetting<Float32Backend::MKLDNN, Float32Op::MATMUL>("mkldnn.matmul.fp32_precision"),
    contextSetting<&Context::deterministicFillUninitializedMemory, &Context::setDeterministicFillUninitializedMemory>(
        "fill_uninitialized_memory"),
    contextSetting<&Context::userEnabledMkldnn, &Context::setUserEnabledMkldnn>("mkldnn.enabled"),
    contextSetting<&Context::deterministicMkldnn, &Context::setDeterministicMkldnn>("mkldnn.deterministic"),
    contextSetting<&Context::userEnabledNNPACK, &Context::setUserEnabledNNPACK>("nnpack.enabled"),
    contextSetting<&Context::qEngine, &Context::setQEngine>("quantized.engine"),
    contextSetting<&Context::allowFP16ReductionCPU, &Context::setAllowFP16ReductionCPU>("cpu.allow_fp16_reduction"),
    contextSetting<&Context::userEnabledCuDNN, &Context::setUserEnabledCuDNN>("cudnn.enabled"),
    contextSetting<&Context::benchmarkCuDNN, &Context::setBenchmarkCuDNN>("cudnn.benchmark"),
    contextSetting<&Context::benchmarkLimitCuDNN, &Context::setBenchmarkLimitCuDNN>("cudnn.benchmark_limit"),
    contextSetting<&Context::deterministicCuDNN, &Context::setDeterministicCuDNN>("cudnn.deterministic"),
    Setting{"cuda.fp16_reduction", [] { return static_cast<int>(context().allowFP16ReductionCuBLAS()); },
            [](int value) { context().setAllowFP16ReductionCuBLAS(value == 0, value != 2); }},
    Setting{"cuda.bf16_reduction", [] { return static_cast<int>(context().allowBF16ReductionCuBLAS()); },
            [](int value) { context().setAllowBF16ReductionCuBLAS(value == 0, value != 2); }},
    contextSetting<&Context::allowFP16AccumulationCuBLAS, &Context::setAllowFP16AccumulationCuBLAS>(
        "cuda.fp16_accumulation"),
    contextSetting<&Context::linalgPreferredBackend, &Context::setLinalgPreferredBackend>("cuda.linalg_library"),
    contextSetting<&Context::blasPreferredBackend, &Context::setBlasPreferredBackend>("cuda.blas_library"),
};

}  // namespace

KernelSettings::KernelSettings() {
  static_assert(kSettings.size() == kCount);
  std::transform(kSettings.begin(), kSettings.end(), values_.begin(),
                 [](const Setting& setting) { return setting.get(); });
}

std::shared_ptr<const KernelSettings> KernelSettings::current() {
  thread_local std::shared_ptr<const KernelSettings> last;
  const KernelSettings now;
  if (last == nullptr || !(*last == now)) {
    last = std::make_shared<const KernelSettings>(now);
  }
  return last;
}

bool KernelSettings::isDeterministic() const noexcept {
  return values_[kDeterministic] % 2 != 0;
}

bool KernelSettings::flushesDenormals() const noexcept {
  return values_[kFlushDenormal] != 0;
}

std::vector<std::pair<std::string_view, int>> KernelSettings::list() const {
  std::vector<std::pair<std::string_view, int>> listed;
  for (const auto i : c10::irange(kCount)) {
    listed.emplace_back(kSettings[i].name, values_[i]);
  }
  return listed;
}

KernelSettingsGuard::KernelSettingsGuard(const KernelSettings& wanted, const KernelSettings& now) {
  if (now.values_ == wanted.values_) {
    return;
  }
  try {
    change(wanted);
  } catch (...) {
    restore();  // an exception in a constructor skips the destructor
    throw;
  }
}

void KernelSettingsGuard::change(const KernelSettings& wanted) {
  for (const auto i : c10::irange(kSettings.size())) {
    const Setting& setting = kSettings[i];
    if (setting.set == nullptr) {
      continue;
    }
    if (const int now = setting.get(); now != wanted.values_[i]) {
      changed_.emplace_back(i, setting.own == nullptr ? now : setting.own());
      setting.set(wanted.values_[i]);
    }
  }
}

KernelSettingsGuard::~KernelSettingsGuard() {
  restore();
}

void KernelSettingsGuard::restore() const {
  for (const auto& [i, value] : changed_) {
    kSettings[i].set(value);
  }
}

int KernelSettings::threads() const noexcept {
  return values_[kThreads];
}

std::optional<std::string_view> KernelSettings::changedCudaPrecision() const {
  constexpr std::size_t kNumCudaPrecisions = 3;
  for (std::size_t i = kCudaPrecisions; i < kCudaPrecisions + kNumCudaPrecisions; ++i) {
    if (values_[i] != kSettings[i].get()) {
      return kSettings[i].name;
    }
  }
  return std::nullopt;
}

}  // namespace torchext

#include "call_key.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <string_view>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DefaultDtype.h>
#include <torchext/fake_tensor.h>

#include "../../../libraries/support/device_index.h"
#include "../../../libraries/support/operator_table.h"
#include "../../../libraries/support/stack_utils.h"
#include "../../hooks/hooks.h"
#include "../../torch_internals/dispatcher_internals.h"
#include "../calls/recording.h"
#include "../storage/fake_storage.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

// Precedes the words of each value, so that different sequences of values have different words.
enum class Kind : std::uint64_t {
  kNone,
  kUndefinedTensor,
  kTensor,
  kSeenTensor,
  kBool,
  kInt,
  kDouble,
  kFreeDouble,
  kComplex,
  kString,
  kDevice,
  kGenerator,
  kList,
};

// Returns a word made of a kind and up to seven bytes of data.
constexpr std::uint64_t word(Kind kind, std::uint64_t rest = 0) {
  return static_cast<std::uint64_t>(kind) | (rest << 8U);
}

template <typename Integer>
std::uint64_t bits(Integer value) {
  return static_cast<std::uint64_t>(value);
}

std::uint64_t bitsOf(double value) {
  std::uint64_t bits_of_value = 0;
  std::memcpy(&bits_of_value, &value, sizeof(value));
  return bits_of_value;
}

std::uint64_t deviceBits(c10::Device device) {
  return bits(static_cast<std::uint8_t>(device.type())) | bits(static_cast<std::uint8_t>(device.index())) << 8U;
}

// Kernels of other libraries may depend on anything. `hasPureKernels()` is exact but slower.
bool mayHavePureKernels(const c10::OperatorHandle& op) {
  constexpr std::array<std::string_view, 3> kNamespaces{"aten", "prims", "torchext"};
  return isAmong(kNamespaces, namespaceOf(op.operator_name()));
}

// They refuse floating-point numbers for integers, or promote them. Their kernels convert a number to a floating-point
// type, which raises an error for numbers out of its range, and look at nothing else of it. addcmul() is not among
// them: it converts the number to the type of integers.
const OperatorSet takesFreeNumbers{"return the same metadata for all ordinary floating-point numbers",
                                   {"aten::add",
                                    "aten::add_",
                                    "aten::sub",
                                    "aten::sub_",
                                    "aten::mul",
                                    "aten::mul_",
                                    "aten::div",
                                    "aten::div_",
                                    "aten::lerp",
                                    "aten::lerp_",
                                    "aten::addcdiv",
                                    "aten::addcdiv_",
                                    "aten::_foreach_add",
                                    "aten::_foreach_add_",
                                    "aten::_foreach_sub",
                                    "aten::_foreach_sub_",
                                    "aten::_foreach_mul",
                                    "aten::_foreach_mul_",
                                    "aten::_foreach_div",
                                    "aten::_foreach_div_",
                                    "aten::_foreach_lerp",
                                    "aten::_foreach_lerp_",
                                    "aten::_foreach_addcdiv",
                                    "aten::_foreach_addcdiv_"}};

// Their results have the memory of an argument, or they change only metadata.
const OperatorSet ignoresSettings{
    "return metadata that depend on their arguments alone",
    {"aten::_reshape_alias", "aten::_unsafe_view", "aten::alias",   "aten::as_strided",
     "aten::detach",         "aten::diagonal",     "aten::expand",  "aten::permute",
     "aten::select",         "aten::set_",         "aten::slice",   "aten::split",
     "aten::squeeze",        "aten::squeeze_",     "aten::t",       "aten::t_",
     "aten::transpose",      "aten::transpose_",   "aten::unbind",  "aten::unsqueeze",
     "aten::unsqueeze_",     "aten::view",         "aten::resize_", "aten::split_with_sizes"}};

// Returns true if all floating-point dtypes can represent the magnitude of `number`. The smallest maximum is that of
// `float8_e4m3fnuz`. Zero does not count: divisions by it may raise errors.
bool isOrdinary(double number) {
  return number != 0 && std::abs(number) <= 240;
}

constexpr std::array kComputingKeys{DispatchKey::Meta, DispatchKey::CPU};

// Keys of tensors that are not described completely by a storage, sizes and strides.
constexpr DispatchKeySet kNotPlain({DispatchKey::Python, DispatchKey::ZeroTensor, DispatchKey::FuncTorchBatched,
                                    DispatchKey::FuncTorchGradWrapper, DispatchKey::Functionalize,
                                    DispatchKey::NestedTensor});

const std::array<KernelSlot, 2>& computingSlots() {
  static const std::array slots{KernelSlot{kComputingKeys[0]}, KernelSlot{kComputingKeys[1]}};
  return slots;
}

bool isDescribedByKey(const Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return impl.has_storage() && impl.layout() == c10::kStrided && !tensor.is_quantized() &&
         !impl.key_set().has_any(kNotPlain) && !impl.has_symbolic_sizes_strides();
}

}  // namespace

static_assert(std::tuple_size_v<CallKernels> == kComputingKeys.size());

DistinctTensors distinctTensors(Arguments arguments) {
  DistinctTensors tensors;
  PointerNumbers seen;
  forEachTensor(arguments, [&](const Tensor& tensor) {
    if (seen.add(tensor.unsafeGetTensorImpl()).second) {
      tensors.push_back(&tensor);
    }
  });
  return tensors;
}

bool hasPureKernels(const c10::OperatorHandle& op) {
  return namespaceOf(op.operator_name()) == "torchext" ||
         std::all_of(kComputingKeys.begin(), kComputingKeys.end(),
                     [&op](DispatchKey key) { return !kernelOf(op, key).isValid() || isKernelOfPyTorch(op, key); });
}

CallKernels kernelsOf(const c10::OperatorHandle& op) {
  CallKernels kernels;
  std::transform(kComputingKeys.begin(), kComputingKeys.end(), kernels.begin(),
                 [&op](DispatchKey key) { return kernelOf(op, key); });
  return kernels;
}

bool areUnchanged(const CallKernels& kernels, const c10::OperatorHandle& op) {
  const auto& slots = computingSlots();
  return std::equal(slots.begin(), slots.end(), kernels.begin(),
                    [&op](const KernelSlot& slot, const c10::KernelFunction& kernel) {
                      return identityOf(slot.of(op)) == identityOf(kernel);
                    });
}

bool isPlainFake(const Tensor& tensor) {
  return tensor.defined() && isDescribedByKey(tensor) && isFake(tensor);
}

CallKey::Traits::Traits(const c10::OperatorHandle& op)
    : may_have_pure_kernels{mayHavePureKernels(op)},
      has_free_numbers{takesFreeNumbers(op)},
      ignores_settings{ignoresSettings(op)} {}

CallKey::CallKey(const c10::OperatorHandle& op, const Stack& stack) : CallKey{op, Traits{op}} {
  const auto count = static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  std::for_each(stack.end() - count, stack.end(), [this](const IValue& value) { add(value); });
}

// The schema identifies the operator, and the kernels identify its registrations. Cache entries hold copies of the
// kernels, so that their addresses are not reused while the entry exists.
void CallKey::addOperator(const c10::OperatorHandle& op) {
  const auto& slots = computingSlots();
  static_assert(kComputingKeys[0] == DispatchKey::Meta);
  is_complete_ = traits_.may_have_pure_kernels && slots[0].of(op).isValid();
  if (!is_complete_) {
    return;
  }
  std::uint64_t* word = grow(1 + slots.size() * std::tuple_size_v<KernelIdentity>);
  *word++ = reinterpret_cast<std::uintptr_t>(&op.schema());
  for (const KernelSlot& slot : slots) {
    const KernelIdentity kernel = identityOf(slot.of(op));
    word = std::copy(kernel.begin(), kernel.end(), word);
  }
  if (!traits_.ignores_settings) {
    addGlobalState();
  }
}

void CallKey::addGlobalState() {
  at::Context& context = at::globalContext();
  const MemoryCounter* counter = memoryCounter();
  const c10::AutogradState& autograd = c10::AutogradState::get_tls_state();
  const FakeDevices& devices = hooks().devices;
  std::uint64_t state = bits(c10::get_default_dtype_as_scalartype()) << 8U | bits(devices.count());
  const auto add_flags = [&state](auto... flags) { ((state = state << 1U | bits(flags)), ...); };
  add_flags(
      autograd.get_grad_mode(), autograd.get_inference_mode(), context.deterministicAlgorithms(),
      context.deterministicAlgorithmsWarnOnly(), context.deterministicFillUninitializedMemory(),
      context.userEnabledMkldnn(), context.userEnabledCuDNN(), context.benchmarkCuDNN(), context.deterministicCuDNN(),
      context.userEnabledNNPACK(), context.userEnabledFlashSDP(), context.userEnabledMemEfficientSDP(),
      context.userEnabledMathSDP(), context.userEnabledCuDNNSDP(), context.userEnabledOverrideableSDP(),
      counter != nullptr && counter->counts(c10::Device{c10::kCUDA, 0}),  // decides whether workspaces are computed
      at::get_num_threads() > 1,  // decides whether oneDNN runs some convolutions
      isRecording());             // operators that are composed on CUDA are recorded as a whole
  words_.push_back(state);
  if (devices.count() > 0) {
    std::uint64_t order = 0;
    for (const at::SDPBackend backend : context.sDPPriorityOrder()) {
      order = order << 8U | bits(static_cast<int64_t>(backend));
    }
    words_.push_back(order);
    words_.push_back(reinterpret_cast<std::uintptr_t>(devices.description()));
  }
}

void CallKey::add(const IValue& value) {
  if (!is_complete_) {
    return;
  }
  if (value.isTensor()) {
    addTensor(value.toTensor());
  } else if (value.isNone()) {
    words_.push_back(word(Kind::kNone));
  } else if (value.isBool()) {
    words_.push_back(word(Kind::kBool, bits(value.toBool())));
  } else if (value.isInt()) {
    words_.append({word(Kind::kInt), bits(value.toInt())});
  } else if (value.isDouble()) {
    addDouble(value.toDouble());
  } else if (value.isList()) {
    const auto elements = value.toListRef();
    addListOf(elements.size());
    std::for_each(elements.begin(), elements.end(), [this](const IValue& element) { add(element); });
  } else if (value.isDevice()) {
    words_.push_back(word(Kind::kDevice, deviceBits(withIndex(value.toDevice()))));
  } else if (value.isString()) {
    addString(value.toStringRef());
  } else if (value.isGenerator()) {
    const at::Generator generator = value.toGenerator();
    words_.push_back(word(Kind::kGenerator, generator.defined() ? deviceBits(generator.device()) : ~std::uint64_t{0}));
  } else if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    words_.append({word(Kind::kComplex), bitsOf(number.real()), bitsOf(number.imag())});
  } else {
    is_complete_ = false;
  }
}

void CallKey::addListOf(std::size_t count) {
  words_.push_back(word(Kind::kList, count));
}

void CallKey::addDouble(double number) {
  if (traits_.has_free_numbers && isOrdinary(number)) {
    words_.push_back(word(Kind::kFreeDouble));
  } else {
    words_.append({word(Kind::kDouble), bitsOf(number)});
  }
}

void CallKey::addTensor(const Tensor& tensor) {
  if (!tensor.defined()) {
    words_.push_back(word(Kind::kUndefinedTensor));
    return;
  }
  const auto [number, is_new] = tensor_numbers_.add(tensor.unsafeGetTensorImpl());
  if (!is_new) {
    words_.push_back(word(Kind::kSeenTensor, number));
    return;
  }
  if (!isDescribedByKey(tensor)) {
    is_complete_ = false;
    return;
  }
  tensors_.push_back(&tensor);
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const c10::Storage& storage = impl.unsafe_storage();
  const bool is_fake = impl.key_set().has(DispatchKey::Fake) && isFakeStorage(storage);
  num_fakes_ += is_fake ? 1 : 0;
  const std::uint64_t flags =
      bits(is_fake) | bits(impl.is_conj()) << 1U | bits(impl.is_neg()) << 2U | bits(impl.is_wrapped_number()) << 3U;
  const c10::IntArrayRef sizes = impl.sizes();
  const c10::IntArrayRef strides = impl.strides();
  std::uint64_t* words = grow(4 + 2 * sizes.size());
  *words++ = word(Kind::kTensor, flags | bits(tensor.scalar_type()) << 8U | deviceBits(impl.device()) << 16U |
                                     bits(sizes.size()) << 32U);
  *words++ = storage_numbers_.add(storage.unsafeGetStorageImpl()).first;
  *words++ = storage.nbytes();
  *words++ = bits(impl.storage_offset());
  std::copy(strides.begin(), strides.end(), std::copy(sizes.begin(), sizes.end(), words));
  if (impl.is_wrapped_number() && !is_fake) {
    addNumberOf(tensor);
  }
}

void CallKey::addNumberOf(const Tensor& wrapped_number) {
  if (wrapped_number.scalar_type() == c10::kDouble) {
    addDouble(*wrapped_number.const_data_ptr<double>());
    return;
  }
  std::array<std::uint64_t, 2> number{};
  std::memcpy(number.data(), wrapped_number.const_data_ptr(), wrapped_number.itemsize());
  words_.append(number.begin(), number.end());
}

void CallKey::addString(std::string_view text) {
  words_.push_back(word(Kind::kString, text.size()));
  for (std::size_t i = 0; i < text.size(); i += sizeof(std::uint64_t)) {
    std::uint64_t part = 0;
    std::memcpy(&part, text.data() + i, std::min(sizeof(part), text.size() - i));
    words_.push_back(part);
  }
}

std::size_t CallKey::hash() const noexcept {
  constexpr std::uint64_t kFactor = 0x9E3779B97F4A7C15;  // 2^64 divided by the golden ratio
  const auto mix = [](std::uint64_t& hash, std::uint64_t part) {
    hash = ((hash << 23U | hash >> 41U) ^ part) * kFactor;
  };
  // Each lane hashes a quarter of the words, because a processor can multiply for several at the same time.
  std::array<std::uint64_t, 4> lanes{words_.size(), 1, 2, 3};
  std::size_t i = 0;
  for (; i + lanes.size() <= words_.size(); i += lanes.size()) {
    mix(lanes[0], words_[i]);
    mix(lanes[1], words_[i + 1]);
    mix(lanes[2], words_[i + 2]);
    mix(lanes[3], words_[i + 3]);
  }
  for (; i < words_.size(); ++i) {
    mix(lanes[0], words_[i]);
  }
  std::for_each(lanes.begin() + 1, lanes.end(), [&](std::uint64_t lane) { mix(lanes[0], lane ^ lane >> 32U); });
  return lanes[0] ^ lanes[0] >> 32U;
}

}  // namespace torchext

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_sparse_compressed_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/cache/call_key.h"
#include "../../core/fake/cache/result_recipe.h"
#include "../../core/fake/calls/errors.h"
#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/calls/recording.h"
#include "../../core/fake/meta/device_rules.h"
#include "../../core/fake/meta/meta_call.h"
#include "../../core/fake/meta/recipe_builder.h"
#include "../../core/fake/storage/fake_keys.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/hooks/hooks.h"
#include "../../core/torch_internals/error_texts.h"
#include "../../core/torch_internals/open_tensor_impl.h"
#include "../../libraries/support/device_index.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/stack_utils.h"
#include "../cuda/fake_cuda.h"
#include "../values/assumed_values.h"
#include "../values/follow_values.h"
#include "../values/known_bytes.h"
#include "sparse_fakes.h"

namespace torchext {

using c10::Device;
using c10::DispatchKey;
using c10::Layout;

namespace {

// Results of calls on sparse fakes whose kernel reads the memory of their members: NOTE [Sparse fakes].

enum class Kind : std::uint8_t {
  // The argument and the result are strided. The result has the metadata that the operator returns for strided
  // arguments of the same shapes.
  kLikeStrided,
  // The same for a product of matrices, whose dtypes must be equal.
  kProduct,
  // The argument is sparse. The result has the same indices, and other values in the dtype of the first argument.
  kLikeArgument,
  // Two COO tensors on CUDA. The result has the elements of both, unless these are more than the tensor has places
  // (`add_out_sparse_cuda()`). CPU kernels merge elements with equal indices.
  kJoined,
  // The argument is compressed. The result has the same elements, compressed along the other dimension.
  kRecompressed,
};

struct Remedy {
  std::array<std::string_view, 4> operators;
  Kind kind;
  std::size_t argument = 0;
  Layout layout = c10::kStrided;  // of the argument, if it is recompressed
};

constexpr std::array kRemedies{
    Remedy{{"aten::add", "aten::add_", "aten::sub", "aten::sub_"}, Kind::kLikeStrided, 0},
    Remedy{{"aten::add"}, Kind::kLikeStrided, 1},
    Remedy{{"aten::add", "aten::add_", "aten::sub", "aten::sub_"}, Kind::kJoined},
    Remedy{{"aten::addmm", "aten::addmm_", "aten::addmv"}, Kind::kProduct, 0},
    Remedy{{"aten::bmm", "aten::mm"}, Kind::kProduct, 1},
    Remedy{{"aten::_sparse_log_softmax", "aten::_sparse_softmax", "aten::sparse_sampled_addmm"}, Kind::kLikeArgument},
    Remedy{{"aten::sparse_mask"}, Kind::kLikeArgument, 1},
    Remedy{{"aten::_to_sparse_bsc"}, Kind::kRecompressed, 0, c10::kSparseBsr},
    Remedy{{"aten::_to_sparse_bsr"}, Kind::kRecompressed, 0, c10::kSparseBsc},
    Remedy{{"aten::_to_sparse_csc"}, Kind::kRecompressed, 0, c10::kSparseCsr},
    Remedy{{"aten::_to_sparse_csr"}, Kind::kRecompressed, 0, c10::kSparseCsc},
};

// (self, other, alpha). For integers and complex factors, PyTorch checks more.
bool canJoin(ArrayRef<IValue> arguments) {
  const Tensor& a = arguments[0].toTensor();
  const IValue& other = arguments[1];
  if (!other.isTensor() || !a.is_floating_point() || arguments[2].toScalar().isComplex() ||
      a.layout() != c10::kSparse || other.toTensor().layout() != c10::kSparse) {
    return false;
  }
  const Tensor& b = other.toTensor();
  return a.is_cuda() && b.is_cuda() && a.sizes() == b.sizes() && a.sparse_dim() == b.sparse_dim() &&
         a.scalar_type() == b.scalar_type() && a._nnz() > 0 && b._nnz() > 0 && a._nnz() + b._nnz() <= a.numel();
}

bool fits(const Remedy& remedy, const OperatorHandle& op, ArrayRef<IValue> arguments) {
  if (!isAmong(remedy.operators, op.schema().name()) || !arguments[remedy.argument].isTensor()) {
    return false;
  }
  const Tensor& argument = arguments[remedy.argument].toTensor();
  switch (remedy.kind) {
    case Kind::kLikeStrided:
    case Kind::kProduct:
      return argument.layout() == c10::kStrided;
    case Kind::kLikeArgument:
      return isSparse(argument);
    case Kind::kJoined:
      return canJoin(arguments);
    case Kind::kRecompressed:
      return argument.layout() == remedy.layout;
  }
  return false;
}

// Returns the remedy with which the metadata of the result follow from those of the arguments, which must all be fake,
// or null.
const Remedy* findRemedy(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const auto found = std::find_if(kRemedies.begin(), kRemedies.end(),
                                  [&](const Remedy& remedy) { return fits(remedy, op, arguments); });
  return found == kRemedies.end() ? nullptr : &*found;
}

Tensor recompressed(const Tensor& self) {
  const auto& source = dynamic_cast<const at::SparseCsrTensorImpl&>(*self.unsafeGetTensorImpl());
  const Layout layout = at::sparse_csr::flip_compressed_layout(self.layout());
  const bool has_blocks = layout == c10::kSparseBsr || layout == c10::kSparseBsc;
  const std::int64_t along = at::sparse_csr::isCompressedRow(layout) ? 0 : 1;
  const std::int64_t batch = source.batch_dim();
  const std::int64_t block = has_blocks ? source.values().size(batch + 1 + along) : 1;
  std::vector<std::int64_t> size = source.compressed_indices().sizes().vec();
  size.back() = self.size(batch + along) / block + 1;
  return at::_sparse_compressed_tensor_unsafe(
      at::empty(size, source.compressed_indices().options()), at::empty_like(source.plain_indices()),
      at::empty_like(source.values(), at::MemoryFormat::Contiguous), self.sizes(), self.options().layout(layout));
}

// The factor `alpha` does not change the metadata.
Tensor joined(const OperatorHandle& op, const Tensor& self, const Tensor& other) {
  const Tensor indices = at::cat({self._indices(), other._indices()}, 1);
  const Tensor values = at::cat({self._values(), other._values()});
  if (op.schema().name().back() != '_') {
    return at::_sparse_coo_tensor_unsafe(indices, values, self.sizes(), self.options());
  }
  dynamic_cast<at::SparseTensorImpl&>(*self.unsafeGetTensorImpl()).set_indices_and_values_unsafe(indices, values);
  return self;
}

// Raises the error of PyTorch's kernels, which access all elements in the dtype of the sparse matrix.
void checkDtypes(ArrayRef<IValue> arguments) {
  std::optional<c10::ScalarType> expected;
  forEachTensor(arguments,
                [&expected](const Tensor& tensor) { expected = isSparse(tensor) ? tensor.scalar_type() : expected; });
  forEachTensor(arguments, [&expected](const Tensor& tensor) {
    TORCH_CHECK(tensor.scalar_type() == *expected, "expected scalar type ", *expected, " but found ",
                tensor.scalar_type());
  });
}

void runLikeStrided(const OperatorHandle& op, Stack& stack) {
  const auto count = static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  const Stack arguments(stack.end() - count, stack.end());
  runOnMeta(op, stack);
  followValues(op, arguments, topOf(stack, op.schema().returns().size()));
}

const OperatorSet countsElements{
    "read the memory of sparse tensors to count the elements of their result",
    {"aten::_coalesce", "aten::_sparse_sparse_matmul", "aten::add", "aten::add_", "aten::addmm", "aten::addmm_",
     "aten::hspmm", "aten::index_select", "aten::mul", "aten::mul_", "aten::sspaddmm", "aten::sub", "aten::sub_"}};

bool makesStrided(const Remedy& remedy) {
  return remedy.kind == Kind::kLikeStrided || remedy.kind == Kind::kProduct;
}

// Returns true if there is a remedy although the kernel counts elements, because the result is strided.
bool hasRemedyForElements(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const Remedy* remedy = findRemedy(op, arguments);
  return remedy != nullptr && makesStrided(*remedy);
}

// Replaces the arguments on top of `stack` by the results. The call must have a remedy, and the thread must include
// `Fake`.
void applyRemedy(const OperatorHandle& op, Stack& stack) {
  const std::size_t count = op.schema().arguments().size();
  const Remedy& remedy = *findRemedy(op, topOf(stack, count));
  if (remedy.kind == Kind::kProduct) {
    checkDtypes(topOf(stack, count));
  }
  if (makesStrided(remedy)) {
    runLikeStrided(op, stack);
    return;
  }
  const Tensor argument = topOf(stack, count)[remedy.argument].toTensor();
  const IValue second = topOf(stack, count)[1];
  outputDevice(op, stack);  // raises for arguments on different devices
  const auto dtype = topOf(stack, count).front().toTensor().scalar_type();
  torch::jit::drop(stack, count);
  torch::jit::push(stack, remedy.kind == Kind::kRecompressed ? recompressed(argument)
                          : remedy.kind == Kind::kJoined     ? joined(op, argument, second.toTensor())
                                                             : argument.clone().to(dtype));
}

// Returns the layout's name in Python, such as `torch.sparse_coo`.
std::string layoutName(Layout layout) {
  switch (layout) {
    case c10::kSparse:
      return "torch.sparse_coo";
    case c10::kSparseCsr:
      return "torch.sparse_csr";
    case c10::kSparseCsc:
      return "torch.sparse_csc";
    case c10::kSparseBsr:
      return "torch.sparse_bsr";
    case c10::kSparseBsc:
      return "torch.sparse_bsc";
    default:
      return c10::str(layout);
  }
}

// Adds the `Fake` key to a sparse tensor whose values are fake. Does nothing to other tensors.
void giveFakeKey(const Tensor& tensor) {
  if (isSparseFake(tensor)) {
    c10::DispatchKeySet& keys = OpenTensorImpl::keysOf(*tensor.unsafeGetTensorImpl());
    keys = keys.add(DispatchKey::Fake);
  }
}

// Returns true for `to_sparse()` and similar conversions.
bool convertsToSparse(const OperatorHandle& op) {
  return op.schema().name().rfind("aten::_to_sparse", 0) == 0;
}

// Returns true for a call of the only operator that returns a sparse tensor because of a flag.
bool isSparseGradient(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  return op.schema().name() == "aten::_embedding_bag_backward" && argumentNamed(op, arguments, "sparse").toBool();
}

std::optional<Layout> layoutArgument(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const IValue& layout = argumentNamed(op, arguments, "layout");
  return layout.isInt() ? std::optional{layout.toLayout()} : std::nullopt;
}

// Returns the rank of the tensor's backend key in the order of dispatch keys, or 0 for an undefined tensor.
int precedence(const Tensor& tensor) {
  if (!tensor.defined()) {
    return 0;
  }
  return !isSparse(tensor) ? 1 : tensor.layout() == c10::kSparse ? 2 : 3;
}

// Returns the tensor argument that determines the dispatch key, or an undefined tensor.
Tensor decidingTensor(ArrayRef<IValue> arguments) {
  Tensor deciding;
  forEachTensor(arguments, [&](const Tensor& tensor) {
    if (precedence(tensor) > precedence(deciding)) {
      deciding = tensor;
    }
  });
  return deciding;
}

// Replaces real arguments by fakes. Only metadata matter here, and a kernel would otherwise call operators with real
// arguments and fake members.
void makeArgumentsFake(const OperatorHandle& op, Stack& stack) {
  mapTensors(stack, op.schema().arguments().size(), [](const Tensor& tensor) {
    const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    return is_number || isFake(tensor) ? tensor : fakeLike(tensor);
  });
}

// Returns everything that the metadata of results depend on, in a form that a CallKey can describe.
IValue described(const Tensor& sparse) {
  const auto* coo = dynamic_cast<const at::SparseTensorImpl*>(sparse.unsafeGetTensorImpl());
  c10::impl::GenericList parts(c10::AnyType::get());
  parts.push_back(static_cast<std::int64_t>(sparse.layout()));
  parts.push_back(coo != nullptr && coo->coalesced());
  parts.push_back(sparse.sizes());
  for (const Tensor& member : sparseMembersOf(sparse)) {
    parts.push_back(member);
  }
  return parts;
}

Stack described(ArrayRef<IValue> arguments) {
  Stack stack = arguments.vec();
  for (IValue& value : stack) {
    if (value.isTensor() && isSparse(value.toTensor())) {
      value = described(value.toTensor());
    }
  }
  return stack;
}

// A call whose kernel reads memory, so that a remedy makes its results, or those of an operator that the kernel calls.
// Each attempt raises an error, so the results are cached.
class RemediedCall {
 public:
  RemediedCall(const OperatorHandle& op, ArrayRef<IValue> arguments)
      : op_{op}, arguments_(arguments), described_(described(arguments)), key_{op, described_} {}

  // Replaces the arguments on top of `stack` by the results, if these are cached.
  bool tryCached(Stack& stack) const {
    const auto recipe = metadataCache().find(key_);
    if (recipe == nullptr) {
      return false;
    }
    Results results = recipe->make(key_.tensors());
    followValues(op_, arguments_, results);
    replaceTop(stack, arguments_.size(), std::move(results));
    return true;
  }

  // Returns true if the operators that the kernel calls neither allocate counted memory nor give the results values.
  bool hasNoOtherEffects() const {
    const MemoryCounter* counter = memoryCounter();
    return !assumesValues() && hasTensor(ArrayRef<IValue>(described_), [counter](const Tensor& tensor) {
      return !hasValue(tensor) && (counter == nullptr || !counter->counts(tensor.device()));
    });
  }

  void remember(ArrayRef<IValue> results) const {
    const bool are_plain =
        allTensors(results, [](const Tensor& result) { return isFake(result) && !isSparse(result); });
    if (are_plain && key_.isComplete() && CallKey{op_, described_}.words() == key_.words()) {
      Substitution themselves;
      for (const Tensor* tensor : key_.tensors()) {
        themselves.add(*tensor, *tensor);
      }
      RecipeBuilder recipe{op_, key_.tensors(), themselves};
      auto built = std::move(recipe).build(results, c10::kCPU, /*pins=*/false);  // fakes are on their own device
      metadataCache().remember(key_, built->isRepeatable() ? std::move(built) : nullptr);
    }
  }

 private:
  const OperatorHandle& op_;
  const ArrayRef<IValue> arguments_;
  const Stack described_;
  const CallKey key_;
};

class SparseCall {
 public:
  SparseCall(const OperatorHandle& op, const Stack& stack);

  // Raises errors that can be predicted without running a kernel: DataDependentError if a strided tensor is converted,
  // because the number of elements of the result depends on values; UnsupportedOperatorError if there is no kernel;
  // c10::NotImplementedError while deferred_init records; c10::Error if the call would write to a real tensor.
  void check() const;

  // Replaces the arguments of a checked call by fake results. Runs the operator's sparse kernel for the claimed device
  // on fake members. If PyTorch has no such kernel, such as for CUDA in a build without CUDA, runs the kernel for the
  // CPU or for Meta, or uses a remedy. `stack` must be the constructor's argument.
  //
  // Raises DataDependentError or UnsupportedOperatorError if the kernel reads memory, and passes on the kernel's
  // errors.
  void run(Stack& stack) const;

 private:
  void checkIsNotRecorded() const;
  void checkNeedsNoValues() const;
  bool prefersRemedy() const;
  void callCached(Stack& stack) const;
  bool callKernel(Stack& stack) const;
  void callOnCpuCopies(Stack& stack) const;
  bool isForeign() const;
  bool hasOwnKernelOn(c10::DeviceType device) const;
  DispatchKey keyOn(c10::DeviceType device) const;
  DispatchKey kernel() const;
  [[noreturn]] void refuseToReadMemory() const;
  [[noreturn]] void refuseDevice(const c10::Error& error) const;

  ArrayRef<IValue> arguments() const {
    return argumentsOf(op_, stack_);
  }

  const OperatorHandle& op_;
  const Stack& stack_;
  // The layout and device that determine the kernel.
  Layout layout_ = c10::kStrided;
  Device device_{c10::kCPU};
};

SparseCall::SparseCall(const OperatorHandle& op, const Stack& stack) : op_{op}, stack_{stack} {
  if (const Tensor deciding = decidingTensor(arguments()); deciding.defined()) {
    layout_ = deciding.layout();
    device_ = deciding.device();
  }
  if (op_.hasKernelForDispatchKey(DispatchKey::BackendSelect)) {
    layout_ = layoutArgument(op_, arguments()).value_or(layout_);
    device_ = argumentNamed(op_, arguments(), "device").toOptional<Device>().value_or(device_);
  }
}

void SparseCall::check() const {
  checkIsNotRecorded();
  refuseToWriteIntoRealTensors(op_, stack_);
  checkNeedsNoValues();
  if (!prefersRemedy()) {
    kernel();
  }
}

void SparseCall::run(Stack& stack) const {
  makeArgumentsFake(op_, stack);
  const FakeFactoriesGuard guard;
  const OnDevice on_device{device_};
  if (prefersRemedy()) {
    applyRemedy(op_, stack);
  } else if (hasRemedyForElements(op_, arguments())) {
    callCached(stack);
  } else {
    callKernel(stack);
  }
  forEachTensor(topOf(stack, op_.schema().returns().size()), giveFakeKey);
}

// The recorder of deferred_init records the values of storages, which sparse tensors do not have. It runs calls that
// are refused here for real.
void SparseCall::checkIsNotRecorded() const {
  TORCH_CHECK_NOT_IMPLEMENTED(!isRecording(), "`", op_.operator_name(), "` takes or returns a tensor of layout ",
                              layoutName(layout_), ", which deferred_init() cannot record.");
}

void SparseCall::checkNeedsNoValues() const {
  if (convertsToSparse(op_) && layout_ == c10::kStrided) {
    TORCHEXT_THROW(DataDependentError,
                   c10::str("`", op_.operator_name(),
                            "` needs the values of a fake tensor, which has none: how many elements the sparse result "
                            "has depends on them. Make the sparse tensor of indices and values with known shapes."));
  }
}

// Returns true if a kernel is registered for this layout and device in particular.
bool SparseCall::hasOwnKernelOn(c10::DeviceType device) const {
  return op_.hasKernelForDispatchKey(keyOn(device));
}

// Returns true if the CPU kernel must be called for another device. Without a CUDA device, CUDA kernels are missing, or
// must not be called because they set the device first. The dispatcher then finds kernels for all devices, and most of
// these only raise an error. `SparseCPU` and `SparseCUDA` mostly have kernels for the same operators.
bool SparseCall::isForeign() const {
  const bool is_missing = device_.is_cuda() ? !hasRealCuda() : !hasOwnKernelOn(device_.type());
  return is_missing && hasOwnKernelOn(c10::kCPU);
}

// The kernel for the claimed device raises the right errors, so it is called first if it exists. The CPU kernel may
// refuse tensors on other devices, so a remedy is preferred to it.
bool SparseCall::prefersRemedy() const {
  return isForeign() && findRemedy(op_, arguments()) != nullptr;
}

void SparseCall::callCached(Stack& stack) const {
  const Stack called = arguments().vec();
  const RemediedCall call{op_, called};
  if (!call.tryCached(stack) && (!callKernel(stack) || call.hasNoOtherEffects())) {
    call.remember(topOf(stack, op_.schema().returns().size()));
  }
}

// Returns false if a remedy or copies on the CPU have made the results.
bool SparseCall::callKernel(Stack& stack) const {
  const Stack called = arguments().vec();
  // Kernels resize strided results before filling them, some without the dispatcher, so the sizes have already changed
  // when the storage refuses access.
  const WrittenTensors written{op_.schema(), called};
  const std::size_t bottom = stack.size() - called.size();
  const auto put_arguments_back = [&] {
    stack.resize(bottom);
    stack.insert(stack.end(), called.begin(), called.end());
    written.restoreGeometry();
  };
  try {
    const SparseKernelGuard in_kernel;
    op_.redispatchBoxed(c10::DispatchKeySet{kernel()}, &stack);
    return true;
  } catch (const DataDependentError&) {
    put_arguments_back();
    if (!hasRemedyForElements(op_, called)) {
      throw;
    }
  } catch (const c10::Error& error) {
    const bool is_refused = isForeign() && isInternalAssert(error);  // CPU kernels refuse other devices this way
    if (is_refused && !declaresNoSharing(op_)) {
      refuseDevice(error);
    }
    if (!is_refused && !isNoDataError(error)) {
      throw;
    }
    put_arguments_back();
    if (is_refused) {
      callOnCpuCopies(stack);
      return false;
    }
    if (findRemedy(op_, called) == nullptr) {
      refuseToReadMemory();
    }
  }
  applyRemedy(op_, stack);
  return false;
}

void SparseCall::callOnCpuCopies(Stack& stack) const {
  mapTensors(stack, op_.schema().arguments().size(), [](const Tensor& tensor) { return tensor.to(c10::kCPU); });
  op_.redispatchBoxed(c10::DispatchKeySet{keyOn(c10::kCPU)}, &stack);
  mapTensors(stack, op_.schema().returns().size(), [this](const Tensor& tensor) { return tensor.to(device_); });
}

DispatchKey SparseCall::keyOn(c10::DeviceType device) const {
  return c10::computeDispatchKey(c10::kFloat, layout_, device);
}

DispatchKey SparseCall::kernel() const {
  if (isForeign()) {
    return keyOn(c10::kCPU);
  }
  for (const c10::DeviceType device : {device_.type(), c10::kMeta}) {
    if (op_.hasComputedKernelForDispatchKey(keyOn(device))) {
      return keyOn(device);
    }
  }
  TORCHEXT_THROW(UnsupportedOperatorError,
                 c10::str("`", op_.operator_name(), "` has no kernel for tensors of layout ", layoutName(layout_),
                          " on ", device_.type(), ", so its result on fake tensors is unknown."));
}

void SparseCall::refuseToReadMemory() const {
  if (countsElements(op_)) {
    TORCHEXT_THROW(
        DataDependentError,
        c10::str("`", op_.operator_name(), "` needs the values of a fake tensor of layout ", layoutName(layout_),
                 ", which has none: how many elements the result has depends on them. Run it on real "
                 "tensors, or convert its arguments with `to_dense()` first."));
  }
  TORCHEXT_THROW(UnsupportedOperatorError,
                 c10::str("`", op_.operator_name(), "` cannot be run on fake tensors of layout ", layoutName(layout_),
                          ": PyTorch's kernel reads their memory, and there is no Meta kernel. Convert them with "
                          "`to_dense()` first."));
}

void SparseCall::refuseDevice(const c10::Error& error) const {
  TORCHEXT_THROW(
      UnsupportedOperatorError,
      c10::str("`", op_.operator_name(), "` has no kernel for tensors of layout ", layoutName(layout_), " on ",
               device_.type(), ", and the CPU kernel refuses them: ", error.what_without_backtrace()));
}

// Returns true for a call that takes a sparse tensor or makes one.
bool isAboutSparse(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const Layout layout = layoutArgument(op, arguments).value_or(c10::kStrided);
  return convertsToSparse(op) || isSparseGradient(op, arguments) ||
         hasTensor(arguments, [](const Tensor& tensor) { return isSparse(tensor); }) || layout == c10::kSparse ||
         at::sparse_csr::is_sparse_compressed(layout);
}

// Handles calls on sparse tensors: NOTE [Sparse fakes].
class SparseCalls final : public CallHandler {
 public:
  std::optional<HandledCall> decide(const OperatorHandle& op,
                                    const Stack& stack,
                                    const ArgumentFacts& /*facts*/) const override {
    if (!isAboutSparse(op, argumentsOf(op, stack))) {
      return std::nullopt;
    }
    try {
      SparseCall{op, stack}.check();
    } catch (const c10::Error&) {
      return HandledCall{std::current_exception()};
    }
    return HandledCall{nullptr, HandledCall::Effect::kDecomposes, "runs the kernel of the layout on fake members"};
  }

  void run(const OperatorHandle& op, c10::DispatchKeySet /*below*/, Stack& stack) const override {
    SparseCall{op, stack}.run(stack);
  }
};

}  // namespace

void registerSparseCalls() {
  static constexpr SparseCalls calls;
  hooks().handlers.add(&calls);
}

}  // namespace torchext

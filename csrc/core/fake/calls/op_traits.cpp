#include "op_traits.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include <ATen/core/enum_tag.h>

#include "../../../libraries/support/stack_utils.h"

namespace torchext {

namespace {

constexpr std::array<std::string_view, 4> kTensorOptions{"dtype", "layout", "device", "pin_memory"};

// `randint_like` reads its bound if that is a tensor.
const OperatorSet isLikeTensor{"make a tensor like their argument and read only its metadata",
                               {"aten::empty_like", "aten::full_like", "aten::ones_like", "aten::zeros_like",
                                "aten::rand_like", "aten::randn_like", "aten::randint_like", "aten::new_empty",
                                "aten::new_empty_strided", "aten::new_full", "aten::new_ones", "aten::new_zeros"}};

bool makesLikeTensor(const OperatorHandle& op) {
  const auto& schema = op.schema();
  if (!isLikeTensor(op) || !takesTensorOptions(schema)) {
    return false;
  }
  const auto count = std::count_if(schema.arguments().begin(), schema.arguments().end(), [](const auto& argument) {
    return argument.type()->isSubtypeOf(*c10::TensorType::get());
  });
  return count == 1;
}

const OperatorSet indexesByTensors{"index by a list of tensors, which may contain masks",
                                   {"aten::index", "aten::_unsafe_index"}};

bool hasMaskIndex(const Stack& stack, const OperatorHandle& op) {
  return hasTensor(argumentNamed(op, argumentsOf(op, stack), "indices"), [](const Tensor& index) {
    return index.scalar_type() == c10::kBool || index.scalar_type() == c10::kByte;
  });
}

// The name of the argument that decides, or an empty name.
const OperatorTable<const char*> updatesStatisticsIf{
    "update running statistics without declaring it",
    {{"training", {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}},
     {"",
      {"aten::batch_norm_update_stats", "aten::batch_norm_gather_stats",
       "aten::batch_norm_gather_stats_with_counts"}}}};

// Returns true if the length of the results depends on the values of arguments and PyTorch does not tag the operator.
bool readsLengths(const OperatorHandle& op, const Stack& stack) {
  const auto& schema = op.schema();
  if (schema.name() == "aten::quantized_lstm" || schema.name() == "aten::quantized_gru") {
    return findArgument(schema, "batch_sizes") >= 0;
  }
  if (schema.name() == "aten::_padded_dense_to_jagged_forward") {
    return argumentNamed(op, argumentsOf(op, stack), "total_L").isNone();
  }
  return schema.name() == "aten::_pack_padded_sequence";
}

bool hasSuffix(const std::string& text, std::string_view suffix) {
  return text.size() >= suffix.size() && text.compare(text.size() - suffix.size(), suffix.size(), suffix) == 0;
}

// Returns true if `op`, or the operator without `out` that it is generated from, has the tag. PyTorch does not give
// `dynamic_output_shape` to `bincount.out` and others.
bool isTagged(const OperatorHandle& op, at::Tag tag) {
  if (op.hasTag(tag)) {
    return true;
  }
  const std::string& overload = op.schema().overload_name();
  if (!hasSuffix(overload, "out")) {
    return false;
  }
  const std::string functional = overload.substr(0, overload.size() - (hasSuffix(overload, "_out") ? 4 : 3));
  const auto found = c10::Dispatcher::singleton().findSchema({op.schema().name(), functional});
  return found && found->hasTag(tag);
}

bool writesRunningStatistics(const OperatorHandle& op, const Stack& stack) {
  const char* const condition = updatesStatisticsIf(op);
  if (condition == nullptr) {
    return false;
  }
  const IValue& is_training = argumentNamed(op, argumentsOf(op, stack), condition);
  return is_training.isNone() || is_training.toBool();
}

const OperatorSet fillsFirst{
    "fill their first argument, a tensor or a list of tensors",
    {"aten::zero_", "aten::fill_", "aten::copy_", "aten::uniform_", "aten::normal_", "aten::log_normal_",
     "aten::bernoulli_", "aten::random_", "aten::exponential_", "aten::geometric_", "aten::cauchy_",
     "torchext::trunc_normal_", "aten::_foreach_zero_", "aten::_foreach_copy_"}};

const OperatorSet isBeyondElements{"reinterpret the storage, or copy all of it (`clone_preserve_strides()`)",
                                   {"aten::as_strided_copy", "aten::_reshape_alias_copy", "aten::as_strided_scatter",
                                    "aten::slice_scatter", "aten::select_scatter", "aten::diagonal_scatter"}};

// Returns true for an operator that makes a tensor from numbers alone.
bool makesValuesOfNumbers(const OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto takes_tensors = [](const c10::Argument& argument) {
    return !argument.is_out() && (argument.type()->isSubtypeOf(*c10::OptionalType::ofTensor()) ||
                                  argument.type()->isSubtypeOf(*c10::ListType::ofTensors()));
  };
  return !onlyAllocates(op) && std::none_of(schema.arguments().begin(), schema.arguments().end(), takes_tensors);
}

}  // namespace

const OperatorSet isLiftFresh{"receive the constants that `torch.tensor()` makes", {"aten::lift_fresh"}};
const OperatorSet isPinMemory{"pin memory", {"aten::_pin_memory"}};
const OperatorSet onlyAllocates{"make a tensor without initializing its memory",
                                {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted",
                                 "aten::new_empty", "aten::new_empty_strided", "aten::_empty_affine_quantized"}};

bool makesPinned(const OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const auto is_set = [&](const char* name) {
    const IValue& value = argumentNamed(op, arguments, name);
    return value.isBool() && value.toBool();
  };
  if (!takesTensorOptions(op.schema())) {
    return false;
  }
  return is_set("pin_memory") ||
         (op.schema().name() == "aten::_to_copy" && is_set("non_blocking") && !arguments.front().toTensor().is_cpu());
}

std::optional<c10::DispatchKey> compositeKernelOf(const OperatorHandle& op) {
  // NOTE [Composite, but not on CUDA]. Some have a CPU kernel that rounds differently from the composite, for example
  // `mish_backward`.
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
      !op.hasKernelForDispatchKey(c10::DispatchKey::Meta) && !op.hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
      !op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
    return c10::DispatchKey::CompositeImplicitAutograd;
  }
  if (op.hasTag(at::Tag::nondeterministic_seeded) &&
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) {
    return c10::DispatchKey::CompositeExplicitAutograd;
  }
  return std::nullopt;
}

bool takesTensorOptions(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  const auto matches = [](const c10::Argument& argument, std::string_view name) { return argument.name() == name; };
  return std::search(arguments.begin(), arguments.end(), kTensorOptions.begin(), kTensorOptions.end(), matches) !=
         arguments.end();
}

bool isFactory(const OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  if (isLiftFresh(op) || makesLikeTensor(op)) {
    return true;
  }
  const auto& returns = op.schema().returns();
  return !hasTensor(arguments, [](const Tensor&) { return true; }) &&
         std::any_of(returns.begin(), returns.end(), isOfTensors);
}

bool onlyMakesViews(const OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto is_view = [](const c10::Argument& result) { return result.alias_info() != nullptr; };
  return !schema.returns().empty() && std::all_of(schema.returns().begin(), schema.returns().end(), is_view) &&
         std::none_of(schema.arguments().begin(), schema.arguments().end(), isWritten);
}

bool declaresNoSharing(const OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto is_shared = [](const c10::Argument& argument) { return argument.alias_info() != nullptr; };
  return namespaceOf(op.operator_name()) == "aten" &&
         std::none_of(schema.returns().begin(), schema.returns().end(), is_shared) &&
         std::none_of(schema.arguments().begin(), schema.arguments().end(), is_shared);
}

// With a single number, the call is a conversion inside an operator.
bool isAboutNumbers(c10::ArrayRef<c10::IValue> arguments) {
  std::size_t numbers = 0;
  bool are_numbers = true;
  forEachTensor(arguments, [&](const Tensor& tensor) {
    are_numbers = are_numbers && tensor.unsafeGetTensorImpl()->is_wrapped_number();
    ++numbers;
  });
  return are_numbers && numbers > 1;
}

bool hasOut(const OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const auto& argument) { return argument.is_out(); });
}

bool isGenerator(const c10::Argument& argument) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  const auto& type = optional ? optional->getElementType() : argument.type();
  return type->kind() == c10::TypeKind::GeneratorType;
}

int generatorArgument(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  const auto found = std::find_if(arguments.begin(), arguments.end(), isGenerator);
  return found == arguments.end() ? -1 : static_cast<int>(found - arguments.begin());
}

bool takesGenerator(const OperatorHandle& op) {
  return generatorArgument(op.schema()) >= 0;
}

bool drawsNumbers(const OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded) && !compositeKernelOf(op);
}

bool needsValues(const OperatorHandle& op, const Stack& stack) {
  if (readsLengths(op, stack) || op.hasTag(at::Tag::data_dependent_output)) {
    return true;
  }
  if (!isTagged(op, at::Tag::dynamic_output_shape)) {
    return false;
  }
  if (op.schema().name() == "aten::_ctc_loss" && op.schema().overload_name().empty()) {
    return false;  // the size depends on lengths, which this overload takes as numbers
  }
  // Tagged because the shape depends on the values of masks. It does not depend on the values of integer indices.
  return !indexesByTensors(op) || hasMaskIndex(stack, op);
}

bool isMaskedIndexing(const OperatorHandle& op, const Stack& stack) {
  return indexesByTensors(op) && hasMaskIndex(stack, op);
}

bool lacksValues(const OperatorHandle& op, const Stack& stack) {
  const bool is_told = !argumentNamed(op, argumentsOf(op, stack), "output_size").isNone() &&
                       namespaceOf(op.operator_name()) == "aten" && isTagged(op, at::Tag::dynamic_output_shape);
  return !is_told && needsValues(op, stack);
}

bool writesArgument(const OperatorHandle& op, const Stack& stack, std::size_t position) {
  const c10::Argument& argument = op.schema().arguments()[position];
  return isWritten(argument) || ((argument.name() == "running_mean" || argument.name() == "running_var") &&
                                 writesRunningStatistics(op, stack));
}

bool overwritesArgument(const OperatorHandle& op, std::size_t position) {
  const auto& schema = op.schema();
  if (schema.arguments()[position].is_out()) {
    return namespaceOf(op.operator_name()) == "aten" && (op.hasTag(at::Tag::pointwise) || makesValuesOfNumbers(op));
  }
  return position == 0 && fillsFirst(op);
}

bool reachesBeyondElements(const OperatorHandle& op) {
  const auto space = namespaceOf(op.operator_name());
  return space == "aten" ? isBeyondElements(op) : space != "torchext";
}

}  // namespace torchext

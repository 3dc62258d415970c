#include "refused_dtypes.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/TypeProperties.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/irange.h>

#include "../../core/fake/calls/errors.h"
#include "../../core/torch_internals/torch_compat.h"
#include "../../libraries/support/stack_utils.h"

namespace torchext {

using c10::ScalarType;

namespace {

constexpr bool kIsOfRelease = compat::applies("dtypes_of_cuda");

// Arguments that take part in type promotion.
constexpr std::array<std::string_view, 7> kPromotes{"other", "exponent", "self", "min", "max", "min_val", "max_val"};

// A row of refused_dtypes.tsv.
struct DtypeRefusal {
  std::string kernel;  // as it calls itself in errors
  // The dtype by which the kernel chooses its code: that of the argument at a position; the one to which tensors and
  // Python numbers are "promoted", or also scalar arguments ("promoted with scalars"); or the argument `dtype`, or else
  // the dtype of the first argument ("requested").
  std::string chooses_by;
  bool has_dimensions;  // whether it holds only if all tensors have dimensions
  std::set<std::string> dtypes;
};

using Table = std::unordered_map<std::string, std::vector<DtypeRefusal>>;  // by operator

// Opens a file that is installed with the library, in `share/torchext` of the package.
std::ifstream openDataFile(const std::string& name) {
  Dl_info library{};
  TORCH_INTERNAL_ASSERT(dladdr(reinterpret_cast<const void*>(&openDataFile), &library) != 0);
  const std::filesystem::path package = std::filesystem::path{library.dli_fname}.parent_path().parent_path();
  const std::filesystem::path path = package / "share" / "torchext" / name;
  std::ifstream file{path};
  TORCH_CHECK(file, "torchext cannot read ", path.string(), ", which is installed with it. Install torchext again.");
  return file;
}

std::set<std::string> wordsIn(const std::string& text) {
  std::istringstream words{text};
  return {std::istream_iterator<std::string>{words}, {}};
}

Table readTable() {
  Table table;
  std::ifstream file = openDataFile("refused_dtypes.tsv");
  for (std::string line; std::getline(file, line);) {
    std::istringstream cells{line};
    std::array<std::string, 5> cell;
    for (std::string& one : cell) {
      std::getline(cells, one, '\t');
    }
    if (!line.empty() && line.front() != '#') {
      for (const std::string& op : wordsIn(cell[4])) {
        table[op].push_back({cell[0], cell[1], cell[2] == "yes", wordsIn(cell[3])});
      }
    }
  }
  return table;
}

// Returns the refusals of an operator, named without `aten::`, or null. Reads the file at the first call.
const std::vector<DtypeRefusal>* refusalsOf(const std::string& op) {
  // Leaked: threads may run operators until the process ends. Several may read the file; the first one keeps its table.
  static std::atomic<const Table*> table = nullptr;
  if (table == nullptr) {
    auto read = std::make_unique<const Table>(readTable());
    const Table* none = nullptr;
    if (table.compare_exchange_strong(none, read.get())) {
      static_cast<void>(read.release());
    }
  }
  const auto found = table.load()->find(op);
  return found == table.load()->end() ? nullptr : &found->second;
}

std::optional<ScalarType> promoted(const OperatorHandle& op, ArrayRef<IValue> arguments, bool with_scalars) {
  at::native::ResultTypeState state;
  try {
    for (const auto i : c10::irange(arguments.size())) {
      const c10::Argument& argument = op.schema().arguments()[i];
      if (argument.is_out()) {
        continue;
      }
      forEachTensor(arguments[i],
                    [&state](const Tensor& tensor) { state = at::native::update_result_type_state(tensor, state); });
      if (with_scalars && arguments[i].isScalar() && isAmong(kPromotes, argument.name())) {
        state = at::native::update_result_type_state(arguments[i].toScalar(), state);
      }
    }
    return at::native::result_type(state);
  } catch (const c10::Error&) {  // float8 is not promoted
    return std::nullopt;
  }
}

std::optional<ScalarType> dtypeOf(const IValue& value) {
  std::optional<ScalarType> dtype;
  const bool is_mixed = hasTensor(value, [&dtype](const Tensor& tensor) {
    dtype = dtype.value_or(tensor.scalar_type());
    return *dtype != tensor.scalar_type();
  });
  return is_mixed ? std::nullopt : dtype;
}

std::optional<ScalarType> chosenBy(const std::string& way, const OperatorHandle& op, ArrayRef<IValue> arguments) {
  if (way == "promoted" || way == "promoted with scalars") {
    return promoted(op, arguments, way == "promoted with scalars");
  }
  if (way != "requested") {
    return dtypeOf(arguments[std::stoul(way)]);
  }
  const IValue& dtype = argumentNamed(op, arguments, "dtype");
  return dtype.isInt() ? dtype.toScalarType() : dtypeOf(arguments[0]);
}

bool isEmpty(const Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor.numel() == 0;
}

}  // namespace

void refuseDtypesOnCuda(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  if (!kIsOfRelease || namespaceOf(op.operator_name()) != "aten" || at::detail::getCUDAHooks().hasROCM()) {
    return;
  }
  const std::string name = c10::toString(op.operator_name());
  const std::vector<DtypeRefusal>* refusals = refusalsOf(name.substr(std::string_view{"aten::"}.size()));
  if (refusals == nullptr) {
    return;
  }
  bool has_empty = hasTensor(results, isEmpty);
  bool has_dimensions = true;
  for (const auto i : c10::irange(arguments.size())) {
    if (!op.schema().arguments()[i].is_out()) {
      forEachTensor(arguments[i], [&](const Tensor& tensor) {
        has_empty = has_empty || isEmpty(tensor);
        has_dimensions = has_dimensions && (tensor.dim() > 0 || tensor.unsafeGetTensorImpl()->is_wrapped_number());
      });
    }
  }
  if (has_empty) {
    return;
  }
  for (const DtypeRefusal& row : *refusals) {
    const auto dtype = chosenBy(row.chooses_by, op, arguments);
    const bool is_refused = dtype && row.dtypes.count(c10::toString(*dtype)) != 0;
    if (is_refused && (has_dimensions || !row.has_dimensions)) {
      TORCHEXT_THROW(RefusedOnCudaError,
                     c10::str('"', row.kernel, "\" not implemented for '", c10::toString(*dtype), "'"));
    }
  }
}

}  // namespace torchext

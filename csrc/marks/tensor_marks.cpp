#include "tensor_marks.h"

#include <map>
#include <mutex>
#include <utility>

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "../amp/amp_handler.h"
#include "../amp/policy_probe.h"
#include "../amp/region.h"
#include "../inference/origins.h"
#include "../interpreter_lock.h"
#include "../stack_utils.h"
#include "../take_key.h"
#include "../torch_internals/open_tensor_impl.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using c10::TensorImpl;
using torch::jit::Stack;

namespace {

using TensorMarksPtr = c10::intrusive_ptr<TensorMarks>;

std::mutex& marksMutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

// There are no more than lines in the program. Leaked, since tensors may live until the process ends.
TensorMarksPtr sharedMarks(const std::string& origin, AmpMark amp) {
  static auto* all = new std::map<std::pair<std::string, AmpMark>, TensorMarksPtr>;
  const InterpreterAwareLock<std::mutex> lock(marksMutex());
  TensorMarksPtr& marks = (*all)[{origin, amp}];
  if (marks == nullptr) {
    marks = c10::make_intrusive<TensorMarks>(origin, amp);
  }
  return marks;
}

// The same for tensors without an origin, which are most of those that are marked in haste. Null for no marks.
const TensorMarksPtr& marksWithoutOrigin(AmpMark amp) {
  static const TensorMarksPtr none;
  static const TensorMarksPtr wrapped = sharedMarks({}, AmpMark::kWrapped);
  static const TensorMarksPtr to_be_cleaned = sharedMarks({}, AmpMark::kToBeCleaned);
  if (amp == AmpMark::kNone) {
    return none;
  }
  return amp == AmpMark::kWrapped ? wrapped : to_be_cleaned;
}

// Writes only what changes: arguments that come back as results may be other threads' too.
void setMarks(TensorImpl& impl, const std::string& origin, AmpMark amp) {
  const bool is_marked = marksOf(impl) != nullptr;
  const bool is_right = originMarkOf(impl) == origin && ampMarkOf(impl) == amp;
  const bool is_a_backends = impl.get_backend_meta() != nullptr && !is_marked;
  if (is_a_backends || (is_right && impl.key_set().has(kMarksKey) == is_marked)) {
    return;
  }
  if (!origin.empty() || amp != AmpMark::kNone) {
    takeMarksKey();
  }
  TensorMarksPtr marks = origin.empty() ? marksWithoutOrigin(amp) : sharedMarks(origin, amp);
  DispatchKeySet& keys = OpenTensorImpl::keysOf(impl);
  keys = marks == nullptr ? keys.remove(kMarksKey) : keys.add(kMarksKey);
  if (marks != nullptr || impl.get_backend_meta() != nullptr) {
    impl.set_backend_meta(std::move(marks));
  }
}

// Which features a call is about.
struct Concerned {
  bool origins = false;
  bool amp = false;
};

Concerned concernedBy(const OperatorHandle& op, const Stack& stack) {
  Concerned concerned{isTracingOrigins(), isInSelfCleaningRegion() || isAskingKernel()};
  forEachTensor(stack, op.schema().arguments().size(), [&concerned](const Tensor& tensor) {
    if (const TensorMarks* marks = marksOf(*tensor.unsafeGetTensorImpl())) {
      concerned.origins = concerned.origins || !marks->origin.empty();
      concerned.amp = concerned.amp || marks->amp != AmpMark::kNone;
    }
  });
  return concerned;
}

void passOn(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard{kMarksKey};
  op.redispatchBoxed(keys & DispatchKeySet{DispatchKeySet::FULL_AFTER, kMarksKey}, stack);
}

}  // namespace

void takeMarksKey() {
  static LazyKey key{kMarksKey, "AmpTensors, self-cleaning regions and the origins of inference tensors need"};
  key.take([] { registerFallback(kMarksKey, torch::CppFunction::makeFromBoxedFunction<&marksFallback>()); });
}

const TensorMarks* marksOf(const TensorImpl& impl) {
  return dynamic_cast<const TensorMarks*>(const_cast<TensorImpl&>(impl).get_backend_meta());
}

void setOriginMark(TensorImpl& impl, const std::string& origin) {
  setMarks(impl, origin, ampMarkOf(impl));
}

void setAmpMark(TensorImpl& impl, AmpMark amp) {
  setMarks(impl, originMarkOf(impl), amp);
}

Tensor withoutMarks(const Tensor& tensor) {
  const TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  Tensor plain{impl.shallow_copy_and_detach(/*version_counter=*/0, /*allow_tensor_metadata_change=*/true)};
  setMarks(*plain.unsafeGetTensorImpl(), {}, AmpMark::kNone);
  return plain;
}

void lockMarks() {
  marksMutex().lock();
}

void unlockMarks() {
  marksMutex().unlock();
}

void marksFallback(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Concerned concerned = concernedBy(op, *stack);
  const MarkedCall call = concerned.amp ? &ampFallback : &passOn;
  if (concerned.origins) {
    originsFallback(op, keys, stack, call);
  } else {
    call(op, keys, stack);
  }
}

}  // namespace torchext

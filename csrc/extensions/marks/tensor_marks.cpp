#include "tensor_marks.h"

#include <array>
#include <atomic>
#include <map>
#include <utility>

#include <c10/util/intrusive_ptr.h>

#include "../../core/torch_internals/open_tensor_impl.h"
#include "../../libraries/support/locks.h"
#include "marks_key.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKeySet;
using c10::TensorImpl;

namespace {

using TensorMarksPtr = c10::intrusive_ptr<TensorMarks>;
using WeakMarks = c10::weak_intrusive_ptr<TensorMarks>;

std::atomic<std::int64_t> live_marks{0};

// Finds shared marks without keeping them alive. Has at most a few entries per source line.
class MarksTable {
 public:
  TensorMarksPtr find(const std::string& origin, AmpMark amp) {
    const Locked lock{LockRank::kMarks};
    WeakMarks& slot = slotOf(origin, amp);
    TensorMarksPtr marks = slot.lock();
    if (marks == nullptr) {
      marks = c10::make_intrusive<TensorMarks>(origin, amp);
      slot = WeakMarks{marks};
    }
    return marks;
  }

  // Others may have replaced `dead` before it came here.
  void erase(const TensorMarks& dead) {
    const Locked lock{LockRank::kMarks};
    WeakMarks& slot = slotOf(dead.origin, dead.amp);
    if (slot._unsafe_get_target() == &dead) {
      slot.reset();
    }
    if (slot._unsafe_get_target() == nullptr && !dead.origin.empty()) {
      with_origin_.erase({dead.origin, dead.amp});
    }
  }

 private:
  WeakMarks& slotOf(const std::string& origin, AmpMark amp) {
    return origin.empty() ? without_origin_.at(static_cast<std::size_t>(amp)) : withOrigin(origin, amp);
  }
  WeakMarks& withOrigin(const std::string& origin, AmpMark amp) {
    return with_origin_.try_emplace({origin, amp}, WeakMarks{TensorMarksPtr{}}).first->second;
  }

  // Indexed by AmpMark. Where marking must be fast, most tensors have no origin.
  std::array<WeakMarks, 3> without_origin_{WeakMarks{TensorMarksPtr{}}, WeakMarks{TensorMarksPtr{}},
                                           WeakMarks{TensorMarksPtr{}}};
  std::map<std::pair<std::string, AmpMark>, WeakMarks> with_origin_;
};

// Leaked, because tensors may live until the process ends.
MarksTable& marksTable() {
  static auto* table = new MarksTable;
  return *table;
}

// Writes only changes: arguments that are returned as results may be in use on other threads.
void setMarks(TensorImpl& impl, const std::string& origin, AmpMark amp) {
  const bool is_marked = marksOf(impl) != nullptr;
  const bool is_right = originMarkOf(impl) == origin && ampMarkOf(impl) == amp;
  if (!canBeMarked(impl) || (is_right && impl.key_set().has(kMarksKey) == is_marked)) {
    return;
  }
  TensorMarksPtr marks;
  if (!origin.empty() || amp != AmpMark::kNone) {
    takeMarksKey();
    marks = marksTable().find(origin, amp);
  }
  DispatchKeySet& keys = OpenTensorImpl::keysOf(impl);
  keys = marks == nullptr ? keys.remove(kMarksKey) : keys.add(kMarksKey);
  if (marks != nullptr || impl.get_backend_meta() != nullptr) {
    impl.set_backend_meta(std::move(marks));
  }
}

}  // namespace

bool testBackendMeta(bool is_broken) {
  const auto make = [] {
    return c10::make_intrusive<c10::TensorImpl>(c10::DispatchKeySet{c10::DispatchKey::CPU},
                                                caffe2::TypeMeta::Make<std::uint8_t>(), c10::Device{c10::kCPU});
  };
  const auto impl = make();
  const auto meta = c10::make_intrusive<c10::BackendMeta>();
  impl->set_backend_meta(meta);
  const auto copy = is_broken ? make() : impl->shallow_copy_and_detach(/*version_counter=*/0, true);
  const auto other = make();
  other->shallow_copy_from(copy);
  return impl->get_backend_meta() == meta.get() && copy->get_backend_meta() == meta.get() &&
         other->get_backend_meta() == meta.get();
}

TensorMarks::TensorMarks(std::string source_line, AmpMark amp_mark) : origin{std::move(source_line)}, amp{amp_mark} {
  live_marks.fetch_add(1, std::memory_order_relaxed);
}

TensorMarks::~TensorMarks() {
  live_marks.fetch_sub(1, std::memory_order_acq_rel);
}

void TensorMarks::release_resources() {
  marksTable().erase(*this);
}

std::int64_t liveMarks() noexcept {
  return live_marks.load(std::memory_order_acquire);
}

const TensorMarks* marksOf(const TensorImpl& impl) {
  return dynamic_cast<const TensorMarks*>(const_cast<TensorImpl&>(impl).get_backend_meta());
}

bool canBeMarked(const TensorImpl& impl) {
  return const_cast<TensorImpl&>(impl).get_backend_meta() == nullptr || marksOf(impl) != nullptr;
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

}  // namespace torchext

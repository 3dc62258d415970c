#include "recorded_value.h"

#include <utility>

#include "../../core/deferred_init/state/real_dispatch.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../libraries/support/locks.h"

namespace torchext {

using at::Tensor;

RecordedValue::RecordedValue(const Tensor& tensor) : value_{valueOf(tensor)} {
  TORCH_CHECK_VALUE(value_ != nullptr, "A tensor of shape ", tensor.sizes(), " has no recorded value.");
  storage_ = tensor.storage();
}

bool RecordedValue::isOf(const Tensor& tensor) const {
  return valueOf(tensor) == value_;
}

void RecordedValue::putBack() const {
  const Locked lock{LockRank::kReplay};
  setValue(storage_, value_);
}

void RecordedValue::keepApart() const {
  const Locked lock{LockRank::kReplay};
  if (value_.use_count() == 1 || value_->writer() != nullptr) {
    return;
  }
  const RealDispatch guard;
  const c10::Storage copy = value_->makeEmptyStorage();
  bytesAt(copy, 0, copy.nbytes()).copy_(bytesAt(value_->constant(), 0, copy.nbytes()));
  value_->fold(copy);
}

}  // namespace torchext

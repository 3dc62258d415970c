#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include "sizes.h"

namespace torchext {

// Numbers distinct pointers in the order of their first use. Most calls have few tensors, but calls of foreach
// operators may have thousands.
class PointerNumbers {
 public:
  // Returns the number of `pointer`, and whether it is new.
  std::pair<std::size_t, bool> add(const void* pointer) {
    const std::size_t known = find(pointer);
    if (known != seen_.size()) {
      return {known, false};
    }
    seen_.push_back(pointer);
    if (seen_.size() > kFew) {
      index();
    }
    return {known, true};
  }

  // Returns the number of `pointer`, or the number of all pointers if it is new.
  std::size_t find(const void* pointer) const {
    if (numbers_ != nullptr) {
      const auto found = numbers_->find(pointer);
      return found == numbers_->end() ? seen_.size() : found->second;
    }
    return toSize(std::find(seen_.begin(), seen_.end(), pointer) - seen_.begin());
  }

 private:
  using Numbers = ska::flat_hash_map<const void*, std::size_t>;
  static constexpr std::size_t kFew = 16;

  void index() {
    if (numbers_ == nullptr) {
      numbers_ = std::make_unique<Numbers>();
    }
    for (std::size_t i = numbers_->size(); i < seen_.size(); ++i) {
      numbers_->emplace(seen_[i], i);
    }
  }

  c10::SmallVector<const void*, kFew> seen_;
  // Holds all pointers once there are more than kFew.
  std::unique_ptr<Numbers> numbers_;
};

}  // namespace torchext

#include "size_scale.h"

#include <algorithm>

namespace torchext {

namespace {

// Numbers up to this one stay unchanged where other numbers are divided, unless they can be divided.
constexpr int64_t kSmallSize = 64;

// Images are at least this large, which leaves room for kernels of the usual sizes.
constexpr int64_t kLeastImage = 17;

// Numbers that differ by at most this keep their difference. The images of others differ by more.
constexpr int64_t kNear = 8;

constexpr int64_t kMostTried = 4096;

bool isMultiple(int64_t number, int64_t factor) {
  return number % factor == 0;
}

}  // namespace

// Requires a number that is larger than all numbers that have an image.
bool SizeScale::keepsRelations(int64_t number, int64_t image) const {
  return (images_.empty() || image > images_.back().second) && isMultiple(number, 2) == isMultiple(image, 2) &&
         std::all_of(images_.begin(), images_.end(), [&](const auto& smaller) {
           const int64_t difference = number - smaller.first;
           const int64_t difference_of_images = image - smaller.second;
           const bool keeps_distance =
               difference <= kNear ? difference_of_images == difference : difference_of_images > kNear;
           return keeps_distance &&
                  (smaller.first < 2 || isMultiple(number, smaller.first) == isMultiple(image, smaller.second));
         });
}

// Returns `number` itself if no smaller number has the same relations.
int64_t SizeScale::smallestLike(int64_t number, int64_t least) const {
  const int64_t first = images_.empty() ? least : std::max(least, images_.back().second + 1);
  const int64_t end = std::min(number, first + kMostTried);
  for (int64_t image = first; image < end; ++image) {
    if (keepsRelations(number, image)) {
      return image;
    }
  }
  return number;
}

std::optional<SizeScale> SizeScale::dividing(c10::ArrayRef<int64_t> numbers, int64_t divisor) {
  SizeScale scale;
  for (const int64_t number : numbers) {
    int64_t image = number;
    if (number > kLeastKept && isMultiple(number, divisor) && number / divisor >= 2) {
      image = number / divisor;
    } else if (number > kSmallSize) {
      image = scale.smallestLike(number, kLeastImage);
    }
    if (!scale.keepsRelations(number, image)) {
      return std::nullopt;
    }
    scale.images_.emplace_back(number, image);
  }
  return scale;
}

SizeScale SizeScale::compressing(c10::ArrayRef<int64_t> numbers, int64_t kept) {
  SizeScale scale;
  const int64_t least = std::min(kept + 1, kLeastImage);
  for (const int64_t number : numbers) {
    const int64_t image = number <= kept ? number : scale.smallestLike(number, least);
    scale.images_.emplace_back(number, image);
  }
  return scale;
}

int64_t SizeScale::of(int64_t number) const {
  const auto found = std::lower_bound(images_.begin(), images_.end(), number,
                                      [](const auto& pair, int64_t wanted) { return pair.first < wanted; });
  return found != images_.end() && found->first == number ? found->second : number;
}

}  // namespace torchext

#pragma once

// Boxes of values: NOTE [Parts of storages].

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <torchext/macros.h>

#include "../../core/deferred_init/plan/replay_plan.h"
#include "grid.h"

namespace torchext {

// Some bytes of a value, in memory.
struct Part {
  c10::Storage storage;
  // The bytes that it holds. Nothing for the whole storage, unmoved.
  std::optional<Box> box;

  bool contains(const Geometry& geometry) const;

  // Returns the tensor `geometry` of the storage, which the part must contain.
  at::Tensor tensor(const Geometry& geometry) const;
};

class BoxesMemory final : public PartsMemory {
 public:
  BoxesMemory(std::vector<Part> parts, c10::Device device) : parts_{std::move(parts)}, device_{device} {}

  const std::vector<Part>& parts() const noexcept {
    return parts_;
  }

  at::Tensor tensorFor(PartRule reader, const Geometry& geometry, bool is_written) const override;
  const c10::Storage& only() const override;

 private:
  std::vector<Part> parts_;
  c10::Device device_;
};

class Boxes final : public ValueParts {
 public:
  // `device` is that of the storage when it was recorded.
  Boxes(std::vector<Box> boxes, c10::Device device) : boxes_{std::move(boxes)}, device_{device} {}

  const std::vector<Box>& boxes() const noexcept {
    return boxes_;
  }

  bool areNone() const noexcept override;
  std::size_t nbytes() const override;
  bool areAmong(const ValueParts& others) const override;
  bool areOnlyPart(const Geometry& geometry, const Geometry& shown) const override;
  std::shared_ptr<const PartsMemory> makeMemory() const override;
  std::shared_ptr<const PartsMemory> inPlace(const ValueMemory& before) const override;
  std::shared_ptr<const PartsMemory> copyOf(const ValueMemory& before) const override;

 private:
  template <typename MakePart>
  std::shared_ptr<const PartsMemory> memoryOf(const MakePart& make_part) const;

  std::vector<Box> boxes_;
  c10::Device device_;
};

// Returns the boxes of parts that are not all of a value.
TORCHEXT_API const std::vector<Box>& boxesOf(const ValueParts& parts);

}  // namespace torchext

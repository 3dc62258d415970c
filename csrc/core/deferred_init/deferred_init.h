#pragma once

// Makes recorded values real: permanently, or for a single read.

#include <cstddef>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/FunctionRef.h>

#include "graph/op_graph.h"
#include "replay/replay.h"

namespace torchext {

// A fake storage to make real.
struct Pending {
  c10::Storage fake;
  StorageValuePtr value;
  // The requested tensors.
  std::vector<at::Tensor> tensors;
};

// The fake storages of a request, in order, without duplicates.
class Request {
 public:
  // Adds the storage of `tensor`, unless it is real. Returns its position. Raises ValueError for a fake that is not
  // deferred.
  std::optional<std::size_t> add(const at::Tensor& tensor);

  std::vector<Pending>& storages() noexcept {
    return storages_;
  }

 private:
  std::vector<Pending> storages_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> places_;
};

// Computes the values of all storages in one pass over the graph, and then calls `become_real` for each, with a storage
// that holds its value and has no other reference. An error of the pass leaves everything unchanged. The caller holds
// the lock `kReplay`.
void materializeTogether(const std::vector<Pending>& storages,
                         Progress on_done,
                         c10::function_ref<void(std::size_t place, const c10::Storage& real)> become_real);

// Raises MaterializationError if `real` is on another device than `fake`.
void checkFits(const c10::Storage& fake, const c10::Storage& real);

}  // namespace torchext

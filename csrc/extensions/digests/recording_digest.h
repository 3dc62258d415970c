#pragma once

// Compares the recordings of processes without sending them.

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

#include "../../core/deferred_init/graph/op_graph.h"
#include "digest.h"

namespace torchext {

// Returns a digest of each of `tensors`, which must be deferred: of its recording and its geometry. Two processes with
// the same digest materialize the same bits, regardless of their other recordings. Operators count by their names and
// arguments, random numbers by the generator's next draws, and real tensors by their bytes. A draw from a generator
// that is not on the CPU gives another digest in each process.
//
// Raises ValueError for a tensor that is not deferred.
TORCHEXT_API std::vector<Digest> digestsOfRecordings(at::ArrayRef<at::Tensor> tensors);

// An origin of the data of a tensor: a random fill, a real tensor or a constant.
struct Source {
  Digest digest;
  // For example `aten::normal_ of [4, 4] at model.py:7`.
  std::string text;
};

// Returns the sources of each of `tensors`, in recording order. They are the same for all parts of a tensor. Draws from
// generators that are not on the CPU are omitted.
TORCHEXT_API std::vector<std::vector<Source>> sourcesOf(at::ArrayRef<at::Tensor> tensors);

// Returns all operators that led to `values`, in recording order. The caller holds the lock `kReplay`.
TORCHEXT_API std::vector<const OpNode*> operatorsBehind(const std::vector<StorageValuePtr>& values);

}  // namespace torchext

#pragma once

// Telling whether two processes have recorded the same, without sending what they have recorded.

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

#include "graph/digest.h"

namespace torchext {

// A digest of each of `tensors`, which are deferred: of how it comes about and how it shows that. Two processes with
// the same digest materialize the same bits, whatever they have recorded besides. Operators are counted by their names
// and arguments, random numbers by those that a generator draws next, and real tensors by their bytes. What draws from
// a generator of another device than the CPU has another digest in each process.
//
// Raises ValueError for a tensor that is not deferred.
TORCHEXT_API std::vector<Digest> digestsOfRecordings(at::ArrayRef<at::Tensor> tensors);

// Where what a tensor shows comes from: a random fill, a real tensor or a constant.
struct Source {
  Digest digest;
  // Such as `aten::normal_ of [4, 4] at model.py:7`.
  std::string text;
};

// The sources of each of `tensors`, in the order of their recording. They are the same for all parts of a tensor. Draws
// from generators of other devices than the CPU are left out.
TORCHEXT_API std::vector<std::vector<Source>> sourcesOf(at::ArrayRef<at::Tensor> tensors);

}  // namespace torchext

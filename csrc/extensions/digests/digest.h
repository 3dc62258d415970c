#pragma once

// Detects whether memory has changed, without keeping a copy of it, and compares the recordings of processes without
// sending them.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

#include "../../core/deferred_init/graph/op_graph.h"

namespace torchext {

// 128 bits of the bytes that a tensor shows. A change within one 8-byte word always changes them; any other change
// leaves them unchanged with a probability of about 2^-64. They do not protect against deliberate collisions.
using Digest = std::pair<std::uint64_t, std::uint64_t>;

// Returns the digest of the elements of `tensor`, which must be strided and have memory. Two tensors of the same shape,
// strides and dtype that show the same bytes have the same digest, on any device. Reads on all threads.
TORCHEXT_API Digest digestOf(const at::Tensor& tensor);

// Returns a digest of each of `tensors`, which must be deferred: of its recording and its geometry. Two processes with
// the same digest materialize the same bits, regardless of their other recordings. Operators count by their names and
// arguments, random numbers by the generator's next draws, and real tensors by their bytes. A draw from a generator
// that is not on the CPU gives another digest in each process.
//
// Raises ValueError for a tensor that is not deferred.
TORCHEXT_API std::vector<Digest> digestsOfRecordings(at::ArrayRef<at::Tensor> tensors);

// The description and the digest of an origin of the data of a tensor: a random fill, a real tensor or a constant. An
// example is `aten::normal_ of [4, 4] at model.py:7`.
using Source = std::pair<std::string, Digest>;

// Returns the sources of each of `tensors`, in recording order. They are the same for all parts of a tensor. Draws from
// generators that are not on the CPU are omitted.
TORCHEXT_API std::vector<std::vector<Source>> sourcesOf(at::ArrayRef<at::Tensor> tensors);

// Returns all operators that led to `values`, in recording order. The caller holds the lock `kReplay`.
TORCHEXT_API std::vector<const OpNode*> operatorsBehind(const std::vector<StorageValuePtr>& values);

}  // namespace torchext

#include "reduction_buffers.h"

#include <algorithm>
#include <bitset>

#include <ATen/TensorIterator.h>
#include <ATen/WrapDimUtilsMulti.h>
#include <ATen/ops/from_blob.h>

#include "../../../core/support/sizes.h"
#include "arithmetic.h"

namespace torchext {

using at::Tensor;
using at::TensorIteratorBase;

namespace {

constexpr std::int64_t kWarp = 32;

// A tensor of the same geometry on memory that is never read: TensorIterator orders and merges its dimensions like
// those of the real tensor. All have the same `dtype`, because on the CPU all operands must.
Tensor withoutMemory(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::int64_t offset, c10::ScalarType dtype) {
  constexpr std::uintptr_t kAligned = 1 << 20;  // like the allocator's blocks: more than any vector needs
  const std::uintptr_t address = kAligned + (static_cast<std::uintptr_t>(offset) * c10::elementSize(dtype));
  return at::from_blob(reinterpret_cast<void*>(address), sizes, strides,  // NOLINT(performance-no-int-to-ptr)
                       at::TensorOptions{dtype}.device(at::kCPU));
}

// As `review_reduce_result()`: inserts the reduced dimensions again.
Tensor viewResult(const Tensor& result,
                  const Reduction& reduction,
                  const std::bitset<64>& mask,
                  c10::ScalarType dtype) {
  c10::DimVector sizes{result.sizes()};
  c10::DimVector strides{result.strides()};
  if (!reduction.keepdim) {
    for (std::int64_t dim = 0; dim < reduction.input.dim(); ++dim) {
      if (mask[toSize(dim)]) {
        sizes.insert(sizes.begin() + dim, 1);
        strides.insert(strides.begin() + dim, 0);
      }
    }
  }
  return withoutMemory(sizes, strides, 0, dtype);
}

at::TensorIterator iterate(const Reduction& reduction) {
  const Tensor& input = reduction.input;
  const bool reduces_all = !reduction.dims.has_value() || reduction.dims.value().empty();
  const auto mask =
      reduces_all ? ~std::bitset<64>{} : at::dim_list_to_bitset(reduction.dims.value(), toSize(input.dim()));
  const c10::ScalarType dtype = input.scalar_type();
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false).resize_outputs(false).is_reduction(true).check_all_same_dtype(false);
  for (const Tensor& result : reduction.results) {
    config.add_owned_output(viewResult(result, reduction, mask, dtype));
  }
  config.add_owned_const_input(withoutMemory(input.sizes(), input.strides(), input.storage_offset(), dtype));
  return config.build();
}

// The launch configuration of `setReduceConfig()`.
class ReduceLaunch {
 public:
  ReduceLaunch(const TensorIteratorBase& iterator, const Reduction& reduction, const GpuDescription& gpu)
      : iterator_{iterator},
        element_{toSigned(reduction.input.element_size())},
        num_outputs_{iterator.num_output_elements()},
        num_inputs_{iterator.numel() / num_outputs_} {
    decide(reduction, gpu);
    accumulator_ = reduction.accumulator_bytes;
  }

  std::int64_t bufferBytes() const {
    if (ctas_per_output_ == 1) {
      return 0;
    }
    return accumulator_ * num_outputs_ * ctas_per_output_ * (reduces_along_x_ ? 1 : width_ * output_vector_);
  }

  std::int64_t semaphoreBytes() const {
    return ctas_per_output_ == 1 ? 0 : toSigned(sizeof(int)) * gridX();
  }

 private:
  std::int64_t inputStride(int dim) const {
    return iterator_.strides(iterator_.ntensors() - 1)[toSize(dim)];
  }
  std::int64_t gridX() const {
    return divideRoundingUp(num_outputs_ / output_vector_, output_step_);
  }
  std::int64_t valuesPerThread() const {
    return divideRoundingUp(num_inputs_, input_step_);
  }

  // `get_output_vec_size()`: the number of adjacent results that a thread can reduce to.
  int outputVectorSize() const {
    const int output_dim = iterator_.num_reduce_dims();
    const int input = iterator_.ntensors() - 1;
    std::int64_t size = 4;
    const auto divide = [&size](std::int64_t n) {
      while (n % size != 0) {
        size /= 2;
      }
    };
    divide(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(iterator_.data_ptr(input))) / element_);
    divide(iterator_.shape()[toSize(output_dim)]);
    for (int dim = 0; dim < iterator_.ndim(); ++dim) {
      if (dim != output_dim) {
        divide(inputStride(dim) / element_);
      }
    }
    return static_cast<int>(size);
  }

  // `set_block_dimension()`.
  void setBlock(std::int64_t dim0, std::int64_t dim1, std::int64_t max_threads) {
    const std::int64_t most = max_threads / output_vector_;
    const std::int64_t power0 = dim0 < most ? lastPowerOf2(dim0) : most;
    const std::int64_t power1 = dim1 < most ? lastPowerOf2(dim1) : most;
    width_ = std::min(power0, kWarp);
    height_ = std::min(power1, most / width_);
    width_ = std::min(power0, most / height_);
  }

  void decide(const Reduction& reduction, const GpuDescription& gpu) {
    const int num_dims = iterator_.ndim();
    const int num_reduced = iterator_.num_reduce_dims();
    reduces_along_x_ = num_dims == 0 || num_reduced == num_dims || inputStride(0) < inputStride(num_reduced);
    std::int64_t dim0 = reduces_along_x_ ? num_inputs_ : num_outputs_;
    const std::int64_t dim1 = reduces_along_x_ ? num_outputs_ : num_inputs_;
    const std::int64_t stride = num_dims == 0 ? element_ : inputStride(reduces_along_x_ ? 0 : num_reduced);
    if (stride == element_) {
      if (!reduces_along_x_) {
        output_vector_ = outputVectorSize();
        dim0 /= output_vector_;
      } else if (dim0 >= 128 && num_reduced == 1) {
        dim0 /= reduction.vector_size;
      }
    }
    constexpr std::int64_t kMaxThreads = 512;
    constexpr std::int64_t kMaxThreadsOfComplexDouble = 256;
    setBlock(dim0, dim1,
             reduction.input.scalar_type() == at::kComplexDouble ? kMaxThreadsOfComplexDouble : kMaxThreads);
    (reduces_along_x_ ? input_step_ : output_step_) *= width_;
    constexpr std::int64_t kMinValues = 16;  // per thread
    constexpr std::int64_t kMaxValues = 256;
    const bool reduces_along_y = valuesPerThread() >= std::min(height_ * kMinValues, kMaxValues);
    (reduces_along_y ? input_step_ : output_step_) *= height_;
    const std::int64_t target = gpu.multiprocessors * (gpu.max_threads_per_multiprocessor / (width_ * height_));
    if (reduces_along_y && valuesPerThread() >= kMaxValues && gridX() <= target) {
      ctas_per_output_ =
          std::max(std::min(divideRoundingUp(target, gridX()), divideRoundingUp(valuesPerThread(), kMinValues)),
                   divideRoundingUp(valuesPerThread(), kMaxValues));
    }
  }

  const TensorIteratorBase& iterator_;
  const std::int64_t element_;
  const std::int64_t num_outputs_;
  const std::int64_t num_inputs_;  // per output
  std::int64_t accumulator_ = 0;
  std::int64_t output_vector_ = 1;
  std::int64_t width_ = 1;  // of a thread block
  std::int64_t height_ = 1;
  std::int64_t input_step_ = 1;
  std::int64_t output_step_ = 1;
  std::int64_t ctas_per_output_ = 1;
  bool reduces_along_x_ = true;
};

}  // namespace

std::int64_t accumulatorBytes(c10::ScalarType dtype) {
  const bool is_half = c10::isReducedFloatingType(dtype) || dtype == at::kComplexHalf;
  return static_cast<std::int64_t>(c10::elementSize(dtype)) * (is_half ? 2 : 1);
}

std::vector<std::int64_t> dimsBut(const Tensor& tensor, std::int64_t kept) {
  std::vector<std::int64_t> dims;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (dim != kept) {
      dims.push_back(dim);
    }
  }
  return dims;
}

void reduceOnGpu(KernelCall& call, const Reduction& reduction) {
  if (reduction.input.numel() == 0) {
    return;
  }
  const auto launch = [&](const TensorIteratorBase& iterator) {
    const ReduceLaunch config{iterator, reduction, call.gpu};
    const auto buffer = call.allocate(config.bufferBytes());
    const auto semaphores = call.allocate(config.semaphoreBytes());
    call.free({semaphores, buffer});
  };
  const at::TensorIterator iterator = iterate(reduction);
  if (iterator.can_use_32bit_indexing()) {
    launch(iterator);
    return;
  }
  for (const at::TensorIterator& part : iterator.with_32bit_indexing()) {
    launch(part);
  }
}

}  // namespace torchext

// Pooling, padding and patches of images: the copies into the layout that their kernels read.

#include <cstdint>

#include "../../../core/support/sizes.h"
#include "kernel_call.h"

namespace torchext {

using at::Tensor;

namespace {

using BlockNumber = KernelCall::BlockNumber;

// The layouts that a kernel reads.
enum class Reads : std::uint8_t {
  kContiguous,  // `contiguous()`
  kOwnFormat,   // `contiguous(suggest_memory_format())`: also channels last
};

bool isReadable(const Tensor& tensor, Reads reads) {
  return tensor.is_contiguous(reads == Reads::kContiguous ? at::MemoryFormat::Contiguous
                                                          : tensor.suggest_memory_format());
}

BlockNumber copyUnless(KernelCall& call, const Tensor& tensor, bool is_readable) {
  return is_readable ? -1 : call.copy(tensor);
}

// Allocates the results, and copies the first argument: an image, or a gradient.
template <Reads kReads>
void copyAfterResults(KernelCall& call) {
  call.allocateResults();
  call.free(copyUnless(call, call.tensor(0), isReadable(call.tensor(0), kReads)));
}

template <Reads kReads>
void copyBeforeResults(KernelCall& call) {
  const BlockNumber copy = copyUnless(call, call.tensor(0), isReadable(call.tensor(0), kReads));
  call.allocateResults();
  call.free(copy);
}

// Reads the gradient in the format of the image, which is the second argument. Also copies the image if `kCopiesImage`.
template <bool kCopiesImage>
void copyInFormatOfImage(KernelCall& call) {
  call.allocateResults();
  const Tensor& image = call.tensor(1);
  const Tensor& gradient = call.tensor(0);
  const BlockNumber image_copy = copyUnless(call, image, !kCopiesImage || isReadable(image, Reads::kOwnFormat));
  const BlockNumber copy = copyUnless(call, gradient, gradient.is_contiguous(image.suggest_memory_format()));
  call.free({copy, image_copy});
}

bool hasChannelsLast(const Tensor& tensor) {
  return tensor.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
}

// AdaptiveAveragePooling.cu: with channels last, the gradient is read without a copy.
void adaptiveAveragePoolBackward(KernelCall& call) {
  call.allocateResults();
  const Tensor& gradient = call.tensor(0);
  call.free(copyUnless(call, gradient, hasChannelsLast(call.tensor(1)) || gradient.is_contiguous()));
}

// AdaptiveMaxPooling2d.cu: results that are not contiguous are computed in a copy.
void adaptiveMaxPool(KernelCall& call) {
  call.allocateResults();
  const BlockNumber output = call.copyUnlessContiguous(call.result());
  const BlockNumber indices = call.copyUnlessContiguous(call.result(1));
  const BlockNumber image = call.copyUnlessContiguous(call.tensor(0));
  call.free({image, indices, output});
}

void adaptiveMaxPoolBackward(KernelCall& call) {
  call.allocateResults();
  const BlockNumber gradient = call.copyUnlessContiguous(call.tensor(0));
  const BlockNumber indices = call.copyUnlessContiguous(call.tensor(2));
  const BlockNumber result = call.copyUnlessContiguous(call.result());
  call.free({result, indices, gradient});
}

// `im2col_out_cuda_template()`: the result starts with the size of the image and is then resized.
void imageToColumns(KernelCall& call) {
  const Tensor& image = call.tensor(0);
  const bool grows = KernelCall::bytesOf(call.result()) > KernelCall::bytesOf(image);
  const BlockNumber first = grows ? call.copy(image) : -1;
  const BlockNumber copy = call.copyUnlessContiguous(image);
  call.allocateResult(0);
  call.free({first, copy});
}

// As `unfold_backward_cuda_kernel()`: overlapping windows need an index of each position.
void unfoldBackward(KernelCall& call) {
  call.allocateResults();
  const std::int64_t dim = call.argument(2).toInt();
  const auto sizes = call.argument(1).toIntVector();
  if (call.argument(4).toInt() < call.argument(3).toInt() && !sizes.empty()) {
    const auto count = toSigned(sizes.size());
    call.allocateAndFree(sizes[toSize(dim < 0 ? dim + count : dim)] * 8);
  }
}

const KernelRules kImageRules{
    {copyAfterResults<Reads::kOwnFormat>,
     {"aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices", "aten::avg_pool2d", "aten::upsample_nearest2d",
      "aten::_upsample_nearest_exact2d"}},
    {copyInFormatOfImage<true>, {"aten::max_pool2d_with_indices_backward", "aten::avg_pool2d_backward"}},
    {copyInFormatOfImage<false>, {"aten::max_pool3d_with_indices_backward"}},
    {copyAfterResults<Reads::kContiguous>,
     {"aten::avg_pool3d", "aten::avg_pool3d_backward", "aten::_adaptive_avg_pool3d_backward",
      "aten::adaptive_max_pool3d", "aten::adaptive_max_pool3d_backward", "aten::reflection_pad1d",
      "aten::reflection_pad1d_backward", "aten::reflection_pad2d", "aten::reflection_pad2d_backward",
      "aten::reflection_pad3d", "aten::col2im"}},
    {copyBeforeResults<Reads::kOwnFormat>, {"aten::_adaptive_avg_pool2d"}},
    {adaptiveAveragePoolBackward, {"aten::_adaptive_avg_pool2d_backward"}},
    {copyBeforeResults<Reads::kContiguous>, {"aten::_adaptive_avg_pool3d"}},
    {adaptiveMaxPool, {"aten::adaptive_max_pool2d"}},
    {adaptiveMaxPoolBackward, {"aten::adaptive_max_pool2d_backward"}},
    {imageToColumns, {"aten::im2col"}},
    {unfoldBackward, {"aten::unfold_backward"}},
};

}  // namespace

}  // namespace torchext

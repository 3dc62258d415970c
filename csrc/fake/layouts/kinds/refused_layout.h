#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "../layout.h"

namespace torchext {

// A layout that has no fakes.
//
// PyTorch's own checks come too late, or do not come at all: `NestedTensorImpl` raises when it is asked for sizes, and
// the Meta kernel of `quantize_per_tensor` returns floating-point numbers.
class RefusedLayout : public LayoutHandler {
 public:
  // The words of the error that refuses a call: "`op` returns `what`; `remedy`."
  struct Words {
    std::string_view what;
    std::string_view remedy;
  };

  // `makers` are prefixes of the names of operators that make such a tensor from others.
  RefusedLayout(Words words, std::vector<std::string_view> makers);

  void refuse(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const final;

 protected:
  // Returns true for a tensor that calls with fakes may not take.
  virtual bool refuses(const at::Tensor& tensor) const;

  // Returns what such a tensor is, as the object of "takes".
  virtual std::string describe(const at::Tensor& tensor) const;

 private:
  const Words words_;
  const std::vector<std::string_view> makers_;
};

}  // namespace torchext

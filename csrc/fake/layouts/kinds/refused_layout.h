#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "../layout.h"

namespace torchext {

// A layout that has no fakes.
//
// PyTorch's own checks are too late or missing: `NestedTensorImpl` raises when its sizes are read, and the Meta kernel
// of `quantize_per_tensor` returns floating-point numbers.
class RefusedLayout : public LayoutHandler {
 public:
  // Parts of the error for a refused call: "`op` returns `what`; `remedy`."
  struct Words {
    std::string_view what;
    std::string_view remedy;
  };

  // `makers`: name prefixes of the operators that make such a tensor from others.
  RefusedLayout(Words words, std::vector<std::string_view> makers);

  void refuse(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const final;

 protected:
  // Returns true for a tensor that calls with fakes must not take.
  virtual bool refuses(const at::Tensor& tensor) const;

  // Describes such a tensor, as the object of "takes".
  virtual std::string describe(const at::Tensor& tensor) const;

 private:
  const Words words_;
  const std::vector<std::string_view> makers_;
};

}  // namespace torchext

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "../layout.h"

namespace torchext {

// A layout of which there are no fakes.
//
// PyTorch's own checks come too late for these: `NestedTensorImpl` has no sizes to ask for, and the Meta kernel of
// `quantize_per_tensor` returns floating-point numbers.
class RefusedLayout : public LayoutHandler {
 public:
  // What refuses calls is said with these words: "`op` returns `what`; `remedy`."
  struct Words {
    std::string_view what;
    std::string_view remedy;
  };

  // `makers` are the beginnings of the names of operators that make such a tensor of others.
  RefusedLayout(Words words, std::vector<std::string_view> makers);

  void refuse(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const final;

 protected:
  // True for a tensor that calls about fakes may not take.
  virtual bool refuses(const at::Tensor& tensor) const;

  // What such a tensor is, as the object of "takes".
  virtual std::string describe(const at::Tensor& tensor) const;

 private:
  const Words words_;
  const std::vector<std::string_view> makers_;
};

}  // namespace torchext

#pragma once

// NOTE [Attention on fake CUDA]
//
// `scaled_dot_product_attention()` is composed of operators, and which ones depends on the device: it asks
// `_fused_sdp_choice_stub` for one of the backends (flash, memory-efficient, cuDNN or math), prepares the arguments for
// it and calls it. They differ in what they allocate and save: math keeps the matrix of scores, the others do not. A
// build without CUDA has nothing registered for CUDA, and would always take math; a build with CUDA would ask the
// driver.
//
// So a function of ours is registered there while fake CUDA devices can be seen. It chooses as PyTorch does
// (`select_sdp_backend()`, sdp_utils.cpp), for the device that was described: by the order and the switches that the
// user has set, and by what each backend supports. What does not depend on the device is checked by PyTorch's own
// functions, which are in a header; so the rules of a release are its own. All official builds have flash and
// memory-efficient attention, and cuDNN in the version that is named in attention.cpp.

namespace torchext {

// Has attention on fake CUDA devices choose as on real ones. To be called where there are no real ones.
void chooseAttentionOnFakeCuda();

}  // namespace torchext

#pragma once

// NOTE [Attention on fake CUDA]
//
// `scaled_dot_product_attention()` is composed of other operators, depending on the device. `_fused_sdp_choice_stub`
// chooses a backend (flash, memory-efficient, cuDNN or math), and attention prepares the arguments for it and calls it.
// The backends differ in what they allocate and save: only math keeps the matrix of scores. In a build without CUDA,
// nothing is registered for CUDA, so math would always be chosen. A build with CUDA would query the driver.
//
// While fake CUDA devices are visible, our own function is registered there. It chooses as PyTorch does
// (`select_sdp_backend()`, sdp_utils.cpp) for the described device: by the order and the switches that the user has
// set, and by the limits of each backend. Checks that do not depend on the device are PyTorch's own functions, which
// are in a header. So each release applies its own rules. All official builds have flash and memory-efficient
// attention, and the cuDNN version named in attention.cpp.

namespace torchext {

// Makes attention on fake CUDA devices choose a backend as on real ones. Call only where there are no real ones.
void chooseAttentionOnFakeCuda();

}  // namespace torchext

#pragma once

#include <torch/library.h>

namespace torchext {

// Registers the kernels of NOTE [Composites that look at memory], except those of NOTE [Shortcuts that read values],
// which must have been registered before.
void registerComposites(torch::Library& library);

}  // namespace torchext

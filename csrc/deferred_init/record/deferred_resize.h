#pragma once

namespace torchext {

// Registers the kernel of the `DeferredInit` key for NOTE [Resizing to the same size]. To be called once per
// process, with its fallback.
void registerResizeOfDeferred();

}  // namespace torchext

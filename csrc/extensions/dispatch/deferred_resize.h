#pragma once

namespace torchext {

// Registers the kernel of the `DeferredInit` key for NOTE [Resizing to the same size]. Call it once per process, when
// the key's fallback is registered.
void registerResizeOfDeferred();

}  // namespace torchext

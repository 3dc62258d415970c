#pragma once

#include <memory>

#include "../layout.h"

namespace torchext {

// Each is defined in the file named after its layout.
std::unique_ptr<const LayoutHandler> makeMkldnnLayout();
std::unique_ptr<const LayoutHandler> makeNestedLayout();
std::unique_ptr<const LayoutHandler> makeQuantizedLayout();
std::unique_ptr<const LayoutHandler> makeSparseLayout();
std::unique_ptr<const LayoutHandler> makeUnknownLayout();

// Registers all layouts. Call once per process, before there are fakes.
void registerLayouts();

}  // namespace torchext

#pragma once

#include "../../core/fake/layouts/layout.h"

namespace torchext {

void registerSparseLayout();

// Registers the layouts without fakes. Call it last: it also refuses every tensor that no other layout has.
void registerRefusedLayouts();

// Registers all layouts. Call once per process, before there are fakes.
void registerLayouts();

}  // namespace torchext

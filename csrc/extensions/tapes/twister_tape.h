#pragma once

// The tape of MT19937, the generator of the CPU: a sequence of 32-bit draws. The engine can be moved along it without
// drawing (libraries/fills/mt19937.h).

#include <cstdint>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include "../../core/deferred_init/random/tape.h"

namespace torchext {

// Puts the engine of a generator into a state. The caller holds the generator's mutex.
void setEngine(at::CPUGeneratorImpl& impl, const at::mt19937_data_pod& data);

// Returns a state of the engine on the tape of `position`, or null if that is not a tape of MT19937.
const at::mt19937_data_pod* keptEngineOf(const TapePositionPtr& position);

// Moves `generator`, a CPU generator, as `draws` calls of `random()` would. Returns its previous position.
TapePositionPtr takeDraws(at::Generator generator, std::uint64_t draws);

// Moves `generator` as `count` calls of `at::normal_distribution<double>` would, including the value that it keeps.
// Returns its previous position.
TapePositionPtr takeNormals(at::Generator generator, std::uint64_t count);

}  // namespace torchext

#pragma once

namespace torchext {

// Answers the hook `MakeMemory`: results of a `RecyclingGuard` are in its memory, and others on huge pages. Call it
// while the library is loaded.
void registerReplayMemory();

}  // namespace torchext

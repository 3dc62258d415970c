#pragma once

// NOTE [Computed values]
//
// A constructor that reads values (`w.norm().item()`), or draws by them (`torch.multinomial(w, 1)`), has them computed
// while it runs. The next read would begin anew, so a loop that feeds on its own results would take quadratic time:
//
//     for _ in range(1000):
//         w[torch.multinomial(w, 1)] += 1
//
// So values are remembered that were computed for a read, both those that were asked for and those that led to them, if
// a tensor shows them: a constant with the same bytes is kept beside the recorded value, and later replays begin there.
// The recorded operators stay, because explanations, digests and other processes need them. The oldest constants are
// dropped where all of them take more than 256 MiB. Each is dropped with its value, too.

#include <c10/core/Storage.h>

#include "op_graph.h"

namespace torchext {

// Returns false for values that are too large.
bool isWorthRemembering(const StorageValue& value);

// Remembers that `value` has the bytes of `storage`, which nothing writes any more. To be called with the lock of
// replays.
void rememberComputed(const StorageValue& value, c10::Storage storage);

}  // namespace torchext

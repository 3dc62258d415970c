#pragma once

// NOTE [Computed values]
//
// A constructor that reads values (`w.norm().item()`), or draws by them (`torch.multinomial(w, 1)`), computes them
// while it runs. If the next read started from scratch, a loop that uses its own results would take quadratic time:
//
//     for _ in range(1000):
//         w[torch.multinomial(w, 1)] += 1
//
// So values that were computed for a read are cached, both the requested ones and those that led to them, if a tensor
// shows them: a constant with the same bytes is kept next to the recorded value, and later replays begin there. The
// recorded operators stay, because explanations, digests and other processes need them. The oldest constants are
// dropped when all together exceed 256 MiB. A constant is also dropped with its value.

namespace torchext {

// Answers the hook `ComputedValues`. Call it while the library is loaded.
void registerComputedValues();

}  // namespace torchext

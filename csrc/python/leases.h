#pragma once

// When PyTorch's functions are replaced: NOTE [Leases on PyTorch's functions]. Python declares the replacements
// (torchext/tools/leases.py) and is called when a lease gets its first holder, and when it loses its last.

namespace torchext::python {

// Replaces the leased functions. Call it when a lease may have got a holder. Returns false with a Python error.
bool settleLeases();

}  // namespace torchext::python

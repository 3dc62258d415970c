#pragma once

// When PyTorch's functions are replaced: NOTE [Leases on PyTorch's functions]. What is replaced, and how, is declared
// in Python (torchext/tools/leases.py), which is asked when something begins to hold a lease, and when nothing does any
// more.

namespace torchext::python {

// Sees to it that what is leased is replaced: to be called when something may have begun to hold a lease. Returns false
// with a Python error.
bool settleLeases();

}  // namespace torchext::python

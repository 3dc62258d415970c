#pragma once

namespace torchext {

// NOTE [Unboxed calls]
//
// The fallback of the `Fake` key is called with boxed arguments. Boxing costs more than a view of a real tensor: a
// tensor that only Python holds gets a second reference, for which PyTorch takes the interpreter's lock, and lists of
// numbers are copied. So the operators that training loops call most have an unboxed kernel on the key. It describes
// the call by the same CallKey, and makes its results if the cache remembers them. It passes all other calls to the
// fallback, boxed, as the dispatcher does without such a kernel. A few operators need no key: aliases, fields of sparse
// tensors, and reading a known value.

// Registers these kernels. Call once per process, when the fallback is registered. If the key is shared, all calls go
// to the fallback.
void registerUnboxedCalls();

}  // namespace torchext

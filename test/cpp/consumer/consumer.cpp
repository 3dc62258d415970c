// Calls no PyTorch function directly, so that a linker may drop the PyTorch libraries that `libtorchext.so` needs.
// test/package/test_cpp.py and .ci/package build and start this program.

#include <cstdio>

#include <torchext/fake.h>

int main() {
  const torchext::FakeModeGuard guard;
  std::puts("ok");
}

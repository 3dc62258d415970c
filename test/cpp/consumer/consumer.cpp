// Calls nothing of PyTorch's itself, so that a linker drops PyTorch's libraries, which `libtorchext.so` needs, where it
// may. test/package/test_cpp.py and .ci/package build and start this program.

#include <cstdio>

#include <torchext/fake.h>

int main() {
  const torchext::FakeModeGuard guard;
  std::puts("ok");
}

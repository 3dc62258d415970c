#include "kernel_memory.h"

namespace torchext {

bool hasKernelMemory(const c10::OperatorHandle& /*op*/) {
  return false;
}

KernelMemory kernelMemoryOf(const c10::OperatorHandle& /*op*/,
                            c10::ArrayRef<c10::IValue> /*arguments*/,
                            c10::ArrayRef<c10::IValue> /*results*/,
                            const GpuDescription& /*gpu*/) {
  return {};
}

}  // namespace torchext

#include "kernel_threads.h"

#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

#include <ATen/Parallel.h>
#include <pthread.h>

// Functions of the OpenMP library that PyTorch loads, if it has one. Those of `at` also set MKL's threads in all
// threads.
extern "C" {
__attribute__((weak)) void omp_set_num_threads(int);
__attribute__((weak)) int omp_get_max_threads();
__attribute__((weak)) int omp_pause_resource_all(int);
}

namespace torchext {

namespace {

// Returns true if this process was forked and has not started another program since then, or if this cannot be read.
bool isForked() {
  constexpr unsigned long kForkedNoExec = 0x40;  // PF_FORKNOEXEC of Linux
  std::ifstream file{"/proc/self/stat"};
  const std::string fields{std::istreambuf_iterator<char>{file}, {}};
  std::istringstream after_name{fields.substr(fields.rfind(')') + 1)};  // the name may contain spaces
  std::string field;
  for (int i = 0; i < 6; ++i) {  // state, parent, group, session, terminal, its group
    after_name >> field;
  }
  unsigned long flags = kForkedNoExec;
  return !(after_name >> flags) || (flags & kForkedNoExec) != 0;
}

constexpr int kKeepSettings = 1;  // omp_pause_soft
[[maybe_unused]] const bool ends_pools =
    omp_pause_resource_all != nullptr && !isForked() &&
    pthread_atfork([] { omp_pause_resource_all(kKeepSettings); }, nullptr, nullptr) == 0;

}  // namespace

OneThread::OneThread(bool is_wanted) noexcept {
  if (is_wanted && omp_set_num_threads != nullptr && omp_get_max_threads != nullptr &&
      at::get_num_threads() > 1) {  // sets the initial number of this thread
    previous_ = omp_get_max_threads();
    omp_set_num_threads(1);
  }
}

OneThread::~OneThread() {
  if (previous_ != 0) {
    omp_set_num_threads(previous_);
  }
}

}  // namespace torchext

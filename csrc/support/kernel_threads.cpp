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

// Returns a field of /proc/self/stat after the name, which may contain spaces. The state is number 3, as in its manual.
unsigned long fieldOfProcess(int number) {
  std::ifstream file{"/proc/self/stat"};
  const std::string fields{std::istreambuf_iterator<char>{file}, {}};
  std::istringstream rest{fields.substr(fields.rfind(')') + 1)};
  std::string skipped;
  for (int i = 3; i < number; ++i) {
    rest >> skipped;
  }
  unsigned long value = 0;
  rest >> value;
  return value;
}

// Returns true if this process was forked and has not started another program since then.
bool isForked() {
  constexpr int kFlags = 9;
  constexpr unsigned long kForkedNoExec = 0x40;  // PF_FORKNOEXEC of Linux
  return (fieldOfProcess(kFlags) & kForkedNoExec) != 0;
}

const bool was_forked_before = isForked();

bool hasOtherThreads() {
  constexpr int kThreads = 20;
  return fieldOfProcess(kThreads) > 1;
}

void endPool() {
  constexpr int kKeepSettings = 1;  // omp_pause_soft
  if (!was_forked_before || hasOtherThreads()) {
    omp_pause_resource_all(kKeepSettings);
  }
}

[[maybe_unused]] const bool ends_pools =
    omp_pause_resource_all != nullptr && pthread_atfork(&endPool, nullptr, nullptr) == 0;

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

#pragma once

// NOTE [Threads of kernels]
//
// GNU OpenMP keeps a pool of threads for each thread that runs parallel code. In a forked process the threads of the
// pool are gone, and a parallel kernel on the thread that forked waits for them forever. The kernels that fakes run
// therefore run there on one thread, or on a new thread, which starts another pool. The results are the same, except
// that the number of threads decides which kernel a convolution runs (`ConvParams::use_mkldnn()`), and where the
// vectors of a range of floating-point numbers begin, so these need a new thread.

#include <c10/macros/Macros.h>
#include <c10/util/FunctionRef.h>

namespace torchext {

// Returns the number of forks between the first process and this one.
int countForks() noexcept;

// Keeps the kernels of this thread from using others, except for MKL's if the program has set the number of threads.
class OneThread {
 public:
  explicit OneThread(bool is_wanted) noexcept;
  C10_DISABLE_COPY_AND_ASSIGN(OneThread);
  ~OneThread();

 private:
  int previous_ = 0;
};

// Returns true if kernels of this thread use several threads where no OneThread exists.
bool hasSeveralThreads();

// Calls `kernel`; in a forked process on a new thread, with the state of this one and the usual number of threads. If
// the system has no more threads, calls it on this one.
void callDespiteFork(c10::function_ref<void()> kernel);

}  // namespace torchext

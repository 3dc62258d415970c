#pragma once

// NOTE [Threads of kernels]
//
// GNU OpenMP keeps a pool of threads for each thread that runs parallel code. In a forked process the threads of the
// pool are gone, and a parallel kernel on the thread that forked would wait for them forever. The kernels that fakes
// run, and those of replays, must return there with the same results, and the number of threads decides some results:
// which kernel a convolution runs (`ConvParams::use_mkldnn()`), and where the vectors of a range of floating-point
// numbers begin.
//
// So a thread that forks ends its pool first. Its next parallel kernel starts another one, in both processes. Ending
// three threads and starting them again takes 0.3 ms on an idle AMD EPYC, and 2 ms beside other processes.
//
// A process that was forked before it loaded this library may have a pool whose threads are gone, and ending it would
// wait for them. Nothing shows whether it has, so such a process keeps its pools, as without this library.

#include <c10/macros/Macros.h>

namespace torchext {

// Keeps the kernels of this thread from using others, except for MKL's if the program has set the number of threads.
class OneThread {
 public:
  explicit OneThread(bool is_wanted) noexcept;
  C10_DISABLE_COPY_AND_ASSIGN(OneThread);
  ~OneThread();

 private:
  int previous_ = 0;
};

}  // namespace torchext

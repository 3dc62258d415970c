// A mistake that the sanitizer of threads has to report: ../sanitize.
// reported as: data_race

#include <thread>

int shared = 0;

extern "C" void make_mistakes() {
  std::thread other{[] { ++shared; }};
  ++shared;
  other.join();
}

// A mistake that the thread sanitizer must report: ../sanitize.
// reported as: data_race

#include <thread>

int shared = 0;

extern "C" void make_mistakes() {
  std::thread other{[] { ++shared; }};
  ++shared;
  other.join();
}

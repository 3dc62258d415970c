// Mistakes that the sanitizers of addresses and of undefined behaviour have to report: ../sanitize.
// reported as: signed_integer_overflow
// reported as: heap-buffer-overflow

extern "C" void make_mistakes() {
  volatile int large = 0x7fffffff;
  large = large + 1;
  volatile int past = 4;
  int* numbers = new int[4];
  numbers[past] = large;
  delete[] numbers;
}

// Mistakes that the address and undefined-behavior sanitizers must report: ../sanitize.
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

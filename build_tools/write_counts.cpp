// A part of the library in builds with TORCHEXT_COVERAGE only.

extern "C" {

void __gcov_dump();

// Writes the counts of lines so far, for processes that end without calling the functions registered for their exit.
__attribute__((visibility("default"))) void torchextWriteCounts() {
  __gcov_dump();
}

}  // extern "C"

// Loaded before everything else: lets the sanitizer of undefined behaviour write to files, too. Its runtime asks for
// that by a function of which each runtime has its own, and finds that of the sanitizer of addresses, which comes
// first.

#include <dlfcn.h>

#include <cstdlib>

namespace {

__attribute__((constructor)) void setReportPath() {
  void* runtime = dlopen("libubsan.so.1", RTLD_NOW);
  const char* path = std::getenv("UNDEFINED_REPORTS");
  if (runtime == nullptr || path == nullptr) {
    return;
  }
  using SetReportPath = void (*)(const char*);
  reinterpret_cast<SetReportPath>(dlsym(runtime, "__sanitizer_set_report_path"))(path);
}

}  // namespace

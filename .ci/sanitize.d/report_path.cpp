// Loaded before everything else: lets the undefined-behavior sanitizer write to files. Its runtime looks up a function
// for that by name, and would find that of the address sanitizer, which is loaded first.

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

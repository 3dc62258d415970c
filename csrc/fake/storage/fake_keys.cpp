#include "fake_keys.h"

#include <vector>

#include "../../take_key.h"

namespace torchext {

namespace {

std::vector<CompositesRegistrar>& registrars() {
  static auto* registrars = new std::vector<CompositesRegistrar>;
  return *registrars;
}

void registerComposites() {
  registerFallback(kCompositesKey, torch::CppFunction::makeFallthrough());
  // Leaked: kernels may be in flight until the process ends.
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", kCompositesKey, __FILE__, __LINE__);
  for (const CompositesRegistrar registrar : registrars()) {
    registrar(*library);
  }
}

}  // namespace

void takeCompositesKey() {
  static LazyKey key{kCompositesKey, "Fake and deferred tensors need"};
  key.take(registerComposites);
}

void registerOnCompositesKey(CompositesRegistrar registrar) {
  registrars().push_back(registrar);
}

}  // namespace torchext

#include "data_files.h"

#include <dlfcn.h>

#include <filesystem>

#include <c10/util/Exception.h>

namespace torchext {

std::ifstream openDataFile(const std::string& name) {
  Dl_info library{};
  TORCH_INTERNAL_ASSERT(dladdr(reinterpret_cast<const void*>(&openDataFile), &library) != 0);
  const std::filesystem::path package = std::filesystem::path{library.dli_fname}.parent_path().parent_path();
  const std::filesystem::path path = package / "share" / "torchext" / name;
  std::ifstream file{path};
  TORCH_CHECK(file, "torchext cannot read ", path.string(), ", which is installed with it. Install torchext again.");
  return file;
}

}  // namespace torchext

#pragma once

#include <fstream>
#include <string>

namespace torchext {

// Opens a file that is installed with the library, in `share/torchext` of the package. Raises RuntimeError with its
// path if it is missing.
std::ifstream openDataFile(const std::string& name);

}  // namespace torchext

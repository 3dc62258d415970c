// Virtual tables of objects with some functions replaced.

#include <string>

#include <c10/util/Exception.h>

#include "extensions/cuda/virtual_table.h"
#include "tests.h"

// The table is exported, as in a PyTorch library.
class __attribute__((visibility("default"))) Hooks {
 public:
  virtual int one() const;
  virtual int two() const;
  virtual int three() const;
};

int Hooks::one() const {
  return 1;
}

int Hooks::two() const {
  return 2;
}

int Hooks::three() const {
  return 3;
}

namespace {

using Table = torchext::VirtualTable<8>;

int returnTwenty(const Hooks* /*hooks*/) {
  return 20;
}

void functionsThatAreNotReplacedStay() {
  Hooks hooks;
  Table table{&hooks, torchext::tableSizeOf<Hooks>()};
  table.replace(torchext::slotOf(&Hooks::two), &returnTwenty);
  table.installInto(&hooks);
  const Hooks* volatile hidden = &hooks;
  EXPECT(hidden->one() == 1 && hidden->two() == 20 && hidden->three() == 3);
}

void tableWhoseSizeDiffersFromTheHeaderIsRejected() {
  const Hooks hooks;
  std::string message;
  try {
    const Table table{&hooks, torchext::tableSizeOf<Hooks>() - 1};
  } catch (const c10::Error& error) {
    message = error.what();
  }
  EXPECT(message.find("has 3 virtual functions, but 2 in the headers") != std::string::npos);
}

constexpr Test kTests[] = {
    {"functions that are not replaced stay", functionsThatAreNotReplacedStay},
    {"table whose size differs from the header is rejected", tableWhoseSizeDiffersFromTheHeaderIsRejected},
};

}  // namespace

EXPORT_TESTS(kTests)

#include "virtual_table.h"

#include <memory>

#include <dlfcn.h>
#include <link.h>

namespace torchext {

std::size_t exportedTableSize(const void* table) {
  constexpr std::size_t kBefore = 2 * sizeof(void*);  // the symbol begins before the first function
  Dl_info info{};
  ElfW(Sym)* symbol = nullptr;
  const bool is_found = dladdr1(table, &info, reinterpret_cast<void**>(&symbol), RTLD_DL_SYMENT) != 0;
  if (!is_found || symbol == nullptr || static_cast<const char*>(info.dli_saddr) + kBefore != table) {
    return 0;
  }
  return (symbol->st_size - kBefore) / sizeof(void*);
}

// Not in an anonymous namespace: there the compiler could prove that no class derives from this one, and call its
// functions directly.
class VirtualTableTest {
 public:
  VirtualTableTest() = default;
  C10_DISABLE_COPY_AND_ASSIGN(VirtualTableTest);
  virtual ~VirtualTableTest() = default;
  virtual int one() const {
    return 1;
  }
  virtual int two() const {
    return 2;
  }
  virtual int three() const {
    return 3;
  }
};

namespace {

int returnTwenty(const VirtualTableTest* /*instance*/) {
  return 20;
}

// Hides the object's class from the compiler, so that it calls functions through the table.
const VirtualTableTest& hidden(const VirtualTableTest& instance) {
  const VirtualTableTest* volatile pointer = &instance;
  return *pointer;
}

}  // namespace

bool testVirtualTable(bool is_broken) {
  constexpr std::size_t kCapacity = 8;
  static VirtualTable<kCapacity> table{std::make_unique<VirtualTableTest>().get(), tableSizeOf<VirtualTableTest>()};
  static const auto original =
      table.replace(slotOf(is_broken ? &VirtualTableTest::one : &VirtualTableTest::two), &returnTwenty);
  VirtualTableTest instance;
  table.installInto(&instance);
  return hidden(instance).one() == 1 && hidden(instance).two() == 20 && hidden(instance).three() == 3 &&
         original(&instance) == 2;
}

}  // namespace torchext

#include "virtual_table.h"

#include <memory>

namespace torchext {

// Not in an anonymous namespace: there the compiler would know that nothing is derived from the class, and call its
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

int answerOtherwise(const VirtualTableTest* /*asked*/) {
  return 20;
}

// Hides the object's class from the compiler, so that it calls functions through the table.
const VirtualTableTest& hidden(const VirtualTableTest& asked) {
  const VirtualTableTest* volatile pointer = &asked;
  return *pointer;
}

}  // namespace

bool testVirtualTable(bool is_broken) {
  constexpr std::size_t kCapacity = 8;
  static VirtualTable<kCapacity> table{std::make_unique<VirtualTableTest>().get(), tableSizeOf<VirtualTableTest>()};
  static const auto original =
      table.replace(slotOf(is_broken ? &VirtualTableTest::one : &VirtualTableTest::two), &answerOtherwise);
  VirtualTableTest asked;
  table.installInto(&asked);
  return hidden(asked).one() == 1 && hidden(asked).two() == 20 && hidden(asked).three() == 3 && original(&asked) == 2;
}

}  // namespace torchext

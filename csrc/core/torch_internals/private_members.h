#pragma once

// Private members of PyTorch's classes, for state without a public accessor.
//
// `TORCHEXT_OPEN_MEMBER(Name, &Class::member_)`, outside of all namespaces, lets `memberOf(opened::Name{})` return that
// pointer: an explicit instantiation may name private members ([temp.spec]). If PyTorch removes the member, the file
// does not compile.

namespace torchext::opened {

template <typename Name, auto Member>
struct Open {
  friend constexpr auto memberOf(Name /*unused*/) {
    return Member;
  }
};

}  // namespace torchext::opened

#define TORCHEXT_OPEN_MEMBER(Name, member) \
  namespace torchext::opened {             \
  struct Name {                            \
    friend constexpr auto memberOf(Name);  \
  };                                       \
  template struct Open<Name, member>;      \
  }

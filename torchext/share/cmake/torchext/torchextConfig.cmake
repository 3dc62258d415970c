# find_package(torchext) defines the target `torchext::torchext`: the headers, `libtorchext.so`, and PyTorch's own target
# `torch` with what that needs. Both packages are found by their folders:
#
#   cmake -DCMAKE_PREFIX_PATH=$(python -c 'import torchext; print(torchext.cmake_prefix_path())') ...
#
# Variables: torchext_VERSION, and torchext_TORCH_VERSION, the release of PyTorch that the library was compiled against.

cmake_minimum_required(VERSION 3.18)

get_filename_component(_torchext_root "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
include("${_torchext_root}/lib/torchextBuild.cmake" OPTIONAL RESULT_VARIABLE _torchext_build)
if(NOT _torchext_build)
  set(torchext_FOUND FALSE)
  set(torchext_NOT_FOUND_MESSAGE
      "${_torchext_root} holds the sources of torchext, which have not been compiled: install it with pip.")
  return()
endif()

include(CMakeFindDependencyMacro)
find_dependency(Torch)

# The C++ interface of PyTorch changes with each release.
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _torchext_built_for "${torchext_TORCH_VERSION}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _torchext_found "${Torch_VERSION}")
if(NOT _torchext_built_for VERSION_EQUAL _torchext_found)
  set(torchext_FOUND FALSE)
  set(torchext_NOT_FOUND_MESSAGE
      "this torchext was built for torch ${torchext_TORCH_VERSION}, but torch ${Torch_VERSION} was found: install torchext again in the environment of that torch.")
  return()
endif()

if(NOT TARGET torchext::torchext)
  add_library(torchext::torchext SHARED IMPORTED)
  set_target_properties(torchext::torchext PROPERTIES
    IMPORTED_LOCATION "${_torchext_root}/lib/libtorchext.so"
    IMPORTED_SONAME "libtorchext.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_torchext_root}/include"
    INTERFACE_LINK_LIBRARIES torch)
endif()

unset(_torchext_root)
unset(_torchext_build)
unset(_torchext_built_for)
unset(_torchext_found)

# find_package(torchext) defines the target `torchext::torchext`: the headers, `libtorchext.so`, PyTorch's headers and
# libraries, and the C++ standard that those need. Both are found by their folders:
#
#   cmake -DCMAKE_PREFIX_PATH="$(python -c 'import torchext; print(torchext.cmake_prefix_path())')" ...
#
# Of PyTorch no more is asked than its folder, because find_package(Torch) fails for a PyTorch with CUDA on a machine
# without the CUDA toolkit, and nothing of torchext needs that. A project that uses CUDA itself calls find_package(Torch)
# before, and gets PyTorch's own target. Otherwise the folder is that of TORCH_INSTALL_PREFIX, of Torch_ROOT or Torch_DIR,
# of CMAKE_PREFIX_PATH, or the one that lies beside this package.
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

foreach(_torchext_component IN LISTS torchext_FIND_COMPONENTS)
  if(torchext_FIND_REQUIRED_${_torchext_component})
    set(torchext_FOUND FALSE)
    set(torchext_NOT_FOUND_MESSAGE "torchext has no components, but `${_torchext_component}` was requested.")
    return()
  endif()
endforeach()

# ---- Where PyTorch is.

set(_torchext_folders "$ENV{TORCH_INSTALL_PREFIX}" "${Torch_ROOT}" "$ENV{Torch_ROOT}")
if(Torch_DIR)
  list(APPEND _torchext_folders "${Torch_DIR}/../../..")
endif()
string(REPLACE ":" ";" _torchext_prefixes "$ENV{CMAKE_PREFIX_PATH}")
foreach(_torchext_prefix IN LISTS CMAKE_PREFIX_PATH _torchext_prefixes)
  # torch.utils.cmake_prefix_path is torch/share/cmake.
  list(APPEND _torchext_folders "${_torchext_prefix}/../.." "${_torchext_prefix}")
endforeach()
list(APPEND _torchext_folders "${_torchext_root}/../torch")

set(_torchext_torch "")
foreach(_torchext_folder IN LISTS _torchext_folders)
  if(EXISTS "${_torchext_folder}/lib/libtorch_cpu.so"
     AND EXISTS "${_torchext_folder}/share/cmake/Torch/TorchConfigVersion.cmake")
    get_filename_component(_torchext_torch "${_torchext_folder}" ABSOLUTE)
    break()
  endif()
endforeach()
if(NOT _torchext_torch)
  set(torchext_FOUND FALSE)
  set(torchext_NOT_FOUND_MESSAGE
      "PyTorch was not found: add to CMAKE_PREFIX_PATH what `python -c 'import torch; print(torch.utils.cmake_prefix_path)'` prints.")
  return()
endif()
file(STRINGS "${_torchext_torch}/share/cmake/Torch/TorchConfigVersion.cmake" _torchext_found REGEX "PACKAGE_VERSION \"")
string(REGEX MATCH "[0-9]+\\.[0-9]+[^\"]*" _torchext_found "${_torchext_found}")

# The C++ interface of PyTorch changes with each minor release.
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _torchext_built_for "${torchext_TORCH_VERSION}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _torchext_found_release "${_torchext_found}")
if(NOT _torchext_built_for VERSION_EQUAL _torchext_found_release)
  set(torchext_FOUND FALSE)
  set(torchext_NOT_FOUND_MESSAGE
      "this torchext was built for torch ${torchext_TORCH_VERSION}, but torch ${_torchext_found} was found in ${_torchext_torch}: install torchext again in the environment of that torch.")
  return()
endif()

# ---- The target.

if(NOT TARGET torchext::torchext)
  set(_torchext_pytorch torch)
  if(NOT TARGET torch)
    set(_torchext_pytorch torchext::torch)
    add_library(torchext::torch INTERFACE IMPORTED)
    set_target_properties(torchext::torch PROPERTIES
      INTERFACE_INCLUDE_DIRECTORIES "${_torchext_torch}/include;${_torchext_torch}/include/torch/csrc/api/include"
      INTERFACE_LINK_LIBRARIES
        "${_torchext_torch}/lib/libtorch.so;${_torchext_torch}/lib/libtorch_cpu.so;${_torchext_torch}/lib/libc10.so")
  endif()
  add_library(torchext::torchext SHARED IMPORTED)
  set_target_properties(torchext::torchext PROPERTIES
    IMPORTED_LOCATION "${_torchext_root}/lib/libtorchext.so"
    IMPORTED_SONAME "libtorchext.so"
    INTERFACE_COMPILE_FEATURES "cxx_std_${torchext_CXX_STANDARD}"
    INTERFACE_INCLUDE_DIRECTORIES "${_torchext_root}/include"
    INTERFACE_LINK_LIBRARIES ${_torchext_pytorch}
    # The program itself needs PyTorch's libraries, called or not: torch may lie where libtorchext.so does not look for
    # them. libtorch.so brings the kernels for CUDA, as with PyTorch's own target.
    INTERFACE_LINK_OPTIONS
      "SHELL:-Wl,--push-state,--no-as-needed \"${_torchext_torch}/lib/libtorch.so\" \"${_torchext_torch}/lib/libtorch_cpu.so\" \"${_torchext_torch}/lib/libc10.so\" -Wl,--pop-state")
endif()

foreach(_torchext_name root build component folders folder prefixes prefix torch found found_release built_for pytorch name)
  unset(_torchext_${_torchext_name})
endforeach()

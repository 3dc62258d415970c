# Asked by find_package(torchext VERSION). As for all versions below 1.0, minor versions are not compatible: `0.1` and
# `0.1.2` admit only 0.1. A range, `0.1...<0.4`, names those that the caller knows, and admits what is in it.

file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../../../version.py" PACKAGE_VERSION REGEX "^__version__ = ")
string(REGEX REPLACE "^__version__ = \"([0-9.]*[0-9]).*\"$" "\\1" PACKAGE_VERSION "${PACKAGE_VERSION}")

string(REGEX MATCH "^[0-9]+\\.[0-9]+" _torchext_has "${PACKAGE_VERSION}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _torchext_wanted "${PACKAGE_FIND_VERSION}.0")
set(PACKAGE_VERSION_COMPATIBLE FALSE)
if(PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION)
  # Too old, for a range as well.
elseif(PACKAGE_FIND_VERSION_RANGE)
  if(PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION_MAX
     OR (PACKAGE_FIND_VERSION_RANGE_MAX STREQUAL "INCLUDE" AND PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION_MAX))
    set(PACKAGE_VERSION_COMPATIBLE TRUE)
  endif()
elseif(_torchext_has VERSION_EQUAL _torchext_wanted)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
  if(PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION)
    set(PACKAGE_VERSION_EXACT TRUE)
  endif()
endif()
unset(_torchext_has)
unset(_torchext_wanted)

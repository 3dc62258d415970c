# Asked by find_package(torchext VERSION). As for all versions below 1.0, minor versions are not compatible.

file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../../../version.py" PACKAGE_VERSION REGEX "^__version__ = ")
string(REGEX REPLACE "^__version__ = \"(.*)\"$" "\\1" PACKAGE_VERSION "${PACKAGE_VERSION}")

string(REGEX MATCH "^[0-9]+\\.[0-9]+" _torchext_has "${PACKAGE_VERSION}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _torchext_wanted "${PACKAGE_FIND_VERSION}.0")
if(PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION OR NOT _torchext_has VERSION_EQUAL _torchext_wanted)
  set(PACKAGE_VERSION_COMPATIBLE FALSE)
else()
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
  if(PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION)
    set(PACKAGE_VERSION_EXACT TRUE)
  endif()
endif()

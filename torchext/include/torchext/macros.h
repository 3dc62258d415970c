#pragma once

/// @file
/// Preprocessor definitions for the other headers.

/// Exports a symbol of `libtorchext.so`. All other symbols have hidden visibility.
#define TORCHEXT_API __attribute__((visibility("default")))

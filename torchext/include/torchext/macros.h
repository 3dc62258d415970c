#pragma once

/// @file
/// What the other headers need of the preprocessor.

/// Marks what `libtorchext.so` exports. All else is compiled with hidden visibility.
#define TORCHEXT_API __attribute__((visibility("default")))

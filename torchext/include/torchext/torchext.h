#pragma once

/// @file
/// All public headers of torchext.

#include <torchext/autocast.h>
#include <torchext/deferred_init.h>
#include <torchext/fake.h>
#include <torchext/fake_cuda.h>
#include <torchext/inference_mode.h>

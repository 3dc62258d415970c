#pragma once

/// @file
/// All of torchext that C++ programs use.

#include <torchext/autocast.h>
#include <torchext/deferred_init.h>
#include <torchext/fake.h>
#include <torchext/fake_cuda.h>
#include <torchext/inference_mode.h>

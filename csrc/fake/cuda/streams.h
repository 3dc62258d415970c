#pragma once

#include <cstdint>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <torchext/macros.h>

namespace torchext {

// The streams of fake CUDA devices are numbers: nothing runs on them, but memory is allocated for them. Which one is
// current is known to Python and to the memory only. The guard of the device always returns the default stream, so that
// the autograd engine sees one stream: for different ones it would call `recordDataPtrOnStream()` with the memory of
// gradients (`record_stream_any_impl()`, input_buffer.cpp), which fakes do not have.

// Returns the stream of `device` that is current on this thread.
TORCHEXT_API c10::StreamId currentFakeStream(c10::DeviceIndex device) noexcept;

// Makes another stream of `device` current on this thread.
TORCHEXT_API void setCurrentFakeStream(c10::DeviceIndex device, c10::StreamId stream);

// Returns a stream that is not in use. As on real devices, there is a limited number, which are given in turn.
TORCHEXT_API c10::StreamId newFakeStream() noexcept;

// Counts an operator that this thread has issued on the current stream of `device`.
TORCHEXT_API void countWork(c10::DeviceIndex device) noexcept;

// Returns how many operators have been issued on `stream` of `device`.
TORCHEXT_API std::int64_t workOn(c10::DeviceIndex device, c10::StreamId stream) noexcept;

}  // namespace torchext

#pragma once

#include <cstdint>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <torchext/macros.h>

namespace torchext {

// The streams of fake CUDA devices are numbers: nothing runs on them, but memory is allocated for them. Only Python and
// the memory counter use the current stream. The guard of the device always returns the default stream to the autograd
// engine. For different streams, the engine would call `recordDataPtrOnStream()` with the memory of gradients
// (`record_stream_any_impl()`, input_buffer.cpp), which fakes do not have.

// Returns the current stream of `device` on this thread.
TORCHEXT_API c10::StreamId currentFakeStream(c10::DeviceIndex device) noexcept;

// Makes `stream` the current stream of `device` on this thread.
TORCHEXT_API void setCurrentFakeStream(c10::DeviceIndex device, c10::StreamId stream);

// Returns the next stream of the pool. As on real devices, the pool is limited and streams are reused in turn.
TORCHEXT_API c10::StreamId newFakeStream() noexcept;

// Counts an operator that this thread has issued on the current stream of `device`.
TORCHEXT_API void countWork(c10::DeviceIndex device) noexcept;

// Returns the number of operators issued on `stream` of `device`.
TORCHEXT_API std::int64_t workOn(c10::DeviceIndex device, c10::StreamId stream) noexcept;

}  // namespace torchext

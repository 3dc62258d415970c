#pragma once

namespace torchext {

// Lets a profile of `ProfilerActivity.CUDA` take no time on devices that are not there. Without CUPTI the profiler
// records an event before and after each operator, by functions that raise an error in a build without CUDA.
void standInForCudaProfiler();

}  // namespace torchext

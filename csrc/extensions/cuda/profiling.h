#pragma once

namespace torchext {

// Makes a profile with `ProfilerActivity.CUDA` record no time on fake CUDA devices. Without CUPTI the profiler records
// an event before and after each operator, by functions that raise an error in a build without CUDA.
void standInForCudaProfiler();

}  // namespace torchext

/* What Triton's launcher needs of the driver besides nullcuda.cpp, whose functions of these names these replace. */
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetLimit(unsigned long *value, int limit) { *value = 1 << 20; return 0; }
int cuCtxSetLimit(int limit, unsigned long value) { return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuLaunchKernelEx(void *config, void *function, void **arguments, void **extra) { return 0; }
int cuOccupancyMaxActiveClusters(int *clusters, void *function, void *config) { *clusters = 1; return 0; }
/* 0: threads of a block, 4: registers of a thread */
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0;
  return 0;
}

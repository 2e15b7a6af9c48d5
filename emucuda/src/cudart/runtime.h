/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * A CUDA runtime for the emulated driver that uses only the public driver API. Each call finds the
 * driver through libcuda.so.1. So the guard in front of that library gets the same calls as from
 * NVIDIA's runtime.
 */
#ifndef EMUCUDA_RUNTIME_H
#define EMUCUDA_RUNTIME_H

#include "runtime_abi.h"

#include <pthread.h>
#include <stdbool.h>

enum { DEVICES = 64 };

/* The driver's functions, with the types that the calls here use. */
#define DRIVER(X)                                                                                            \
    X(cuInit, (unsigned)) X(cuDriverGetVersion, (int *)) X(cuDeviceGetCount, (int *))                        \
    X(cuGetExportTable, (const void **, const void *))                                                       \
    X(cuDeviceGetName, (char *, int, int)) X(cuDeviceGetUuid, (CUuuid *, int))                               \
    X(cuDeviceTotalMem, (size_t *, int)) X(cuDeviceGetAttribute, (int *, int, int))                          \
    X(cuDeviceGetPCIBusId, (char *, int, int)) X(cuDeviceGetByPCIBusId, (int *, const char *))               \
    X(cuDeviceCanAccessPeer, (int *, int, int)) X(cuDeviceGetP2PAttribute, (int *, int, int, int))           \
    X(cuDevicePrimaryCtxRetain, (CUcontext *, int)) X(cuDevicePrimaryCtxReset, (int))                        \
    X(cuDevicePrimaryCtxGetState, (int, unsigned *, int *)) X(cuDevicePrimaryCtxSetFlags, (int, unsigned))   \
    X(cuCtxSetCurrent, (CUcontext)) X(cuCtxGetCurrent, (CUcontext *)) X(cuCtxGetDevice, (int *))             \
    X(cuCtxGetStreamPriorityRange, (int *, int *)) X(cuCtxEnablePeerAccess, (CUcontext, unsigned))           \
    X(cuCtxDisablePeerAccess, (CUcontext)) X(cuCtxGetLimit, (size_t *, int)) X(cuCtxSetLimit, (int, size_t)) \
    X(cuMemAlloc, (CUdeviceptr *, size_t)) X(cuMemFree, (CUdeviceptr)) X(cuMemGetInfo, (size_t *, size_t *)) \
    X(cuMemAllocPitch, (CUdeviceptr *, size_t *, size_t, size_t, unsigned))                                  \
    X(cuMemAllocManaged, (CUdeviceptr *, size_t, unsigned)) X(cuMemHostAlloc, (void **, size_t, unsigned))   \
    X(cuMemFreeHost, (void *)) X(cuMemHostRegister, (void *, size_t, unsigned))                              \
    X(cuMemHostUnregister, (void *)) X(cuMemHostGetDevicePointer, (CUdeviceptr *, void *, unsigned))         \
    X(cuMemHostGetFlags, (unsigned *, void *))                                                               \
    X(cuMemcpy, (CUdeviceptr, CUdeviceptr, size_t)) X(cuMemcpyHtoD, (CUdeviceptr, const void *, size_t))     \
    X(cuMemcpyDtoH, (void *, CUdeviceptr, size_t)) X(cuMemcpyDtoD, (CUdeviceptr, CUdeviceptr, size_t))       \
    X(cuMemcpyAsync, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                           \
    X(cuMemcpyHtoDAsync, (CUdeviceptr, const void *, size_t, CUstream))                                      \
    X(cuMemcpyDtoHAsync, (void *, CUdeviceptr, size_t, CUstream))                                            \
    X(cuMemcpyDtoDAsync, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                       \
    X(cuMemcpy2D, (const CUDA_MEMCPY2D *)) X(cuMemcpy2DAsync, (const CUDA_MEMCPY2D *, CUstream))             \
    X(cuMemcpyPeer, (CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t))                                \
    X(cuMemcpyPeerAsync, (CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t, CUstream))                 \
    X(cuMemsetD8, (CUdeviceptr, unsigned char, size_t))                                                      \
    X(cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream))                                       \
    X(cuMemsetD2D8Async, (CUdeviceptr, size_t, unsigned char, size_t, size_t, CUstream))                     \
    X(cuPointerGetAttribute, (void *, int, CUdeviceptr))                                                     \
    X(cuIpcGetMemHandle, (CUipcMemHandle *, CUdeviceptr))                                                    \
    X(cuIpcOpenMemHandle, (CUdeviceptr *, CUipcMemHandle, unsigned)) X(cuIpcCloseMemHandle, (CUdeviceptr))   \
    X(cuIpcGetEventHandle, (CUipcMemHandle *, CUevent)) X(cuIpcOpenEventHandle, (CUevent *, CUipcMemHandle)) \
    X(cuMemAllocAsync, (CUdeviceptr *, size_t, CUstream)) X(cuMemFreeAsync, (CUdeviceptr, CUstream))         \
    X(cuMemAllocFromPoolAsync, (CUdeviceptr *, size_t, CUmemoryPool, CUstream))                              \
    X(cuDeviceGetDefaultMemPool, (CUmemoryPool *, int)) X(cuDeviceGetMemPool, (CUmemoryPool *, int))         \
    X(cuDeviceSetMemPool, (int, CUmemoryPool)) X(cuMemPoolCreate, (CUmemoryPool *, const CUmemPoolProps *))  \
    X(cuMemPoolDestroy, (CUmemoryPool)) X(cuMemPoolGetAttribute, (CUmemoryPool, int, void *))                \
    X(cuMemPoolSetAttribute, (CUmemoryPool, int, void *)) X(cuMemPoolTrimTo, (CUmemoryPool, size_t))         \
    X(cuMemPoolSetAccess, (CUmemoryPool, const CUmemAccessDesc *, size_t))                                   \
    X(cuStreamCreateWithPriority, (CUstream *, unsigned, int)) X(cuStreamDestroy, (CUstream))                \
    X(cuStreamSynchronize, (CUstream)) X(cuStreamQuery, (CUstream)) X(cuStreamGetFlags, (CUstream, unsigned *)) \
    X(cuStreamWaitEvent, (CUstream, CUevent, unsigned)) X(cuStreamGetPriority, (CUstream, int *))            \
    X(cuStreamGetId, (CUstream, unsigned long long *))                                                       \
    X(cuStreamAddCallback, (CUstream, void (*)(CUstream, CUresult, void *), void *, unsigned))               \
    X(cuStreamIsCapturing, (CUstream, int *)) X(cuStreamBeginCapture, (CUstream, int))                       \
    X(cuStreamEndCapture, (CUstream, CUgraph *)) X(cuThreadExchangeStreamCaptureMode, (int *))               \
    X(cuStreamGetCaptureInfo, (CUstream, int *, uint64_t *, CUgraph *, const CUgraphNode **, const void **, size_t *)) \
    X(cuEventCreate, (CUevent *, unsigned)) X(cuEventDestroy, (CUevent)) X(cuEventQuery, (CUevent))          \
    X(cuEventRecordWithFlags, (CUevent, CUstream, unsigned)) X(cuEventSynchronize, (CUevent))                \
    X(cuEventElapsedTime, (float *, CUevent, CUevent))                                                       \
    X(cuLaunchHostFunc, (CUstream, void (*)(void *), void *))                                                \
    X(cuLaunchKernel, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,     \
                       CUstream, void **, void **))                                                          \
    X(cuModuleLoadData, (CUmodule *, const void *)) X(cuModuleGetFunction, (CUfunction *, CUmodule, const char *)) \
    X(cuFuncGetAttribute, (int *, int, CUfunction)) X(cuFuncSetAttribute, (CUfunction, int, int))            \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, (int *, CUfunction, int, size_t, unsigned))      \
    X(cuGraphCreate, (CUgraph *, unsigned)) X(cuGraphDestroy, (CUgraph)) X(cuGraphExecDestroy, (CUgraphExec)) \
    X(cuGraphClone, (CUgraph *, CUgraph)) X(cuGraphGetNodes, (CUgraph, CUgraphNode *, size_t *))             \
    X(cuGraphInstantiateWithFlags, (CUgraphExec *, CUgraph, unsigned long long))                             \
    X(cuGraphLaunch, (CUgraphExec, CUstream)) X(cuGraphUpload, (CUgraphExec, CUstream))                      \
    X(cuGraphNodeGetType, (CUgraphNode, int *))                                                              \
    X(cuGraphAddEmptyNode, (CUgraphNode *, CUgraph, const CUgraphNode *, size_t))                            \
    X(cuGetErrorName, (int, const char **)) X(cuGetErrorString, (int, const char **))                        \
    X(cuCtxSynchronize, (void))

struct driver_calls {
#define FIELD(name, parameters) CUresult (*name) parameters;
    DRIVER(FIELD)
#undef FIELD
    CUresult (*find)(const char *name, void **out, int version, uint64_t flags, int *status);
    int count; /* number of devices */
};
extern struct driver_calls drv;

/* Stores the thread's last error for cudaGetLastError, and returns the error. */
cudaError noted(cudaError error);
cudaError not_run(cudaError error); /* like noted(), for the error of a kernel that cannot run here;
                                     * the next call that gives results returns the error again */
cudaError unasked(void);            /* returns the error that not_run() stored, and clears it;
                                     * returns success if the thread of the launch has already asked
                                     * for its last error */
cudaError started(void);        /* makes sure that the driver is initialised */
cudaError ready(void);          /* calls started(), and makes sure that the thread has a current
                                 * context; the default is the context of its device */
cudaError enter_device(int d);  /* makes the primary context of that device current */
int device_now(void);           /* the device of the calling thread */
CUcontext primary_of(int d);    /* NULL if enter_device() has not run */
void say(const char *name, const char *why); /* prints a message to standard error, once for each
                                              * name */

#define STARTED                        \
    do {                               \
        cudaError error_ = started();  \
        if (error_)                    \
            return noted(error_);      \
    } while (0)
#define READY                          \
    do {                               \
        cudaError error_ = ready();    \
        if (error_)                    \
            return noted(error_);      \
    } while (0)
/* Like READY, but for a call that gives results to the program, or waits for results. If a kernel
 * could not run and the program ignored the error of the launch, this call returns the error again.
 * Otherwise the program would read old bytes as the results of that kernel. */
#define RESULTS                        \
    do {                               \
        cudaError error_ = unasked();  \
        if (error_)                    \
            return noted(error_);      \
        READY;                         \
    } while (0)
#define AT(pointer) ((CUdeviceptr)(uintptr_t)(pointer))

/* Defines a call of the runtime that makes just one call of the driver. */
#define SAME(name, parameters, call)   \
    EXPORT cudaError name parameters   \
    {                                  \
        READY;                         \
        return noted(drv.call);        \
    }
#define SAME_RESULTS(name, parameters, call) \
    EXPORT cudaError name parameters   \
    {                                  \
        RESULTS;                       \
        return noted(drv.call);        \
    }

#endif

/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Prototypes of the functions that count memory, and of the functions that record why a session
 * cannot be suspended.
 */
#ifndef GPUPOOL_GUARD_WRAPS_MEMORY_H
#define GPUPOOL_GUARD_WRAPS_MEMORY_H

#include "cuda_abi.h"

/* Passed by value. */
typedef struct {
    char bytes[64];
} CUipcHandle;

#pragma GCC visibility push(hidden)

/* context.c */
CUresult wrap_cuCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice device);
CUresult wrap_cuCtxCreate_v3(CUcontext *out, void *affinity, int count, unsigned flags, CUdevice device);
CUresult wrap_cuCtxCreate_v4(CUcontext *out, void *params, unsigned flags, CUdevice device);
CUresult wrap_cuGLCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice device);
CUresult wrap_cuVDPAUCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice device, uint32_t vdp, void *get);
CUresult wrap_cuGreenCtxCreate(CUgreenCtx *out, void *resources, CUdevice device, unsigned flags);
CUresult wrap_cuGreenCtxDestroy(CUgreenCtx context);
CUresult wrap_cuCtxDestroy_v2(CUcontext context);
CUresult wrap_cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device);
CUresult wrap_cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active);
CUresult wrap_cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned flags);
CUresult wrap_cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags);
CUresult wrap_cuDevicePrimaryCtxRelease_v2(CUdevice device);
CUresult wrap_cuDevicePrimaryCtxReset_v2(CUdevice device);

/* memory.c */
CUresult wrap_cuMemAlloc_v2(CUdeviceptr *out, size_t bytes);
CUresult wrap_cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height,
    unsigned element);
CUresult wrap_cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags);
CUresult wrap_cuMemFree_v2(CUdeviceptr address);
CUresult wrap_cuMemFreeAsync(CUdeviceptr address, CUstream stream);
CUresult wrap_cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream);

/* arrays.c */
CUresult wrap_cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *d);
CUresult wrap_cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *d);
CUresult wrap_cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *d,
    unsigned levels);
CUresult wrap_cuArrayDestroy(CUarray array);
CUresult wrap_cuMipmappedArrayDestroy(CUmipmappedArray array);

/* vmm.c */
CUresult wrap_cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes,
    const CUmemAllocationProp *prop, unsigned long long flags);
CUresult wrap_cuMemRelease(CUmemGenericAllocationHandle handle);
CUresult wrap_cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
    CUmemGenericAllocationHandle handle, unsigned long long flags);
CUresult wrap_cuMemUnmap(CUdeviceptr address, size_t bytes);
CUresult wrap_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address);

/* pools.c */
CUresult wrap_cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream);
CUresult wrap_cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t bytes, CUstream stream);
CUresult wrap_cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream);
CUresult wrap_cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *out, size_t bytes, CUmemoryPool pool,
    CUstream stream);
CUresult wrap_cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props);
CUresult wrap_cuMemGetDefaultMemPool(CUmemoryPool *out, CUmemLocation *location, int type);
CUresult wrap_cuMemGetMemPool(CUmemoryPool *out, CUmemLocation *location, int type);
CUresult wrap_cuMemPoolDestroy(CUmemoryPool pool);
CUresult wrap_cuMemPoolTrimTo(CUmemoryPool pool, size_t keep_bytes);
CUresult wrap_cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value);

/* graphs.c */
CUresult wrap_cuGraphInstantiate(CUgraphExec *out, CUgraph graph, CUgraphNode *node, char *log,
    size_t size);
CUresult wrap_cuGraphInstantiate_v2(CUgraphExec *out, CUgraph graph, CUgraphNode *node, char *log,
    size_t size);
CUresult wrap_cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags);
CUresult wrap_cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph graph, void *params);
CUresult wrap_cuGraphInstantiateWithParams_ptsz(CUgraphExec *out, CUgraph graph, void *params);
CUresult wrap_cuGraphLaunch(CUgraphExec exec, CUstream stream);
CUresult wrap_cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream);
CUresult wrap_cuGraphUpload(CUgraphExec exec, CUstream stream);
CUresult wrap_cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream);
CUresult wrap_cuGraphExecDestroy(CUgraphExec exec);
CUresult wrap_cuDeviceGraphMemTrim(CUdevice device);

/* pins.c */
CUresult wrap_cuIpcGetMemHandle(void *handle, CUdeviceptr address);
CUresult wrap_cuIpcOpenMemHandle(CUdeviceptr *out, CUipcHandle handle, unsigned flags);
CUresult wrap_cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcHandle handle, unsigned flags);
CUresult wrap_cuIpcGetEventHandle(void *handle, void *event);
CUresult wrap_cuIpcOpenEventHandle(void **event, CUipcHandle handle);
CUresult wrap_cuIpcCloseMemHandle(CUdeviceptr address);
CUresult wrap_cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type,
    unsigned long long flags);
CUresult wrap_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *handle, int type);
CUresult wrap_cuMemPoolExportToShareableHandle(void *out, CUmemoryPool pool, int type,
    unsigned long long flags);
CUresult wrap_cuMemPoolImportFromShareableHandle(CUmemoryPool *out, void *handle, int type,
    unsigned long long flags);
CUresult wrap_cuMemPoolExportPointer(void *out, CUdeviceptr address);
CUresult wrap_cuMemPoolImportPointer(CUdeviceptr *out, CUmemoryPool pool, void *data);
CUresult wrap_cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t bytes, int type,
    unsigned long long flags);
CUresult wrap_cuImportExternalMemory(void **out, const void *description);
CUresult wrap_cuImportExternalSemaphore(void **out, const void *description);
CUresult wrap_cuExternalMemoryGetMappedBuffer(CUdeviceptr *out, void *memory, const void *description);
CUresult wrap_cuExternalMemoryGetMappedMipmappedArray(CUmipmappedArray *out, void *memory,
    const void *description);
CUresult wrap_cuDestroyExternalMemory(void *memory);
CUresult wrap_cuDestroyExternalSemaphore(void *semaphore);
CUresult wrap_cuGLRegisterBufferObject(unsigned buffer);
CUresult wrap_cuGraphicsGLRegisterBuffer(void **out, unsigned buffer, unsigned flags);
CUresult wrap_cuGraphicsGLRegisterImage(void **out, unsigned image, unsigned target, unsigned flags);
CUresult wrap_cuGraphicsEGLRegisterImage(void **out, void *image, unsigned flags);
CUresult wrap_cuGraphicsVDPAURegisterOutputSurface(void **out, unsigned surface, unsigned flags);
CUresult wrap_cuGraphicsVDPAURegisterVideoSurface(void **out, unsigned surface, unsigned flags);
CUresult wrap_cuGraphicsMapResources(unsigned count, void **resources, CUstream stream);
CUresult wrap_cuGraphicsMapResources_ptsz(unsigned count, void **resources, CUstream stream);
CUresult wrap_cuGraphicsUnregisterResource(void *resource);
CUresult wrap_cuMulticastCreate(CUmemGenericAllocationHandle *out, const void *prop);
CUresult wrap_cuMulticastAddDevice(CUmemGenericAllocationHandle object, CUdevice device);
CUresult wrap_cuMulticastBindMem(CUmemGenericAllocationHandle object, size_t at,
    CUmemGenericAllocationHandle memory, size_t from, size_t bytes, unsigned long long flags);
CUresult wrap_cuMulticastBindMem_v2(CUmemGenericAllocationHandle object, CUdevice device, size_t at,
    CUmemGenericAllocationHandle memory, size_t from, size_t bytes, unsigned long long flags);
CUresult wrap_cuMulticastBindAddr(CUmemGenericAllocationHandle object, size_t at, CUdeviceptr address,
    size_t bytes, unsigned long long flags);
CUresult wrap_cuMulticastBindAddr_v2(CUmemGenericAllocationHandle object, CUdevice device, size_t at,
    CUdeviceptr address, size_t bytes, unsigned long long flags);
CUresult wrap_cuMulticastUnbind(CUmemGenericAllocationHandle object, CUdevice device, size_t at,
    size_t bytes);

/* registered.c */
CUresult wrap_cuMemHostRegister(void *p, size_t bytes, unsigned flags);
CUresult wrap_cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags);
CUresult wrap_cuMemHostUnregister(void *p);

/* info.c */
CUresult wrap_cuMemGetInfo_v2(size_t *available, size_t *total);
CUresult wrap_cuDeviceTotalMem_v2(size_t *bytes, CUdevice device);
/* synced.c */
CUresult wrap_cuCtxSynchronize(void);
CUresult wrap_cuCtxSynchronize_v2(CUcontext context);
CUresult wrap_cuStreamSynchronize(CUstream stream);
CUresult wrap_cuStreamSynchronize_ptsz(CUstream stream);
CUresult wrap_cuEventSynchronize(void *event);
CUresult wrap_cuStreamQuery(CUstream stream);
CUresult wrap_cuStreamQuery_ptsz(CUstream stream);
CUresult wrap_cuEventQuery(void *event);

/* captures.c */
CUresult wrap_cuStreamBeginCapture(CUstream stream);
CUresult wrap_cuStreamBeginCapture_ptsz(CUstream stream);
CUresult wrap_cuStreamBeginCapture_v2(CUstream stream, int mode);
CUresult wrap_cuStreamBeginCapture_v2_ptsz(CUstream stream, int mode);
CUresult wrap_cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *after,
    const void *edges, size_t edge_count, int mode);
CUresult wrap_cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *after,
    const void *edges, size_t edge_count, int mode);
CUresult wrap_cuStreamEndCapture(CUstream stream, CUgraph *out);
CUresult wrap_cuStreamEndCapture_ptsz(CUstream stream, CUgraph *out);
CUresult wrap_cuStreamDestroy_v2(CUstream stream);

/* current.c */
CUresult wrap_cuCtxSetCurrent(CUcontext context);
CUresult wrap_cuCtxPushCurrent_v2(CUcontext context);
CUresult wrap_cuCtxPopCurrent_v2(CUcontext *out);
CUresult wrap_cuCtxGetCurrent(CUcontext *out);
CUresult wrap_cuCtxGetDevice(CUdevice *out);
CUresult wrap_cuCtxGetDevice_v2(CUdevice *out, CUcontext context);

#pragma GCC visibility pop
#endif

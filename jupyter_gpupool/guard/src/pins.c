/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Calls after which the driver cannot suspend a session, because they share memory or events with
 * another process, with a graphics API, or over a multicast object. The guard passes the calls to
 * the driver unchanged, because they take no additional memory. Before a call returns, the guard
 * writes the reason to the page, and the broker does not suspend a session while such a call is
 * inside the driver. The process that exports memory counts it, not the process that imports it.
 */
#include "counting.h"
#include "wraps.h"

#define PINS(pins, name, parameters, arguments) \
    CUresult wrap_##name parameters             \
    {                                           \
        ENTER;                                  \
        CUresult result = REAL(name) arguments; \
        if (!result)                            \
            guard_pin(pins);                    \
        return result;                          \
    }
#define ENDS(name, parameters, arguments) \
    CUresult wrap_##name parameters       \
    {                                     \
        ENTER;                            \
        return REAL(name) arguments;      \
    }

PINS(PIN_IPC, cuIpcGetMemHandle, (void *handle, CUdeviceptr address), (handle, address))
PINS(PIN_IPC, cuIpcOpenMemHandle, (CUdeviceptr *out, CUipcHandle handle, unsigned flags), (out, handle, flags))
PINS(PIN_IPC, cuIpcOpenMemHandle_v2, (CUdeviceptr *out, CUipcHandle handle, unsigned flags), (out, handle, flags))
PINS(PIN_IPC, cuIpcGetEventHandle, (void *handle, void *event), (handle, event))
PINS(PIN_IPC, cuIpcOpenEventHandle, (void **event, CUipcHandle handle), (event, handle))
ENDS(cuIpcCloseMemHandle, (CUdeviceptr address), (address))

PINS(PIN_IPC, cuMemExportToShareableHandle,
     (void *out, CUmemGenericAllocationHandle handle, int type, unsigned long long flags), (out, handle, type, flags))
PINS(PIN_IPC, cuMemPoolExportToShareableHandle, (void *out, CUmemoryPool pool, int type, unsigned long long flags),
     (out, pool, type, flags))
PINS(PIN_IPC, cuMemPoolImportFromShareableHandle,
     (CUmemoryPool *out, void *handle, int type, unsigned long long flags), (out, handle, type, flags))
PINS(PIN_IPC, cuMemPoolExportPointer, (void *out, CUdeviceptr address), (out, address))
PINS(PIN_IPC, cuMemPoolImportPointer, (CUdeviceptr *out, CUmemoryPool pool, void *data), (out, pool, data))

/* This call exports device memory as a file descriptor, for network and storage devices. The driver
 * cannot suspend such memory. */
PINS(PIN_IPC, cuMemGetHandleForAddressRange,
     (void *handle, CUdeviceptr address, size_t bytes, int type, unsigned long long flags),
     (handle, address, bytes, type, flags))

PINS(PIN_IPC, cuImportExternalMemory, (void **out, const void *description), (out, description))
PINS(PIN_IPC, cuImportExternalSemaphore, (void **out, const void *description), (out, description))
ENDS(cuExternalMemoryGetMappedBuffer, (CUdeviceptr *out, void *memory, const void *description),
     (out, memory, description))
ENDS(cuExternalMemoryGetMappedMipmappedArray, (CUmipmappedArray *out, void *memory, const void *description),
     (out, memory, description))
ENDS(cuDestroyExternalMemory, (void *memory), (memory))
ENDS(cuDestroyExternalSemaphore, (void *semaphore), (semaphore))

PINS(PIN_GRAPHICS, cuGLRegisterBufferObject, (unsigned buffer), (buffer))
PINS(PIN_GRAPHICS, cuGraphicsGLRegisterBuffer, (void **out, unsigned buffer, unsigned flags), (out, buffer, flags))
PINS(PIN_GRAPHICS, cuGraphicsGLRegisterImage, (void **out, unsigned image, unsigned target, unsigned flags),
     (out, image, target, flags))
PINS(PIN_GRAPHICS, cuGraphicsEGLRegisterImage, (void **out, void *image, unsigned flags), (out, image, flags))
PINS(PIN_GRAPHICS, cuGraphicsVDPAURegisterOutputSurface, (void **out, unsigned surface, unsigned flags),
     (out, surface, flags))
PINS(PIN_GRAPHICS, cuGraphicsVDPAURegisterVideoSurface, (void **out, unsigned surface, unsigned flags),
     (out, surface, flags))
ENDS(cuGraphicsMapResources, (unsigned count, void **resources, CUstream stream), (count, resources, stream))
ENDS(cuGraphicsMapResources_ptsz, (unsigned count, void **resources, CUstream stream), (count, resources, stream))
ENDS(cuGraphicsUnregisterResource, (void *resource), (resource))

PINS(PIN_MULTICAST, cuMulticastCreate, (CUmemGenericAllocationHandle *out, const void *prop), (out, prop))
ENDS(cuMulticastAddDevice, (CUmemGenericAllocationHandle object, CUdevice device), (object, device))
ENDS(cuMulticastBindMem, (CUmemGenericAllocationHandle object, size_t at, CUmemGenericAllocationHandle memory,
                          size_t from, size_t bytes, unsigned long long flags),
     (object, at, memory, from, bytes, flags))
ENDS(cuMulticastBindMem_v2, (CUmemGenericAllocationHandle object, CUdevice device, size_t at,
                             CUmemGenericAllocationHandle memory, size_t from, size_t bytes, unsigned long long flags),
     (object, device, at, memory, from, bytes, flags))
ENDS(cuMulticastBindAddr, (CUmemGenericAllocationHandle object, size_t at, CUdeviceptr address, size_t bytes,
                           unsigned long long flags),
     (object, at, address, bytes, flags))
ENDS(cuMulticastBindAddr_v2, (CUmemGenericAllocationHandle object, CUdevice device, size_t at, CUdeviceptr address,
                              size_t bytes, unsigned long long flags),
     (object, device, at, address, bytes, flags))
ENDS(cuMulticastUnbind, (CUmemGenericAllocationHandle object, CUdevice device, size_t at, size_t bytes),
     (object, device, at, bytes))

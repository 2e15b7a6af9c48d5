/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Prototypes of the guard's C functions for entry points. REAL() takes its types from them. A
 * pointer that the guard only passes on may be a void *. All other types are the published
 * types.
 */
#ifndef GPUPOOL_GUARD_WRAPS_H
#define GPUPOOL_GUARD_WRAPS_H

#include "cuda_abi.h"
#include "wraps_memory.h"

#pragma GCC visibility push(hidden)

CUresult wrap_cuInit(unsigned flags);
CUresult wrap_cuDriverGetVersion(int *version);
CUresult wrap_cuDeviceGet(CUdevice *device, int ordinal);
CUresult wrap_cuDeviceGetCount(int *count);
CUresult wrap_cuDeviceGetName(char *name, int length, CUdevice device);
CUresult wrap_cuDeviceGetUuid(CUuuid *uuid, CUdevice device);
CUresult wrap_cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device);
CUresult wrap_cuDeviceGetAttribute(int *value, int attribute, CUdevice device);
CUresult wrap_cuDeviceComputeCapability(int *major, int *minor, CUdevice device);

/* window.c */
CUresult wrap_cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                             unsigned bz, unsigned shared, CUstream stream, void **params, void **extra);
CUresult wrap_cuLaunchKernel_ptsz(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                  unsigned bz, unsigned shared, CUstream stream, void **params, void **extra);
CUresult wrap_cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra);
CUresult wrap_cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction f, void **params, void **extra);
CUresult wrap_cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                        unsigned by, unsigned bz, unsigned shared, CUstream stream, void **params);
CUresult wrap_cuLaunchCooperativeKernel_ptsz(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                             unsigned by, unsigned bz, unsigned shared, CUstream stream,
                                             void **params);

CUresult wrap_cuGetErrorName(CUresult error, const char **out);
CUresult wrap_cuGetErrorString(CUresult error, const char **out);
CUresult wrap_cuGetProcAddress(const char *name, void **out, int version, uint64_t flags);
CUresult wrap_cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags,
                                  int *status);

#pragma GCC visibility pop
#endif

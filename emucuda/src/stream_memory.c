/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Calls by which a stream writes values to memory. PyTorch looks these names up together with the
 * names that its expandable segments need. If one name is missing, PyTorch uses none of them. Calls
 * that wait for a value are not emulated. Here work runs during the call that submits it, so a call
 * that waits would wait forever.
 */
#include "driver.h"

enum { NO_MEMORY_BARRIER = 1 };

extern CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream);
EXPORT CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr to, uint32_t value, unsigned flags);
EXPORT CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr to, uint64_t value, unsigned flags);

EXPORT CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr to, uint32_t value, unsigned flags)
{
    CHECKED;
    REQUIRE(!(flags & ~(unsigned)NO_MEMORY_BARRIER) && to % sizeof value == 0);
    return cuMemsetD32Async(to, value, 1, stream);
}

EXPORT CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr to, uint64_t value, unsigned flags)
{
    CHECKED;
    REQUIRE(!(flags & ~(unsigned)NO_MEMORY_BARRIER) && to % sizeof value == 0);
    CUresult result = cuMemsetD32Async(to, (uint32_t)value, 1, stream);
    return result ? result : cuMemsetD32Async(to + 4, (uint32_t)(value >> 32), 1, stream);
}

/* Defines the name that cuStreamWriteValue has in earlier versions, and the per-thread variants of
 * both names. */
#define NAMES(bits)                                                                                          \
    EXPORT CUresult cuStreamWriteValue##bits(CUstream s, CUdeviceptr to, uint##bits##_t v, unsigned flags)    \
    {                                                                                                        \
        return cuStreamWriteValue##bits##_v2(s, to, v, flags);                                               \
    }                                                                                                        \
    EXPORT CUresult cuStreamWriteValue##bits##_ptsz(CUstream s, CUdeviceptr to, uint##bits##_t v, unsigned f) \
    {                                                                                                        \
        return cuStreamWriteValue##bits##_v2(s ? s : STREAM_PER_THREAD, to, v, f);                           \
    }                                                                                                        \
    EXPORT CUresult cuStreamWriteValue##bits##_v2_ptsz(CUstream s, CUdeviceptr to, uint##bits##_t v, unsigned f) \
    {                                                                                                        \
        return cuStreamWriteValue##bits##_v2(s ? s : STREAM_PER_THREAD, to, v, f);                           \
    }
NAMES(32)
NAMES(64)

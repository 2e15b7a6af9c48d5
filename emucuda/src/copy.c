/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Copies and fills. The bytes move during the call. The modelled time comes from the machine's
 * bandwidth. The stream is busy for this time, and a synchronous call waits until it has passed.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

static uint64_t copy_ns(uint64_t bytes, int from, int to)
{
    int device = from >= 0 ? from : to;
    const struct rates *rates = spec_rates(&machine->spec);
    uint64_t bandwidth = 0; /* a copy from host to host takes no modelled time */
    if (from >= 0 && from == to)
        bandwidth = rates->memory / 2; /* half, because the copy both reads and writes this
                                        * memory */
    else if (from >= 0 && to >= 0)
        bandwidth = rates->copies;
    else if (device >= 0)
        bandwidth = copy_bandwidth(driver.device[device].physical, rates->copies);
    return bandwidth ? (uint64_t)((unsigned __int128)bytes * 1000000000u / bandwidth) : 0;
}

/* `rows` rows of `width` bytes; a plain copy has one row. */
struct transfer {
    uint64_t to, from;
    size_t to_pitch, from_pitch, width, rows;
};

/* Computes the number of bytes from the begin of the first row to the end of the last one. Returns
 * false if the number overflows. */
static bool reach(size_t pitch, size_t rows, size_t width, uint64_t *out)
{
    return !__builtin_mul_overflow(pitch, rows - 1, out) && !__builtin_add_overflow(*out, width, out);
}

/* Adds the offset of byte `x` in row `y` of plane `z` to `*address`. Returns false if the sum
 * overflows. */
static bool locate(uint64_t *address, size_t x, size_t y, size_t z, size_t height, size_t pitch)
{
    uint64_t offset;
    return !__builtin_mul_overflow(z, height, &offset) && !__builtin_add_overflow(offset, y, &offset) &&
           !__builtin_mul_overflow(offset, pitch, &offset) && !__builtin_add_overflow(offset, x, &offset) &&
           !__builtin_add_overflow(*address, offset, address);
}

static CUresult move(const struct transfer *t, CUstream stream, bool wait)
{
    uint64_t to_bytes, from_bytes;
    struct stream *s;
    void *to = NULL, *from = NULL;
    int to_device = -1, from_device = -1;
    pthread_mutex_lock(&driver.lock);
    CUresult result = stream_resolve(stream, &s);
    if (!result && t->rows && t->width) {
        if (!reach(t->to_pitch, t->rows, t->width, &to_bytes) || !reach(t->from_pitch, t->rows, t->width, &from_bytes))
            result = CUDA_ERROR_INVALID_VALUE;
        if (!result)
            result = resolve(t->to, to_bytes, &to, &to_device);
        if (!result)
            result = resolve(t->from, from_bytes, &from, &from_device);
    }
    pthread_mutex_unlock(&driver.lock);
    if (result || !t->rows || !t->width)
        return result;
    uint64_t duration = copy_ns(t->width * t->rows, from_device, to_device);
    pthread_mutex_lock(&driver.lock);
    uint64_t tail = stream_submit(s, duration);
    pthread_mutex_unlock(&driver.lock);
    bool written = from_device < 0 && t->rows == 1 && arena_write(to_device, t->to, from, t->width, false);
    for (size_t row = 0; row < t->rows && !written; row++)
        memmove((char *)to + row * t->to_pitch, (char *)from + row * t->from_pitch, t->width);
    if (wait)
        sleep_until(tail);
    return CUDA_SUCCESS;
}

static CUresult transfer(const struct transfer *t, CUstream stream, bool wait)
{
    GATED;
    CUresult result;
    CUDA_MEMCPY3D p = {.srcMemoryType = MEMORYTYPE_UNIFIED, .srcDevice = t->from, .srcPitch = t->from_pitch,
                       .dstMemoryType = MEMORYTYPE_UNIFIED, .dstDevice = t->to, .dstPitch = t->to_pitch,
                       .WidthInBytes = t->width, .Height = t->rows, .Depth = 1};
    return capture_copy(stream, &p, wait, &result) ? result : move(t, stream, wait);
}

static CUresult copy(uint64_t to, uint64_t from, size_t size, CUstream stream, bool wait)
{
    struct transfer t = {to, from, size, size, size, 1};
    return transfer(&t, stream, wait);
}

/* Defines a synchronous copy and its variant for the per-thread stream. */
#define COPY(name, suffix, to_t, from_t)                                                     \
    EXPORT CUresult name##suffix(to_t to, from_t from, size_t size)                          \
    {                                                                                        \
        return copy((uint64_t)to, (uint64_t)from, size, STREAM_LEGACY, true);                \
    }                                                                                        \
    EXPORT CUresult name##suffix##_ptds(to_t to, from_t from, size_t size)                   \
    {                                                                                        \
        return copy((uint64_t)to, (uint64_t)from, size, STREAM_PER_THREAD, true);            \
    }
#define COPY_ASYNC(name, suffix, to_t, from_t)                                               \
    EXPORT CUresult name##suffix(to_t to, from_t from, size_t size, CUstream stream)         \
    {                                                                                        \
        return copy((uint64_t)to, (uint64_t)from, size, stream, false);                      \
    }                                                                                        \
    EXPORT CUresult name##suffix##_ptsz(to_t to, from_t from, size_t size, CUstream stream)  \
    {                                                                                        \
        return copy((uint64_t)to, (uint64_t)from, size, stream ? stream : STREAM_PER_THREAD, false); \
    }

COPY(cuMemcpy, , CUdeviceptr, CUdeviceptr)
COPY(cuMemcpyHtoD, _v2, CUdeviceptr, const void *)
COPY(cuMemcpyDtoH, _v2, void *, CUdeviceptr)
COPY(cuMemcpyDtoD, _v2, CUdeviceptr, CUdeviceptr)
COPY_ASYNC(cuMemcpyAsync, , CUdeviceptr, CUdeviceptr)
COPY_ASYNC(cuMemcpyHtoDAsync, _v2, CUdeviceptr, const void *)
COPY_ASYNC(cuMemcpyDtoHAsync, _v2, void *, CUdeviceptr)
COPY_ASYNC(cuMemcpyDtoDAsync, _v2, CUdeviceptr, CUdeviceptr)

EXPORT CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext tc, CUdeviceptr from, CUcontext fc, size_t size)
{
    (void)tc;
    (void)fc;
    return copy(to, from, size, STREAM_LEGACY, true);
}

EXPORT CUresult cuMemcpyPeer_ptds(CUdeviceptr to, CUcontext tc, CUdeviceptr from, CUcontext fc, size_t size)
{
    (void)tc;
    (void)fc;
    return copy(to, from, size, STREAM_PER_THREAD, true);
}

EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext tc, CUdeviceptr from, CUcontext fc,
                                  size_t size, CUstream stream)
{
    (void)tc;
    (void)fc;
    return copy(to, from, size, stream, false);
}

/* The batch call of CUDA 13. Its attributes are hints, which change nothing here. */
EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                                      void *attributes, size_t *indices, size_t attribute_count,
                                      CUstream stream)
{
    REQUIRE(attribute_count); /* the driver requires attributes for every copy */
    CHECKED;
    (void)attributes;
    (void)indices;
    for (size_t i = 0; i < count; i++) {
        CUresult result = copy(to[i], from[i], sizes[i], stream, false);
        if (result)
            return result;
    }
    return CUDA_SUCCESS;
}

static uint64_t base(int type, const void *host, CUdeviceptr device)
{
    return type == MEMORYTYPE_HOST ? (uint64_t)host : type == MEMORYTYPE_ARRAY ? 0 : device;
}

static CUresult copy2d(const CUDA_MEMCPY2D *p, CUstream stream, bool wait)
{
    CHECKED;
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t from = base(p->srcMemoryType, p->srcHost, p->srcDevice);
    uint64_t to = base(p->dstMemoryType, p->dstHost, p->dstDevice);
    size_t from_pitch = p->srcPitch ? p->srcPitch : p->WidthInBytes;
    size_t to_pitch = p->dstPitch ? p->dstPitch : p->WidthInBytes;
    if (!from || !to)
        return CUDA_ERROR_NOT_SUPPORTED; /* an array's bytes cannot be read or written here */
    if (from_pitch < p->WidthInBytes || to_pitch < p->WidthInBytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (!locate(&to, p->dstXInBytes, p->dstY, 0, 0, to_pitch) ||
        !locate(&from, p->srcXInBytes, p->srcY, 0, 0, from_pitch))
        return CUDA_ERROR_INVALID_VALUE;
    struct transfer t = {to, from, to_pitch, from_pitch, p->WidthInBytes, p->Height};
    return transfer(&t, stream, wait);
}

EXPORT CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *p) { return copy2d(p, STREAM_LEGACY, true); }
EXPORT CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *p) { return copy2d(p, STREAM_LEGACY, true); }
EXPORT CUresult cuMemcpy2D_v2_ptds(const CUDA_MEMCPY2D *p) { return copy2d(p, STREAM_PER_THREAD, true); }
EXPORT CUresult cuMemcpy2DUnaligned_v2_ptds(const CUDA_MEMCPY2D *p) { return copy2d(p, STREAM_PER_THREAD, true); }
EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *p, CUstream s) { return copy2d(p, s, false); }

static CUresult planes(const CUDA_MEMCPY3D *p, CUstream stream, bool wait)
{
    uint64_t from = base(p->srcMemoryType, p->srcHost, p->srcDevice);
    uint64_t to = base(p->dstMemoryType, p->dstHost, p->dstDevice);
    size_t from_pitch = p->srcPitch ? p->srcPitch : p->WidthInBytes;
    size_t to_pitch = p->dstPitch ? p->dstPitch : p->WidthInBytes;
    size_t from_height = p->srcHeight ? p->srcHeight : p->Height;
    size_t to_height = p->dstHeight ? p->dstHeight : p->Height;
    if (!from || !to)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (from_pitch < p->WidthInBytes || to_pitch < p->WidthInBytes)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t z = 0; z < p->Depth; z++) {
        struct transfer t = {to, from, to_pitch, from_pitch, p->WidthInBytes, p->Height};
        if (!locate(&t.to, p->dstXInBytes, p->dstY, p->dstZ + z, to_height, to_pitch) ||
            !locate(&t.from, p->srcXInBytes, p->srcY, p->srcZ + z, from_height, from_pitch))
            return CUDA_ERROR_INVALID_VALUE;
        CUresult result = move(&t, stream, wait);
        if (result)
            return result;
    }
    return CUDA_SUCCESS;
}

CUresult copy_now(const CUDA_MEMCPY3D *p, CUstream stream) { return planes(p, stream, false); }

static CUresult copy3d(const CUDA_MEMCPY3D *p, CUstream stream, bool wait)
{
    GATED;
    CUresult result;
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    return capture_copy(stream, p, wait, &result) ? result : planes(p, stream, wait);
}

EXPORT CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D *p) { return copy3d(p, STREAM_LEGACY, true); }
EXPORT CUresult cuMemcpy3D_v2_ptds(const CUDA_MEMCPY3D *p) { return copy3d(p, STREAM_PER_THREAD, true); }
EXPORT CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *p, CUstream s) { return copy3d(p, s, false); }

/* ---- fills ---- */

static CUresult fill_lines(const CUDA_MEMSET_NODE_PARAMS *p, CUstream stream, bool wait)
{
    struct stream *s;
    void *host = NULL;
    int device = -1;
    uint64_t line, bytes = 0;
    size_t width = p->width, rows = p->height, unit = p->elementSize;
    if (p->dst % unit || __builtin_mul_overflow(width, unit, &line) || (rows > 1 && p->pitch < line) ||
        (rows && !reach(p->pitch, rows, line, &bytes)))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    CUresult result = stream_resolve(stream, &s);
    if (!result && width && rows)
        result = resolve(p->dst, bytes, &host, &device);
    uint64_t tail = result ? 0 : stream_submit(s, 0);
    pthread_mutex_unlock(&driver.lock);
    if (result || !width)
        return result;
    char piece[ARENA_PIECE];
    bool written = unit == 1 && rows == 1 && width >= GRANULE &&
                   arena_write(device, p->dst, memset(piece, (int)p->value, sizeof piece), width, true);
    for (size_t row = 0; row < rows && !written; row++) {
        char *to = (char *)host + row * p->pitch;
        if (unit == 1)
            memset(to, (int)p->value, width);
        for (size_t i = 0; unit == 2 && i < width; i++)
            ((uint16_t *)to)[i] = (uint16_t)p->value;
        for (size_t i = 0; unit == 4 && i < width; i++)
            ((uint32_t *)to)[i] = p->value;
    }
    if (wait)
        sleep_until(tail);
    return CUDA_SUCCESS;
}

CUresult fill_now(const CUDA_MEMSET_NODE_PARAMS *p, CUstream stream) { return fill_lines(p, stream, false); }

static CUresult fill(uint64_t to, size_t pitch, unsigned value, unsigned unit, size_t width, size_t rows,
                     CUstream stream, bool wait)
{
    REQUIRE_STREAM(stream);
    GATED;
    CUresult result;
    CUDA_MEMSET_NODE_PARAMS p = {to, pitch, value, unit, width, rows};
    return capture_fill(stream, &p, wait, &result) ? result : fill_lines(&p, stream, wait);
}

#define FILL(bits, value_t)                                                                           \
    EXPORT CUresult cuMemsetD##bits##_v2(CUdeviceptr to, value_t v, size_t n)                         \
    {                                                                                                 \
        return fill(to, 0, v, bits / 8, n, 1, STREAM_LEGACY, true);                                   \
    }                                                                                                 \
    EXPORT CUresult cuMemsetD##bits##_v2_ptds(CUdeviceptr to, value_t v, size_t n)                    \
    {                                                                                                 \
        return fill(to, 0, v, bits / 8, n, 1, STREAM_PER_THREAD, true);                               \
    }                                                                                                 \
    EXPORT CUresult cuMemsetD##bits##Async(CUdeviceptr to, value_t v, size_t n, CUstream s)           \
    {                                                                                                 \
        return fill(to, 0, v, bits / 8, n, 1, s, false);                                              \
    }                                                                                                 \
    EXPORT CUresult cuMemsetD##bits##Async_ptsz(CUdeviceptr to, value_t v, size_t n, CUstream s)      \
    {                                                                                                 \
        return fill(to, 0, v, bits / 8, n, 1, s ? s : STREAM_PER_THREAD, false);                      \
    }                                                                                                 \
    EXPORT CUresult cuMemsetD2D##bits##_v2(CUdeviceptr to, size_t pitch, value_t v, size_t w, size_t h) \
    {                                                                                                 \
        return fill(to, pitch, v, bits / 8, w, h, STREAM_LEGACY, true);                               \
    }                                                                                                 \
    EXPORT CUresult cuMemsetD2D##bits##Async(CUdeviceptr to, size_t pitch, value_t v, size_t w,       \
                                             size_t h, CUstream s)                                    \
    {                                                                                                 \
        return fill(to, pitch, v, bits / 8, w, h, s, false);                                          \
    }                                                                                                 \
    EXPORT CUresult cuMemsetD2D##bits##_v2_ptds(CUdeviceptr to, size_t pitch, value_t v, size_t w,    \
                                                size_t h)                                             \
    {                                                                                                 \
        return fill(to, pitch, v, bits / 8, w, h, STREAM_PER_THREAD, true);                           \
    }                                                                                                 \
    EXPORT CUresult cuMemsetD2D##bits##Async_ptsz(CUdeviceptr to, size_t pitch, value_t v, size_t w,  \
                                                  size_t h, CUstream s)                               \
    {                                                                                                 \
        return fill(to, pitch, v, bits / 8, w, h, s ? s : STREAM_PER_THREAD, false);                  \
    }

FILL(8, unsigned char)
FILL(16, unsigned short)
FILL(32, unsigned)

/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Arrays and mipmapped arrays. The driver does not report the size of an array, so the guard
 * computes it from the format and the extents. It does not know the padding of the driver's layout,
 * and does not count it. A sparse array and an array with deferred mapping take no memory when they
 * are made: the program maps memory of cuMemCreate into them, and the guard counts that memory in
 * cuMemCreate.
 */
#include "counting.h"
#include "wraps.h"

enum { ARRAY_LAYERED = 0x01, ARRAY_CUBEMAP = 0x04, ARRAY_SPARSE = 0x40, ARRAY_DEFERRED = 0x80 };

/* The size of one texel with all its channels, in bits. If the format has a fixed number of
 * channels, the function ignores `channels`. */
static unsigned texel_bits(int format, unsigned channels)
{
    switch (format) {
    case 0x01: case 0x08: return 8 * channels;
    case 0x02: case 0x09: case 0x10: return 16 * channels;
    case 0x03: case 0x0a: case 0x20: return 32 * channels;
    case 0x50: return 32;                                             /* 10-10-10-2 */
    case 0x91: case 0x92: case 0x97: case 0x98: return 4;             /* BC1, BC4 */
    case 0x93: case 0x94: case 0x95: case 0x96: case 0x99: case 0x9a:
    case 0x9b: case 0x9c: case 0x9d: case 0x9e: return 8;             /* BC2, 3, 5, 6H, 7 */
    case 0xc0: case 0xc6: return 8;
    case 0xc1: case 0xc7: case 0xc3: case 0xc9: return 16;
    case 0xc2: case 0xc8: case 0xc4: case 0xca: return 32;
    case 0xc5: case 0xcb: return 64;
    case 0xb0: return 12;                                             /* NV12 */
    case 0xa2: case 0xa5: return 16;                                  /* NV16, YUY2 */
    case 0x9f: case 0xa1: case 0xb2: case 0xb4: return 24;            /* P010, P016, Y444 8 bit */
    case 0xa3: case 0xa4: case 0xa6: case 0xa7: case 0xa8: case 0xa9: return 32;
    case 0xb3: case 0xb5: return 48;                                  /* Y444 16 bit */
    case 0xb1: return 64;                                             /* Y416 */
    default: return 128; /* an unknown format: the largest texel */
    }
}

static uint64_t at_least_one(uint64_t n) { return n ? n : 1; }

static uint64_t level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned level)
{
    bool flat = d->Flags & (ARRAY_LAYERED | ARRAY_CUBEMAP); /* here the depth is the number of
                                                             * layers */
    unsigned __int128 bits = texel_bits(d->Format, at_least_one(d->NumChannels));
    bits *= at_least_one(d->Width >> level);
    bits *= at_least_one(d->Height >> level);
    bits *= at_least_one(flat ? d->Depth : d->Depth >> level);
    unsigned __int128 bytes = (bits + 4095) / 4096 * 512;
    return bytes > UINT64_MAX / 2 ? UINT64_MAX / 2 : (uint64_t)bytes;
}

static uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels)
{
    uint64_t sum = 0;
    if (d->Flags & (ARRAY_SPARSE | ARRAY_DEFERRED))
        return 0;
    for (unsigned i = 0; i < levels && i < 32; i++)
        if (__builtin_add_overflow(sum, level_bytes(d, i), &sum))
            return UINT64_MAX;
    return sum;
}

/* Charge `size` bytes. If they fit, run `call`: a call of the driver that sets *handle. */
#define CREATE(handle, size, call, undo)                                                      \
    struct here h = here_now();                                                               \
    struct own own = {.bytes = h.ordinal < 0 ? 0 : (size), .owner  = h.number,                \
                      .kind = OWN_ARRAY, .ordinal = (int16_t)h.ordinal};                      \
    if (!own.bytes)                                                                           \
        return call;                                                                          \
    CUresult result = guard_charge(h.ordinal, own.bytes);                                     \
    if (result)                                                                               \
        return result;                                                                        \
    result = call;                                                                            \
    if (!result)                                                                              \
        own.key = (uint64_t)*(handle);                                                        \
    return keep(result, &own, undo)

static CUresult undo_array(CUdeviceptr key) { return REAL(cuArrayDestroy)((CUarray)key); }
static CUresult undo_mipmap(CUdeviceptr key) { return REAL(cuMipmappedArrayDestroy)((CUmipmappedArray)key); }

CUresult wrap_cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *d)
{
    ENTER;
    if (!out || !d)
        return REAL(cuArray3DCreate_v2)(out, d);
    CREATE(out, array_bytes(d, 1), REAL(cuArray3DCreate_v2)(out, d), undo_array);
}

CUresult wrap_cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *d)
{
    ENTER;
    if (!out || !d)
        return REAL(cuArrayCreate_v2)(out, d);
    CUDA_ARRAY3D_DESCRIPTOR wide = {d->Width, d->Height, 0, d->Format, d->NumChannels, 0};
    CREATE(out, array_bytes(&wide, 1), REAL(cuArrayCreate_v2)(out, d), undo_array);
}

CUresult wrap_cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels)
{
    ENTER;
    if (!out || !d)
        return REAL(cuMipmappedArrayCreate)(out, d, levels);
    CREATE(out, array_bytes(d, levels), REAL(cuMipmappedArrayCreate)(out, d, levels), undo_mipmap);
}

#define DESTROY(name, handle, call)                             \
    ENTER_BACK(name, (uint64_t)(handle));                       \
    struct own own, stale;                                      \
    bool ours = table_take(OWN_ARRAY, (uint64_t)(handle), &own); \
    CUresult result = call;                                     \
    if (ours && !result)                                        \
        guard_credit(own.ordinal, own.bytes);                   \
    else if (ours && table_put(&own, &stale))                   \
        settle_stale(&stale);                                   \
    return result

CUresult wrap_cuArrayDestroy(CUarray array) { DESTROY(cuArrayDestroy, array, REAL(cuArrayDestroy)(array)); }

CUresult wrap_cuMipmappedArrayDestroy(CUmipmappedArray array)
{
    DESTROY(cuMipmappedArrayDestroy, array, REAL(cuMipmappedArrayDestroy)(array));
}

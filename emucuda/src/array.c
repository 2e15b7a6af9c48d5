/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Arrays. Their device memory is charged, but no call can read or write it, because its layout is
 * opaque.
 */
#include "driver.h"

#include <stdlib.h>

struct array {
    uint32_t magic;
    struct context *context;
    uint64_t bytes;
    CUDA_ARRAY3D_DESCRIPTOR descriptor;
    bool level; /* a level of a mipmap; the mipmap owns the bytes */
    struct array *next;
};

#define MAX_LEVELS 32

struct mipmap {
    uint32_t magic;
    unsigned levels;
    struct array level[MAX_LEVELS];
    struct mipmap *next;
};

static struct array *arrays; /* driver.lock protects these two lists */
static struct mipmap *mipmaps;

static void release(const struct context *c, uint64_t bytes)
{
    machine_release(driver.slot, driver.device[c->device].physical, bytes);
}

static unsigned format_bytes(int format)
{
    switch (format) {
    case 0x01: case 0x08: return 1;            /* 8-bit integers */
    case 0x02: case 0x09: case 0x10: return 2; /* 16-bit integers, half */
    case 0x03: case 0x0a: case 0x20: return 4; /* 32-bit integers, float */
    default: return 0;
    }
}

/* Computes the bytes of an array of this shape. */
static CUresult measure(const CUDA_ARRAY3D_DESCRIPTOR *d, uint64_t *out)
{
    unsigned unit = d ? format_bytes(d->Format) : 0;
    if (!unit || !d->Width || d->NumChannels < 1 || d->NumChannels > 4 || d->NumChannels == 3)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t height = d->Height ? d->Height : 1, depth = d->Depth ? d->Depth : 1;
    unsigned __int128 bytes = (unsigned __int128)d->Width * height * depth * unit * d->NumChannels;
    if (bytes > machine->spec.memory)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = ((uint64_t)bytes + 511) / 512 * 512;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *d)
{
    GATED;
    struct context *c;
    uint64_t bytes = 0;
    CUresult result = context_current(&c);
    if (!result)
        result = out ? measure(d, &bytes) : CUDA_ERROR_INVALID_VALUE;
    if (result)
        return result;
    struct array *a = calloc(1, sizeof *a);
    if (!a)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!machine_charge(driver.slot, driver.device[c->device].physical, bytes)) {
        free(a);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&driver.lock);
    *a = (struct array){MAGIC_ARRAY, c, bytes, *d, false, arrays};
    arrays = a;
    pthread_mutex_unlock(&driver.lock);
    *out = a;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *d)
{
    CHECKED;
    if (!d)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_ARRAY3D_DESCRIPTOR wide = {d->Width, d->Height, 0, d->Format, d->NumChannels, 0};
    return cuArray3DCreate_v2(out, &wide);
}

/* Makes the handle invalid, and frees the device memory, but not the memory behind the handle. */
static void array_end(struct array **link)
{
    struct array *a = *link;
    *link = a->next;
    release(a->context, a->bytes);
    a->magic = 0;
}

EXPORT CUresult cuArrayDestroy(CUarray a)
{
    GATED;
    pthread_mutex_lock(&driver.lock);
    bool bad = !a || a->magic != MAGIC_ARRAY || a->level;
    for (struct array **link = &arrays; !bad && *link; link = &(*link)->next)
        if (*link == a) {
            array_end(link);
            break;
        }
    pthread_mutex_unlock(&driver.lock);
    if (bad)
        return CUDA_ERROR_INVALID_HANDLE;
    free(a);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *out, CUarray a)
{
    REQUIRE_HANDLE(a);
    CHECKED;
    if (a->magic != MAGIC_ARRAY)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = a->descriptor;
    return CUDA_SUCCESS;
}

/* ---- mipmaps ---- */

static uint64_t total(const struct mipmap *m)
{
    uint64_t bytes = 0;
    for (unsigned i = 0; i < m->levels; i++)
        bytes += m->level[i].bytes;
    return bytes;
}

static size_t halve(size_t n) { return n > 1 ? n / 2 : n; }

EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels)
{
    GATED;
    struct context *c;
    CUresult result = context_current(&c);
    if (!result && (!out || !d || !levels || levels > MAX_LEVELS))
        result = CUDA_ERROR_INVALID_VALUE;
    struct mipmap *m = result ? NULL : calloc(1, sizeof *m);
    if (!m)
        return result ? result : CUDA_ERROR_OUT_OF_MEMORY;
    m->magic = MAGIC_MIPMAP;
    CUDA_ARRAY3D_DESCRIPTOR shape = *d;
    for (bool last = false; m->levels < levels && !last && !result; m->levels++) {
        uint64_t bytes = 0;
        result = measure(&shape, &bytes);
        m->level[m->levels] = (struct array){MAGIC_ARRAY, c, bytes, shape, true, NULL};
        last = shape.Width <= 1 && shape.Height <= 1 && shape.Depth <= 1; /* the smallest level */
        shape.Width = halve(shape.Width);
        shape.Height = halve(shape.Height);
        shape.Depth = halve(shape.Depth);
    }
    if (!result && !machine_charge(driver.slot, driver.device[c->device].physical, total(m)))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result) {
        free(m);
        return result;
    }
    pthread_mutex_lock(&driver.lock);
    m->next = mipmaps;
    mipmaps = m;
    pthread_mutex_unlock(&driver.lock);
    *out = m;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMipmappedArrayGetLevel(CUarray *out, CUmipmappedArray m, unsigned level)
{
    REQUIRE_HANDLE(m);
    CHECKED;
    if (m->magic != MAGIC_MIPMAP)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out || level >= m->levels)
        return CUDA_ERROR_INVALID_VALUE;
    *out = &m->level[level];
    return CUDA_SUCCESS;
}

static void mipmap_end(struct mipmap **link)
{
    struct mipmap *m = *link;
    *link = m->next;
    release(m->level[0].context, total(m));
    m->magic = 0;
    for (unsigned i = 0; i < m->levels; i++)
        m->level[i].magic = 0;
}

EXPORT CUresult cuMipmappedArrayDestroy(CUmipmappedArray m)
{
    GATED;
    pthread_mutex_lock(&driver.lock);
    bool bad = !m || m->magic != MAGIC_MIPMAP;
    for (struct mipmap **link = &mipmaps; !bad && *link; link = &(*link)->next)
        if (*link == m) {
            mipmap_end(link);
            break;
        }
    pthread_mutex_unlock(&driver.lock);
    if (bad)
        return CUDA_ERROR_INVALID_HANDLE;
    free(m);
    return CUDA_SUCCESS;
}

/* Like the handle of a context, the handles of its arrays stay readable. */
void arrays_end(const struct context *c)
{
    for (struct array **link = &arrays; *link;)
        if ((*link)->context == c)
            array_end(link);
        else
            link = &(*link)->next;
    for (struct mipmap **link = &mipmaps; *link;)
        if ((*link)->level[0].context == c)
            mipmap_end(link);
        else
            link = &(*link)->next;
}

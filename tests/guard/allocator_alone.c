/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The allocation wrappers (memory.c, table.c) on another allocator: one that puts everything into a
 * range of its own and knows the block behind each address, as one that moves bytes itself would.
 * What the rest of the guard does is replaced by accounts kept here. Prints "right".
 */
#include "allocator.h"
#include "wraps.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *guard_real[E_COUNT + E_SPARES]; /* empty: a call of the driver's is a crash */
static struct page page;
struct page *guard_page = &page;

static int64_t charged;
static int entered, allocations;
static uint64_t room = 100 << 20;

CUresult guard_enter(void) { return entered++, CUDA_SUCCESS; }
CUresult guard_enter_back(uint32_t entry, const uint64_t *argument)
{
    (void)entry, (void)argument;
    return guard_enter();
}
void current_seen(CUcontext context) { (void)context; }
void guard_leave(void) { entered--; }
void guard_pin(uint32_t pins) { (void)pins; }
bool guard_initialised(void) { return true; }
void pool_freed(const struct own *own) { (void)own; }
void capture_over(const struct own *own) { (void)own; }
void registered_over(const struct own *own) { (void)own; }
struct here here_now(void) { return (struct here){.number = 1, .ordinal = 3}; }
CUresult guard_charge(int ordinal, uint64_t bytes)
{
    if (ordinal != 3 || (uint64_t)charged + bytes > room)
        return CUDA_ERROR_OUT_OF_MEMORY;
    charged += (int64_t)bytes;
    return CUDA_SUCCESS;
}
void guard_credit(int ordinal, uint64_t bytes) { charged -= ordinal == 3 ? (int64_t)bytes : 0; }

/* ---- the allocator */

#define BASE 0x700000000000ull
#define STEP (64ull << 20)
#define BLOCKS 16

static struct placement blocks[BLOCKS];
static bool fails;

static uint64_t extent(uint64_t bytes) { return (bytes + 65535) / 65536 * 65536; }

static CUresult alloc(CUdeviceptr *out, size_t bytes)
{
    for (unsigned i = 0; i < BLOCKS && !fails; i++)
        if (!blocks[i].bytes) {
            *out = BASE + i * STEP;
            blocks[i] = (struct placement){*out, bytes, extent(bytes), 3, 1000 + i};
            allocations++;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult alloc_pitch(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element)
{
    (void)element;
    *pitch = (width + 4095) / 4096 * 4096;
    return alloc(out, *pitch * height);
}

static bool where(CUdeviceptr address, struct placement *out)
{
    unsigned i = (unsigned)((address - BASE) / STEP);
    if (address < BASE || i >= BLOCKS || address - blocks[i].base >= blocks[i].bytes)
        return false;
    *out = blocks[i];
    return true;
}

static CUresult release(CUdeviceptr address)
{
    struct placement p;
    if (!where(address, &p) || p.base != address)
        return CUDA_ERROR_INVALID_VALUE;
    blocks[(address - BASE) / STEP].bytes = 0;
    allocations--;
    return CUDA_SUCCESS;
}

static const struct allocator other = {"other", alloc, alloc_pitch, release, extent, where};

static void expect(bool good, int line)
{
    if (good && !entered)
        return;
    printf("wrong at line %d: %lld bytes charged, %d allocations, %d inside\n", line, (long long)charged,
           allocations, entered);
    exit(1);
}
#define EXPECT(what) expect(what, __LINE__)

int main(void)
{
    CUdeviceptr p, q;
    struct placement at;
    size_t pitch;
    guard_allocator = &other;
    EXPECT(!wrap_cuMemAlloc_v2(&p, 100000) && charged == 131072);
    EXPECT(guard_allocator->where(p + 99999, &at) && at.base == p && at.physical == 1000 && at.extent == 131072);
    EXPECT(!guard_allocator->where(p + 100000, &at));
    EXPECT(!wrap_cuMemAllocPitch_v2(&q, &pitch, 100, 64, 4) && pitch == 4096);
    EXPECT(charged == 131072 + 262144 && allocations == 2);
    /* The pitch shows what it takes after it was taken: too much, and undone. */
    room = (uint64_t)charged + 65536;
    EXPECT(wrap_cuMemAllocPitch_v2(&q, &pitch, 100, 640, 4) == CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT(charged == 131072 + 262144 && allocations == 2);
    EXPECT(wrap_cuMemAlloc_v2(&q, 65537) == CUDA_ERROR_OUT_OF_MEMORY && allocations == 2);
    fails = true;
    EXPECT(wrap_cuMemAlloc_v2(&q, 65536) == CUDA_ERROR_OUT_OF_MEMORY && charged == 131072 + 262144);
    fails = false;
    EXPECT(wrap_cuMemFree_v2(p + 1) == CUDA_ERROR_INVALID_VALUE);
    EXPECT(!wrap_cuMemFree_v2(p) && charged == 262144);
    EXPECT(wrap_cuMemFree_v2(p) == CUDA_ERROR_INVALID_VALUE && charged == 262144);
    EXPECT(!wrap_cuMemFree_v2(BASE + STEP) && charged == 0 && allocations == 0);
    printf("right\n");
    return 0;
}

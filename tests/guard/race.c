/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * race SEED ROUNDS: threads allocate and free memory in all ways at once, in a slice that is too
 * small for all of them. The status is 0 if every call returned an allowed result. The program
 * prints how many requests were refused, and the free and the total bytes at the end.
 */
#include "cuda_abi.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define THREADS 4
#define MIB (1ull << 20)

struct alloc_node {
    CUmemPoolProps pool;
    const void *access;
    size_t accesses, bytes;
    CUdeviceptr address;
};

#define CALLS                                                                                        \
    X(cuInit, (unsigned)) X(cuDevicePrimaryCtxRetain, (void **, int))                                \
    X(cuCtxSetCurrent, (void *)) X(cuCtxSynchronize, (void)) X(cuCtxCreate_v2, (void **, unsigned, int)) \
    X(cuCtxDestroy_v2, (void *)) X(cuMemGetInfo_v2, (size_t *, size_t *))                            \
    X(cuDeviceTotalMem_v2, (size_t *, int)) X(cuMemAlloc_v2, (CUdeviceptr *, size_t))                \
    X(cuMemAllocPitch_v2, (CUdeviceptr *, size_t *, size_t, size_t, unsigned))                       \
    X(cuMemFree_v2, (CUdeviceptr)) X(cuMemAllocAsync, (CUdeviceptr *, size_t, void *))               \
    X(cuMemFreeAsync, (CUdeviceptr, void *)) X(cuStreamCreate, (void **, unsigned))                  \
    X(cuStreamSynchronize, (void *)) X(cuMemPoolCreate, (void **, const CUmemPoolProps *))           \
    X(cuMemAllocFromPoolAsync, (CUdeviceptr *, size_t, void *, void *))                              \
    X(cuMemPoolDestroy, (void *)) X(cuMemPoolTrimTo, (void *, size_t))                               \
    X(cuDeviceGetDefaultMemPool, (void **, int))                                                     \
    X(cuArrayCreate_v2, (void **, const CUDA_ARRAY_DESCRIPTOR *)) X(cuArrayDestroy, (void *))        \
    X(cuMemCreate, (uint64_t *, size_t, const CUmemAllocationProp *, unsigned long long))            \
    X(cuMemRelease, (uint64_t)) X(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)) \
    X(cuMemAddressFree, (CUdeviceptr, size_t)) X(cuMemMap, (CUdeviceptr, size_t, size_t, uint64_t, unsigned long long)) \
    X(cuMemUnmap, (CUdeviceptr, size_t)) X(cuMemRetainAllocationHandle, (uint64_t *, void *))        \
    X(cuGraphCreate, (void **, unsigned)) X(cuGraphDestroy, (void *))                                \
    X(cuGraphAddMemAllocNode, (void **, void *, void *const *, size_t, struct alloc_node *))         \
    X(cuGraphAddMemFreeNode, (void **, void *, void *const *, size_t, CUdeviceptr))                  \
    X(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long))                            \
    X(cuGraphLaunch, (void *, void *)) X(cuGraphExecDestroy, (void *)) X(cuDeviceGraphMemTrim, (int))

#define X(name, types) static CUresult(*name) types;
CALLS
#undef X

static void *primary;
static int rounds;
static uint64_t refusals;

/* "Out of memory" is an allowed result; any other error is a failure. */
static int given(CUresult result, int line)
{
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        __atomic_add_fetch(&refusals, 1, __ATOMIC_RELAXED);
    else if (result) {
        printf("line %d: error %d\n", line, result);
        exit(1);
    }
    return !result;
}
#define GIVEN(call) given(call, __LINE__)
#define DONE(call)                              \
    do {                                        \
        CUresult done_ = call;                  \
        if (done_) {                            \
            printf("line %d: error %d\n", __LINE__, done_); \
            exit(1);                            \
        }                                       \
    } while (0)

static const CUmemPoolProps pool_props = {.allocType = 1, .location = {MEM_LOCATION_DEVICE, 0}};

static void graph_of(size_t bytes, void *stream)
{
    struct alloc_node params = {.pool = pool_props, .bytes = bytes};
    void *graph, *node, *last, *executable;
    DONE(cuGraphCreate(&graph, 0));
    if (GIVEN(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &params))) {
        DONE(cuGraphAddMemFreeNode(&last, graph, &node, 1, params.address));
        if (GIVEN(cuGraphInstantiateWithFlags(&executable, graph, 0))) {
            for (int i = 0; i < 2; i++)
                if (GIVEN(cuGraphLaunch(executable, stream)))
                    DONE(cuStreamSynchronize(stream));
            DONE(cuGraphExecDestroy(executable));
        }
    }
    DONE(cuGraphDestroy(graph));
}

static void mapped(size_t bytes)
{
    CUmemAllocationProp prop = {.type = 1, .location = {MEM_LOCATION_DEVICE, 0}};
    uint64_t handle, again;
    CUdeviceptr at;
    bytes = (bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
    if (!GIVEN(cuMemCreate(&handle, bytes, &prop, 0)))
        return;
    DONE(cuMemAddressReserve(&at, bytes, 0, 0, 0));
    DONE(cuMemMap(at, bytes, 0, handle, 0));
    DONE(cuMemRelease(handle));
    DONE(cuMemRetainAllocationHandle(&again, (void *)at));
    DONE(cuMemUnmap(at, bytes));
    DONE(cuMemRelease(again));
    DONE(cuMemAddressFree(at, bytes));
}

static void own_pool(size_t bytes, void *stream)
{
    void *pool;
    CUdeviceptr p;
    if (!GIVEN(cuMemPoolCreate(&pool, &pool_props)))
        return;
    int there = GIVEN(cuMemAllocFromPoolAsync(&p, bytes, pool, stream));
    if (there && bytes % 3) {
        DONE(cuMemFreeAsync(p, stream));
        DONE(cuMemPoolTrimTo(pool, 0));
        there = 0;
    }
    DONE(cuMemPoolDestroy(pool));
    if (there)
        DONE(cuMemFreeAsync(p, stream));
}

static void own_context(size_t bytes)
{
    void *context;
    CUdeviceptr p;
    if (!GIVEN(cuCtxCreate_v2(&context, 0, 0)))
        return;
    GIVEN(cuMemAlloc_v2(&p, bytes)); /* the end of the context frees this memory */
    DONE(cuCtxDestroy_v2(context));
    DONE(cuCtxSetCurrent(primary));
}

static void *work(void *seed_of)
{
    unsigned seed = *(unsigned *)seed_of;
    void *stream, *array;
    size_t pitch, available, total;
    CUdeviceptr p;
    DONE(cuCtxSetCurrent(primary));
    DONE(cuStreamCreate(&stream, 1));
    for (int i = 0; i < rounds; i++) {
        size_t n = (size_t)rand_r(&seed), bytes = rand_r(&seed) % 4 ? 1 + n % 100000 : MIB * (1 + n % 80);
        CUDA_ARRAY_DESCRIPTOR shape = {1024, 1 + bytes / 1024, 0x01, 1};
        switch (rand_r(&seed) % 9) {
        case 0:
            if (GIVEN(cuMemAlloc_v2(&p, bytes)))
                DONE(rand_r(&seed) % 2 ? cuMemFree_v2(p) : cuMemFreeAsync(p, stream));
            break;
        case 1:
            if (GIVEN(cuMemAllocPitch_v2(&p, &pitch, 100, 1 + bytes / 512, 4)))
                DONE(cuMemFree_v2(p));
            break;
        case 2:
            if (GIVEN(cuMemAllocAsync(&p, bytes, stream)))
                DONE(rand_r(&seed) % 4 ? cuMemFreeAsync(p, stream) : cuMemFree_v2(p));
            if (rand_r(&seed) % 4 == 0)
                DONE(cuStreamSynchronize(stream));
            break;
        case 3: own_pool(bytes, stream); break;
        case 4: mapped(bytes); break;
        case 5: graph_of(bytes, stream); break;
        case 6:
            DONE(cuMemGetInfo_v2(&available, &total));
            if (available > total)
                DONE(CUDA_ERROR_INVALID_VALUE);
            break;
        case 7:
            if (GIVEN(cuArrayCreate_v2(&array, &shape)))
                DONE(cuArrayDestroy(array));
            break;
        case 8: own_context(bytes); break;
        }
    }
    DONE(cuStreamSynchronize(stream));
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t thread[THREADS];
    unsigned seed[THREADS];
    size_t available, total;
    void *pool, *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (argc != 3 || !library)
        return 2;
    rounds = atoi(argv[2]);
#define X(name, types)                                             \
    if (!(name = (CUresult(*) types)dlsym(library, #name)))        \
        return 2;
    CALLS
    DONE(cuInit(0));
    DONE(cuDevicePrimaryCtxRetain(&primary, 0));
    DONE(cuCtxSetCurrent(primary));
    for (int i = 0; i < THREADS; i++) {
        seed[i] = (unsigned)(atoi(argv[1]) * THREADS + i);
        if (pthread_create(&thread[i], NULL, work, &seed[i]))
            return 2;
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    DONE(cuCtxSynchronize());
    DONE(cuDeviceGraphMemTrim(0));
    DONE(cuDeviceGetDefaultMemPool(&pool, 0));
    DONE(cuMemPoolTrimTo(pool, 0));
    DONE(cuMemGetInfo_v2(&available, &total));
    printf("%llu %zu %zu\n", (unsigned long long)refusals, available, total);
    return 0;
}

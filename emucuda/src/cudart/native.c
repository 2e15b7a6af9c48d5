/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Kernels of programs that were compiled by a CUDA compiler. Such kernels are machine code for a
 * GPU, which cannot run here. A launch returns an error and names the kernel. Without the error,
 * the program would read old bytes as the kernel's result. Queries about such a kernel get an
 * answer, because libraries use the answer to choose the shape of a launch.
 */
#include "runtime.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct native {
    const void *stub; /* the address of the kernel's host function */
    const char *name;
};
static struct native *table; /* a hash table with open addressing */
static size_t room, used;
static pthread_mutex_t kernels = PTHREAD_MUTEX_INITIALIZER;

static size_t place(const struct native *in, size_t size, const void *stub)
{
    size_t i = (size_t)((uintptr_t)stub >> 4) * 0x9e3779b97f4a7c15ull % size;
    while (in[i].stub && in[i].stub != stub)
        i = (i + 1) % size;
    return i;
}

EXPORT void __cudaRegisterFunction(void **binary, const void *stub, char *device, const char *name, int limit,
                                   void *tid, void *bid, void *block, void *grid, int *size)
{
    (void)binary, (void)device, (void)limit, (void)tid, (void)bid, (void)block, (void)grid, (void)size;
    pthread_mutex_lock(&kernels);
    if (2 * used >= room) {
        size_t more = room ? 4 * room : 1 << 10;
        struct native *larger = calloc(more, sizeof *larger);
        for (size_t i = 0; larger && i < room; i++)
            if (table[i].stub)
                larger[place(larger, more, table[i].stub)] = table[i];
        if (larger) {
            free(table);
            table = larger;
            room = more;
        }
    }
    if (used < room) {
        struct native *n = &table[place(table, room, stub)];
        used += !n->stub;
        *n = (struct native){stub, name};
    }
    pthread_mutex_unlock(&kernels);
}

static const char *name_of(const void *stub)
{
    pthread_mutex_lock(&kernels);
    const char *name = room ? table[place(table, room, stub)].name : NULL;
    pthread_mutex_unlock(&kernels);
    return name;
}

/* True for the kernel of PyTorch's torch.cuda._sleep(). The kernel waits for a number of clock
 * cycles. */
static bool is_sleep(const char *name) { return strstr(name, "11spin_kernelEl") != NULL; }

static cudaError sleep_cycles(uint64_t cycles, CUstream stream)
{
    static const char ptx[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                              ".visible .entry emucuda_spin_ns(.param .u64 ns) { ret; }\n";
    CUmodule module;
    CUfunction spin;
    int khz = 0;
    drv.cuDeviceGetAttribute(&khz, 13, device_now());
    uint64_t ns = khz > 0 ? cycles * 1000000 / (uint64_t)khz : cycles;
    void *params[] = {&ns};
    /* Do not unload the module, because a graph may still use the kernel. The module is small. */
    CUresult result = drv.cuModuleLoadData(&module, ptx);
    if (!result)
        result = drv.cuModuleGetFunction(&spin, module, "emucuda_spin_ns");
    return result ? result : drv.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL);
}

static cudaError launch(const void *stub, void **args, CUstream stream)
{
    READY;
    const char *name = name_of(stub);
    if (!name)
        return noted(cudaErrorInvalidDeviceFunction);
    if (is_sleep(name))
        return noted(sleep_cycles(*(uint64_t *)args[0], stream));
    say(name, "is a kernel in a GPU's machine code, which cannot run on an emulated device.");
    return not_run(CUDA_ERROR_NO_BINARY_FOR_GPU);
}

EXPORT cudaError cudaLaunchKernel(const void *stub, dim3 grid, dim3 block, void **args, size_t shared, CUstream stream)
{
    (void)grid, (void)block, (void)shared;
    return launch(stub, args, stream);
}

EXPORT cudaError cudaLaunchCooperativeKernel(const void *stub, dim3 grid, dim3 block, void **args, size_t shared,
                                             CUstream stream)
{
    return cudaLaunchKernel(stub, grid, block, args, shared, stream);
}

EXPORT cudaError cudaLaunchKernelExC(const cudaLaunchConfig *c, const void *stub, void **args)
{
    return launch(stub, args, c->stream);
}

/* ---- functions that the output of a CUDA compiler calls ---- */

EXPORT void **__cudaRegisterFatBinary(void *wrapper)
{
    static void *handle;
    (void)wrapper;
    return &handle;
}

EXPORT void __cudaRegisterFatBinaryEnd(void **binary) { (void)binary; }
EXPORT void __cudaUnregisterFatBinary(void **binary) { (void)binary; }
EXPORT char __cudaInitModule(void **binary) { return binary != NULL; }

EXPORT void __cudaRegisterVar(void **binary, char *host, char *device, const char *name, int external, size_t size,
                              int constant, int global)
{
    (void)binary, (void)host, (void)device, (void)name, (void)external, (void)size, (void)constant, (void)global;
}

enum { CONFIGURATIONS = 8 };
static __thread struct {
    dim3 grid, block;
    size_t shared;
    CUstream stream;
} pushed[CONFIGURATIONS];
static __thread int depth;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream stream)
{
    if (depth == CONFIGURATIONS)
        return 1;
    pushed[depth].grid = grid;
    pushed[depth].block = block;
    pushed[depth].shared = shared;
    pushed[depth++].stream = stream;
    return 0;
}

EXPORT cudaError __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, CUstream *stream)
{
    if (!depth)
        return noted(cudaErrorMissingConfiguration);
    depth--;
    *grid = pushed[depth].grid;
    *block = pushed[depth].block;
    *shared = pushed[depth].shared;
    *stream = pushed[depth].stream;
    return CUDA_SUCCESS;
}

EXPORT cudaError __cudaGetKernel(const void **kernel, const void *stub)
{
    *kernel = stub; /* only this runtime reads the handle, so the handle can be the stub's
                     * address */
    return name_of(stub) ? CUDA_SUCCESS : noted(cudaErrorInvalidDeviceFunction);
}

EXPORT cudaError __cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared,
                                    CUstream stream)
{
    return cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}

/* ---- queries ---- */

enum { THREADS = 1024, RESIDENT_THREADS = 2048, SHARED_BYTES = 49152 };

EXPORT cudaError cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *stub)
{
    READY;
    if (!name_of(stub))
        return noted(cudaErrorInvalidDeviceFunction);
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = THREADS;
    out->numRegs = 32;
    out->ptxVersion = out->binaryVersion = 80;
    out->maxDynamicSharedSizeBytes = SHARED_BYTES;
    return CUDA_SUCCESS;
}

EXPORT cudaError cudaFuncSetAttribute(const void *stub, int which, int value)
{
    READY;
    (void)which, (void)value;
    return name_of(stub) ? CUDA_SUCCESS : noted(cudaErrorInvalidDeviceFunction);
}

EXPORT cudaError cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *stub, int size,
                                                                        size_t shared, unsigned flags)
{
    READY;
    (void)shared, (void)flags;
    if (!name_of(stub))
        return noted(cudaErrorInvalidDeviceFunction);
    if (size < 1 || size > THREADS)
        return noted(CUDA_ERROR_INVALID_VALUE);
    *blocks = RESIDENT_THREADS / size;
    return CUDA_SUCCESS;
}

EXPORT cudaError cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *stub, int size, size_t shared)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, stub, size, shared, 0);
}

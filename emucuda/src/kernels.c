/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Kernels. The kernels with the names below are built in. The text of any other kernel is
 * interpreted (ptx/).
 *
 *   emucuda_spin_ns(u64 ns)                      occupies the stream for that long
 *   emucuda_fill_u64(u64 *p, u64 n, u64 value)   p[i] = value
 *   emucuda_iota_u32(u32 *p, u64 n, u32 first)   p[i] = first + i
 *   emucuda_add_u32(u32 *p, u64 n, u32 value)    p[i] += value
 *   emucuda_sum_u32(u64 *out, u32 *p, u64 n)     *out += sum of p[i]
 *   emucuda_illegal_address()                    fails the context with error 700
 *   emucuda_host_call(u64 f, u64 x, u64 ns)      calls f(x) on the host, and counts as running for ns
 *
 * `kernels.py` has real PTX of the same kernels (without emucuda_host_call), so that a program that
 * uses them also runs on hardware.
 */
#include "module.h"

#include <string.h>

#define LAUNCH_NS 3000ull /* about the time of the shortest kernels on current boards */

static uint64_t u64(void **params, int i)
{
    uint64_t value;
    memcpy(&value, params[i], 8);
    return value;
}

static uint32_t u32(void **params, int i)
{
    uint32_t value;
    memcpy(&value, params[i], 4);
    return value;
}

/* Sets `*host` to the bytes of `count` elements. Parameter `i` of the kernel is the pointer to
 * them, and `unit` is the size of an element. */
static CUresult operand(void **params, int i, uint64_t count, unsigned unit, void **host)
{
    uint64_t address = u64(params, i);
    if (!count)
        return CUDA_SUCCESS;
    if (address % unit || count > INT64_MAX / unit)
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    pthread_mutex_lock(&driver.lock);
    /* A kernel can use only memory in the driver's tables. This also holds for host memory. */
    CUresult result = resolve(address, count * unit, host, NULL);
    if (!result && *host == (void *)address && !allocation_find(address))
        result = CUDA_ERROR_ILLEGAL_ADDRESS;
    pthread_mutex_unlock(&driver.lock);
    return result ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
}

static CUresult fill_u64(void **params)
{
    void *p = NULL;
    uint64_t n = u64(params, 1), value = u64(params, 2);
    CUresult result = operand(params, 0, n, 8, &p);
    for (uint64_t i = 0; i < n && !result; i++)
        ((uint64_t *)p)[i] = value;
    return result;
}

static CUresult iota_u32(void **params)
{
    void *p = NULL;
    uint64_t n = u64(params, 1);
    uint32_t first = u32(params, 2);
    CUresult result = operand(params, 0, n, 4, &p);
    for (uint64_t i = 0; i < n && !result; i++)
        ((uint32_t *)p)[i] = first + (uint32_t)i;
    return result;
}

static CUresult add_u32(void **params)
{
    void *p = NULL;
    uint64_t n = u64(params, 1);
    uint32_t value = u32(params, 2);
    CUresult result = operand(params, 0, n, 4, &p);
    for (uint64_t i = 0; i < n && !result; i++)
        ((uint32_t *)p)[i] += value;
    return result;
}

static CUresult sum_u32(void **params)
{
    void *out = NULL, *p = NULL;
    uint64_t n = u64(params, 2), sum = 0;
    CUresult result = operand(params, 0, 1, 8, &out);
    if (!result)
        result = operand(params, 1, n, 4, &p);
    for (uint64_t i = 0; i < n && !result; i++)
        sum += ((uint32_t *)p)[i];
    if (!result)
        *(uint64_t *)out += sum;
    return result;
}

static CUresult illegal_address(void **params)
{
    (void)params;
    return CUDA_ERROR_ILLEGAL_ADDRESS;
}

/* Runs a function of the program on the host. The program launches, captures and replays the call
 * like a kernel. The function returns 0, or the error with which the launch ends the
 * context. */
static CUresult host_call(void **params)
{
    CUresult (*function)(uint64_t) = (CUresult(*)(uint64_t))(uintptr_t)u64(params, 0);
    gate_inside(1);
    CUresult result = function(u64(params, 1));
    gate_inside(-1);
    return result;
}

static const struct {
    const char *name;
    uint32_t params;
    CUresult (*run)(void **params);
} builtins[] = {
    {"emucuda_fill_u64", 3, fill_u64}, {"emucuda_iota_u32", 3, iota_u32},
    {"emucuda_add_u32", 3, add_u32},   {"emucuda_sum_u32", 3, sum_u32},
    {"emucuda_illegal_address", 0, illegal_address},
    {"emucuda_host_call", 3, host_call},
};

/* Returns the index of the built-in kernel, or the number of built-in kernels if the kernel is not
 * among them. */
static unsigned builtin(const struct kernel *k)
{
    unsigned i = 0;
    while (i < sizeof builtins / sizeof *builtins &&
           (strcmp(k->name, builtins[i].name) || k->params != builtins[i].params))
        i++;
    return i;
}

static bool spins(const struct kernel *k) { return !strcmp(k->name, "emucuda_spin_ns") && k->params == 1; }

CUresult kernel_check(CUfunction k, int device)
{
    bool is_builtin = spins(k) || builtin(k) < sizeof builtins / sizeof *builtins;
    return is_builtin ? CUDA_SUCCESS : kernel_compiled(k, device);
}

uint64_t kernel_run(CUfunction k, int device, const struct launch *launch, void **params, CUresult *result)
{
    *result = CUDA_SUCCESS;
    if (spins(k))
        return u64(params, 0);
    unsigned i = builtin(k);
    if (i == sizeof builtins / sizeof *builtins) {
        uint64_t ns = kernel_interpret(k, device, launch, params, result);
        return ns > LAUNCH_NS ? ns : LAUNCH_NS;
    }
    *result = builtins[i].run(params);
    return builtins[i].run == host_call ? u64(params, 2) : LAUNCH_NS;
}

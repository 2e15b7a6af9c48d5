/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Modules and kernels, for the code that loads and launches them.
 */
#ifndef EMUCUDA_MODULE_H
#define EMUCUDA_MODULE_H

#include "driver.h"

#define MAX_PARAMS 64

struct kernel {
    uint32_t magic;
    struct module *module;
    char *name;
    uint32_t params;
    uint32_t offset[MAX_PARAMS], size[MAX_PARAMS];
    int dynamic_shared; /* the most dynamic shared memory of a launch, in bytes */
    struct code *code[MAX_DEVICES]; /* [d]: the kernel's compiled code for device d, see ptx/ */
    uint64_t storage[MAX_DEVICES];  /* [d]: on device d, the address that the module's variables had
                                     * when the kernel was compiled */
    struct kernel *next;
};

struct module {
    uint32_t magic;
    unsigned count;
    struct kernel *kernels; /* the kernels in the order of the text */
    struct ptx *ptx;
    pthread_mutex_t compiling;
    struct module *next;
};

/* launch.c: returns a list of pointers to the parameters. If the caller passed one buffer in
 * `extra`, the function fills `list` and returns it. */
void **launch_params(CUfunction k, void **params, void **extra, void **list);

/* launch.c: whether the kernel cannot be launched in this shape. */
bool launch_bad(CUfunction k, const struct launch *launch);

static inline bool kernel_bad(const struct kernel *k) { return !k || k->magic != MAGIC_KERNEL; }

#endif

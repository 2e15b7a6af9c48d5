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
    int dynamic_shared;
    struct code *code[MAX_DEVICES]; /* the kernel compiled for a launch on that device: ptx/ */
    uint64_t storage[MAX_DEVICES];  /* the address of the variables of the kernel's module when the
                                     * kernel was compiled */
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

/* launch.c: returns the parameters as a list. If they came as a buffer, makes the list in
 * `list`. */
void **launch_params(CUfunction k, void **params, void **extra, void **list);

bool launch_bad(const struct launch *launch); /* launch.c: whether the shape of the launch is
                                               * invalid */

static inline bool kernel_bad(const struct kernel *k) { return !k || k->magic != MAGIC_KERNEL; }

#endif

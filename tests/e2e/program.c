/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Uses a GPU like a kernel of another language, without any Python:
 *
 *     program FOLDER
 *
 * The test creates the files FOLDER/1, FOLDER/2, ... one after the other. For each file n, the
 * program calls use_gpu and writes its result to FOLDER/n.done. The first call makes a context and
 * fills device memory. Each later call reads the memory back, compares all bytes, and writes new
 * bytes. With -DLIBRARY, this file becomes a library for R.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB 96
#define WORDS ((size_t)MIB << 17)

static void *driver;
static uint64_t address, *host;
static uint64_t key;

static int call(const char *name, uint64_t a, uint64_t b, uint64_t c)
{
    int (*function)(uint64_t, uint64_t, uint64_t);
    *(void **)&function = dlsym(driver, name);
    return function ? function(a, b, c) : 500;
}

static uint64_t expected(size_t at) { return (at + 1) * 0x9E3779B97F4A7C15u ^ key; }

static int fill(void)
{
    for (size_t i = 0; i < WORDS; i++)
        host[i] = expected(i);
    return call("cuMemcpyHtoD_v2", address, (uint64_t)host, WORDS * 8);
}

/* Returns 0, an error of the driver, -1 for wrong bytes, or -2 without a driver or host memory. */
int use_gpu(void)
{
    int error;
    if (!driver) {
        void *context;
        int device;
        driver = dlopen("libcuda.so.1", RTLD_NOW);
        host = malloc(WORDS * 8);
        if (!driver || !host)
            return -2;
        if ((error = call("cuInit", 0, 0, 0)) ||
            (error = call("cuDeviceGet", (uint64_t)&device, 0, 0)) ||
            (error = call("cuDevicePrimaryCtxRetain", (uint64_t)&context, (uint64_t)device, 0)) ||
            (error = call("cuCtxSetCurrent", (uint64_t)context, 0, 0)) ||
            (error = call("cuMemAlloc_v2", (uint64_t)&address, WORDS * 8, 0)))
            return error;
        key = (uint64_t)getpid();
        return fill();
    }
    memset(host, 0, WORDS * 8);
    if ((error = call("cuMemcpyDtoH_v2", (uint64_t)host, address, WORDS * 8)))
        return error;
    for (size_t i = 0; i < WORDS; i++)
        if (host[i] != expected(i))
            return -1;
    key++;
    return fill();
}

#ifdef LIBRARY

void use_gpu_from_r(int *answer) { *answer = use_gpu(); }

#else

int main(int argc, char **argv)
{
    char path[1024], part[1040], done[1040];
    if (argc != 2)
        return 2;
    for (int n = 1;; n++) {
        snprintf(path, sizeof path, "%s/%d", argv[1], n);
        while (access(path, F_OK))
            usleep(10000);
        int answer = use_gpu();
        snprintf(part, sizeof part, "%s.part", path);
        snprintf(done, sizeof done, "%s.done", path);
        FILE *file = fopen(part, "w");
        if (!file)
            return 1;
        fprintf(file, "%d\n", answer);
        fclose(file);
        rename(part, done);
    }
}

#endif

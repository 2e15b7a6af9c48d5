/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Modules, libraries and kernels. When a module is loaded, this file finds the entries of its PTX
 * text and their parameters. kernels.c runs the kernels, and ptx/ compiles the text of a kernel at
 * its first launch.
 */
#include "ptx/ptx.h"

#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_DYNAMIC_SHARED = 8 }; /* number of a kernel's attribute */
enum { MAX_SHARED_PER_BLOCK = 8, MAX_SHARED_PER_BLOCK_OPTIN = 97 }; /* numbers of a device's attributes */

static struct module *modules; /* driver.lock protects this list */

static void module_free(struct module *m)
{
    for (struct kernel *k = m->kernels, *next; k; k = next) {
        next = k->next;
        k->magic = 0;
        for (int d = 0; d < MAX_DEVICES; d++)
            code_free(k->code[d]);
        free(k->name);
        free(k);
    }
    m->magic = 0;
    pthread_mutex_destroy(&m->compiling);
    free(m);
}

/* Parses "(.param .u64 a, .param .align 8 .b8 b[16])". */
static void parse_params(struct kernel *k, const char *p)
{
    uint32_t end = 0;
    while (*p && *p != ')' && k->params < MAX_PARAMS) {
        uint32_t unit = 0, align = 0, many = 1;
        const char *stop = p + strcspn(p, ",)");
        bool pointer = false; /* after .ptr, .align does not describe the parameter, but the memory
                               * that the parameter points to */
        for (const char *q = p; q < stop; q++) {
            unsigned number;
            if (!strncmp(q, ".ptr", 4))
                pointer = true;
            else if (!strncmp(q, ".align", 6) && pointer)
                q += 5;
            else if (!strncmp(q, ".align", 6) && sscanf(q + 6, "%u", &number) == 1)
                align = number;
            else if (*q == '.' && strchr("busf", q[1]) && sscanf(q + 2, "%u", &number) == 1)
                unit = number / 8;
            else if (*q == '[' && sscanf(q + 1, "%u", &number) == 1)
                many = number;
        }
        if (unit) {
            align = align ? align : unit;
            end = (end + align - 1) / align * align;
            k->offset[k->params] = end;
            k->size[k->params++] = unit * many;
            end += unit * many;
        }
        p = *stop ? stop + (*stop == ',') : stop;
    }
}

/* Replaces comments by blanks, so that no entry inside a comment is found. */
static void strip_comments(char *text)
{
    for (char *p = text; *p; p++) {
        if (p[0] == '/' && p[1] == '/')
            for (; *p && *p != '\n'; p++)
                *p = ' ';
        else if (p[0] == '/' && p[1] == '*')
            for (; *p && !(p[0] == '*' && p[1] == '/'); p++)
                *p = ' ';
        if (!*p)
            break;
    }
}

static CUresult parse_ptx(char *text, struct module *m)
{
    struct kernel **tail = &m->kernels;
    strip_comments(text);
    if (!strstr(text, ".version") || !strstr(text, ".target"))
        return CUDA_ERROR_INVALID_PTX;
    for (char *p = text; (p = strstr(p, ".entry")); ) {
        p += 6;
        p += strspn(p, " \t\r\n");
        size_t length = 0;
        while (isalnum((unsigned char)p[length]) || p[length] == '_' || p[length] == '$')
            length++;
        struct kernel *k = length ? calloc(1, sizeof *k) : NULL;
        if (!k)
            return length ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_PTX;
        k->magic = MAGIC_KERNEL;
        k->module = m;
        k->name = strndup(p, length);
        k->dynamic_shared = device_attribute(MAX_SHARED_PER_BLOCK, 0);
        *tail = k;
        tail = &k->next;
        m->count++;
        if (!k->name)
            return CUDA_ERROR_OUT_OF_MEMORY;
        p += length;
        p += strspn(p, " \t\r\n");
        if (*p == '(')
            parse_params(k, p + 1);
    }
    return CUDA_SUCCESS;
}

static CUresult load(struct module **out, const char *image)
{
    if (!out || !image)
        return CUDA_ERROR_INVALID_VALUE;
    /* A cubin (ELF) or a fat binary is machine code, which cannot run here. */
    if (!memcmp(image, "\x7f" "ELF", 4) || !memcmp(image, "\x50\xed\x55\xba", 4))
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    char *text = strdup(image);
    struct module *m = calloc(1, sizeof *m);
    CUresult result = text && m ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    if (!result) {
        m->magic = MAGIC_MODULE;
        pthread_mutex_init(&m->compiling, NULL);
        result = parse_ptx(text, m);
    }
    if (!result) {
        result = ptx_open(text, &m->ptx); /* now the text belongs to m->ptx */
        text = NULL;
    }
    free(text);
    if (result) {
        if (m)
            module_free(m);
        return result;
    }
    pthread_mutex_lock(&driver.lock);
    m->next = modules;
    modules = m;
    pthread_mutex_unlock(&driver.lock);
    *out = m;
    return CUDA_SUCCESS;
}

static CUresult load_file(struct module **out, const char *path)
{
    struct stat st;
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return CUDA_ERROR_FILE_NOT_FOUND;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    char *text = fstat(fd, &st) ? NULL : calloc(1, (size_t)st.st_size + 8);
    if (text)
        result = read(fd, text, (size_t)st.st_size) == st.st_size ? load(out, text)
                                                                 : CUDA_ERROR_INVALID_IMAGE;
    free(text);
    close(fd);
    return result;
}

static struct module *module_find(const struct module *module)
{
    for (struct module *m = modules; m; m = m->next)
        if (m == module)
            return m;
    return NULL;
}

static CUresult unload(struct module *module)
{
    struct ptx *ptx = NULL;
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&driver.lock);
    for (struct module **link = &modules; *link; link = &(*link)->next)
        if (*link == module) {
            *link = module->next;
            ptx = module->ptx;
            module_free(module);
            result = CUDA_SUCCESS;
            break;
        }
    pthread_mutex_unlock(&driver.lock);
    ptx_close(ptx);
    return result;
}

static CUresult get_kernel(struct kernel **out, struct module *module, const char *name)
{
    CUresult result = CUDA_ERROR_NOT_FOUND;
    if (!out || !name)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    if (!module_find(module))
        result = CUDA_ERROR_INVALID_HANDLE;
    for (struct kernel *k = result == CUDA_ERROR_NOT_FOUND ? module->kernels : NULL; k; k = k->next)
        if (!strcmp(k->name, name)) {
            *out = k;
            result = CUDA_SUCCESS;
            break;
        }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

EXPORT CUresult cuModuleLoadData(CUmodule *out, const void *image)
{
    GATED;
    struct context *c;
    CUresult result = context_current(&c);
    return result ? result : load(out, image);
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned n, int *options, void **values)
{
    (void)n;
    (void)options;
    (void)values;
    return cuModuleLoadData(out, image);
}

EXPORT CUresult cuModuleLoadFatBinary(CUmodule *out, const void *image) { return cuModuleLoadData(out, image); }

EXPORT CUresult cuModuleLoad(CUmodule *out, const char *path)
{
    GATED;
    return load_file(out, path);
}

EXPORT CUresult cuModuleUnload(CUmodule module)
{
    GATED;
    return unload(module);
}

EXPORT CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name)
{
    CHECKED;
    return get_kernel(out, module, name);
}

EXPORT CUresult cuModuleGetFunctionCount(unsigned *count, CUmodule module)
{
    REQUIRE(count);
    REQUIRE_HANDLE(module);
    CHECKED;
    *count = module->count;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleEnumerateFunctions(CUfunction *out, unsigned n, CUmodule module)
{
    REQUIRE(out);
    REQUIRE_HANDLE(module);
    CHECKED;
    for (struct kernel *k = module->kernels; k && n--; k = k->next)
        *out++ = k;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetLoadingMode(int *mode)
{
    CHECKED;
    if (!mode)
        return CUDA_ERROR_INVALID_VALUE;
    *mode = 2; /* lazy loading */
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *out, size_t *size, CUmodule module, const char *name)
{
    GATED;
    struct context *c;
    CUresult result = context_current(&c);
    if (result)
        return result;
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    struct ptx *ptx = module_find(module) ? module->ptx : NULL;
    pthread_mutex_unlock(&driver.lock);
    const struct variable *v = ptx ? variable_find(ptx, name, strlen(name)) : NULL;
    if (!v || v->shared)
        return ptx ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_INVALID_HANDLE;
    result = variables_place(ptx, c->device);
    if (!result && out)
        *out = ptx->storage[c->device].address + v->offset;
    if (!result && size)
        *size = v->size;
    return result;
}

EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr *out, size_t *size, CUlibrary library, const char *name)
{
    REQUIRE(library && name && *name);
    return cuModuleGetGlobal_v2(out, size, library, name);
}

EXPORT CUresult cuLibraryLoadData(CUlibrary *out, const void *image, int *jit, void **jv, unsigned jn,
                                  int *options, void **ov, unsigned on)
{
    REQUIRE(out && image);
    GATED;
    (void)jit;
    (void)jv;
    (void)jn;
    (void)options;
    (void)ov;
    (void)on;
    return load(out, image);
}

EXPORT CUresult cuLibraryLoadFromFile(CUlibrary *out, const char *path, int *jit, void **jv, unsigned jn,
                                      int *options, void **ov, unsigned on)
{
    REQUIRE(out && path);
    GATED;
    (void)jit;
    (void)jv;
    (void)jn;
    (void)options;
    (void)ov;
    (void)on;
    return load_file(out, path);
}

EXPORT CUresult cuLibraryUnload(CUlibrary library)
{
    REQUIRE_HANDLE(library);
    GATED;
    return unload(library);
}

EXPORT CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary library, const char *name)
{
    REQUIRE(out && name);
    REQUIRE_HANDLE(library);
    CHECKED;
    return get_kernel(out, library, name);
}

EXPORT CUresult cuLibraryGetKernelCount(unsigned *count, CUlibrary library)
{
    return cuModuleGetFunctionCount(count, library);
}

EXPORT CUresult cuLibraryEnumerateKernels(CUkernel *out, unsigned n, CUlibrary library)
{
    return cuModuleEnumerateFunctions(out, n, library);
}

EXPORT CUresult cuLibraryGetModule(CUmodule *out, CUlibrary library)
{
    REQUIRE(out);
    REQUIRE_HANDLE(library);
    CHECKED;
    *out = library;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetFunction(CUfunction *out, CUkernel k)
{
    REQUIRE(out);
    REQUIRE_HANDLE(!kernel_bad(k));
    CHECKED;
    *out = k;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetLibrary(CUlibrary *out, CUkernel k)
{
    REQUIRE(out);
    REQUIRE_HANDLE(!kernel_bad(k));
    CHECKED;
    *out = k->module;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetModule(CUmodule *out, CUfunction f)
{
    CHECKED;
    return cuKernelGetLibrary(out, f);
}

EXPORT CUresult cuKernelGetName(const char **name, CUkernel k)
{
    REQUIRE(name && k);
    REQUIRE_HANDLE(!kernel_bad(k));
    CHECKED;
    *name = k->name;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetName(const char **name, CUfunction f)
{
    REQUIRE(name && f);
    CHECKED;
    return cuKernelGetName(name, f);
}

EXPORT CUresult cuKernelGetParamInfo(CUkernel k, size_t index, size_t *offset, size_t *size)
{
    REQUIRE(k && offset);
    CHECKED;
    if (kernel_bad(k))
        return CUDA_ERROR_INVALID_HANDLE;
    if (index >= k->params)
        return CUDA_ERROR_INVALID_VALUE;
    *offset = k->offset[index];
    if (size)
        *size = k->size[index];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetParamInfo(CUfunction f, size_t index, size_t *offset, size_t *size)
{
    return cuKernelGetParamInfo(f, index, offset, size);
}

EXPORT CUresult cuFuncGetAttribute(int *value, int which, CUfunction f)
{
    REQUIRE(value);
    REQUIRE_HANDLE(f);
    CHECKED;
    if (kernel_bad(f))
        return CUDA_ERROR_INVALID_HANDLE;
    switch (which) {
    case 0: *value = 1024; break; /* MAX_THREADS_PER_BLOCK */
    case 4: *value = 32; break;   /* NUM_REGS */
    case 5: case 6: *value = 80; break; /* PTX_VERSION, BINARY_VERSION */
    case MAX_DYNAMIC_SHARED: *value = f->dynamic_shared; break;
    default:
        if (which < 0 || which > 15)
            return CUDA_ERROR_INVALID_VALUE;
        *value = 0;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction f, int which, int value)
{
    CHECKED;
    if (kernel_bad(f))
        return CUDA_ERROR_INVALID_HANDLE;
    if (which != MAX_DYNAMIC_SHARED)
        return CUDA_SUCCESS;
    if (value < 0 || value > device_attribute(MAX_SHARED_PER_BLOCK_OPTIN, 0))
        return CUDA_ERROR_INVALID_VALUE;
    f->dynamic_shared = value;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetAttribute(int *value, int which, CUkernel k, CUdevice device)
{
    REQUIRE_HANDLE(!kernel_bad(k));
    (void)device;
    return cuFuncGetAttribute(value, which, k);
}

EXPORT CUresult cuKernelSetAttribute(int which, int value, CUkernel k, CUdevice device)
{
    REQUIRE_HANDLE(!kernel_bad(k));
    (void)device;
    return cuFuncSetAttribute(k, which, value);
}

EXPORT CUresult cuFuncSetCacheConfig(CUfunction f, int config)
{
    CHECKED;
    (void)config;
    return kernel_bad(f) ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

EXPORT CUresult cuFuncIsLoaded(int *state, CUfunction f)
{
    REQUIRE(state);
    REQUIRE_HANDLE(f);
    CHECKED;
    if (kernel_bad(f))
        return CUDA_ERROR_INVALID_HANDLE;
    *state = 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncLoad(CUfunction f)
{
    REQUIRE_HANDLE(f);
    CHECKED;
    return kernel_bad(f) ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

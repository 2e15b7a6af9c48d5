/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The linker. Its inputs are PTX. Its output is the text of all inputs together, which a module
 * loads like any PTX.
 */
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INPUT_PTX = 1, MAGIC_LINK = 0x6c6e6b31 };

struct link {
    uint32_t magic;
    char *text;
    size_t size; /* length without the 0 at the end */
};

static bool link_bad(const struct link *l) { return !l || l->magic != MAGIC_LINK; }

EXPORT CUresult cuLinkCreate_v2(unsigned count, int *options, void **values, struct link **out)
{
    (void)count, (void)options, (void)values;
    GATED;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    struct link *l = calloc(1, sizeof *l);
    if (l)
        l->text = calloc(1, 1);
    if (!l || !l->text) {
        free(l);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    l->magic = MAGIC_LINK;
    *out = l;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLinkAddData_v2(struct link *l, int type, void *data, size_t size, const char *name, unsigned count,
                                 int *options, void **values)
{
    (void)name, (void)count, (void)options, (void)values;
    REQUIRE_HANDLE(l);
    REQUIRE(!link_bad(l) && data && size);
    GATED;
    if (type != INPUT_PTX || !memcmp(data, "\x7f" "ELF", size < 4 ? size : 4))
        return CUDA_ERROR_NO_BINARY_FOR_GPU; /* machine code of a GPU cannot run here */
    size = strnlen(data, size);
    char *longer = realloc(l->text, l->size + size + 2);
    if (!longer)
        return CUDA_ERROR_OUT_OF_MEMORY;
    l->text = longer;
    memcpy(l->text + l->size, data, size);
    l->size += size;
    l->text[l->size++] = '\n';
    l->text[l->size] = 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLinkAddFile_v2(struct link *l, int type, const char *path, unsigned count, int *options,
                                 void **values)
{
    REQUIRE_HANDLE(l);
    REQUIRE(!link_bad(l) && path);
    FILE *file = fopen(path, "re");
    char *text = NULL;
    size_t size = 0;
    if (!file)
        return CUDA_ERROR_FILE_NOT_FOUND;
    ssize_t read = getdelim(&text, &size, 0, file);
    fclose(file);
    CUresult result = read > 0 ? cuLinkAddData_v2(l, type, text, (size_t)read, path, count, options, values)
                               : CUDA_ERROR_INVALID_IMAGE;
    free(text);
    return result;
}

EXPORT CUresult cuLinkComplete(struct link *l, void **out, size_t *size)
{
    REQUIRE_HANDLE(l);
    REQUIRE(!link_bad(l) && out);
    GATED;
    *out = l->text;
    if (size)
        *size = l->size + 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLinkDestroy(struct link *l)
{
    REQUIRE_HANDLE(l);
    REQUIRE(!link_bad(l));
    GATED;
    l->magic = 0;
    free(l->text);
    free(l);
    return CUDA_SUCCESS;
}

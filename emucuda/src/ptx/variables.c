/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The contents of a module's text: functions, and the module's variables. Global and constant
 * variables are device memory. The driver takes this memory when a kernel or the program first
 * needs it.
 */
#include "ptx.h"

#include <ctype.h>
#include <stdlib.h>

/* A kernel has at most 48 KiB of static shared memory. So the dynamic shared memory of a launch can
 * begin after 48 KiB. */
#define MAX_STATIC_SHARED (48u << 10)

static uint64_t aligned(uint64_t at, uint64_t to) { return to ? (at + to - 1) / to * to : at; }

static void *more(void *array, size_t count, size_t size)
{
    if (count & (count - 1))
        return array; /* there is room up to the next power of two */
    return realloc(array, (count ? 2 * count : 1) * size);
}

/* Reads the text after ".func" or ".entry", such as "(.param .b32 r) name (.param .b32 a) .noreturn
 * { ... }". Returns the text after the function, or NULL if the text is not a function. */
static char *read_function(struct ptx *ptx, char *p, bool entry)
{
    struct function f = {.entry = entry};
    p = skip_space(p);
    if (*p == '(') {
        f.results = p;
        if (!(p = matching(p)))
            return NULL;
        p = skip_space(p + 1);
    }
    f.name = p;
    f.name_length = name_length(p);
    p = skip_space(p + f.name_length);
    if (!f.name_length)
        return NULL;
    if (*p == '(') {
        f.params = p;
        if (!(p = matching(p)))
            return NULL;
        p++;
    }
    p += strcspn(p, "{;");
    if (*p == '{') {
        f.body = p;
        if (!(p = matching(p)))
            return NULL;
    }
    struct function *larger = more(ptx->function, ptx->functions, sizeof f);
    if (!larger || !*p)
        return NULL;
    ptx->function = larger;
    ptx->function[ptx->functions++] = f;
    return p + 1;
}

/* Reads ".align 4 .b8 name[16] = {1, 2};" after ".global". */
static char *read_variable(struct ptx *ptx, char *p, bool shared, bool external)
{
    struct variable v = {.shared = shared};
    uint64_t align = 0, many = 1, vector = 1;
    for (p = skip_space(p); *p == '.'; p = skip_space(p)) {
        size_t length = name_length(++p);
        char word[16] = "";
        memcpy(word, p, length < 15 ? length : 15);
        p += length;
        if (!strcmp(word, "align"))
            align = strtoull(p, &p, 10);
        else if (!strcmp(word, "v2") || !strcmp(word, "v4"))
            vector = (uint64_t)(word[1] - '0');
        else if (!strcmp(word, "attribute"))
            p = matching(skip_space(p)) ? matching(skip_space(p)) + 1 : p;
        else
            type_parse(word, &v.type);
    }
    size_t length = name_length(p);
    v.element = (type_bits(v.type) + 7) / 8;
    if (!length || !v.element)
        return NULL;
    v.name = strndup(p, length);
    for (p = skip_space(p + length); *p == '['; p = skip_space(p + 1)) {
        const char *q = skip_space(p + 1);
        bool good = true;
        many *= *q == ']' ? 0 : (uint64_t)number(&q, &good);
        p = skip_space((char *)q);
        if (!good || *p != ']' || many > 1ull << 32)
            return NULL;
    }
    if (*p == '=')
        v.values = p = skip_space(p + 1);
    if (*p == '{' && !(p = matching(p)))
        return NULL;
    p += strcspn(p, ";,");
    v.size = v.element * vector * many;
    v.external = external && shared;
    uint64_t *end = shared ? &ptx->shared_size : &ptx->global_size;
    v.offset = aligned(*end, align ? align : v.element * vector);
    if (!v.external)
        *end = v.offset + v.size;
    struct variable *larger = more(ptx->variable, ptx->variables, sizeof v);
    if (!larger || !v.name || !*p)
        return NULL;
    ptx->variable = larger;
    ptx->variable[ptx->variables++] = v;
    return p + 1;
}

static bool is_word(const char *p, const char *word)
{
    size_t length = strlen(word);
    return !strncmp(p, word, length) && !isalnum((unsigned char)p[length]) && p[length] != '_';
}

/* Whether a function declares its own shared memory. */
static bool declares_shared(const struct ptx *ptx)
{
    for (size_t n = 0; n < ptx->functions; n++) {
        char *body = ptx->function[n].body, *end = body ? matching(body) : NULL;
        for (char *p = body; p && (p = strstr(p, ".shared")) && p < end; p += 7)
            if (isspace((unsigned char)p[-1]) || p[-1] == '{')
                return true;
    }
    return false;
}

static bool outline(struct ptx *ptx)
{
    bool external = false;
    for (char *p = ptx->text; p && *(p = skip_space(p));) {
        if (*p == '{') { /* a section */
            p = matching(p);
            p += p != NULL;
        } else if (*p != '.') {
            p++;
        } else if (is_word(p, ".extern")) {
            external = true;
            p += 7;
        } else if (is_word(p, ".visible") || is_word(p, ".weak") || is_word(p, ".common")) {
            p += 1 + strcspn(p + 1, " \t\r\n.");
        } else if (is_word(p, ".entry") || is_word(p, ".func")) {
            p = read_function(ptx, p + (p[1] == 'e' ? 6 : 5), p[1] == 'e');
            external = false;
        } else if (is_word(p, ".global") || is_word(p, ".const") || is_word(p, ".shared")) {
            p = read_variable(ptx, p + (p[1] == 'c' ? 6 : 7), p[1] == 's', external);
            external = false;
        } else if (is_word(p, ".section")) {
            p += strcspn(p, "{");
        } else {
            p += strcspn(p, "\n");
        }
        if (!p)
            return false;
    }
    ptx->dynamic_shared = declares_shared(ptx) ? MAX_STATIC_SHARED : aligned(ptx->shared_size, 128);
    for (size_t n = 0; n < ptx->variables; n++)
        if (ptx->variable[n].external)
            ptx->variable[n].offset = ptx->dynamic_shared;
    return true;
}

CUresult ptx_open(char *text, struct ptx **out)
{
    struct ptx *ptx = calloc(1, sizeof *ptx);
    if (!ptx) {
        free(text);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    ptx->text = text;
    if (!outline(ptx)) {
        ptx_close(ptx);
        return CUDA_ERROR_INVALID_PTX;
    }
    *out = ptx;
    return CUDA_SUCCESS;
}

/* Returns the allocation that has the module's variables on the device. Returns NULL if the
 * allocation does not exist: it ends when its context ends. Call this with the lock held. */
static struct allocation *stored(const struct ptx *ptx, int device)
{
    struct allocation *a = ptx->storage[device].address ? allocation_find(ptx->storage[device].address) : NULL;
    return a && a->id == ptx->storage[device].id ? a : NULL;
}

void ptx_close(struct ptx *ptx)
{
    if (!ptx)
        return;
    pthread_mutex_lock(&driver.lock);
    for (int d = 0; d < driver.count; d++) {
        struct allocation *a = stored(ptx, d);
        if (a) {
            device_release(a, false);
            allocation_remove(a);
        }
    }
    pthread_mutex_unlock(&driver.lock);
    for (size_t n = 0; n < ptx->variables; n++)
        free(ptx->variable[n].name);
    free(ptx->variable);
    free(ptx->function);
    free(ptx->text);
    free(ptx);
}

const struct variable *variable_find(const struct ptx *ptx, const char *name, size_t length)
{
    for (size_t n = 0; n < ptx->variables; n++)
        if (strlen(ptx->variable[n].name) == length && !memcmp(ptx->variable[n].name, name, length))
            return &ptx->variable[n];
    return NULL;
}

/* Reads one initial value: a number, or the address of a variable ("generic(name) + 4"). */
static bool initial(const struct ptx *ptx, const struct variable *v, const char *p, size_t length, uint64_t base,
                    uint64_t *out)
{
    char text[128];
    bool good;
    if (length >= sizeof text)
        return false;
    memcpy(text, p, length);
    text[length] = 0;
    char *at = text;
    if (!strncmp(at, "generic(", 8))
        at += 8;
    if (isdigit((unsigned char)*at) || *at == '-') {
        *out = literal(at, v->type, &good);
        return good;
    }
    const struct variable *of = variable_find(ptx, at, name_length(at));
    if (!of || of->shared)
        return false;
    *out = base + of->offset;
    at += name_length(at);
    at = skip_space(at + (*at == ')'));
    if (*at == '+') {
        const char *q = skip_space(at + 1);
        *out += (uint64_t)number(&q, &good);
        return good;
    }
    return !*at;
}

static bool initialise(const struct ptx *ptx, const struct variable *v, uint64_t base, uint8_t *to)
{
    uint64_t at = 0;
    for (const char *p = v->values; p && *p && *p != ';';) {
        p += strspn(p, " \t\r\n,{}");
        size_t length = strcspn(p, ",};");
        size_t used = length;
        while (used && isspace((unsigned char)p[used - 1]))
            used--;
        if (!used)
            break;
        uint64_t value;
        if (at + v->element > v->size || !initial(ptx, v, p, used, base, &value))
            return false;
        memcpy(to + at, &value, v->element < 8 ? v->element : 8);
        at += v->element;
        p += length;
        if (*v->values != '{')
            break;
    }
    return true;
}

CUresult variables_place(struct ptx *ptx, int device)
{
    if (!ptx->global_size)
        return CUDA_SUCCESS;
    struct allocation a;
    pthread_mutex_lock(&driver.lock);
    CUresult result = stored(ptx, device) ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
    if (result) {
        /* This memory belongs to the driver, so the process is not charged for it. */
        result = device_allocate(device, ptx->global_size, false, &a);
        a.context = driver.device[device].primary;
        struct allocation *added = result ? NULL : allocation_add(&a);
        if (!result && !added) {
            device_release(&a, false);
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
        if (added) {
            ptx->storage[device].address = added->address;
            ptx->storage[device].id = added->id;
            uint8_t *to = arena_host(added->address);
            memset(to, 0, ptx->global_size);
            for (size_t n = 0; n < ptx->variables && !result; n++)
                if (!ptx->variable[n].shared && !initialise(ptx, &ptx->variable[n], added->address,
                                                            to + ptx->variable[n].offset))
                    result = CUDA_ERROR_INVALID_PTX;
        }
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

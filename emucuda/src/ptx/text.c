/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The text of PTX: statements, names, types, numbers.
 */
#include "ptx.h"

#include <ctype.h>
#include <stdlib.h>

char *skip_space(char *p) { return p + strspn(p, " \t\r\n"); }

size_t name_length(const char *p)
{
    size_t n = 0;
    while (isalnum((unsigned char)p[n]) || p[n] == '_' || p[n] == '$' || p[n] == '%')
        n++;
    return n;
}

char *matching(char *open)
{
    int depth = 0;
    for (char *p = open; *p; p++) {
        if (*p == '"') {
            for (p++; *p && *p != '"'; p++)
                if (*p == '\\' && p[1])
                    p++;
            if (!*p)
                return NULL;
        } else if (strchr("([{", *p)) {
            depth++;
        } else if (strchr(")]}", *p) && !--depth) {
            return p;
        }
    }
    return NULL;
}

bool type_parse(const char *name, struct type *out)
{
    static const struct {
        const char *name;
        struct type type;
    } other[] = {
        {"pred", {KIND_PREDICATE, 1, 1}}, {"bf16", {KIND_BFLOAT, 16, 1}}, {"bf16x2", {KIND_BFLOAT, 16, 2}},
        {"f16x2", {KIND_FLOAT, 16, 2}},   {"tf32", {KIND_TF32, 32, 1}},   {"e4m3", {KIND_E4M3, 8, 1}},
        {"e5m2", {KIND_E5M2, 8, 1}},      {"e4m3x2", {KIND_E4M3, 8, 2}},  {"e5m2x2", {KIND_E5M2, 8, 2}},
        {"u16x2", {KIND_UNSIGNED, 16, 2}}, {"s16x2", {KIND_SIGNED, 16, 2}},
    };
    for (unsigned i = 0; i < sizeof other / sizeof *other; i++)
        if (!strcmp(name, other[i].name)) {
            *out = other[i].type;
            return true;
        }
    const char *kinds = "busf", *kind = *name ? strchr(kinds, *name) : NULL;
    char *end;
    if (!kind || !isdigit((unsigned char)name[1]))
        return false;
    unsigned long bits = strtoul(name + 1, &end, 10);
    if (*end || (bits != 8 && bits != 16 && bits != 32 && bits != 64 && bits != 128))
        return false;
    *out = (struct type){(uint8_t)(kind - kinds), (uint8_t)bits, 1};
    return true;
}

bool has(const struct statement *s, const char *part)
{
    for (int i = 0; i < s->parts; i++)
        if (!strcmp(s->part[i], part))
            return true;
    return false;
}

struct type type_at(const struct statement *s, int which)
{
    struct type t = {0};
    for (int i = s->parts; i-- && which;)
        if (type_parse(s->part[i], &t))
            which--;
    return which ? (struct type){0} : t;
}

/* Splits a list such as "a, {b, c}, [d + 4]" at the commas outside brackets. Removes the spaces
 * around each argument. */
static bool split(char *p, struct statement *out)
{
    out->args = 0;
    p = skip_space(p);
    while (*p) {
        if (out->args == MAX_ARGS)
            return false;
        char *start = p;
        while (*p && *p != ',') {
            if (strchr("([{", *p) && !(p = matching(p)))
                return false;
            p++;
        }
        char *end = p, *next = *p ? p + 1 : p;
        while (end > start && isspace((unsigned char)end[-1]))
            end--;
        if (end == start)
            return false;
        *end = 0;
        out->arg[out->args++] = start;
        p = skip_space(next);
    }
    return true;
}

bool statement_parse(char *text, struct statement *out)
{
    char *end = text + strcspn(text, " \t\r\n");
    char *rest = *end ? end + 1 : end, *save;
    *end = 0;
    out->parts = 0;
    out->name = strtok_r(text, ".", &save);
    if (!out->name)
        return false;
    for (char *part; (part = strtok_r(NULL, ".", &save));) {
        if (out->parts == MAX_MODIFIERS)
            return false;
        out->part[out->parts++] = part;
    }
    return split(rest, out);
}

int64_t number(const char **p, bool *good)
{
    char *end;
    bool negative = **p == '-';
    const char *start = *p + negative;
    uint64_t value = start[0] == '0' && (start[1] == 'b' || start[1] == 'B') ? strtoull(start + 2, &end, 2)
                                                                            : strtoull(start, &end, 0);
    *good = end != start && isdigit((unsigned char)*start);
    if (*good && (*end == 'U' || *end == 'u'))
        end++;
    *p = end;
    return (int64_t)(negative ? 0 - value : value);
}

uint64_t literal(const char *text, struct type t, bool *good)
{
    bool negative = *text == '-';
    const char *p = text + negative;
    double value;
    char *end;
    if (p[0] == '0' && strchr("fFdD", p[1]) && p[1]) {
        uint64_t bits = strtoull(p + 2, &end, 16);
        bool is_single = p[1] == 'f' || p[1] == 'F';
        *good = !*end && end != p + 2;
        if (t.kind != KIND_FLOAT && t.kind != KIND_BFLOAT)
            return is_single == (t.bits == 32) || t.bits == 64 ? bits : of_f32((float)as_f64(bits));
        if (!negative && t.bits == (is_single ? 32 : 64))
            return bits; /* a NaN keeps its bits */
        value = is_single ? (double)as_f32(bits) : as_f64(bits);
    } else if (t.kind == KIND_FLOAT || t.kind == KIND_BFLOAT || strpbrk(p, ".")) {
        value = strtod(p, &end);
        *good = !*end && end != p;
    } else {
        p = text;
        uint64_t bits = (uint64_t)number(&p, good);
        *good = *good && !*p;
        return bits & low_bits(type_bits(t));
    }
    if (negative)
        value = -value;
    struct type as = t.kind == KIND_FLOAT || t.kind == KIND_BFLOAT ? t : (struct type){KIND_FLOAT, t.bits, 1};
    return narrow(as, value, TO_NEAREST, 0);
}

/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The names in a kernel's text (registers, variables, parameters), and the operands that use them.
 */
#include "builder.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>

struct symbol *add_symbol(struct builder *b, const char *name, size_t length)
{
    b->symbol = grown(b, b->symbol, b->symbols, &b->symbols_room, sizeof *b->symbol);
    b->symbol[b->symbols] = (struct symbol){.name = name, .length = length, .many = -1, .scope = b->scope};
    return &b->symbol[b->symbols++];
}

/* Returns true if the symbol declares the name, and sets `*index`. For example, "%r<10>" declares
 * "%r7", and the index of "%r7" is 7. */
static bool is_named(const struct symbol *s, const char *name, size_t length, int64_t *index)
{
    *index = 0;
    if (length < s->length || memcmp(name, s->name, s->length))
        return false;
    if (s->many < 0)
        return length == s->length;
    if (length == s->length || length > s->length + 9 || (name[s->length] == '0' && length > s->length + 1))
        return false;
    for (size_t i = s->length; i < length; i++) {
        if (!isdigit((unsigned char)name[i]))
            return false;
        *index = *index * 10 + (name[i] - '0');
    }
    return *index < s->many;
}

static const struct symbol *find_symbol(const struct builder *b, const char *name, size_t length, int64_t *index)
{
    for (size_t n = b->symbols; n-- > b->first_symbol;)
        if (is_named(&b->symbol[n], name, length, index))
            return &b->symbol[n];
    return NULL;
}

static const struct {
    const char *name;
    enum special special;
} specials[] = {
    {"%tid.x", TID_X}, {"%tid.y", TID_Y}, {"%tid.z", TID_Z}, {"%ntid.x", NTID_X}, {"%ntid.y", NTID_Y},
    {"%ntid.z", NTID_Z}, {"%ctaid.x", CTAID_X}, {"%ctaid.y", CTAID_Y}, {"%ctaid.z", CTAID_Z},
    {"%nctaid.x", NCTAID_X}, {"%nctaid.y", NCTAID_Y}, {"%nctaid.z", NCTAID_Z}, {"%laneid", LANEID},
    {"%warpid", WARPID}, {"%nwarpid", NWARPID}, {"%smid", SMID}, {"%nsmid", NSMID}, {"%gridid", GRIDID},
    {"%lanemask_eq", MASK_EQ}, {"%lanemask_lt", MASK_LT}, {"%lanemask_le", MASK_LE}, {"%lanemask_gt", MASK_GT},
    {"%lanemask_ge", MASK_GE}, {"%clock", CLOCK}, {"%clock_hi", CLOCK_HI}, {"%clock64", CLOCK64},
    {"%globaltimer", TIMER}, {"%globaltimer_lo", TIMER_LO}, {"%globaltimer_hi", TIMER_HI},
    {"%dynamic_smem_size", DYNAMIC_SHARED}, {"%total_smem_size", TOTAL_SHARED},
    {"%cluster_ctaid.x", ALWAYS_0}, {"%cluster_ctaid.y", ALWAYS_0}, {"%cluster_ctaid.z", ALWAYS_0},
    {"%cluster_ctarank", ALWAYS_0}, {"%cluster_nctaid.x", ALWAYS_1}, {"%cluster_nctaid.y", ALWAYS_1},
    {"%cluster_nctaid.z", ALWAYS_1}, {"%cluster_nctarank", ALWAYS_1},
};

static int32_t special_slot(struct builder *b, const char *name)
{
    for (unsigned n = 0; n < sizeof specials / sizeof *specials; n++)
        if (!strcmp(name, specials[n].name)) {
            int32_t *slot = &b->code->special[specials[n].special];
            if (!*slot)
                *slot = new_slot(b);
            return *slot;
        }
    return NO_SLOT;
}

/* Sets `*out` to the address of a variable in its address space. Returns false if no variable has
 * this name. */
bool variable_address(struct builder *b, const char *name, size_t length, uint64_t *out)
{
    int64_t index;
    const struct symbol *s = find_symbol(b, name, length, &index);
    if (s && !s->is_register) {
        *out = s->address;
        return true;
    }
    const struct variable *v = s ? NULL : variable_find(b->ptx, name, length);
    if (v)
        *out = v->offset + (v->shared ? 0 : b->ptx->storage[b->device].address);
    return v;
}

static void negate(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0), *a = ARG(w, i, 1, 0);
    FOR_LANES(l, mask)
        d[l] = !a[l];
}

void append(struct builder *b, struct instruction *i, int32_t slot, bool begins)
{
    int a = 0, used = 0;
    while (a < MAX_ARGS && i->count[a])
        used += i->count[a++];
    if (!begins)
        a--;
    if (a >= MAX_ARGS || used >= MAX_OPERANDS)
        bad(b, "too many operands");
    if (begins)
        i->first[a] = (uint8_t)used;
    i->slot[used] = slot;
    i->count[a]++;
}

int32_t value_slot(struct builder *b, char *text, struct type t)
{
    size_t length = name_length(text);
    int64_t index;
    if (!strcmp(text, "_"))
        return 0;
    if (*text == '!') {
        int32_t of = value_slot(b, skip_space(text + 1), t), to = new_slot(b);
        struct instruction i = {.run = negate, .predicate = NO_SLOT, .meets = NO_SLOT};
        append(b, &i, to, true);
        append(b, &i, of, true);
        emit(b, &i);
        return to;
    }
    if (*text == '%') {
        int32_t slot = special_slot(b, text);
        if (slot != NO_SLOT)
            return slot;
    }
    if (!isdigit((unsigned char)*text) && *text != '-' && length) {
        const struct symbol *s = find_symbol(b, text, length, &index);
        if (s && s->is_register && !text[length])
            return s->slot + (int32_t)index;
        uint64_t address;
        if (variable_address(b, text, length, &address)) {
            const char *p = skip_space(text + length);
            bool good = true;
            if (*p == '+') {
                p = skip_space((char *)p + 1);
                address += (uint64_t)number(&p, &good);
            }
            if (!good || *p)
                bad(b, "an address that is not understood");
            return constant_slot(b, address);
        }
        if (!strcmp(text, "WARP_SZ"))
            return constant_slot(b, 32);
        refuse(b, CUDA_ERROR_NOT_SUPPORTED, "%s in \"%.200s\" is not known to the emulation.", text, b->statement);
    }
    bool good;
    uint64_t value = literal(text, t, &good);
    if (!good)
        bad(b, "a number that is not understood");
    return constant_slot(b, value);
}

/* Calls append() for each part of "{a, b}" or "a|b", or once for a simple operand. */
int32_t arg_value(struct builder *b, struct instruction *i, char *text, struct type t)
{
    bool vector = *text == '{';
    if (!vector && !strchr(text, '|')) {
        int32_t slot = value_slot(b, text, t);
        append(b, i, slot, true);
        return slot;
    }
    char *copy = keep(b, text + vector, strlen(text) - 2u * vector), *save;
    bool begins = true;
    for (char *one = strtok_r(copy, vector ? "," : "|", &save); one; one = strtok_r(NULL, vector ? "," : "|", &save)) {
        one = skip_space(one);
        one[strcspn(one, " \t\r\n")] = 0;
        append(b, i, value_slot(b, one, t), begins);
        begins = false;
    }
    return NO_SLOT;
}

void arg_result(struct builder *b, struct instruction *i, char *text)
{
    int before = 0;
    while (i->count[before])
        before++;
    arg_value(b, i, text, (struct type){KIND_BITS, 64, 1});
    for (int n = 0; n < i->count[before]; n++)
        if (i->slot[i->first[before] + n] < 0)
            bad(b, "a result that is not a register");
}

void arg_address(struct builder *b, struct instruction *i, char *text, enum space space)
{
    char *end = *text == '[' ? matching(text) : NULL;
    if (!end)
        bad(b, "an address that is not understood");
    char *inner = keep(b, text + 1, (size_t)(end - text - 1));
    inner = skip_space(inner);
    int64_t offset = 0;
    char *plus = *inner ? strpbrk(inner + 1, "+-") : NULL;
    if (plus) {
        const char *p = skip_space(plus + (*plus == '+'));
        bool good;
        offset = number(&p, &good);
        if (!good || *skip_space((char *)p))
            bad(b, "an address that is not understood");
        *plus = 0;
    }
    inner[strcspn(inner, " \t\r\n")] = 0;
    append(b, i, value_slot(b, inner, (struct type){KIND_BITS, 64, 1}), true);
    int a = 0;
    while (a + 1 < MAX_ARGS && i->count[a + 1])
        a++;
    i->offset[a] = offset;
    i->space[a] = (uint8_t)space;
}

/* ---- declarations ---- */

struct declared {
    struct type type;
    uint64_t align, size; /* of one element, in bytes */
};

/* Reads "[.align 8] .b8 ..." up to the first name, and returns the text from that name on. */
static char *declared_type(struct builder *b, char *p, struct declared *out)
{
    bool pointer = false; /* true after .ptr: the words then describe the memory behind the
                           * pointer */
    uint64_t vector = 1;
    *out = (struct declared){0};
    for (p = skip_space(p); *p == '.'; p = skip_space(p)) {
        char word[24];
        size_t length = name_length(++p);
        snprintf(word, sizeof word, "%.*s", (int)length, p);
        p += length;
        if (!strcmp(word, "align")) {
            char *end;
            uint64_t align = strtoull(p, &end, 10);
            p = end;
            if (!pointer)
                out->align = align;
        } else if (!strcmp(word, "ptr")) {
            pointer = true;
        } else if (!strcmp(word, "v2") || !strcmp(word, "v4")) {
            vector = (uint64_t)(word[1] - '0');
        } else if (!strcmp(word, "attribute")) {
            bad(b, "an attribute that is not supported");
        } else if (!pointer) {
            type_parse(word, &out->type);
        }
    }
    if (!out->type.count)
        bad(b, "a declaration without a type");
    out->size = (type_bits(out->type) + 7) / 8 * vector;
    if (!out->align)
        out->align = out->size;
    return p;
}

/* Reads "[4][2]" after a name. */
static char *declared_size(struct builder *b, char *p, uint64_t *many)
{
    for (p = skip_space(p); *p == '['; p = skip_space(p + 1)) {
        const char *q = skip_space(p + 1);
        bool good = true;
        *many *= *q == ']' ? 0 : (uint64_t)number(&q, &good);
        p = skip_space((char *)q);
        if (!good || *p != ']')
            bad(b, "an array whose size is not understood");
    }
    return p;
}

uint64_t aligned(uint64_t at, uint64_t to) { return (at + to - 1) / to * to; }

void declare(struct builder *b, const char *space, char *p)
{
    struct declared d;
    p = declared_type(b, p, &d);
    while (*p) {
        size_t length = name_length(p);
        if (!length)
            bad(b, "a declaration that is not understood");
        struct symbol *s = add_symbol(b, p, length);
        uint64_t many = 1;
        s->type = d.type;
        p += length;
        if (!strcmp(space, "reg")) {
            s->is_register = true;
            s->slot = (int32_t)b->code->slots;
            if (*p == '<') {
                s->many = strtoll(p + 1, &p, 10);
                p += *p == '>';
            }
            b->code->slots += (uint32_t)(s->many < 0 ? 1 : s->many);
        } else {
            p = declared_size(b, p, &many);
            uint32_t *end = strcmp(space, "shared") ? &b->code->local : &b->code->shared;
            uint64_t at = aligned(*end, d.align);
            s->address = at + (strcmp(space, "param") ? 0 : LOCAL_WINDOW);
            if (at + d.size * many > 1u << 24)
                bad(b, "a variable that is too large");
            *end = (uint32_t)(at + d.size * many);
        }
        p = skip_space(p);
        if (*p && *p != ',')
            bad(b, "a declaration that is not understood");
        p = skip_space(p + (*p == ','));
    }
}

/* Reads a list such as "(.param .b32 a, .reg .u32 b)" into `out`, and returns the number of its
 * parameters. */
int formals(struct builder *b, const char *list, struct formal *out, int room)
{
    if (!list)
        return 0;
    char *open = keep(b, list, strlen(list)), *end = matching(open);
    int count = 0;
    if (!end)
        bad(b, "a list of parameters that does not end");
    *end = 0;
    for (char *p = skip_space(open + 1); *p; p = skip_space(p + (*p == ','))) {
        struct declared d;
        uint64_t many = 1;
        bool in_register = !strncmp(p, ".reg", 4);
        if (count == room)
            bad(b, "too many parameters");
        p = declared_type(b, p + (in_register ? 4 : 6), &d);
        struct formal *f = &out[count++];
        *f = (struct formal){p, name_length(p), in_register, d.align, d.size, d.type};
        p = declared_size(b, p + f->length, &many);
        f->size *= many;
    }
    return count;
}

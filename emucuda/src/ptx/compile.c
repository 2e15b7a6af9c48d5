/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Compiles a kernel's text to a list of instructions. A called function is compiled into its
 * caller, with its own registers, so a kernel has neither calls nor a stack.
 */
#include "builder.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void refuse(struct builder *b, CUresult code, const char *format, ...)
{
    char message[512];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    fprintf(stderr, "emucuda: kernel %s was not launched: %s\n", b->kernel, message);
    b->error = code;
    longjmp(b->out, 1);
}

void bad(struct builder *b, const char *what)
{
    refuse(b, CUDA_ERROR_INVALID_PTX, "%s in \"%.200s\".", what, b->statement);
}

void *grown(struct builder *b, void *array, size_t count, size_t *room, size_t size)
{
    if (count < *room)
        return array;
    *room = *room ? 2 * *room : 64;
    void *larger = realloc(array, *room * size);
    if (!larger)
        refuse(b, CUDA_ERROR_OUT_OF_MEMORY, "the host has no memory for its instructions.");
    return larger;
}

char *keep(struct builder *b, const char *text, size_t length)
{
    struct kept *k = malloc(sizeof *k + length + 1);
    if (!k)
        refuse(b, CUDA_ERROR_OUT_OF_MEMORY, "the host has no memory for its instructions.");
    memcpy(k->text, text, length);
    k->text[length] = 0;
    k->next = b->code->kept;
    b->code->kept = k;
    return k->text;
}

/* ---- slots and code ---- */

int32_t new_slot(struct builder *b) { return (int32_t)b->code->slots++; }

int32_t constant_slot(struct builder *b, uint64_t value)
{
    struct code *c = b->code;
    for (uint32_t n = 0; n < c->constants; n++)
        if (c->constant[(size_t)n * LANES] == value)
            return -1 - (int32_t)n;
    size_t room = c->constants_room;
    c->constant = grown(b, c->constant, c->constants, &room, LANES * sizeof *c->constant);
    c->constants_room = (uint32_t)room;
    for (int l = 0; l < LANES; l++)
        c->constant[(size_t)c->constants * LANES + (size_t)l] = value;
    return -1 - (int32_t)c->constants++;
}

struct instruction *emit(struct builder *b, const struct instruction *i)
{
    struct code *c = b->code;
    size_t room = c->room;
    c->at = grown(b, c->at, c->count, &room, sizeof *c->at);
    c->room = (uint32_t)room;
    c->at[c->count] = *i;
    c->at[c->count].text = b->statement;
    return &c->at[c->count++];
}

void add_place(struct builder *b, struct places *to, const char *label, int scope, uint32_t at)
{
    to->item = grown(b, to->item, to->count, &to->room, sizeof *to->item);
    to->item[to->count++] = (struct place){label, scope, at};
}

static const char END[] = "end of the function";

static int function_scope(const struct builder *b)
{
    int scope = b->scope;
    while (b->parent[scope] >= 0)
        scope = b->parent[scope];
    return scope;
}

void go_to(struct builder *b, struct instruction *i, const char *label)
{
    i->branches = true;
    add_place(b, &b->branches, label ? label : END, label ? b->scope : function_scope(b), b->code->count);
}

int branch_targets(struct builder *b, const char *list, const char **labels, int room)
{
    for (size_t n = b->lists; n--;) {
        if (strcmp(b->list[n].label, list))
            continue;
        const char *targets = b->list[n].label + strlen(list) + 1;
        char *text = keep(b, targets, strlen(targets)), *save;
        int count = 0;
        for (char *label = strtok_r(text, ", \t\r\n", &save); label && count < room;
             label = strtok_r(NULL, ", \t\r\n", &save))
            labels[count++] = label;
        return count;
    }
    return 0;
}

bool in_entry(const struct builder *b) { return b->depth <= 1; }

static void resolve_branches(struct builder *b)
{
    for (size_t n = 0; n < b->branches.count; n++) {
        const struct place *from = &b->branches.item[n];
        const struct place *found = NULL;
        for (int scope = from->scope; scope >= 0 && !found; scope = b->parent[scope])
            for (size_t k = 0; k < b->labels.count && !found; k++)
                if (b->labels.item[k].scope == scope && !strcmp(b->labels.item[k].label, from->label))
                    found = &b->labels.item[k];
        if (!found)
            refuse(b, CUDA_ERROR_INVALID_PTX, "the label %s does not exist.", from->label);
        b->code->at[from->at].target = found->at;
    }
}

/* ---- functions ---- */

static void move64(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0), *a = ARG(w, i, 1, 0);
    FOR_LANES(l, mask)
        d[l] = a[l];
}

static void emit_move(struct builder *b, int32_t to, int32_t of)
{
    struct instruction i = {.run = move64, .predicate = NO_SLOT, .meets = NO_SLOT};
    append(b, &i, to, true);
    append(b, &i, of, true);
    emit(b, &i);
}

static void body(struct builder *b, char *p, const char *end);

static int push_scope(struct builder *b, int parent)
{
    size_t room = (size_t)b->scopes_room;
    b->parent = grown(b, b->parent, (size_t)b->scopes, &room, sizeof *b->parent);
    b->scopes_room = (int)room;
    b->parent[b->scopes] = parent;
    return b->scope = b->scopes++;
}

static void function_body(struct builder *b, const struct function *f)
{
    if (b->depth == MAX_DEPTH)
        refuse(b, CUDA_ERROR_NOT_SUPPORTED, "it calls functions more than %d deep.", MAX_DEPTH);
    for (int n = 0; n < b->depth; n++)
        if (b->stack[n] == f)
            refuse(b, CUDA_ERROR_NOT_SUPPORTED, "the function %.*s calls itself, which the emulation does not do.",
                   (int)f->name_length, f->name);
    b->stack[b->depth++] = f;
    int scope = b->scope;
    body(b, f->body + 1, matching(f->body));
    add_place(b, &b->labels, END, scope, b->code->count);
    b->depth--;
}

static const struct function *find_function(const struct ptx *ptx, const char *name)
{
    for (size_t n = 0; n < ptx->functions; n++) {
        const struct function *f = &ptx->function[n];
        if (f->body && f->name_length == strlen(name) && !memcmp(f->name, name, f->name_length))
            return f;
    }
    return NULL;
}

static int actuals(struct builder *b, const char *list, char **out, int room)
{
    char *open = keep(b, list, strlen(list)), *save;
    int count = 0;
    open[strlen(open) - 1] = 0;
    for (char *one = strtok_r(open + 1, ",", &save); one; one = strtok_r(NULL, ",", &save)) {
        one = skip_space(one);
        one[strcspn(one, " \t\r\n")] = 0;
        if (*one && count < room)
            out[count++] = one;
    }
    return count;
}

/* Adds a symbol for a formal parameter of the called function. A parameter in memory is the
 * caller's variable itself. A parameter in a register is a copy of the caller's register. */
static void bind(struct builder *b, const struct formal *f, uint64_t address, int32_t slot)
{
    struct symbol *s = add_symbol(b, f->name, f->length);
    s->type = f->type;
    s->is_register = f->in_register;
    s->address = address;
    s->slot = slot;
}

/* Compiles: call (results), name, (params) */
void call_function(struct builder *b, const struct statement *s, struct instruction *i)
{
    enum { ROOM = 64 };
    struct formal formal[ROOM];
    char *actual[ROOM];
    uint64_t address[ROOM] = {0};
    int32_t slot[ROOM], of[ROOM];
    int arg = 0;
    const char *lists[2] = {NULL, NULL}; /* the results and the parameters */
    if (s->args && s->arg[0][0] == '(')
        lists[0] = s->arg[arg++];
    const char *name = arg < s->args ? s->arg[arg++] : "";
    if (arg < s->args && s->arg[arg][0] == '(')
        lists[1] = s->arg[arg++];
    const struct function *f = find_function(b->ptx, name);
    if (!f)
        refuse(b, CUDA_ERROR_NOT_SUPPORTED, "it calls %s, which the emulation does not have.", name);
    if (i->predicate != NO_SLOT) { /* the lanes where the predicate is false jump over the call */
        struct instruction skip = {.run = jump, .predicate = i->predicate, .negated = !i->negated, .meets = NO_SLOT};
        char label[32];
        snprintf(label, sizeof label, "past call %u", b->code->count);
        const char *kept = keep(b, label, strlen(label));
        go_to(b, &skip, kept);
        emit(b, &skip);
        struct instruction now = {.predicate = NO_SLOT};
        call_function(b, s, &now);
        add_place(b, &b->labels, kept, b->scope, b->code->count);
        return;
    }
    int results = 0, all = 0;
    for (int which = 0; which < 2; which++) {
        int more = formals(b, which ? f->params : f->results, formal + all, ROOM - all);
        int given = lists[which] ? actuals(b, lists[which], actual + all, ROOM - all) : 0;
        if (more != given)
            bad(b, "a call with another number of parameters than the function's");
        all += more;
        results = which ? results : more;
    }
    for (int n = 0; n < all; n++) {
        if (formal[n].in_register) {
            of[n] = value_slot(b, actual[n], formal[n].type);
            slot[n] = new_slot(b);
            if (n >= results)
                emit_move(b, slot[n], of[n]);
        } else if (!variable_address(b, actual[n], strlen(actual[n]), &address[n])) {
            bad(b, "a parameter that is not declared");
        }
    }
    int scope = b->scope;
    size_t first = b->first_symbol, symbols = b->symbols;
    const char *statement = b->statement;
    b->first_symbol = b->symbols;
    push_scope(b, -1);
    for (int n = 0; n < all; n++)
        bind(b, &formal[n], address[n], slot[n]);
    function_body(b, f);
    b->scope = scope;
    b->symbols = symbols;
    b->first_symbol = first;
    b->statement = statement;
    for (int n = 0; n < results; n++)
        if (formal[n].in_register)
            emit_move(b, of[n], slot[n]);
}

/* ---- statements ---- */

static const struct decoding *const groups[] = {move_group, integer_group, floating_group, compare_group,
                                                convert_group, control_group, atomic_group, warp_group, matrix_group};

static bool decode(struct builder *b, const struct statement *s, struct instruction *i)
{
    for (unsigned g = 0; g < sizeof groups / sizeof *groups; g++)
        for (const struct decoding *d = groups[g]; d->name; d++) {
            if (strcmp(d->name, s->name))
                continue;
            struct instruction trial = *i;
            if (d->decode(b, s, &trial)) {
                *i = trial;
                return true;
            }
        }
    return false;
}

static void instruction(struct builder *b, const char *start, size_t length)
{
    char *text = keep(b, start, length);
    for (char *p = text; *p; p++)
        if (isspace((unsigned char)*p))
            *p = ' ';
    b->statement = text;
    /* If a bracket directly follows the name, as in "call(", a space must go between them. So copy
     * one byte more than the text. */
    char *p = keep(b, text, length + 1);
    struct instruction i = {.predicate = NO_SLOT, .meets = NO_SLOT};
    if (*p == '@') {
        p = skip_space(p + 1);
        i.negated = *p == '!';
        char *name = skip_space(p + i.negated);
        size_t n = name_length(name);
        p = name + n;
        if (!n || !*p)
            bad(b, "a predicate that is not understood");
        *p++ = 0;
        i.predicate = value_slot(b, name, (struct type){KIND_PREDICATE, 1, 1});
        p = skip_space(p);
    }
    size_t opcode = strcspn(p, " ({");
    if (p[opcode] == '(' || p[opcode] == '{') {
        memmove(p + opcode + 1, p + opcode, strlen(p + opcode) + 1);
        p[opcode] = ' ';
    }
    struct statement s = {.text = text};
    if (!statement_parse(p, &s))
        bad(b, "an instruction that is not understood");
    if (!strcmp(s.name, "call")) {
        call_function(b, &s, &i);
        return;
    }
    if (!decode(b, &s, &i))
        refuse(b, CUDA_ERROR_NOT_SUPPORTED, "the emulation does not interpret \"%.200s\".", text);
    if (i.run)
        emit(b, &i);
}

static const char *statement_end(char *p)
{
    for (; *p && *p != ';'; p++) {
        if (strchr("([{\"", *p)) {
            char *close = *p == '"' ? strchr(p + 1, '"') : matching(p);
            if (!close)
                return NULL;
            p = close;
        }
    }
    return *p ? p : NULL;
}

static void directive(struct builder *b, char *p, size_t length, const char *end)
{
    static const char *const declarations[] = {"reg", "local", "shared", "param"};
    if (!strncmp(p, "pragma", 6))
        return;
    char *text = keep(b, p, (size_t)(end - p));
    b->statement = text;
    for (unsigned n = 0; n < sizeof declarations / sizeof *declarations; n++)
        if (length == strlen(declarations[n]) && !memcmp(text, declarations[n], length)) {
            declare(b, declarations[n], text + length);
            return;
        }
    refuse(b, CUDA_ERROR_NOT_SUPPORTED, "the emulation does not interpret \".%.200s\".", text);
}

/* Reads a label, or a list of labels such as "name: .branchtargets a, b;". Returns the text after
 * it. */
static char *label(struct builder *b, char *p, size_t length, const char *end)
{
    char *after = skip_space(strchr(p + length, ':') + 1);
    char *name = keep(b, p, length);
    if (strncmp(after, ".branchtargets", 14)) {
        add_place(b, &b->labels, name, b->scope, b->code->count);
        return after;
    }
    const char *stop = statement_end(after);
    if (!stop || stop >= end)
        bad(b, "a list of labels that does not end");
    char *both = keep(b, p, length + 1 + (size_t)(stop - after - 14));
    both[length] = 0;
    memcpy(both + length + 1, after + 14, (size_t)(stop - after - 14));
    struct place *more = realloc(b->list, (b->lists + 1) * sizeof *more);
    if (!more)
        refuse(b, CUDA_ERROR_OUT_OF_MEMORY, "the host has no memory for its instructions.");
    b->list = more;
    b->list[b->lists++] = (struct place){both, b->scope, 0};
    return (char *)stop + 1;
}

static void body(struct builder *b, char *p, const char *end)
{
    int scope = b->scope;
    size_t symbols = b->symbols;
    while ((p = skip_space(p)) < end) {
        size_t length = name_length(p);
        const char *stop;
        if (*p == '{') {
            char *close = matching(p);
            if (!close)
                bad(b, "a brace without its partner");
            push_scope(b, scope);
            body(b, p + 1, close);
            b->scope = scope;
            p = close + 1;
        } else if (*p == ';') {
            p++;
        } else if (*p == '.' && (!strncmp(p, ".loc ", 5) || !strncmp(p, ".loc\t", 5) || !strncmp(p, ".file", 5))) {
            p += strcspn(p, "\n");
        } else if (length && *skip_space(p + length) == ':' && skip_space(p + length)[1] != ':') {
            p = label(b, p, length, end);
        } else {
            stop = statement_end(p);
            if (!stop || stop > end) {
                b->statement = "the end of the function";
                bad(b, "a statement without its semicolon");
            }
            if (*p == '.')
                directive(b, p + 1, name_length(p + 1), stop);
            else
                instruction(b, p, (size_t)(stop - p));
            p = (char *)stop + 1;
        }
    }
    b->symbols = symbols;
}

static void entry(struct builder *b, const struct function *f)
{
    struct formal formal[MAX_PARAMS];
    uint64_t at = 0;
    push_scope(b, -1);
    int count = formals(b, f->params, formal, MAX_PARAMS);
    for (int n = 0; n < count; n++) {
        at = aligned(at, formal[n].align);
        bind(b, &formal[n], PARAM_WINDOW + at, 0);
        at += formal[n].size;
    }
    function_body(b, f);
    struct instruction last = {.run = NULL, .predicate = NO_SLOT, .meets = NO_SLOT};
    struct statement s = {.name = "exit", .text = (char *)"exit"};
    b->statement = "exit";
    decode(b, &s, &last);
    emit(b, &last);
    resolve_branches(b);
    /* Round both sizes up, so that memory after these bytes is aligned. */
    b->code->shared = (uint32_t)aligned(b->code->shared, 16);
    b->code->local = (uint32_t)aligned(b->code->local, 16);
}

void code_free(struct code *code)
{
    if (!code)
        return;
    for (struct kept *k = code->kept, *next; k; k = next) {
        next = k->next;
        free(k);
    }
    free(code->at);
    free(code->constant);
    free(code);
}

CUresult compile(struct ptx *ptx, const char *name, int device, struct code **out)
{
    struct builder *b = calloc(1, sizeof *b);
    struct code *code = calloc(1, sizeof *code);
    *out = NULL;
    if (!b || !code) {
        free(b);
        free(code);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    b->ptx = ptx;
    b->code = code;
    b->device = device;
    b->kernel = name;
    b->statement = name;
    code->slots = 1;
    code->shared = (uint32_t)ptx->shared_size;
    CUresult result;
    if (!setjmp(b->out)) {
        const struct function *f = find_function(ptx, name);
        if (!f)
            refuse(b, CUDA_ERROR_INVALID_PTX, "its text has no end.");
        entry(b, f);
        result = CUDA_SUCCESS;
    } else {
        result = b->error;
    }
    free(b->symbol);
    free(b->parent);
    free(b->labels.item);
    free(b->branches.item);
    free(b->list);
    free(b);
    if (result)
        code_free(code);
    else
        *out = code;
    return result;
}

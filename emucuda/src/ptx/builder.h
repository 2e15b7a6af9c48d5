/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * What compile.c and names.c share: a kernel that is being compiled.
 */
#ifndef EMUCUDA_BUILDER_H
#define EMUCUDA_BUILDER_H

#include "ptx.h"

enum { MAX_DEPTH = 32, MAX_BRANCHES = 512 };

struct symbol {
    const char *name;
    size_t length;
    int64_t many; /* of "%r<10>"; -1: one */
    bool is_register;
    int32_t slot;     /* the first */
    uint64_t address; /* of a variable, in its space */
    struct type type;
    int scope;
};

struct place { /* of a label, or of a branch to it */
    const char *label;
    int scope;
    uint32_t at;
};

struct places {
    struct place *item;
    size_t count, room;
};

struct kept {
    struct kept *next;
    char text[];
};

struct builder {
    struct ptx *ptx;
    struct code *code;
    int device;
    const char *kernel;
    const char *statement; /* for messages */
    CUresult error;
    jmp_buf out;
    struct symbol *symbol;
    size_t symbols, symbols_room, first_symbol; /* of the function */
    int *parent; /* of each scope; -1: a function's */
    int scopes, scopes_room, scope;
    struct places labels, branches;
    struct place *list; /* .branchtargets; the label is followed by the list's text */
    size_t lists;
    const struct function *stack[MAX_DEPTH];
    int depth;
};

struct formal {
    char *name;
    size_t length;
    bool in_register;
    uint64_t align, size;
    struct type type;
};

_Noreturn void bad(struct builder *b, const char *what); /* the statement is no PTX */
void *grown(struct builder *b, void *array, size_t count, size_t *room, size_t size);
char *keep(struct builder *b, const char *text, size_t length); /* a copy that lives as long as the code */
void add_place(struct builder *b, struct places *to, const char *label, int scope, uint32_t at);

/* ---- names.c ---- */
struct symbol *add_symbol(struct builder *b, const char *name, size_t length);
bool variable_address(struct builder *b, const char *name, size_t length, uint64_t *out);
void append(struct builder *b, struct instruction *i, int32_t slot, bool begins); /* a slot of an argument */
void declare(struct builder *b, const char *space, char *p);
int formals(struct builder *b, const char *list, struct formal *out, int room);
uint64_t aligned(uint64_t at, uint64_t to);

#endif

/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Declarations that compile.c and names.c share: a kernel while it is being compiled.
 */
#ifndef EMUCUDA_BUILDER_H
#define EMUCUDA_BUILDER_H

#include "ptx.h"

enum { MAX_DEPTH = 32, MAX_BRANCHES = 512 };

struct symbol {
    const char *name;
    size_t length;
    int64_t many; /* number of registers: 10 for "%r<10>"; -1: the name stands for one register or
                   * variable */
    bool is_register;
    int32_t slot;     /* slot of the first register */
    uint64_t address; /* address of a variable in its space */
    struct type type;
    int scope;
};

struct place { /* the place of a label, or of a branch to a label */
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
    const char *statement; /* text of the present statement, for messages */
    CUresult error;
    jmp_buf out;
    struct symbol *symbol;
    size_t symbols, symbols_room, first_symbol; /* first_symbol: index of the first symbol of the
                                                 * present function */
    int *parent; /* the parent of each scope; -1: the scope of a function */
    int scopes, scopes_room, scope;
    struct places labels, branches;
    struct place *list; /* the .branchtargets lists; the text of a list follows its label */
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

_Noreturn void bad(struct builder *b, const char *what); /* ends the compilation: the statement is
                                                          * not PTX */
void *grown(struct builder *b, void *array, size_t count, size_t *room, size_t size);
/* Returns a copy that lives as long as the code. */
char *keep(struct builder *b, const char *text, size_t length);
void add_place(struct builder *b, struct places *to, const char *label, int scope, uint32_t at);

/* ---- names.c ---- */
struct symbol *add_symbol(struct builder *b, const char *name, size_t length);
bool variable_address(struct builder *b, const char *name, size_t length, uint64_t *out);
/* Adds a slot to an argument. */
void append(struct builder *b, struct instruction *i, int32_t slot, bool begins);
void declare(struct builder *b, const char *space, char *p);
int formals(struct builder *b, const char *list, struct formal *out, int room);
uint64_t aligned(uint64_t at, uint64_t to);

#endif

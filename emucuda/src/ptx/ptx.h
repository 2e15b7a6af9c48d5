/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * An interpreter of PTX: kernels of PTX modules compute on the bytes of the device.
 *
 *   text.c      the text: statements, names, numbers
 *   compile.c   a kernel as a list of instructions: statements, scopes, labels, calls (inlined)
 *   names.c     its registers, variables and parameters, and the operands that name them
 *   variables.c memory of a module's global and constant variables
 *   block.c     runs blocks of threads: warps, branches, barriers
 *   access.c    where the bytes of an address are
 *
 * and one file for each group of instructions, with a table of the names that it decodes:
 *   integer.c, floating.c, compare.c, convert.c, move.c (ld, st, mov), atomic.c, warp.c (shfl, vote),
 *   matrix.c (mma, ldmatrix), control.c (bra, call, bar)
 *
 * A register of a warp is an array of 32 values, one for each lane. If lanes are at different
 * instructions, the lanes at the lowest instruction run first. So the lanes run together again
 * where their paths join.
 */
#ifndef EMUCUDA_PTX_H
#define EMUCUDA_PTX_H

#include "../module.h"

#include <setjmp.h>
#include <string.h>

enum { LANES = 32, MAX_ARGS = 8, MAX_OPERANDS = 32, MAX_MODIFIERS = 16 };

/* Windows of the generic address space. They lie above every address of a process. */
#define SHARED_WINDOW (1ull << 48)
#define LOCAL_WINDOW (2ull << 48)
#define PARAM_WINDOW (3ull << 48)

/* ---- types ---- */

enum kind { KIND_BITS, KIND_UNSIGNED, KIND_SIGNED, KIND_FLOAT, KIND_BFLOAT, KIND_TF32, KIND_PREDICATE, KIND_E4M3,
            KIND_E5M2 };
struct type {
    uint8_t kind;
    uint8_t bits;  /* bits of one value */
    uint8_t count; /* 2: a packed type such as f16x2; 0: no type */
};
static inline unsigned type_bits(struct type t) { return (unsigned)t.bits * t.count; }
bool type_parse(const char *name, struct type *out); /* text.c */

/* ---- a statement of the text ---- */

struct statement {
    const char *name;             /* "add" of "add.rn.f32" */
    const char *part[MAX_MODIFIERS];  /* "rn", "f32" */
    int parts;
    char *arg[MAX_ARGS];
    int args;
    char *text; /* the text of the statement, for messages */
};
bool has(const struct statement *s, const char *part);
/* Returns a type that is a part of the instruction's name. `which` counts types from the end of the
 * name: 1 is the last type, 2 is the type before it. */
struct type type_at(const struct statement *s, int which);
bool statement_parse(char *text, struct statement *out); /* this changes the text */

char *skip_space(char *p);
size_t name_length(const char *p);
char *matching(char *open); /* the closing bracket of this opening bracket, or NULL */
int64_t number(const char **p, bool *good);
uint64_t literal(const char *text, struct type t, bool *good);

/* ---- compiled code ---- */

struct warp;
struct instruction;
typedef void execute(struct warp *w, const struct instruction *i, uint32_t mask);

struct instruction {
    execute *run;
    int32_t predicate; /* a slot, or NO_SLOT */
    bool negated;
    bool branches; /* the instruction may move lanes to another place in the code, stop them at a
                    * barrier, or end them: control.c */
    int32_t meets; /* slot that has the mask of the lanes that must execute the instruction
                    * together; NO_SLOT: no mask */
    struct type type, from;
    uint16_t how, flags; /* each group of instructions has its own values */
    uint32_t target;
    uint8_t first[MAX_ARGS], count[MAX_ARGS]; /* [a]: for argument a, index of its first slot in
                                               * `slot`, and number of its slots */
    int64_t offset[MAX_ARGS];                 /* offset of an argument that is an address */
    uint8_t space[MAX_ARGS];
    int32_t slot[MAX_OPERANDS];
    const char *text;
};

enum { NO_SLOT = INT32_MAX };
enum space { SPACE_GENERIC, SPACE_SHARED, SPACE_LOCAL };
enum { FTZ = 1, SATURATE = 2, HIGH = 4, WIDE = 8, CARRY_OUT = 16, CARRY_IN = 32, RELU = 64, NAN_WINS = 128,
       HAS_RESULT = 256 };
enum rounding { TO_NEAREST, TO_ZERO, DOWN, UP, TO_NEAREST_AWAY };

struct code {
    struct instruction *at;
    uint32_t count, room;
    uint32_t slots; /* number of registers of a warp; slot 0 takes results that nobody reads */
    uint64_t *constant; /* slot -1 - n has constant n; each lane has a copy of its value, so a
                         * constant has LANES copies */
    uint32_t constants, constants_room;
    int32_t special[64]; /* slot of each special register in use; 0: unused */
    uint32_t shared, local; /* bytes */
    struct kept *kept;      /* texts that live as long as the code */
};

/* ---- compile.c ---- */

struct function { /* a function of a module's text */
    const char *name;
    size_t name_length;
    bool entry;
    char *results, *params, *body; /* the texts in brackets; NULL: none */
};

struct variable { /* a variable of a module */
    char *name;
    bool shared;
    bool external; /* the launch gives its size */
    uint64_t offset, size;
    uint64_t element; /* bytes of one element */
    struct type type;
    char *values;
};

struct ptx {
    char *text;
    struct function *function;
    size_t functions;
    struct variable *variable;
    size_t variables;
    uint64_t global_size, shared_size;
    uint64_t dynamic_shared; /* offset at which the launch's dynamic shared memory begins; external
                              * variables name this place */
    struct { uint64_t address, id; } storage[MAX_DEVICES];
};

struct builder;
/* These three functions append an argument. */
int32_t arg_value(struct builder *b, struct instruction *i, char *text, struct type t);
void arg_result(struct builder *b, struct instruction *i, char *text);
void arg_address(struct builder *b, struct instruction *i, char *text, enum space space);
int32_t value_slot(struct builder *b, char *text, struct type t);
int32_t constant_slot(struct builder *b, uint64_t value);
int32_t new_slot(struct builder *b);
struct instruction *emit(struct builder *b, const struct instruction *i);
/* Ends the compilation. The message goes to standard error, and the launch returns the code. */
_Noreturn void refuse(struct builder *b, CUresult code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Decodes an instruction of a group: fills in `i` from the statement. Returns false if the
 * statement is not an instruction of this group. */
typedef bool decoder(struct builder *b, const struct statement *s, struct instruction *i);
struct decoding {
    const char *name;
    decoder *decode;
};
extern const struct decoding integer_group[], floating_group[], compare_group[], convert_group[], move_group[],
    atomic_group[], warp_group[], matrix_group[], control_group[];

/* Compiles the called function into its caller. */
void call_function(struct builder *b, const struct statement *s, struct instruction *i);
/* Compiles a jump to the label, or to the end of the function if the label is NULL. */
void go_to(struct builder *b, struct instruction *i, const char *label);
/* Returns the number of labels of a .branchtargets list; 0: there is no such list. */
int branch_targets(struct builder *b, const char *list, const char **labels, int room);
bool in_entry(const struct builder *b); /* false: in a function that the entry calls */
extern execute jump;
extern execute nothing;

CUresult compile(struct ptx *ptx, const char *name, int device, struct code **out);
void code_free(struct code *code);

/* ---- variables.c ---- */
CUresult ptx_open(char *text, struct ptx **out); /* takes over the text, which must have no
                                                  * comments */
void ptx_close(struct ptx *ptx);
CUresult variables_place(struct ptx *ptx, int device); /* makes sure that the variables' memory
                                                        * exists and is initialised */
const struct variable *variable_find(const struct ptx *ptx, const char *name, size_t length);

/* ---- block.c ---- */

struct range_of_memory {
    uint64_t start, size, delta; /* a byte's address plus `delta` is the address at which the host
                                  * reaches the byte */
};

struct run { /* one launch */
    const struct code *code;
    const struct launch *launch;
    const uint8_t *params;
    uint32_t params_size, shared_size;
    CUresult error;
    char message[512];
    jmp_buf out; /* where fail() jumps to */
    struct range_of_memory known[8];
    unsigned next_known;
    uint64_t bytes; /* bytes of global memory that the launch has used */
};

struct block {
    struct run *run;
    uint32_t index[3];
    uint8_t *shared;
    struct warp *warp;
    unsigned warps, living; /* number of warps; number of threads that have not ended */
    struct {
        uint32_t arrived, wanted; /* numbers of threads */
        uint32_t result;          /* result of a reduction */
        unsigned generation;
    } barrier[16];
};

struct warp {
    struct block *block;
    uint64_t *reg;
    uint8_t *local;
    uint32_t pc[LANES];
    uint32_t alive, waiting; /* waiting: lanes at a barrier */
    uint32_t held;           /* lanes that wait at an instruction for the other lanes of the
                              * instruction's mask */
    uint32_t carry;          /* condition code of each lane */
    uint8_t at_barrier[LANES];
    unsigned index; /* index in the block */
    const struct instruction *now;
};

static inline uint64_t *R(const struct warp *w, int32_t slot)
{
    return slot >= 0 ? w->reg + (size_t)slot * LANES : w->block->run->code->constant + (size_t)(-1 - slot) * LANES;
}
/* Slot `n` of argument `a`. */
static inline uint64_t *ARG(const struct warp *w, const struct instruction *i, int a, int n)
{
    return R(w, i->slot[i->first[a] + n]);
}

#define FOR_LANES(l, mask) \
    for (uint32_t rest_ = (mask), l; rest_ && (l = (uint32_t)__builtin_ctz(rest_), 1); rest_ &= rest_ - 1)

static inline uint64_t low_bits(unsigned bits) { return bits >= 64 ? ~0ull : (1ull << bits) - 1; }
static inline int64_t sign_extend(uint64_t v, unsigned bits)
{
    return bits >= 64 ? (int64_t)v : (int64_t)(v << (64 - bits)) >> (64 - bits);
}

/* Ends the launch with an error. The message names the instruction. */
_Noreturn void fail(struct warp *w, CUresult error, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* special registers: compile.c names them, block.c sets them */
enum special { TID_X = 1, TID_Y, TID_Z, NTID_X, NTID_Y, NTID_Z, CTAID_X, CTAID_Y, CTAID_Z, NCTAID_X, NCTAID_Y,
               NCTAID_Z, LANEID, WARPID, NWARPID, SMID, NSMID, GRIDID, MASK_EQ, MASK_LT, MASK_LE, MASK_GT, MASK_GE,
               CLOCK, CLOCK_HI, CLOCK64, TIMER, TIMER_LO, TIMER_HI, DYNAMIC_SHARED, TOTAL_SHARED, ALWAYS_0, ALWAYS_1 };
void refresh_clock(struct warp *w);

/* ---- access.c ---- */
enum { READ, WRITE };
/* Returns the host address of the `size` bytes that a lane reads or writes at `address`. */
void *bytes_of(struct warp *w, unsigned lane, uint64_t address, unsigned size, int mode);

/* ---- move.c ---- */
uint64_t lane_address(const struct warp *w, const struct instruction *i, int argument, unsigned lane);
bool space_of(const struct statement *s, enum space *out); /* false: the emulation does not have
                                                            * this space */

/* ---- floating.c: widen() converts a value to double without loss; narrow() rounds a double to
 * the type ---- */
double widen(struct type t, uint64_t bits);
uint64_t narrow(struct type t, double value, enum rounding rounding, int flags);
enum rounding rounding_of(const struct statement *s);

static inline float as_f32(uint64_t bits)
{
    uint32_t low = (uint32_t)bits;
    float f;
    memcpy(&f, &low, 4);
    return f;
}
static inline double as_f64(uint64_t bits)
{
    double f;
    memcpy(&f, &bits, 8);
    return f;
}
static inline uint64_t of_f32(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}
static inline uint64_t of_f64(double f)
{
    uint64_t bits;
    memcpy(&bits, &f, 8);
    return bits;
}

#endif

/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Matrices that are spread over the lanes of a warp: mma, ldmatrix, stmatrix, movmatrix.
 *
 * Layout of a fragment: one register holds n values of one row. The first register of lane l has
 * values of row l / 4, beginning with column (l % 4) * n. In a matrix of 16 rows, the lane's next
 * register has the same columns of row l / 4 + 8. The registers after that have the same rows
 * further right (PTX ISA, "Matrix Fragments").
 */
#include "ptx.h"

enum { ROWS = 16, COLUMNS = 8, MAX_DEPTH = 64 };

struct shape {
    int m, n, k;
};

static double value(struct type t, uint64_t bits)
{
    bits &= low_bits(t.bits);
    switch (t.kind) {
    case KIND_SIGNED: return (double)sign_extend(bits, t.bits);
    case KIND_UNSIGNED: return (double)bits;
    case KIND_TF32: return (double)as_f32(bits & 0xffffe000); /* hardware ignores the other bits */
    default: return widen(t, bits);
    }
}

/* Computes each element of the result in f64, and rounds it once at the end. For integers, f64 is
 * exact. */
static void mma(struct warp *w, const struct instruction *i, uint32_t mask)
{
    double a[ROWS][MAX_DEPTH], b[MAX_DEPTH][COLUMNS];
    struct shape s = {i->how >> 8 == 16 ? 16 : 8, 8, i->how & 255};
    unsigned per = i->from.bits == 64 ? 1 : 32u / i->from.bits;
    struct type at = i->from, bt = i->from;
    if (mask != ~0u)
        fail(w, CUDA_ERROR_LAUNCH_FAILED, "only a part of the warp executes it");
    if (i->flags & HIGH)
        bt.kind = bt.kind == KIND_SIGNED ? KIND_UNSIGNED : KIND_SIGNED;
    for (int l = 0; l < LANES; l++) {
        int group = l / 4, within = l % 4;
        for (int r = 0; r < i->count[1]; r++)
            for (unsigned n = 0; n < per; n++) {
                int row = s.m == 16 ? group + 8 * (r & 1) : group, step = s.m == 16 ? r >> 1 : r;
                a[row][within * (int)per + step * 4 * (int)per + (int)n] =
                    value(at, ARG(w, i, 1, r)[l] >> (at.bits < 64 ? at.bits * n : 0));
            }
        for (int r = 0; r < i->count[2]; r++)
            for (unsigned n = 0; n < per; n++)
                b[within * (int)per + r * 4 * (int)per + (int)n][group] =
                    value(bt, ARG(w, i, 2, r)[l] >> (bt.bits < 64 ? bt.bits * n : 0));
    }
    struct type t = i->type;
    int packed = t.bits == 16 ? 2 : 1;
    for (int l = 0; l < LANES; l++)
        for (int r = 0; r < i->count[0]; r++) {
            uint64_t out = 0;
            for (int p = 0; p < packed; p++) {
                int e = r * packed + p, row = l / 4 + 8 * (e >> 1), column = l % 4 * 2 + (e & 1);
                uint64_t c = ARG(w, i, 3, r)[l] >> (t.bits * (unsigned)p * (packed == 2));
                double sum = value(t, c);
                for (int k = 0; k < s.k; k++)
                    sum += a[row][k] * b[k][column];
                uint64_t bits = t.kind == KIND_SIGNED ? (uint64_t)(uint32_t)(int64_t)sum : narrow(t, sum, TO_NEAREST, 0);
                out |= bits << (t.bits * (unsigned)p * (packed == 2));
            }
            ARG(w, i, 0, r)[l] = out;
        }
}

static bool decode_mma(struct builder *b, const struct statement *s, struct instruction *i)
{
    struct shape shape = {0, 0, 0};
    struct type c = type_at(s, 1), bt = type_at(s, 2), at = type_at(s, 3), d = type_at(s, 4);
    for (int n = 0; n < s->parts; n++)
        if (s->part[n][0] == 'm') {
            const char *p = s->part[n] + 1;
            bool good = true;
            shape.m = (int)number(&p, &good);
            if (good && *p++ == 'n')
                shape.n = (int)number(&p, &good);
            if (good && *p++ == 'k')
                shape.k = (int)number(&p, &good);
            break;
        }
    bool doubles = at.kind == KIND_FLOAT && at.bits == 64;
    if (!d.count || s->args != 4 || !has(s, "row") || !has(s, "col") || has(s, "sp") || shape.n != 8 ||
        shape.k > MAX_DEPTH || (shape.m != 16 && !(doubles && shape.m == 8)) || memcmp(&c, &d, sizeof c) ||
        at.bits != bt.bits || (at.kind != bt.kind && at.kind > KIND_SIGNED))
        return false;
    i->type = d;
    i->from = at;
    i->flags = at.kind != bt.kind ? HIGH : 0;
    i->how = (uint16_t)(shape.m << 8 | shape.k);
    i->meets = constant_slot(b, 0xffffffff);
    arg_result(b, i, s->arg[0]);
    for (int n = 1; n < 4; n++)
        arg_value(b, i, s->arg[n], n == 3 ? d : at);
    int per = doubles ? 1 : 32 / at.bits;
    i->run = mma;
    return i->count[1] == shape.m * shape.k / 32 / per && i->count[2] == 8 * shape.k / 32 / per &&
           i->count[0] == shape.m * 8 / 32 / (d.bits == 16 ? 2 : 1) && i->count[3] == i->count[0];
}

/* ldmatrix, stmatrix. Lane 8 n + r has the address of row r of matrix n. For each matrix, lane l
 * has two values: those in row l / 4 at the columns 2 (l % 4) and 2 (l % 4) + 1. */
static void ldmatrix(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint16_t m[8][8];
    bool transposed = i->flags & 1, stores = i->flags & 2;
    int registers = stores ? 1 : 0, address = stores ? 0 : 1;
    if (mask != ~0u)
        fail(w, CUDA_ERROR_LAUNCH_FAILED, "only a part of the warp executes it");
    for (int n = 0; n < i->count[registers]; n++) {
        uint64_t *d = ARG(w, i, registers, n);
        uint8_t *row[8];
        for (unsigned r = 0; r < 8; r++) {
            unsigned lane = 8 * (unsigned)n + r;
            row[r] = bytes_of(w, lane, lane_address(w, i, address, lane), 16, stores ? WRITE : READ);
            memcpy(m[r], row[r], 16);
        }
        for (int l = 0; l < LANES; l++) {
            int r = l / 4, c = l % 4 * 2;
            uint16_t *one = transposed ? &m[c][r] : &m[r][c], *two = transposed ? &m[c + 1][r] : &m[r][c + 1];
            if (stores) {
                *one = (uint16_t)d[l];
                *two = (uint16_t)(d[l] >> 16);
            } else {
                d[l] = *one | (uint32_t)*two << 16;
            }
        }
        for (int r = 0; stores && r < 8; r++)
            memcpy(row[r], m[r], 16);
    }
}

static bool decode_ldmatrix(struct builder *b, const struct statement *s, struct instruction *i)
{
    enum space space;
    bool stores = s->name[0] == 's';
    int count = has(s, "x4") ? 4 : has(s, "x2") ? 2 : 1;
    if (s->args != 2 || !has(s, "m8n8") || !has(s, "b16") || !space_of(s, &space))
        return false;
    i->flags = (uint16_t)((has(s, "trans") ? 1 : 0) | (stores ? 2 : 0));
    i->meets = constant_slot(b, 0xffffffff);
    if (stores) {
        arg_address(b, i, s->arg[0], space);
        arg_value(b, i, s->arg[1], (struct type){KIND_BITS, 32, 1});
    } else {
        arg_result(b, i, s->arg[0]);
        arg_address(b, i, s->arg[1], space);
    }
    i->run = ldmatrix;
    return i->count[stores] == count;
}

static void movmatrix(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0), a[LANES];
    if (mask != ~0u)
        fail(w, CUDA_ERROR_LAUNCH_FAILED, "only a part of the warp executes it");
    memcpy(a, ARG(w, i, 1, 0), sizeof a);
    for (int l = 0; l < LANES; l++) {
        uint64_t r = 0;
        for (int n = 0; n < 2; n++) { /* row l / 4 of the result is column l / 4 of the operand */
            int row = l % 4 * 2 + n, column = l / 4;
            r |= (a[row * 4 + column / 2] >> (16 * (column & 1)) & 0xffff) << (16 * n);
        }
        d[l] = r;
    }
}

static bool decode_movmatrix(struct builder *b, const struct statement *s, struct instruction *i)
{
    if (s->args != 2 || !has(s, "trans") || !has(s, "b16"))
        return false;
    arg_result(b, i, s->arg[0]);
    arg_value(b, i, s->arg[1], (struct type){KIND_BITS, 32, 1});
    i->meets = constant_slot(b, 0xffffffff);
    i->run = movmatrix;
    return true;
}

const struct decoding matrix_group[] = {
    {"mma", decode_mma}, {"ldmatrix", decode_ldmatrix}, {"stmatrix", decode_ldmatrix},
    {"movmatrix", decode_movmatrix}, {NULL, NULL},
};

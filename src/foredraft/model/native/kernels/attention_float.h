/* Attention over keys and values in half or single precision, a block of slots at a time. */
#ifndef FOREDRAFT_ATTENTION_FLOAT_H
#define FOREDRAFT_ATTENTION_FLOAT_H

#include "pack.h"

#define BLOCK 64 /* slots at a time */

#if W == 8
#define TOGETHER_QUERIES 2 /* as many as fit into registers with four slots, or four vectors of values */
#else
#define TOGETHER_QUERIES 6
#endif

/* A query of one head of one node. */
typedef struct {
    const float *x; /* [dim rounded up to GROUP] */
    float *scores;  /* of each place, then their weights; up to the end of a block */
    float *out;     /* [result_width(dim)]: the weighted sum of values */
    float inverse;  /* of the sum of weights */
    int8_t *codes;  /* [dim rounded up to GROUP], for keys in 8 bits; then, for each group: */
    float *scales;
    int32_t *offsets; /* what the 128 in codes of keys adds to the integer sum, negative */
} Query;

/* Floats of a result: whole vectors, and what attention in 8 bits needs. */
INLINE int64_t result_width(int64_t dim) { return padded(dim, 64); }

INLINE void store_floats(int32_t kv, uint8_t *slot, const float *x, int64_t width) {
    for (int64_t c = 0; c < width; c += W) {
        if (kv == KV_F16)
            v_store_half((uint16_t *)slot + c, v_load(x + c));
        else
            v_store((float *)slot + c, v_load(x + c));
    }
}

INLINE vf load_state(int kv, const uint8_t *slot, int64_t column) {
    return kv == KV_F16 ? v_load_half((const uint16_t *)slot + column) : v_load((const float *)slot + column);
}

INLINE void float_scores_of(
    int kv, const uint8_t *const *at, int64_t left, int64_t width, Query *queries, int count, int64_t first) {
    for (int64_t i = 0; i < left; i += 4) {
        vf sums[TOGETHER_QUERIES][4];
        for (int q = 0; q < count; q++)
            for (int j = 0; j < 4; j++) sums[q][j] = v_set(0.0f);
        for (int64_t c = 0; c < width; c += W) {
            vf key[4];
            for (int j = 0; j < 4; j++) key[j] = load_state(kv, at[i + j], c);
            for (int q = 0; q < count; q++) {
                vf query = v_load(queries[q].x + c);
                for (int j = 0; j < 4; j++) sums[q][j] = v_fma(query, key[j], sums[q][j]);
            }
        }
        for (int q = 0; q < count; q++)
            v_sums(sums[q][0], sums[q][1], sums[q][2], sums[q][3], queries[q].scores + first + i);
    }
}

/* Columns c to c + vectors * W of out_q += sum_i weights_q,i v_i */
INLINE void float_columns_of(
    int kv, const uint8_t *const *at, int64_t left, int vectors, int64_t c, Query *queries, int count, int64_t first) {
    vf sums[TOGETHER_QUERIES][4];
    for (int q = 0; q < count; q++)
        for (int v = 0; v < vectors; v++) sums[q][v] = v_load(queries[q].out + c + v * W);
    for (int64_t i = 0; i < left; i++)
        for (int v = 0; v < vectors; v++) {
            vf value = load_state(kv, at[i], c + v * W);
            for (int q = 0; q < count; q++) sums[q][v] = v_fma(v_set(queries[q].scores[first + i]), value, sums[q][v]);
        }
    for (int q = 0; q < count; q++)
        for (int v = 0; v < vectors; v++) v_store(queries[q].out + c + v * W, sums[q][v]);
}

INLINE void float_values_of(
    int kv, const uint8_t *const *at, int64_t left, int64_t width, Query *queries, int count, int64_t first) {
    int64_t c = 0;
    for (; c + 4 * W <= width; c += 4 * W) float_columns_of(kv, at, left, 4, c, queries, count, first);
    for (; c < width; c += W) float_columns_of(kv, at, left, 1, c, queries, count, first);
}

/* A function for each number of queries, so that their sums stay in registers. */
#define QUERIES(work, kv, count)                                      \
    case count:                                                       \
        work(kv, at, left, width, queries, count, first);             \
        break;

#if TOGETHER_QUERIES > 2
#define MORE_QUERIES(work, kv) QUERIES(work, kv, 3) QUERIES(work, kv, 4) QUERIES(work, kv, 5) QUERIES(work, kv, 6)
#else
#define MORE_QUERIES(work, kv)
#endif

#define FLOAT_BLOCK(name, work, kv)                                                                                     \
    static __attribute__((noinline)) void name(                                                                        \
        const uint8_t *const *at, int64_t left, int64_t width, Query *queries, int count, int64_t first) {             \
        for (; count > 0; count -= TOGETHER_QUERIES, queries += TOGETHER_QUERIES) {                                     \
            switch (count < TOGETHER_QUERIES ? count : TOGETHER_QUERIES) {                                              \
                QUERIES(work, kv, 1)                                                                                    \
                QUERIES(work, kv, 2)                                                                                    \
                MORE_QUERIES(work, kv)                                                                                  \
            }                                                                                                           \
        }                                                                                                               \
    }
FLOAT_BLOCK(half_scores, float_scores_of, KV_F16)
FLOAT_BLOCK(single_scores, float_scores_of, KV_F32)
FLOAT_BLOCK(half_values, float_values_of, KV_F16)
FLOAT_BLOCK(single_values, float_values_of, KV_F32)

/* The queries' scores of the slots in a block; up to three more places are written. */
static void float_scores(
    int32_t kv, const uint8_t *const *at, int64_t left, int64_t width, Query *queries, int count, int64_t first) {
    (kv == KV_F16 ? half_scores : single_scores)(at, left, width, queries, count, first);
}

static void float_values(
    int32_t kv, const uint8_t *const *at, int64_t left, int64_t width, Query *queries, int count, int64_t first) {
    (kv == KV_F16 ? half_values : single_values)(at, left, width, queries, count, first);
}

#endif

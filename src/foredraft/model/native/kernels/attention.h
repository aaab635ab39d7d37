/* Attention of nodes over their visible slots, in slot order.
 *
 * A slot that a node sees has a place: the i-th visible slot is in place i, whatever slots lie between. Sums over slots go
 * by place, so a node of a tree adds the same terms in the same order as plain decoding does for the same history.
 * Queries of several heads and nodes read the slots that they share together; that changes no sum.
 */
#ifndef FOREDRAFT_ATTENTION_H
#define FOREDRAFT_ATTENTION_H

#include "attention_float.h"
#include "attention_int8.h"

#define MOST_QUERIES 24 /* that read the same slots together */
#define FAR (-1e30f)

/* The slots that a node attends to: ``count`` of them, ``run`` from ``begin`` on, then ``others``. */
typedef struct {
    int64_t begin, run, count;
    const int32_t *others;
} Slots;

/* Keys or values of one head of one row. */
typedef struct {
    const uint8_t *states;
    int64_t stride; /* bytes of a slot */
    const uint8_t *nothing; /* in place of a slot where there is none: zeros */
} Head;

/* Bytes of a head's keys, or values, in one slot. */
INLINE int64_t state_bytes(int32_t kv, int64_t dim) {
    if (kv == KV_I8) return int8_bytes(dim);
    return padded(dim, TILE) * (kv == KV_F16 ? 2 : 4);
}

INLINE void store_state(int32_t kv, uint8_t *slot, const float *x, int64_t dim, int keys) {
    if (kv != KV_I8)
        store_floats(kv, slot, x, padded(dim, TILE));
    else if (keys)
        store_int8_key(slot, x, dim);
    else
        store_int8_value(slot, x, dim);
}

/* Where the slots of places [first, first + BLOCK) are; returns how many there are. */
INLINE int64_t block_at(const Head *head, const Slots *s, int64_t first, const uint8_t **at) {
    int64_t left = s->count - first < BLOCK ? s->count - first : BLOCK;
    for (int64_t i = 0; i < BLOCK; i++) {
        int64_t place = first + i;
        int64_t slot = place < s->run ? s->begin + place : place < s->count ? s->others[place - s->run] : -1;
        at[i] = slot < 0 ? head->nothing : head->states + slot * head->stride;
    }
    return left;
}

/* Weights of a softmax in place of ``count`` scores; returns the inverse of their sum. There are zeros up to the end of
 * the last block.
 */
static float softmax(float *scores, int64_t count, float scale, float cap) {
    vf high = v_set(FAR);
    for (int64_t i = count; i < padded(count, W); i++) scores[i] = FAR;
    for (int64_t i = 0; i < count; i += W) {
        vf score = v_mul(v_load(scores + i), v_set(scale));
        if (cap > 0.0f) score = v_mul(v_tanh(v_div(score, v_set(cap))), v_set(cap));
        v_store(scores + i, score);
        high = v_max(high, score);
    }
    for (int64_t i = count; i < padded(count, W); i++) scores[i] = FAR;
    if (cap > 0.0f && count % W) { /* what was behind the end may have been the highest */
        high = v_set(FAR);
        for (int64_t i = 0; i < count; i += W) high = v_max(high, v_load(scores + i));
    }
    vf most = v_set(v_highest(high)), total = v_set(0.0f);
    for (int64_t i = 0; i < count; i += W) {
        v_store(scores + i, v_exp(v_sub(v_load(scores + i), most)));
        for (int64_t j = count; j < i + W; j++) scores[j] = 0.0f;
        total = v_add(total, v_load(scores + i));
    }
    for (int64_t i = padded(count, W); i < padded(count, BLOCK); i++) scores[i] = 0.0f;
    return 1.0f / v_sum(total);
}

typedef void (*Blocks)(int32_t kv, const uint8_t *const *at, int64_t left, int64_t dim, Query *queries, int count, int64_t first, Int8Space *space);

static void scores_of(
    int32_t kv, const uint8_t *const *at, int64_t left, int64_t dim, Query *queries, int count, int64_t first, Int8Space *space) {
    if (kv == KV_I8)
        int8_scores(at, left, dim, queries, count, first, space);
    else
        float_scores(kv, at, left, padded(dim, TILE), queries, count, first);
}

static void values_of(
    int32_t kv, const uint8_t *const *at, int64_t left, int64_t dim, Query *queries, int count, int64_t first, Int8Space *space) {
    if (kv == KV_I8)
        int8_values(at, left, dim, queries, count, first, space);
    else
        float_values(kv, at, left, padded(dim, TILE), queries, count, first);
}

/* What queries attend to together: nodes of one row and heads that share keys. */
typedef struct {
    int32_t kv;
    int nodes, heads; /* queries are those of the first node's heads, then the next node's */
    int64_t dim;
    const Slots *slots; /* of each node */
    Head keys, values;
    float scale, cap;
} Together;

/* Fetch the block of slots from ``slot`` on: a slot in 8 bits is no whole number of lines, and its reads do not look like a
 * stream to the processor. Half precision loses by it, and so does a single node. Measured on Zen 4: docs/log/native.md.
 */
INLINE void fetch_block(const Head *head, int64_t slot) {
    const uint8_t *from = head->states + slot * head->stride;
    for (int64_t line = 0; line < BLOCK * head->stride; line += 64) __builtin_prefetch(from + line, 0, 2);
}

/* Call ``work`` for all blocks of slots: once for those that all nodes see in the same places, then for each node. */
INLINE void each_block(const Together *g, const Head *head, Blocks work, Query *queries, Int8Space *space) {
    const uint8_t *at[BLOCK];
    const Slots *slots = g->slots;
    int64_t shared = slots->run;
    for (int n = 1; n < g->nodes; n++) {
        if (slots[n].begin != slots->begin) shared = 0;
        shared = slots[n].run < shared ? slots[n].run : shared;
    }
    shared = shared / BLOCK * BLOCK;
    for (int64_t first = 0; first < shared; first += BLOCK) {
        if (g->kv == KV_I8 && g->nodes > 1 && first + BLOCK < shared) fetch_block(head, slots->begin + first + BLOCK);
        work(g->kv, at, block_at(head, slots, first, at), g->dim, queries, g->nodes * g->heads, first, space);
    }
    for (int n = 0; n < g->nodes; n++)
        for (int64_t first = shared; first < slots[n].count; first += BLOCK)
            work(g->kv, at, block_at(head, slots + n, first, at), g->dim, queries + n * g->heads, g->heads, first, space);
}

/* Attention of all queries; their results are in ``out`` then. */
static void attend(const Together *g, Query *queries, Int8Space *space) {
    int count = g->nodes * g->heads;
    for (int i = 0; g->kv == KV_I8 && i < count; i++) quantise_query(&queries[i], g->dim);
    each_block(g, &g->keys, scores_of, queries, space);
    for (int i = 0; i < count; i++) {
        int64_t visible = g->slots[i / g->heads].count;
        memset(queries[i].out, 0, (size_t)result_width(g->dim) * 4);
        queries[i].inverse = visible ? softmax(queries[i].scores, visible, g->scale, g->cap) : 0.0f;
    }
    each_block(g, &g->values, values_of, queries, space);
    for (int i = 0; i < count; i++) {
        if (g->kv == KV_I8) int8_in_order(queries[i].out, g->dim);
        for (int64_t c = 0; c < padded(g->dim, W); c += W)
            v_store(queries[i].out + c, v_mul(v_load(queries[i].out + c), v_set(queries[i].inverse)));
    }
}

#endif

/* Attention of one node over its visible slots, in slot order.
 *
 * Scores are compacted: the i-th visible slot is in place i, whatever slots lie between. So a node of a tree adds the same
 * terms in the same lanes as plain decoding does for the same history.
 */
#ifndef FOREDRAFT_ATTENTION_H
#define FOREDRAFT_ATTENTION_H

#include "engine.h"
#include "vector.h"

#define MOST_SHARED 4 /* query heads that read a key together */
#define FAR (-1e30f)

/* The slots that a node attends to: ``count`` of them, ``run`` from ``begin`` on, then ``others``. */
typedef struct {
    int64_t begin, run, count;
    const int32_t *others;
} Slots;

/* Keys or values of one head of one row: ``width`` numbers per slot. */
typedef struct {
    const void *states;
    int64_t width;
    int32_t kv;
} Head;

INLINE int64_t slot_at(const Slots *s, int64_t i) { return i < s->run ? s->begin + i : s->others[i - s->run]; }

INLINE vf load_state(const Head *head, int kv, int64_t slot, int64_t column) {
    int64_t place = slot * head->width + column;
    return kv == KV_F16 ? v_load_half((const uint16_t *)head->states + place) : v_load((const float *)head->states + place);
}

/* scores[h * stride + i] = q_h . k_i */
INLINE void scores_of(const Head *keys, int kv, const Slots *s, int heads, const float *q, float *scores, int64_t stride) {
    for (int64_t i = 0; i < s->count; i += 4) {
        vf sums[MOST_SHARED][4];
        int64_t slots[4];
        for (int j = 0; j < 4; j++) {
            slots[j] = slot_at(s, i + j < s->count ? i + j : s->count - 1);
            for (int h = 0; h < heads; h++) sums[h][j] = v_set(0.0f);
        }
        for (int64_t c = 0; c < keys->width; c += W) {
            vf key[4];
            for (int j = 0; j < 4; j++) key[j] = load_state(keys, kv, slots[j], c);
            for (int h = 0; h < heads; h++) {
                vf query = v_load(q + h * keys->width + c);
                for (int j = 0; j < 4; j++) sums[h][j] = v_fma(query, key[j], sums[h][j]);
            }
        }
        for (int h = 0; h < heads; h++)
            v_sums(sums[h][0], sums[h][1], sums[h][2], sums[h][3], scores + h * stride + i);
    }
}

/* Weights of a softmax in place of ``count`` scores; returns the inverse of their sum. The places up to the next multiple
 * of W are written, too. */
static float softmax(float *scores, int64_t count, float scale, float cap) {
    vf high = v_set(FAR);
    for (int64_t i = count; i < count + W; i++) scores[i] = FAR;
    for (int64_t i = 0; i < count; i += W) {
        vf score = v_mul(v_load(scores + i), v_set(scale));
        if (cap > 0.0f) score = v_mul(v_tanh(v_div(score, v_set(cap))), v_set(cap));
        v_store(scores + i, score);
        high = v_max(high, score);
    }
    for (int64_t i = count; i < count + W; i++) scores[i] = FAR;
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
    return 1.0f / v_sum(total);
}

/* Columns c to c + vectors * W of out_h = sum_i weights_h,i v_i */
INLINE void values_of(
    const Head *values, int kv, const Slots *s, int heads, int vectors, const float *weights, int64_t stride,
    const float *inverse, int64_t c, float *out) {
    vf sums[MOST_SHARED][4];
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < vectors; v++) sums[h][v] = v_set(0.0f);
    for (int64_t i = 0; i < s->count; i++) {
        int64_t slot = slot_at(s, i);
        for (int v = 0; v < vectors; v++) {
            vf value = load_state(values, kv, slot, c + v * W);
            for (int h = 0; h < heads; h++) sums[h][v] = v_fma(v_set(weights[h * stride + i]), value, sums[h][v]);
        }
    }
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < vectors; v++)
            v_store(out + h * values->width + c + v * W, v_mul(sums[h][v], v_set(inverse[h])));
}

INLINE void attend_shared(
    const Head *keys, const Head *values, int kv, const Slots *s, int heads, const float *q, float scale, float cap,
    float *scores, int64_t stride, float *out) {
    scores_of(keys, kv, s, heads, q, scores, stride);
    float inverse[MOST_SHARED];
    for (int h = 0; h < heads; h++) inverse[h] = softmax(scores + h * stride, s->count, scale, cap);
    int64_t c = 0;
    for (; c + 4 * W <= values->width; c += 4 * W) values_of(values, kv, s, heads, 4, scores, stride, inverse, c, out);
    for (; c < values->width; c += W) values_of(values, kv, s, heads, 1, scores, stride, inverse, c, out);
}

#define SHARED(count)                                                                                   \
    case count:                                                                                         \
        if (keys->kv == KV_F16)                                                                         \
            attend_shared(keys, values, KV_F16, s, count, q, scale, cap, scores, stride, out);          \
        else                                                                                            \
            attend_shared(keys, values, KV_F32, s, count, q, scale, cap, scores, stride, out);          \
        break;

/* Up to MOST_SHARED heads over the same keys; q and out are [heads, width], scores [heads, stride]. */
static void attend(
    const Head *keys, const Head *values, const Slots *s, int heads, const float *q, float scale, float cap, float *scores,
    int64_t stride, float *out) {
    if (!s->count) {
        memset(out, 0, (size_t)(heads * values->width) * 4);
        return;
    }
    switch (heads) {
        SHARED(1)
        SHARED(2)
        SHARED(3)
        SHARED(4)
    }
}

#endif

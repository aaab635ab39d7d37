/* The best guesses for a node's next token and their shares, from its logits.
 *
 * A score is logit / temperature, in sampled rows less the logarithm of the token's arrival time; a share is the softmax of
 * the scores. Sums have one fixed order, so that a row's shares do not depend on other rows.
 */
#ifndef FOREDRAFT_RANK_H
#define FOREDRAFT_RANK_H

#include <float.h>

#include "engine.h"
#include "pack.h"
#include "race.h"

#define LEAST (-FLT_MAX / 64) /* so that a path's sum cannot overflow */

/* leads[i] = -log(times[i]). */
static void leads_of(const float *times, int64_t count, float *leads) {
    for (int64_t i = 0; i < count; i++) leads[i] = -logarithm(times[i]);
}

/* Scores up to the next multiple of W, LEAST behind the end; returns the highest. ``leads`` may be NULL. */
static float scores_of_row(const float *logits, int64_t count, float temperature, const float *leads, float *scores) {
    for (int64_t i = 0; i < count; i++) {
        float x = logits[i];
        x = (x <= FLT_MAX ? x : x > FLT_MAX ? 0.0f : LEAST) / temperature; /* NaN: LEAST */
        scores[i] = x >= LEAST ? x <= -LEAST ? x : -LEAST : LEAST;
    }
    for (int64_t i = 0; leads && i < count; i++) scores[i] += leads[i];
    for (int64_t i = count; i < padded(count, W); i++) scores[i] = LEAST * 2;
    vf high = v_load(scores);
    for (int64_t i = W; i < count; i += W) high = v_max(high, v_load(scores + i));
    return v_highest(high);
}

/* The log of the sum of e^(score - high); the places up to the next multiple of W add nothing. */
static float log_sum(const float *scores, int64_t count, float high) {
    vf total = v_set(0.0f), most = v_set(high);
    int64_t i = 0;
    for (; i + W <= count; i += W) total = v_add(total, v_exp(v_sub(v_load(scores + i), most)));
    float sum = v_sum(total), rest[W];
    if (i < count) v_store(rest, v_exp(v_sub(v_load(scores + i), most)));
    for (int64_t j = i; j < count; j++) sum += rest[j - i];
    return logarithm(sum);
}

/* The ``wanted`` highest scores, best first, the earlier one first among equals. */
static void best_of(const float *scores, int64_t count, int64_t wanted, int64_t *tokens, float *values) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i += W) {
        if (found == wanted && v_highest(v_load(scores + i)) <= values[found - 1]) continue;
        for (int64_t j = i; j < i + W && j < count; j++) {
            if (found == wanted && scores[j] <= values[found - 1]) continue;
            int64_t place = found < wanted ? found++ : found - 1;
            for (; place > 0 && values[place - 1] < scores[j]; place--)
                values[place] = values[place - 1], tokens[place] = tokens[place - 1];
            values[place] = scores[j], tokens[place] = j;
        }
    }
}

/* ``wanted`` tokens of one node, and the logs of their shares. ``scores``: room for ``count``, rounded up to W. */
static void rank_node(
    const float *logits, int64_t count, float temperature, const float *leads, int64_t wanted, float *scores,
    int64_t *tokens, float *shares) {
    float high = scores_of_row(logits, count, temperature, leads, scores), sum = log_sum(scores, count, high);
    best_of(scores, count, wanted, tokens, shares);
    for (int64_t i = 0; i < wanted; i++) shares[i] = shares[i] - high - sum;
}

static int32_t check_ranking(const Ranking *r) {
    if (r->rows < 1 || r->nodes < 1 || r->count < 1 || r->wanted < 1 || r->wanted > r->count || r->stride < r->count) return BAD_SHAPE;
    for (int64_t b = 0; b < r->rows; b++)
        if (!(r->temperatures[b] > 0.0f)) return BAD_SHAPE;
    return OK;
}

#endif

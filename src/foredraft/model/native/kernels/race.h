/* Arrival times of tokens in the race that draws them: exponentials, hashed from a position's random bits and the token;
 * and the race itself.
 *
 * The integers are those of core/rng.py. The logarithm differs from torch's in the last place. Plain loops, which the
 * compiler makes vectors of; every lane has the same bits.
 */
#ifndef FOREDRAFT_RACE_H
#define FOREDRAFT_RACE_H

#include "vector.h"

#define RACE 256 /* tokens at a time */

INLINE uint64_t mixed(uint64_t x) { /* the finaliser of splitmix64 */
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* The logarithm of positive normal numbers (Cephes, logf). */
INLINE float logarithm(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits -= 0x3f3504f3; /* of 0.7071: the rest is in [0.7071, 1.4142) */
    float power = (float)((int32_t)bits >> 23), f;
    bits = (bits & 0x7fffff) + 0x3f3504f3;
    memcpy(&f, &bits, 4);
    f -= 1.0f;
    float square = f * f, y = 7.0376836292e-2f;
    y = y * f - 1.1514610310e-1f;
    y = y * f + 1.1676998740e-1f;
    y = y * f - 1.2420140846e-1f;
    y = y * f + 1.4249322787e-1f;
    y = y * f - 1.6668057665e-1f;
    y = y * f + 2.0000714765e-1f;
    y = y * f - 2.4999993993e-1f;
    y = y * f + 3.3333331174e-1f;
    y = y * f * square - power * 2.12194440e-4f - 0.5f * square;
    return f + y + power * 0.693359375f;
}

/* -log(1 - u) for u in (0, 1), with its relative precision where u is small. */
INLINE float time_of(float u) {
    float rest = 1.0f - u, taken = 1.0f - rest;
    return taken > 0.0f ? -logarithm(rest) * (u / taken) : u;
}

/* The bits from which the times at a position are hashed: ``Noise.target_bits``. */
INLINE uint64_t race_bits(int64_t seed, int64_t position) {
    const uint64_t golden = 0x9e3779b97f4a7c15u, target = 4;
    uint64_t rows = mixed((uint64_t)seed + golden);
    return mixed((mixed((rows ^ (uint64_t)position) + golden) ^ target) + golden);
}

INLINE float uniform_of(uint64_t bits, uint64_t token) {
    const float most = 1.0f - 0x1p-24f; /* so that every time is finite */
    uint64_t x = mixed(bits + (token + 1) * 0x9e3779b97f4a7c15u) >> 11;
    float u = ((float)(int64_t)x + 0.5f) * 0x1p-53f;
    return u < most ? u : most;
}

/* Arrival times of the first ``count`` tokens, or of those that ``ids`` names. */
static void times_of(uint64_t bits, const int64_t *ids, int64_t count, float *out) {
    for (int64_t begin = 0; begin < count; begin += RACE) {
        int64_t left = count - begin < RACE ? count - begin : RACE;
        float uniform[RACE];
        if (ids)
            for (int64_t i = 0; i < left; i++) uniform[i] = uniform_of(bits, (uint64_t)ids[begin + i]);
        else
            for (int64_t i = 0; i < left; i++) uniform[i] = uniform_of(bits, (uint64_t)(begin + i));
        for (int64_t i = 0; i < left; i++) out[begin + i] = time_of(uniform[i]);
    }
}

void fd_exponentials(const int64_t *bits, int64_t rows, int64_t count, float *out) {
    for (int64_t row = 0; row < rows; row++) times_of((uint64_t)bits[row], NULL, count, out + row * count);
}

INLINE int64_t at_most(int64_t count, int64_t most) { return count < most ? count : most; }

/* The least product of two numbers each; all are positive. */
INLINE float least_product(const float *x, const float *y) {
    vf low = v_mul(v_load(x), v_load(y));
    for (int64_t i = W; i < RACE; i += W) low = v_min(v_mul(v_load(x + i), v_load(y + i)), low);
    return -v_highest(v_sub(v_set(0.0f), low));
}

/* The first arrival of a race in which token i takes time / e^(scores[i] / temperature): the token of the least
 * time * e^(highest - score). A block whose numbers, which are below their times, do not reach it needs no logarithms.
 */
INLINE int64_t first_arrival(const float *scores, int64_t count, float temperature, float highest, uint64_t bits) {
    const float below = 0.9999f; /* more than time_of rounds */
    float least = INFINITY;
    int64_t token = 0;
    for (int64_t first = 0; first < count; first += RACE) {
        int64_t left = at_most(count - first, RACE);
        float delay[RACE], time[RACE];
        for (int64_t i = 0; i < RACE; i++) delay[i] = i < left ? scores[first + i] : -INFINITY;
        for (int64_t i = 0; i < RACE; i += W)
            v_store(delay + i, v_exp(v_sub(v_set(highest), v_div(v_load(delay + i), v_set(temperature)))));
        for (int64_t i = 0; i < RACE; i++) time[i] = uniform_of(bits, (uint64_t)(first + i));
        if (least_product(time, delay) * below >= least) continue;
        for (int64_t i = 0; i < RACE; i++) time[i] = time_of(time[i]);
        float soonest = least_product(time, delay);
        if (soonest >= least) continue;
        least = soonest;
        for (int64_t i = left - 1; i >= 0; i--)
            if (time[i] * delay[i] == least) token = first + i;
    }
    return token;
}

/* The highest score and the block where it is first; NaN if a score is. */
INLINE float highest_of(const float *x, int64_t count, int64_t *block) {
    float best = -INFINITY;
    for (int64_t first = 0; first < count; first += RACE) {
        int64_t left = at_most(count - first, RACE), i = 0;
        vf high = v_set(-INFINITY), other = high, sum = v_set(0.0f);
        for (; i + 2 * W <= left; i += 2 * W) {
            vf a = v_load(x + first + i), b = v_load(x + first + i + W);
            high = v_max(a, high), other = v_max(b, other);
            sum = v_add(sum, v_add(a, b)); /* NaN stays, but opposite infinities add up to it, too */
        }
        float found = v_highest(v_max(high, other)), total = v_sum(sum);
        for (; i < left; i++) found = x[first + i] > found ? x[first + i] : found, total += x[first + i];
        for (i = 0; total != total && i < left; i++)
            if (x[first + i] != x[first + i]) return NAN;
        if (found > best) best = found, *block = first;
    }
    return best;
}

int64_t fd_choose(const float *scores, int64_t count, float temperature, int64_t bits) {
    int64_t block = 0;
    float highest = highest_of(scores, count, &block);
    if (!isfinite(highest)) return -1;
    if (temperature > 0.0f) {
        highest /= temperature;
        return isfinite(highest) ? first_arrival(scores, count, temperature, highest, (uint64_t)bits) : -1;
    }
    while (scores[block] != highest) block++;
    return block;
}

#endif

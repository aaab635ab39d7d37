/* Arrival times of tokens in the race that draws them: exponentials, hashed from a position's random bits and the token.
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
    uint64_t x = mixed(bits + (token + 1) * 0x9e3779b97f4a7c15u) >> 11;
    return ((float)(int64_t)x + 0.5f) * 0x1p-53f;
}

/* Arrival times of the first ``count`` tokens, or of those that ``ids`` names. */
static void times_of(uint64_t bits, const int64_t *ids, int64_t count, float *out) {
    const float most = 1.0f - 0x1p-24f; /* so that every time is finite */
    for (int64_t begin = 0; begin < count; begin += RACE) {
        int64_t left = count - begin < RACE ? count - begin : RACE;
        float uniform[RACE];
        if (ids)
            for (int64_t i = 0; i < left; i++) uniform[i] = uniform_of(bits, (uint64_t)ids[begin + i]);
        else
            for (int64_t i = 0; i < left; i++) uniform[i] = uniform_of(bits, (uint64_t)(begin + i));
        for (int64_t i = 0; i < left; i++) out[begin + i] = time_of(uniform[i] < most ? uniform[i] : most);
    }
}

void fd_exponentials(const int64_t *bits, int64_t rows, int64_t count, float *out) {
    for (int64_t row = 0; row < rows; row++) times_of((uint64_t)bits[row], NULL, count, out + row * count);
}

#endif

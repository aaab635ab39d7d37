/* Attention over keys and values in 8 bits, a block of slots at a time.
 *
 * A key is its codes + 128, in groups of 32, then a half-precision scale for each group. A value is its codes, then one
 * scale in single precision. Queries are rounded like keys. Weights times the scales of values are rounded to 8 bits with
 * one scale for 32 places. So all sums within a group are exact integers, and groups are by place.
 */
#ifndef FOREDRAFT_ATTENTION_INT8_H
#define FOREDRAFT_ATTENTION_INT8_H

#include "attention_float.h"

#define INT8_TOGETHER 4 /* queries whose sums stay in registers */
#define PLACES 32       /* that share a scale of weights */
#define LEAST_WEIGHT 1e-30f

/* Keys or values of PLACES slots, rearranged. */
typedef struct {
    uint8_t *states; /* [PLACES, result_width] */
    float *scales;   /* [groups + 1, PLACES] */
} Int8Space;

INLINE int64_t int8_bytes(int64_t dim) { return padded(dim, GROUP) + padded(2 * groups_of(dim), 4); }

/* Codes of a group of 32 numbers; returns their sum. */
INLINE int32_t group_codes(const float *x, float inverse, int8_t *codes) {
    uint32_t sum = 0;
    for (int i = 0; i < GROUP; i += W) sum += (uint32_t)v_quantise(v_load(x + i), inverse, codes + i);
    return (int32_t)sum;
}

INLINE float largest_of(const float *x, int64_t count) {
    vf high = v_abs(v_load(x));
    for (int64_t i = W; i < count; i += W) high = v_max(high, v_abs(v_load(x + i)));
    return v_highest(high);
}

static void store_int8_key(uint8_t *slot, const float *x, int64_t dim) {
    int64_t width = padded(dim, GROUP);
    for (int64_t c = 0; c < width; c += GROUP) {
        uint16_t scale = float_to_half(largest_of(x + c, GROUP) / 127.0f);
        group_codes(x + c, inverse_of(half_to_float(scale)), (int8_t *)slot + c);
        for (int i = 0; i < GROUP; i++) slot[c + i] ^= 128;
        memcpy(slot + width + c / GROUP * 2, &scale, 2);
    }
}

static void store_int8_value(uint8_t *slot, const float *x, int64_t dim) {
    int64_t width = padded(dim, GROUP);
    float most = largest_of(x, width), scale = most / 127.0f;
    for (int64_t c = 0; c < width; c += GROUP) group_codes(x + c, inverse_of(scale), (int8_t *)slot + c);
    memcpy(slot + width, &scale, 4);
}

static void quantise_query(Query *query, int64_t dim) {
    for (int64_t g = 0; g < groups_of(dim); g++) {
        const float *x = query->x + g * GROUP;
        float most = largest_of(x, GROUP), inverse = most > 0.0f ? 127.0f / most : 0.0f;
        int32_t sum = group_codes(x, inverse, query->codes + g * GROUP);
        query->scales[g] = most / 127.0f;
        query->offsets[g] = (int32_t)((uint32_t)-128 * (uint32_t)sum);
    }
}

/* Codes of the weights of PLACES places, each with its value's scale; returns their own scale. */
INLINE float weight_codes(const float *weights, const float *scales, uint8_t *codes) {
    vf scaled[PLACES / W], high = v_set(0.0f);
    for (int i = 0; i < PLACES / W; i++) {
        scaled[i] = v_mul(v_load(weights + i * W), v_load(scales + i * W));
        high = v_max(high, scaled[i]);
    }
    float most = v_highest(high), inverse = most > LEAST_WEIGHT ? 255.0f / most : 0.0f;
    for (int i = 0; i < PLACES / W; i++) v_store_codes(v_mul(scaled[i], v_set(inverse)), codes + i * W);
    return most / 255.0f;
}

INLINE void value_scales(const uint8_t *const *at, int64_t width, float *scales) {
    for (int i = 0; i < PLACES; i++) memcpy(scales + i, at[i] + width, 4);
}

#if W == 16

INLINE __mmask64 columns_left(int64_t width, int64_t c) { return width - c < 64 ? (__mmask64)0xffffffff : ~(__mmask64)0; }

/* A matrix of 16 x 16 numbers of 32 bits, transposed. */
INLINE void transpose(__m512i *r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88), d = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
        t[i] = _mm512_shuffle_i32x4(a, c, 0x88), t[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        t[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88), t[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

/* For each four columns, those of all PLACES keys; and for each group, their scales. */
static void lay_keys(const uint8_t *const *at, int64_t width, Int8Space *space) {
    for (int half = 0; half < 2; half++) {
        for (int64_t c = 0; c < width; c += 64) {
            __m512i r[16];
            for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi8(columns_left(width, c), at[16 * half + i] + c);
            transpose(r);
            for (int i = 0; i < 16; i++) _mm512_store_si512(space->states + (c / 4 + i) * 4 * PLACES + 64 * half, r[i]);
        }
        for (int64_t pair = 0; 2 * pair * GROUP < width; pair++) {
            int32_t both[16];
            for (int i = 0; i < 16; i++) memcpy(both + i, at[16 * half + i] + width + 4 * pair, 4);
            __m512i scales = _mm512_loadu_si512(both);
            float *out = space->scales + 2 * pair * PLACES + 16 * half;
            _mm512_storeu_ps(out, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(scales)));
            _mm512_storeu_ps(out + PLACES, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(scales, 16))));
        }
    }
}

INLINE void int8_scores_of(const Int8Space *space, int64_t width, Query *queries, int count, int64_t first) {
    int64_t groups = width / GROUP;
    vf total[INT8_TOGETHER][2];
    for (int i = 0; i < count; i++) total[i][0] = total[i][1] = v_set(0.0f);
    for (int64_t g = 0; g < groups; g++) {
        __m512i sums[INT8_TOGETHER][2];
        for (int i = 0; i < count; i++) sums[i][0] = sums[i][1] = _mm512_set1_epi32(queries[i].offsets[g]);
        for (int64_t d = 8 * g; d < 8 * g + 8; d++) {
            __m512i low = _mm512_load_si512(space->states + d * 4 * PLACES);
            __m512i high = _mm512_load_si512(space->states + d * 4 * PLACES + 64);
            for (int i = 0; i < count; i++) {
                __m512i query = _mm512_set1_epi32(four(queries[i].codes + 4 * d));
                sums[i][0] = _mm512_dpbusd_epi32(sums[i][0], low, query);
                sums[i][1] = _mm512_dpbusd_epi32(sums[i][1], high, query);
            }
        }
        for (int i = 0; i < count; i++)
            for (int half = 0; half < 2; half++) {
                vf own = v_mul(_mm512_cvtepi32_ps(sums[i][half]), v_set(queries[i].scales[g]));
                total[i][half] = v_fma(own, v_load(space->scales + g * PLACES + 16 * half), total[i][half]);
            }
    }
    for (int i = 0; i < count; i++)
        for (int half = 0; half < 2; half++) v_store(queries[i].scores + first + 16 * half, total[i][half]);
}

/* For each four slots and 64 columns: four vectors in which each four bytes are one column of these slots. */
static void lay_values(const uint8_t *const *at, int64_t width, Int8Space *space) {
    value_scales(at, width, space->scales);
    for (int64_t c = 0; c < width; c += 64)
        for (int i = 0; i < PLACES; i += 4) {
            __m512i r[4], *out = (__m512i *)(space->states + c * PLACES + 64 * i);
            for (int j = 0; j < 4; j++) r[j] = _mm512_maskz_loadu_epi8(columns_left(width, c), at[i + j] + c);
            __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpackhi_epi8(r[0], r[1]);
            __m512i d = _mm512_unpacklo_epi8(r[2], r[3]), e = _mm512_unpackhi_epi8(r[2], r[3]);
            _mm512_store_si512(out, _mm512_unpacklo_epi16(a, d)), _mm512_store_si512(out + 1, _mm512_unpackhi_epi16(a, d));
            _mm512_store_si512(out + 2, _mm512_unpacklo_epi16(b, e)), _mm512_store_si512(out + 3, _mm512_unpackhi_epi16(b, e));
        }
}

INLINE void int8_values_of(const Int8Space *space, int64_t width, Query *queries, int count, int64_t first) {
    uint8_t codes[INT8_TOGETHER][PLACES];
    float scales[INT8_TOGETHER];
    for (int i = 0; i < count; i++) scales[i] = weight_codes(queries[i].scores + first, space->scales, codes[i]);
    for (int64_t c = 0; c < width; c += 64) {
        __m512i sums[INT8_TOGETHER][4];
        for (int i = 0; i < count; i++)
            for (int v = 0; v < 4; v++) sums[i][v] = _mm512_setzero_si512();
        for (int p = 0; p < PLACES; p += 4) {
            const __m512i *values = (const __m512i *)(space->states + c * PLACES + 64 * p);
            for (int i = 0; i < count; i++) {
                __m512i weight = _mm512_set1_epi32(four((const int8_t *)codes[i] + p));
                for (int v = 0; v < 4; v++) sums[i][v] = _mm512_dpbusd_epi32(sums[i][v], weight, values[v]);
            }
        }
        for (int i = 0; i < count; i++)
            for (int v = 0; v < 4; v++) {
                float *out = queries[i].out + c + 16 * v;
                v_store(out, v_fma(_mm512_cvtepi32_ps(sums[i][v]), v_set(scales[i]), v_load(out)));
            }
    }
}

/* Columns of a result in their order: vector v of 64 columns has 4 v to 4 v + 3 of each 16. */
INLINE void int8_in_order(float *out, int64_t dim) {
    for (int64_t c = 0; c < padded(dim, GROUP); c += 64) {
        __m512 r[4];
        for (int v = 0; v < 4; v++) r[v] = _mm512_loadu_ps(out + c + 16 * v);
        __m512 a = _mm512_shuffle_f32x4(r[0], r[1], 0x88), b = _mm512_shuffle_f32x4(r[0], r[1], 0xdd);
        __m512 d = _mm512_shuffle_f32x4(r[2], r[3], 0x88), e = _mm512_shuffle_f32x4(r[2], r[3], 0xdd);
        _mm512_storeu_ps(out + c, _mm512_shuffle_f32x4(a, d, 0x88));
        _mm512_storeu_ps(out + c + 16, _mm512_shuffle_f32x4(b, e, 0x88));
        _mm512_storeu_ps(out + c + 32, _mm512_shuffle_f32x4(a, d, 0xdd));
        _mm512_storeu_ps(out + c + 48, _mm512_shuffle_f32x4(b, e, 0xdd));
    }
}

#define INT8_QUERIES(work, count)                          \
    case count:                                            \
        work(space, width, queries, count, first);         \
        break;
#define INT8_BLOCK(name, work)                                                                              \
    static __attribute__((noinline)) void name(                                                            \
        const Int8Space *space, int64_t width, Query *queries, int count, int64_t first) {                 \
        for (; count > 0; count -= INT8_TOGETHER, queries += INT8_TOGETHER) {                         \
            switch (count < INT8_TOGETHER ? count : INT8_TOGETHER) {                                  \
                INT8_QUERIES(work, 1)                                                                       \
                INT8_QUERIES(work, 2)                                                                       \
                INT8_QUERIES(work, 3)                                                                       \
                INT8_QUERIES(work, 4)                                                                       \
            }                                                                                               \
        }                                                                                                   \
    }
INT8_BLOCK(all_int8_scores, int8_scores_of)
INT8_BLOCK(all_int8_values, int8_values_of)

INLINE void int8_scores_part(const uint8_t *const *at, int64_t width, Query *queries, int count, int64_t first, Int8Space *space) {
    lay_keys(at, width, space);
    all_int8_scores(space, width, queries, count, first);
}

INLINE void int8_values_part(const uint8_t *const *at, int64_t width, Query *queries, int count, int64_t first, Int8Space *space) {
    lay_values(at, width, space);
    all_int8_values(space, width, queries, count, first);
}

#else /* plain loops, which the compiler makes vectors of */

INLINE void int8_in_order(float *out, int64_t dim) { (void)out, (void)dim; }

INLINE int32_t group_dot(const int8_t *query, const uint8_t *key) {
    int32_t sum = 0;
    for (int i = 0; i < GROUP; i++) sum += query[i] * (int8_t)(key[i] ^ 128);
    return sum;
}

static void int8_scores_part(const uint8_t *const *at, int64_t width, Query *queries, int count, int64_t first, Int8Space *space) {
    int64_t groups = width / GROUP;
    (void)space;
    for (int i = 0; i < PLACES; i++)
        for (int q = 0; q < count; q++) {
            float total = 0.0f;
            for (int64_t g = 0; g < groups; g++) {
                uint16_t scale;
                memcpy(&scale, at[i] + width + 2 * g, 2);
                float own = (float)group_dot(queries[q].codes + g * GROUP, at[i] + g * GROUP);
                total = s_fma(own * queries[q].scales[g], half_to_float(scale), total);
            }
            queries[q].scores[first + i] = total;
        }
}

static void int8_values_part(const uint8_t *const *at, int64_t width, Query *queries, int count, int64_t first, Int8Space *space) {
    value_scales(at, width, space->scales);
    for (int q = 0; q < count; q++) {
        uint8_t codes[PLACES];
        float scale = weight_codes(queries[q].scores + first, space->scales, codes);
        for (int64_t c = 0; c < width; c += GROUP) {
            int32_t sums[GROUP] = {0};
            for (int p = 0; p < PLACES; p++) {
                const int8_t *value = (const int8_t *)at[p] + c;
                for (int i = 0; i < GROUP; i++) sums[i] += (int16_t)codes[p] * (int16_t)value[i];
            }
            for (int i = 0; i < GROUP; i++) queries[q].out[c + i] = s_fma((float)sums[i], scale, queries[q].out[c + i]);
        }
    }
}

#endif

/* The queries' scores of the slots in a block. */
static void int8_scores(const uint8_t *const *at, int64_t left, int64_t dim, Query *queries, int count, int64_t first, Int8Space *space) {
    for (int64_t i = 0; i < left; i += PLACES) int8_scores_part(at + i, padded(dim, GROUP), queries, count, first + i, space);
}

static void int8_values(const uint8_t *const *at, int64_t left, int64_t dim, Query *queries, int count, int64_t first, Int8Space *space) {
    for (int64_t i = 0; i < left; i += PLACES) int8_values_part(at + i, padded(dim, GROUP), queries, count, first + i, space);
}

#endif

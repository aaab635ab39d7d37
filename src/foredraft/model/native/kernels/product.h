/* y = x W^T for quantised weights and activations.
 *
 * Sums within a group of 32 inputs are exact integers, and groups are added as floats in their order, so that a row's
 * result does not depend on the other rows, whichever rows share a tile.
 */
#ifndef FOREDRAFT_PRODUCT_H
#define FOREDRAFT_PRODUCT_H

#include "pack.h"

#define PANEL 64 /* rows whose activations stay in the caches of a core while weights pass */

/* Activations of one product: codes in [-127, 127] with one scale per row and group, value = scale * code. */
typedef struct {
    const int8_t *codes;    /* [groups, across, GROUP] */
    const float *scales;    /* [groups, across] */
    const int32_t *offsets; /* [groups, across]: what symmetric codes add to the integer sum */
    const float *sums;      /* [groups, across]: scale * sum of codes, for minima */
    int64_t across;         /* rows that there is space for */
    const float *floats;    /* [rows, stride], for float weights */
    int64_t stride;
} Activations;

/* A group of the activations, from a row on. */
typedef struct {
    const int8_t *codes;
    const float *scales, *sums;
    const int32_t *offsets;
} Part;

INLINE Part part_at(const Activations *a, int64_t row, int64_t group) {
    int64_t place = group * a->across + row;
    return (Part){a->codes + place * GROUP, a->scales + place, a->sums + place, a->offsets + place};
}

/* Where the results of a block of outputs go. */
typedef struct {
    float *first;          /* of row 0 */
    int64_t stride;        /* between rows */
    const int64_t *places; /* the place of each row, or NULL: its own */
} Output;

INLINE float *output_row(const Output *y, int64_t row) {
    return y->first + (y->places ? y->places[row] : row) * y->stride;
}

#if defined(__ARM_FEATURE_DOTPROD)
#define SIGNED_CODES 128 /* sdot takes codes of 8 bits as code - 128 */
#else
#define SIGNED_CODES 0
#endif

/* Quantise a group of a row for a matrix. */
INLINE void quantise_group(const Matrix *m, const float *x, int8_t *codes, float *scale, int32_t *offset, float *weighted) {
    int32_t shift = (m->bits == 8 ? SIGNED_CODES : 0) - (m->zero == MINIMA ? 0 : m->zero);
    vf high = v_abs(v_load(x));
    for (int i = W; i < GROUP; i += W) high = v_max(high, v_abs(v_load(x + i)));
    float most = v_highest(high), inverse = most > 0.0f ? 127.0f / most : 0.0f;
    uint32_t sum = 0;
    for (int i = 0; i < GROUP; i += W) sum += (uint32_t)v_quantise(v_load(x + i), inverse, codes + i);
    *scale = most / 127.0f;
    *offset = (int32_t)((uint32_t)shift * sum);
    *weighted = *scale * (float)(int32_t)sum;
}

/* Whether few rows are fetched near: true, but Intel's memory answers too late for that. */
static int fetches_near = 1;

#if defined(__x86_64__)
__attribute__((constructor)) static void know_processor(void) {
    __builtin_cpu_init();
    fetches_near = !__builtin_cpu_is("intel");
}
#endif

/* Fetch weights ahead; a block is one stream, and the next block follows it. Memory is the limit for few rows: on Zen 4,
 * what is fetched far ahead into the second level of the caches comes in the way then, but long rows of 4 bits gain by the
 * first level. With more rows, and on a Xeon always, far is better. Measured: docs/log.md.
 */
INLINE void fetch_ahead(const uint8_t *block, int64_t group, int64_t groups, int bits, int minima, int rows) {
    const int64_t size = group_bytes(bits, minima);
    const uint8_t *here = block + group * size;
    const int few = rows <= bits / 4 && fetches_near, deep = few && bits == 4 && groups >= 64;
    for (int64_t line = 0; line < size; line += 64) {
        if (deep)
            __builtin_prefetch(here + 4096 + line, 0, 3);
        else
            __builtin_prefetch(here + (few ? 512 : 8192) + line, 0, 2);
    }
}

#if W == 16

#define MOST_ROWS 12

INLINE void group_sums(const uint8_t *w, int bits, int rows, const int8_t *x, __m512i *sums) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int c = 0; c < (bits == 4 ? 4 : 8); c++) {
        __m512i codes = _mm512_load_si512(w + 64 * c);
        __m512i first = bits == 4 ? _mm512_and_si512(codes, low) : codes;
        for (int r = 0; r < rows; r++)
            sums[r] = _mm512_dpbusd_epi32(sums[r], first, _mm512_set1_epi32(four(x + r * GROUP + 4 * c)));
        if (bits == 4) {
            __m512i second = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low);
            for (int r = 0; r < rows; r++)
                sums[r] = _mm512_dpbusd_epi32(sums[r], second, _mm512_set1_epi32(four(x + r * GROUP + 16 + 4 * c)));
        }
    }
}

INLINE void block_rows(
    const uint8_t *block, int64_t groups, int bits, int minima, int rows, const Activations *a, int64_t row,
    const float *bias, const Output *y) {
    vf total[MOST_ROWS];
    for (int r = 0; r < rows; r++) total[r] = v_set(0.0f);
    for (int64_t g = 0; g < groups; g++) {
        const Group at = group_at(block, groups, g, bits, minima);
        const Part x = part_at(a, row, g);
        if (row == 0) fetch_ahead(block, g, groups, bits, minima, rows);
        __m512i sums[MOST_ROWS];
        for (int r = 0; r < rows; r++) sums[r] = _mm512_set1_epi32(x.offsets[r]);
        group_sums(at.codes, bits, rows, x.codes, sums);
        vf scale = v_load_half(at.scales);
        for (int r = 0; r < rows; r++)
            total[r] = v_fma(v_mul(_mm512_cvtepi32_ps(sums[r]), v_set(x.scales[r])), scale, total[r]);
        if (minima) {
            vf minimum = v_load_half(at.minima);
            for (int r = 0; r < rows; r++) total[r] = v_fma(v_set(x.sums[r]), minimum, total[r]);
        }
    }
    for (int r = 0; r < rows; r++)
        v_store(output_row(y, row + r), bias ? v_add(total[r], v_load(bias)) : total[r]);
}

#elif W == 8

#define MOST_ROWS 4

/* For outputs 8 h to 8 h + 7: sums of pairs of products of 4-bit codes fit 16 bits for a whole group. */
INLINE void group_sums(const uint8_t *w, int bits, int rows, const int8_t *x, __m256i *sums) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i first[MOST_ROWS], second[MOST_ROWS];
    for (int r = 0; r < rows; r++) first[r] = second[r] = _mm256_setzero_si256();
    for (int c = 0; c < (bits == 4 ? 4 : 8); c++) {
        __m256i codes = _mm256_load_si256((const __m256i *)(w + 64 * c));
        __m256i lower = _mm256_and_si256(codes, low), upper = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low);
        for (int r = 0; r < rows; r++) {
            const int8_t *p = x + r * GROUP + 4 * c;
            __m256i own = _mm256_set1_epi32(four(p)), other = bits == 4 ? _mm256_set1_epi32(four(p + 16)) : own;
            first[r] = _mm256_add_epi16(first[r], _mm256_maddubs_epi16(lower, own));
            second[r] = _mm256_add_epi16(second[r], _mm256_maddubs_epi16(upper, other));
        }
    }
    const __m256i one = _mm256_set1_epi16(1), upper_unit = _mm256_set1_epi16(bits == 4 ? 1 : 16);
    for (int r = 0; r < rows; r++) {
        __m256i both = _mm256_add_epi32(_mm256_madd_epi16(first[r], one), _mm256_madd_epi16(second[r], upper_unit));
        sums[r] = _mm256_add_epi32(sums[r], both);
    }
}

INLINE void block_rows(
    const uint8_t *block, int64_t groups, int bits, int minima, int rows, const Activations *a, int64_t row,
    const float *bias, const Output *y) {
    vf total[2 * MOST_ROWS];
    for (int r = 0; r < 2 * rows; r++) total[r] = v_set(0.0f);
    for (int64_t g = 0; g < groups; g++) {
        const Group at = group_at(block, groups, g, bits, minima);
        const Part x = part_at(a, row, g);
        if (row == 0) fetch_ahead(block, g, groups, bits, minima, rows);
        for (int half = 0; half < 2; half++) {
            __m256i sums[MOST_ROWS];
            for (int r = 0; r < rows; r++) sums[r] = _mm256_set1_epi32(x.offsets[r]);
            group_sums(at.codes + 32 * half, bits, rows, x.codes, sums);
            vf scale = v_load_half(at.scales + W * half);
            vf *own = total + half * rows;
            for (int r = 0; r < rows; r++)
                own[r] = v_fma(v_mul(_mm256_cvtepi32_ps(sums[r]), v_set(x.scales[r])), scale, own[r]);
            if (minima) {
                vf minimum = v_load_half(at.minima + W * half);
                for (int r = 0; r < rows; r++) own[r] = v_fma(v_set(x.sums[r]), minimum, own[r]);
            }
        }
    }
    for (int half = 0; half < 2; half++)
        for (int r = 0; r < rows; r++) {
            vf result = total[half * rows + r];
            v_store(output_row(y, row + r) + W * half, bias ? v_add(result, v_load(bias + W * half)) : result);
        }
}

#elif W == 4

#define MOST_ROWS 4

INLINE void group_sums(const uint8_t *w, int bits, int rows, const int8_t *x, int32x4_t *sums) {
    const uint8x16_t low = vdupq_n_u8(15), sign = vdupq_n_u8(128);
    for (int c = 0; c < (bits == 4 ? 4 : 8); c++)
        for (int q = 0; q < 4; q++) {
            uint8x16_t codes = vld1q_u8(w + 64 * c + 16 * q);
            int8x16_t first = vreinterpretq_s8_u8(bits == 4 ? vandq_u8(codes, low) : veorq_u8(codes, sign));
            int8x16_t second = vreinterpretq_s8_u8(vshrq_n_u8(codes, 4));
            for (int r = 0; r < rows; r++) {
                const int8_t *p = x + r * GROUP + 4 * c;
                int32x4_t *own = sums + 4 * r + q;
                *own = vdotq_s32(*own, first, vreinterpretq_s8_s32(vdupq_n_s32(four(p))));
                if (bits == 4) *own = vdotq_s32(*own, second, vreinterpretq_s8_s32(vdupq_n_s32(four(p + 16))));
            }
        }
}

INLINE void block_rows(
    const uint8_t *block, int64_t groups, int bits, int minima, int rows, const Activations *a, int64_t row,
    const float *bias, const Output *y) {
    vf total[4 * MOST_ROWS];
    for (int i = 0; i < 4 * rows; i++) total[i] = v_set(0.0f);
    for (int64_t g = 0; g < groups; g++) {
        const Group at = group_at(block, groups, g, bits, minima);
        const Part x = part_at(a, row, g);
        int32x4_t sums[4 * MOST_ROWS];
        for (int i = 0; i < 4 * rows; i++) sums[i] = vdupq_n_s32(x.offsets[i / 4]);
        group_sums(at.codes, bits, rows, x.codes, sums);
        for (int i = 0; i < 4 * rows; i++) {
            vf scale = v_load_half(at.scales + W * (i % 4)), own = v_set(x.scales[i / 4]);
            total[i] = v_fma(v_mul(vcvtq_f32_s32(sums[i]), own), scale, total[i]);
            if (minima) {
                vf minimum = v_load_half(at.minima + W * (i % 4));
                total[i] = v_fma(v_set(x.sums[i / 4]), minimum, total[i]);
            }
        }
    }
    for (int i = 0; i < 4 * rows; i++) {
        vf result = bias ? v_add(total[i], v_load(bias + W * (i % 4))) : total[i];
        v_store(output_row(y, row + i / 4) + W * (i % 4), result);
    }
}

#else

#define MOST_ROWS 1

INLINE void block_rows(
    const uint8_t *block, int64_t groups, int bits, int minima, int rows, const Activations *a, int64_t row,
    const float *bias, const Output *y) {
    (void)rows;
    float *out = output_row(y, row);
    float total[TILE] = {0};
    for (int64_t g = 0; g < groups; g++) {
        const Group at = group_at(block, groups, g, bits, minima);
        const Part x = part_at(a, row, g);
        int32_t sums[TILE];
        for (int o = 0; o < TILE; o++) sums[o] = *x.offsets;
        for (int i = 0; i < GROUP; i++) {
            int32_t code = x.codes[i];
            for (int o = 0; o < TILE; o++) sums[o] += code * code_at(at.codes, bits, o, i);
        }
        for (int o = 0; o < TILE; o++) {
            total[o] += (float)sums[o] * *x.scales * half_to_float(at.scales[o]);
            if (minima) total[o] += *x.sums * half_to_float(at.minima[o]);
        }
    }
    for (int o = 0; o < TILE; o++) out[o] = bias ? total[o] + bias[o] : total[o];
}

#endif

static void float_block(const float *block, const Activations *a, int64_t row, int64_t inputs, const float *bias, float *y) {
    const float *x = a->floats + row * a->stride;
    for (int o = 0; o < TILE; o += W) {
        vf total = v_set(0.0f);
        for (int64_t i = 0; i < inputs; i++) total = v_fma(v_set(x[i]), v_load(block + i * TILE + o), total);
        v_store(y + o, bias ? v_add(total, v_load(bias + o)) : total);
    }
}

#define ROWS(count)                                                                                          \
    case count:                                                                                              \
        block_rows(block, groups, bits, minima, count, a, row, bias, y);                                     \
        break;

/* All rows from ``row`` on, ``left`` of them, with one block of outputs. */
INLINE void block_all(
    const uint8_t *block, int64_t groups, int bits, int minima, int64_t left, const Activations *a, int64_t row,
    const float *bias, const Output *y) {
    for (int64_t taken; left > 0; left -= taken, row += taken) {
        taken = left < MOST_ROWS ? left : MOST_ROWS;
        switch (taken) {
            ROWS(1)
#if MOST_ROWS > 1
            ROWS(2)
            ROWS(3)
            ROWS(4)
#endif
#if MOST_ROWS > 4
            ROWS(5)
            ROWS(6)
            ROWS(7)
            ROWS(8)
            ROWS(9)
            ROWS(10)
            ROWS(11)
            ROWS(12)
#endif
        }
    }
}

#define KIND(name, bits, minima)                                                                                     \
    static __attribute__((noinline)) void name(                                                                      \
        const uint8_t *block, int64_t groups, int64_t left, const Activations *a, int64_t row, const float *bias,    \
        const Output *y) {                                                                                           \
        block_all(block, groups, bits, minima, left, a, row, bias, y);                                               \
    }
KIND(int4_symmetric, 4, 0)
KIND(int4_minima, 4, 1)
KIND(int8_symmetric, 8, 0)
KIND(int8_minima, 8, 1)

/* Outputs of the blocks [first, last) for all rows; each row of y has space for whole blocks. */
static void product_blocks(const Matrix *m, const Activations *a, int64_t rows, const Output *y, int64_t first, int64_t last) {
    int64_t size = block_bytes(m->inputs, m->bits, m->zero), groups = groups_of(m->inputs);
    for (int64_t row = 0; row < rows; row += PANEL) {
        int64_t left = rows - row < PANEL ? rows - row : PANEL;
        for (int64_t b = first; b < last; b++) {
            const uint8_t *block = m->data + b * size;
            const float *bias = m->bias ? m->bias + b * TILE : NULL;
            Output out = {y->first + b * TILE, y->stride, y->places};
            if (m->bits == 32) {
                for (int64_t r = row; r < row + left; r++)
                    float_block((const float *)block, a, r, m->inputs, bias, output_row(&out, r));
            } else if (m->bits == 4) {
                (m->zero == MINIMA ? int4_minima : int4_symmetric)(block, groups, left, a, row, bias, &out);
            } else {
                (m->zero == MINIMA ? int8_minima : int8_symmetric)(block, groups, left, a, row, bias, &out);
            }
        }
    }
}

#endif

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
    const int32_t *counts;  /* [groups, across, 2]: sums of the codes of the first 16 inputs, and of all */
    const float *sums;      /* [groups, across]: scale * sum of codes, for minima */
    int64_t across;         /* rows that there is space for */
    const float *floats;    /* [rows, stride], for float weights */
    int64_t stride;
} Activations;

/* A group of the activations, from a row on. */
typedef struct {
    const int8_t *codes;
    const float *scales, *sums;
    const int32_t *counts;
} Part;

INLINE Part part_at(const Activations *a, int64_t row, int64_t group) {
    int64_t place = group * a->across + row;
    return (Part){a->codes + place * GROUP, a->scales + place, a->sums + place, a->counts + 2 * place};
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

/* What is added to the integer sum of a group for each unit of its activations' sum. */
INLINE int32_t shift_of(Form form) { return (form.bits == 8 ? SIGNED_CODES : 0) - (form.zero == MINIMA ? 0 : form.zero); }

/* Quantise a group of a row; counts: see Activations. */
INLINE void quantise_group(const float *x, int8_t *codes, float *scale, int32_t *counts, float *weighted) {
    vf high = v_abs(v_load(x));
    for (int i = W; i < GROUP; i += W) high = v_max(high, v_abs(v_load(x + i)));
    float most = v_highest(high), inverse = most > 0.0f ? 127.0f / most : 0.0f;
    uint32_t first = 0, second = 0;
    for (int i = 0; i < GROUP / 2; i += W) first += (uint32_t)v_quantise(v_load(x + i), inverse, codes + i);
    for (int i = GROUP / 2; i < GROUP; i += W) second += (uint32_t)v_quantise(v_load(x + i), inverse, codes + i);
    *scale = most / 127.0f;
    counts[0] = (int32_t)first, counts[1] = (int32_t)(first + second);
    *weighted = *scale * (float)counts[1];
}

/* Whether few rows of 8 bits fetch near: true, but Intel's memory answers too late for that. */
static int fetches_near = 1;

#if defined(__x86_64__)
__attribute__((constructor)) static void know_processor(void) {
    __builtin_cpu_init();
    fetches_near = !__builtin_cpu_is("intel");
}
#endif

/* Fetch weights ahead; a block is one stream, and the next block follows it. A page and a half ahead, into the second level of
 * the caches: what is fetched within a page comes too late. One or two rows of 8 bits wait for memory alone and gain by
 * the first level. Measured: docs/log/native.md.
 */
INLINE void fetch_ahead(const uint8_t *block, int64_t group, Kind kind, int rows) {
    const int64_t size = group_share(kind);
    const uint8_t *here = block + group * size;
    const int near = kind.bits == 8 && rows <= 2 && fetches_near;
    for (int64_t line = 0; line < size; line += 64) {
        if (near)
            __builtin_prefetch(here + 256 + line, 0, 3);
        else
            __builtin_prefetch(here + (6144) + line, 0, 2);
    }
}

/* The integer sums of a group: of all its inputs, or, where scales are ``split``, of the first 16 and of the others. Codes are
 * read 64 bytes at a time, of which byte 4 o + j is input 4 k + j of output o; ``k`` counts to 8.
 */
INLINE int is_split(Kind kind) { return kind.small && !kind.minima; }

/* Where the high bits of codes k lie (see pack.h): which vector of 64 bytes, and how far they go to the left to bits 4 and 5. */
INLINE int high_vector(int bits, int k) { return bits == 6 ? k / 4 : 0; }
INLINE int high_shift(int bits, int k) { return bits == 6 ? 4 - 2 * (k % 4) : 4 - k; }
#define HIGH_MASK(bits) ((bits) == 6 ? 0x30 : 0x10)

#if W == 16

#define MOST_ROWS 12

INLINE __m512i codes_at(const uint8_t *w, int bits, int k) {
    const __m512i low = _mm512_set1_epi8(15);
    if (bits == 8) return _mm512_load_si512(w + 64 * k);
    __m512i both = _mm512_load_si512(w + 64 * (k % 4));
    __m512i codes = _mm512_and_si512(k < 4 ? both : _mm512_srli_epi16(both, 4), low);
    if (bits == 4) return codes;
    __m512i high = _mm512_load_si512(w + 256 + 64 * high_vector(bits, k));
    int shift = high_shift(bits, k);
    high = shift > 0 ? _mm512_slli_epi16(high, (unsigned)shift) : shift < 0 ? _mm512_srli_epi16(high, (unsigned)-shift) : high;
    return _mm512_ternarylogic_epi32(codes, high, _mm512_set1_epi8(HIGH_MASK(bits)), 0xf8); /* codes | (high & mask) */
}

INLINE void block_rows(
    const uint8_t *block, int64_t groups, Kind kind, int32_t shift, int rows, const Activations *a, int64_t row, const float *bias,
    const Output *y) {
    const int split = is_split(kind);
    vf total[MOST_ROWS];
    for (int r = 0; r < rows; r++) total[r] = v_set(0.0f);
    for (int64_t g = 0; g < groups; g++) {
        const Group at = group_at(block, groups, g, kind);
        const Part x = part_at(a, row, g);
        if (row == 0) fetch_ahead(block, g, kind, rows);
        __m512i sums[MOST_ROWS], others[MOST_ROWS];
        for (int r = 0; r < rows; r++) {
            int32_t first = x.counts[2 * r], all = x.counts[2 * r + 1];
            sums[r] = kind.minima ? _mm512_setzero_si512() : _mm512_set1_epi32(shift * (split ? first : all));
            if (split) others[r] = _mm512_set1_epi32(shift * (all - first));
        }
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) {
            __m512i codes = codes_at(at.codes, kind.bits, k);
            for (int r = 0; r < rows; r++) {
                __m512i *own = split && k >= 4 ? others + r : sums + r;
                *own = _mm512_dpbusd_epi32(*own, codes, _mm512_set1_epi32(four(x.codes + r * GROUP + 4 * k)));
            }
        }
        if (split) {
            vf scale = v_load_half(at.scales), first = v_load_signed(at.small), second = v_load_signed(at.small + TILE);
            for (int r = 0; r < rows; r++) {
                vf sum = v_fma(_mm512_cvtepi32_ps(others[r]), second, v_mul(_mm512_cvtepi32_ps(sums[r]), first));
                total[r] = v_fma(v_mul(sum, v_set(x.scales[r])), scale, total[r]);
            }
            continue;
        }
        vf scale = scales_at(&at, kind, 0);
        for (int r = 0; r < rows; r++)
            total[r] = v_fma(v_mul(_mm512_cvtepi32_ps(sums[r]), v_set(x.scales[r])), scale, total[r]);
        if (kind.minima) {
            vf minimum = minima_at(&at, kind, 0);
            for (int r = 0; r < rows; r++) total[r] = v_fma(v_set(x.sums[r]), minimum, total[r]);
        }
    }
    for (int r = 0; r < rows; r++)
        v_store(output_row(y, row + r), bias ? v_add(total[r], v_load(bias)) : total[r]);
}

#elif W == 8

#define MOST_ROWS 4

INLINE __m256i codes_at(const uint8_t *w, int bits, int k) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i both = _mm256_load_si256((const __m256i *)(w + 64 * (k % 4)));
    __m256i codes = _mm256_and_si256(k < 4 ? both : _mm256_srli_epi16(both, 4), low);
    if (bits == 4) return codes;
    __m256i high = _mm256_load_si256((const __m256i *)(w + 256 + 64 * high_vector(bits, k)));
    int shift = high_shift(bits, k);
    high = shift > 0 ? _mm256_slli_epi16(high, shift) : shift < 0 ? _mm256_srli_epi16(high, -shift) : high;
    return _mm256_or_si256(codes, _mm256_and_si256(high, _mm256_set1_epi8(HIGH_MASK(bits))));
}

/* Sums of products of bytes for outputs 8 h to 8 h + 7, in pairs of 16 bits. Codes below 32 fit for half a group; those of 6
 * bits for a quarter; of codes of 8 bits each half is multiplied alone. ``first``: of the first 16 inputs, or all if equal.
 */
INLINE void group_sums(const uint8_t *w, int bits, int rows, const int8_t *x, __m256i *first, __m256i *second) {
    const __m256i one = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15), sixteen = _mm256_set1_epi16(16);
    const int together = bits == 6 ? 2 : 4;
    __m256i lower[MOST_ROWS], upper[MOST_ROWS];
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) {
        __m256i *sums = k < 4 ? first : second;
        __m256i codes = bits == 8 ? _mm256_load_si256((const __m256i *)(w + 64 * k)) : codes_at(w, bits, k);
        __m256i high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low);
        if (bits == 8) codes = _mm256_and_si256(codes, low);
        for (int r = 0; r < rows; r++) {
            __m256i own = _mm256_set1_epi32(four(x + r * GROUP + 4 * k));
            __m256i sum = _mm256_maddubs_epi16(codes, own);
            lower[r] = k % together ? _mm256_add_epi16(lower[r], sum) : sum;
            if (bits == 8) {
                sum = _mm256_maddubs_epi16(high, own);
                upper[r] = k % together ? _mm256_add_epi16(upper[r], sum) : sum;
            }
            if (k % together != together - 1) continue;
            sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(lower[r], one));
            if (bits == 8) sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(upper[r], sixteen));
        }
    }
}

INLINE void block_rows(
    const uint8_t *block, int64_t groups, Kind kind, int32_t shift, int rows, const Activations *a, int64_t row, const float *bias,
    const Output *y) {
    const int split = is_split(kind);
    vf total[2 * MOST_ROWS];
    for (int r = 0; r < 2 * rows; r++) total[r] = v_set(0.0f);
    for (int64_t g = 0; g < groups; g++) {
        const Group at = group_at(block, groups, g, kind);
        const Part x = part_at(a, row, g);
        if (row == 0) fetch_ahead(block, g, kind, rows);
        for (int half = 0; half < 2; half++) {
            __m256i sums[MOST_ROWS], others[MOST_ROWS];
            for (int r = 0; r < rows; r++) {
                int32_t first = x.counts[2 * r], all = x.counts[2 * r + 1];
                sums[r] = _mm256_set1_epi32(shift * (split ? first : all));
                others[r] = _mm256_set1_epi32(shift * (all - first));
            }
            group_sums(at.codes + 32 * half, kind.bits, rows, x.codes, sums, split ? others : sums);
            vf *own = total + half * rows;
            if (split) {
                vf scale = v_load_half(at.scales + W * half), first = v_load_signed(at.small + W * half);
                vf second = v_load_signed(at.small + TILE + W * half);
                for (int r = 0; r < rows; r++) {
                    vf sum = v_fma(_mm256_cvtepi32_ps(others[r]), second, v_mul(_mm256_cvtepi32_ps(sums[r]), first));
                    own[r] = v_fma(v_mul(sum, v_set(x.scales[r])), scale, own[r]);
                }
                continue;
            }
            vf scale = scales_at(&at, kind, W * half);
            for (int r = 0; r < rows; r++)
                own[r] = v_fma(v_mul(_mm256_cvtepi32_ps(sums[r]), v_set(x.scales[r])), scale, own[r]);
            if (kind.minima) {
                vf minimum = minima_at(&at, kind, W * half);
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

INLINE int8x16_t codes_at(const uint8_t *w, int bits, int k) {
    if (bits == 8) return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w + 64 * k), vdupq_n_u8(128)));
    uint8x16_t both = vld1q_u8(w + 64 * (k % 4));
    uint8x16_t codes = k < 4 ? vandq_u8(both, vdupq_n_u8(15)) : vshrq_n_u8(both, 4);
    if (bits == 4) return vreinterpretq_s8_u8(codes);
    uint8x16_t high = vshlq_u8(vld1q_u8(w + 256 + 64 * high_vector(bits, k)), vdupq_n_s8((int8_t)high_shift(bits, k)));
    return vreinterpretq_s8_u8(vorrq_u8(codes, vandq_u8(high, vdupq_n_u8(HIGH_MASK(bits)))));
}

INLINE void block_rows(
    const uint8_t *block, int64_t groups, Kind kind, int32_t shift, int rows, const Activations *a, int64_t row, const float *bias,
    const Output *y) {
    const int split = is_split(kind);
    vf total[4 * MOST_ROWS];
    for (int i = 0; i < 4 * rows; i++) total[i] = v_set(0.0f);
    for (int64_t g = 0; g < groups; g++) {
        const Group at = group_at(block, groups, g, kind);
        const Part x = part_at(a, row, g);
        int32x4_t sums[4 * MOST_ROWS], others[4 * MOST_ROWS];
        for (int i = 0; i < 4 * rows; i++) {
            int32_t first = x.counts[i / 4 * 2], all = x.counts[i / 4 * 2 + 1];
            sums[i] = vdupq_n_s32(shift * (split ? first : all));
            others[i] = vdupq_n_s32(shift * (all - first));
        }
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++)
            for (int q = 0; q < 4; q++) {
                int8x16_t codes = codes_at(at.codes + 16 * q, kind.bits, k);
                for (int r = 0; r < rows; r++) {
                    int32x4_t *own = (split && k >= 4 ? others : sums) + 4 * r + q;
                    *own = vdotq_s32(*own, codes, vreinterpretq_s8_s32(vdupq_n_s32(four(x.codes + r * GROUP + 4 * k))));
                }
            }
        for (int i = 0; i < 4 * rows; i++) {
            vf own = v_set(x.scales[i / 4]);
            if (split) {
                vf first = v_load_signed(at.small + W * (i % 4)), second = v_load_signed(at.small + TILE + W * (i % 4));
                vf sum = v_fma(vcvtq_f32_s32(others[i]), second, v_mul(vcvtq_f32_s32(sums[i]), first));
                total[i] = v_fma(v_mul(sum, own), v_load_half(at.scales + W * (i % 4)), total[i]);
                continue;
            }
            total[i] = v_fma(v_mul(vcvtq_f32_s32(sums[i]), own), scales_at(&at, kind, W * (i % 4)), total[i]);
            if (kind.minima) total[i] = v_fma(v_set(x.sums[i / 4]), minima_at(&at, kind, W * (i % 4)), total[i]);
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
    const uint8_t *block, int64_t groups, Kind kind, int32_t shift, int rows, const Activations *a, int64_t row, const float *bias,
    const Output *y) {
    (void)rows;
    const int split = is_split(kind);
    float *out = output_row(y, row);
    float total[TILE] = {0};
    for (int64_t g = 0; g < groups; g++) {
        const Group at = group_at(block, groups, g, kind);
        const Part x = part_at(a, row, g);
        int32_t sums[TILE], others[TILE];
        for (int o = 0; o < TILE; o++) {
            sums[o] = shift * (split ? x.counts[0] : x.counts[1]);
            others[o] = shift * (x.counts[1] - x.counts[0]);
        }
        for (int i = 0; i < GROUP; i++) {
            int32_t code = x.codes[i], *own = split && i >= GROUP / 2 ? others : sums;
            for (int o = 0; o < TILE; o++) own[o] += code * code_at(at.codes, kind.bits, o, i);
        }
        for (int o = 0; o < TILE; o++) {
            if (split) {
                float sum = (float)others[o] * v_load_signed(at.small + TILE + o) + (float)sums[o] * v_load_signed(at.small + o);
                total[o] += sum * *x.scales * half_to_float(at.scales[o]);
                continue;
            }
            total[o] += (float)sums[o] * *x.scales * scales_at(&at, kind, o);
            if (kind.minima) total[o] += *x.sums * minima_at(&at, kind, o);
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

#define ROWS(count)                                                        \
    case count:                                                            \
        block_rows(block, groups, kind, shift, count, a, row, bias, y);           \
        break;

/* All rows from ``row`` on, ``left`` of them, with one block of outputs. */
INLINE void block_all(
    const uint8_t *block, int64_t groups, Kind kind, int32_t shift, int64_t left, const Activations *a, int64_t row, const float *bias,
    const Output *y) {
    const int64_t most = is_split(kind) && MOST_ROWS > 8 ? 8 : MOST_ROWS; /* as many as have registers */
    for (int64_t taken; left > 0; left -= taken, row += taken) {
        taken = left < most ? left : most;
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

#define KIND(name, bits, minima, small)                                                                              \
    static __attribute__((noinline)) void name(                                                                      \
        const uint8_t *block, int64_t groups, int32_t shift, int64_t left, const Activations *a, int64_t row,        \
        const float *bias, const Output *y) {                                                                        \
        block_all(block, groups, (Kind){bits, minima, small}, shift, left, a, row, bias, y);                         \
    }
#define KINDS(bits)                      \
    KIND(symmetric_##bits, bits, 0, 0)   \
    KIND(minima_##bits, bits, 1, 0)      \
    KIND(small_##bits, bits, 0, 1)       \
    KIND(small_minima_##bits, bits, 1, 1)
KINDS(4)
KINDS(5)
KINDS(6)
KINDS(8)

typedef void (*Kernel)(
    const uint8_t *, int64_t, int32_t, int64_t, const Activations *, int64_t, const float *, const Output *);

static Kernel kernel_of(Form form) {
    static const Kernel kernels[4][4] = {
        {symmetric_4, minima_4, small_4, small_minima_4},
        {symmetric_5, minima_5, small_5, small_minima_5},
        {symmetric_6, minima_6, small_6, small_minima_6},
        {symmetric_8, minima_8, small_8, small_minima_8}};
    Kind kind = kind_of(form);
    return kernels[kind.bits == 8 ? 3 : kind.bits - 4][2 * kind.small + kind.minima];
}

/* Outputs of the blocks [first, last) of this matrix alone, for all rows; each row of y has space for whole blocks. */
static void own_blocks(const Matrix *m, const Activations *a, int64_t rows, const Output *y, int64_t first, int64_t last) {
    int64_t size = block_bytes(m->inputs, m->form), groups = groups_of(m->inputs);
    Kernel kernel = m->form.bits == 32 ? NULL : kernel_of(m->form);
    for (int64_t row = 0; row < rows; row += PANEL) {
        int64_t left = rows - row < PANEL ? rows - row : PANEL;
        for (int64_t b = first; b < last; b++) {
            const uint8_t *block = m->data + b * size;
            const float *bias = m->bias ? m->bias + b * TILE : NULL;
            Output out = {y->first + b * TILE, y->stride, y->places};
            if (kernel)
                kernel(block, groups, shift_of(m->form), left, a, row, bias, &out);
            else
                for (int64_t r = row; r < row + left; r++)
                    float_block((const float *)block, a, r, m->inputs, bias, output_row(&out, r));
        }
    }
}

/* The same for blocks that are counted through this matrix and the next ones. */
static void product_blocks(const Matrix *m, const Activations *a, int64_t rows, const Output *y, int64_t first, int64_t last) {
    Output out = *y;
    for (int64_t tiles; m && last > 0; m = m->next, first -= tiles, last -= tiles, out.first += tiles * TILE) {
        tiles = tiles_of(m->outputs);
        if (first < tiles) own_blocks(m, a, rows, &out, first > 0 ? first : 0, last < tiles ? last : tiles);
    }
}

#endif

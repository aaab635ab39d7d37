/* Blocks of GGUF files into tiles, without another rounding.
 *
 * A row is a sequence of blocks: of 32 weights with a half-precision scale, or, in K-quants, of 256 weights with small
 * scales. Layouts: https://github.com/ggml-org/ggml, ggml-common.h.
 */
#ifndef FOREDRAFT_BLOCKS_H
#define FOREDRAFT_BLOCKS_H

#include "pack.h"
#include "pool.h"

enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23 };

/* A block as tiles hold it: the codes, small integers (two of each 32 weights, next to each other) and two halves. */
typedef struct {
    uint8_t codes[BLOCK_GROUPS * GROUP];
    int8_t small[2 * BLOCK_GROUPS];
    uint16_t scale, minimum;
} Block;

typedef void (*ReadBlock)(const uint8_t *from, Block *block);

INLINE uint16_t half_at(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

INLINE void low_and_high(const uint8_t *from, int count, uint8_t *low, uint8_t *high) {
    for (int i = 0; i < count; i++) low[i] = from[i] & 15, high[i] = from[i] >> 4;
}

/* The bits of a number are the fifth bits of 32 codes. */
INLINE void add_fifth_bits(const uint8_t *from, uint8_t *codes) {
    for (int i = 0; i < 32; i++) codes[i] |= (uint8_t)((from[i / 8] >> i % 8 & 1) << 4);
}

INLINE void read_q4_0(const uint8_t *from, Block *block) {
    block->scale = half_at(from);
    low_and_high(from + 2, 16, block->codes, block->codes + 16);
}

INLINE void read_q4_1(const uint8_t *from, Block *block) {
    block->scale = half_at(from), block->minimum = half_at(from + 2);
    low_and_high(from + 4, 16, block->codes, block->codes + 16);
}

INLINE void read_q5_0(const uint8_t *from, Block *block) {
    block->scale = half_at(from);
    low_and_high(from + 6, 16, block->codes, block->codes + 16);
    add_fifth_bits(from + 2, block->codes);
}

INLINE void read_q5_1(const uint8_t *from, Block *block) {
    block->scale = half_at(from), block->minimum = half_at(from + 2);
    low_and_high(from + 8, 16, block->codes, block->codes + 16);
    add_fifth_bits(from + 4, block->codes);
}

INLINE void read_q8_0(const uint8_t *from, Block *block) {
    block->scale = half_at(from);
    for (int i = 0; i < 32; i++) block->codes[i] = from[2 + i] ^ 128;
}

/* Values of the non-linear types of 4 bits, plus 128. */
static const uint8_t non_linear[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

INLINE void non_linear_codes(uint8_t *codes, int count) {
    for (int i = 0; i < count; i++) codes[i] = non_linear[codes[i]];
}

INLINE void read_iq4_nl(const uint8_t *from, Block *block) {
    read_q4_0(from, block);
    non_linear_codes(block->codes, 32);
}

/* Bits of 32 bytes, from ``first`` on, into as many codes at ``place``. */
INLINE void add_bits(const uint8_t *from, int first, int mask, int place, uint8_t *codes) {
    for (int i = 0; i < 32; i++) codes[i] |= (uint8_t)((from[i] >> first & mask) << place);
}

/* Codes of 128 weights in 64 bytes: 32 low halves, 32 high ones, and again. */
INLINE void nibbles_of_k(const uint8_t *from, uint8_t *codes, int count) {
    for (int i = 0; i < count; i += 64) low_and_high(from + i / 2, 32, codes + i, codes + i + 32);
}

/* Scales and minima of eight groups, 6 bits each in 12 bytes; the minima are subtracted. */
INLINE void read_six_bits(const uint8_t *from, Block *block) {
    const uint8_t *p = from + 4;
    block->scale = half_at(from), block->minimum = half_at(from + 2) ^ 0x8000;
    for (int i = 0; i < 4; i++) {
        block->small[2 * i] = (int8_t)(p[i] & 63), block->small[2 * i + 1] = (int8_t)(p[4 + i] & 63);
        block->small[8 + 2 * i] = (int8_t)((p[8 + i] & 15) | p[i] >> 6 << 4);
        block->small[9 + 2 * i] = (int8_t)(p[8 + i] >> 4 | p[4 + i] >> 6 << 4);
    }
}

INLINE void read_q4_k(const uint8_t *from, Block *block) {
    read_six_bits(from, block);
    nibbles_of_k(from + 16, block->codes, 256);
}

INLINE void read_q5_k(const uint8_t *from, Block *block) {
    read_six_bits(from, block);
    nibbles_of_k(from + 48, block->codes, 256);
    for (int group = 0; group < 8; group++) add_bits(from + 16, group, 1, 4, block->codes + 32 * group);
}

INLINE void read_q6_k(const uint8_t *from, Block *block) {
    for (int half = 0; half < 2; half++) {
        uint8_t *codes = block->codes + 128 * half;
        const uint8_t *high = from + 128 + 32 * half;
        low_and_high(from + 64 * half, 64, codes, codes + 64);
        for (int group = 0; group < 4; group++) add_bits(high, 2 * group, 3, 4, codes + 32 * group);
    }
    memcpy(block->small, from + 192, 16);
    block->scale = half_at(from + 208);
}

INLINE void read_q3_k(const uint8_t *from, Block *block) {
    const uint8_t *small = from + 96;
    memset(block->codes, 0, 256);
    for (int group = 0; group < 8; group++) {
        add_bits(from + 32 + group / 4 * 32, group % 4 * 2, 3, 0, block->codes + 32 * group);
        add_bits(from, group, 1, 2, block->codes + 32 * group);
    }
    for (int i = 0; i < 16; i++) {
        int low = small[i % 8] >> i / 8 * 4 & 15, high = small[8 + i % 4] >> i / 4 * 2 & 3;
        block->small[i] = (int8_t)((low | high << 4) - 32);
    }
    block->scale = half_at(from + 108);
}

INLINE void read_iq4_xs(const uint8_t *from, Block *block) {
    uint16_t high = half_at(from + 2);
    block->scale = half_at(from);
    for (int i = 0; i < 8; i++) {
        int scale = (from[4 + i / 2] >> i % 2 * 4 & 15) | (high >> 2 * i & 3) << 4;
        block->small[2 * i] = block->small[2 * i + 1] = (int8_t)(scale - 32);
        low_and_high(from + 8 + 16 * i, 16, block->codes + 32 * i, block->codes + 32 * i + 16);
    }
    non_linear_codes(block->codes, 256);
}

typedef struct {
    const uint8_t *const *rows; /* the blocks of each output */
    int64_t outputs, inputs;
    uint8_t *data;
    _Atomic int bad; /* whether a half is no finite number */
} Packing;

INLINE int is_finite_half(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

/* Tiles [first, last); ``read`` reads a block of so many bytes. */
INLINE void pack_tiles(Packing *p, Form form, ReadBlock read, int64_t bytes, int64_t first, int64_t last) {
    const Kind kind = kind_of(form);
    int64_t size = block_bytes(p->inputs, form), groups = groups_of(p->inputs), each = kind.small ? BLOCK_GROUPS : 1;
    for (int64_t tile = first; tile < last; tile++) {
        uint8_t *to = p->data + tile * size;
        memset(to, 0, (size_t)size);
        for (int64_t g = 0; g < groups; g += each)
            for (int64_t o = 0; o < TILE && tile * TILE + o < p->outputs; o++) {
                Block block;
                read(p->rows[tile * TILE + o] + g / each * bytes, &block);
                if (!is_finite_half(block.scale) || (kind.minima && !is_finite_half(block.minimum))) atomic_store(&p->bad, 1);
                for (int64_t i = 0; i < each; i++) {
                    Group at = group_at(to, groups, g + i, kind);
                    put_codes((uint8_t *)at.codes, kind.bits, o, block.codes + i * GROUP);
                    ((uint16_t *)at.scales)[o] = block.scale;
                    if (kind.minima) ((uint16_t *)at.minima)[o] = block.minimum;
                    if (kind.small) ((int8_t *)at.small)[o] = block.small[2 * i], ((int8_t *)at.small)[TILE + o] = block.small[2 * i + 1];
                }
            }
    }
}

#define STORED(name, bytes, bits, zero, scales)                                              \
    static void pack_##name(void *context, int64_t first, int64_t last, int thread) {         \
        (void)thread;                                                                          \
        pack_tiles(context, (Form){bits, zero, scales}, read_##name, bytes, first, last);      \
    }                                                                                          \
    static const Form form_##name = {bits, zero, scales};

STORED(q4_0, 18, 4, 8, HALF_SCALES)
STORED(q4_1, 20, 4, MINIMA, HALF_SCALES)
STORED(q5_0, 22, 5, 16, HALF_SCALES)
STORED(q5_1, 24, 5, MINIMA, HALF_SCALES)
STORED(q8_0, 34, 8, 128, HALF_SCALES)
STORED(q3_k, 110, 4, 4, SMALL_SCALES)
STORED(q4_k, 144, 4, MINIMA, SMALL_SCALES)
STORED(q5_k, 176, 5, MINIMA, SMALL_SCALES)
STORED(q6_k, 210, 6, 32, SMALL_SCALES)
STORED(iq4_nl, 18, 8, 128, HALF_SCALES)
STORED(iq4_xs, 136, 8, 128, SMALL_SCALES)

/* How a type is stored, and what packs it; NULL for a type that is not. */
static Work packing_of(int32_t type, Form *form) {
    switch (type) {
        case Q4_0: *form = form_q4_0; return pack_q4_0;
        case Q4_1: *form = form_q4_1; return pack_q4_1;
        case Q5_0: *form = form_q5_0; return pack_q5_0;
        case Q5_1: *form = form_q5_1; return pack_q5_1;
        case Q8_0: *form = form_q8_0; return pack_q8_0;
        case Q3_K: *form = form_q3_k; return pack_q3_k;
        case Q4_K: *form = form_q4_k; return pack_q4_k;
        case Q5_K: *form = form_q5_k; return pack_q5_k;
        case Q6_K: *form = form_q6_k; return pack_q6_k;
        case IQ4_NL: *form = form_iq4_nl; return pack_iq4_nl;
        case IQ4_XS: *form = form_iq4_xs; return pack_iq4_xs;
        default: return NULL;
    }
}

int32_t fd_block_form(int32_t type, Form *form) { return packing_of(type, form) ? OK : BAD_SHAPE; }

/* BAD_NUMBER: a scale is infinite or NaN, as in a damaged file. */
int32_t fd_pack_blocks(
    int32_t type, const uint8_t *const *rows, int64_t outputs, int64_t inputs, uint8_t *data, int32_t threads) {
    Form form;
    Work pack = packing_of(type, &form);
    if (!pack || bad_matrix(outputs, inputs, form) || inputs % GROUP) return BAD_SHAPE;
    Packing packing = {rows, outputs, inputs, data, 0};
    Pool pool;
    pool_begin(&pool);
    pool_resize(&pool, threads);
    parallel(&pool, pack, &packing, tiles_of(outputs), 4);
    pool_end(&pool);
    return packing.bad ? BAD_NUMBER : OK;
}

#endif

/* Weights into tiles of 16 outputs by 32 inputs, and back.
 *
 * The block of 16 outputs is one stream: for each pair of groups their codes, their scales and their minima, if any; the
 * last group may be alone. It is padded to 64 bytes. Codes of 4 bits: byte 64 c + 4 o + j of a group has input 4 c + j of output o in its low half and input
 * 16 + 4 c + j in its high half. Codes of 8 bits: byte 64 c + 4 o + j is input 4 c + j of output o. Float weights: for each
 * input, those of the 16 outputs.
 */
#ifndef FOREDRAFT_PACK_H
#define FOREDRAFT_PACK_H

#include "engine.h"
#include "vector.h"

INLINE int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }
INLINE int64_t tiles_of(int64_t outputs) { return (outputs + TILE - 1) / TILE; }
INLINE int64_t padded(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }
INLINE int64_t code_bytes(int32_t bits) { return bits == 4 ? 256 : 512; }

INLINE int64_t group_bytes(int32_t bits, int minima) { return code_bytes(bits) + (minima ? 4 : 2) * TILE; }

/* Bytes of a block of 16 outputs. */
INLINE int64_t block_bytes(int64_t inputs, int32_t bits, int32_t zero) {
    if (bits == 32) return padded(inputs, GROUP) * TILE * 4;
    return padded(groups_of(inputs) * group_bytes(bits, zero == MINIMA), 64);
}

INLINE int32_t four(const int8_t *p) { /* codes as a number */
    int32_t value;
    memcpy(&value, p, 4);
    return value;
}

/* What a block holds of a group, from the 16 outputs' codes on; ``minima`` means nothing where there are none. */
typedef struct {
    const uint8_t *codes;
    const uint16_t *scales, *minima;
} Group;

INLINE Group group_at(const uint8_t *block, int64_t groups, int64_t group, int32_t bits, int minima) {
    int64_t second = group % 2, together = second || group + 1 < groups ? 2 : 1;
    const uint8_t *pair = block + (group - second) * group_bytes(bits, minima);
    const uint16_t *scales = (const uint16_t *)(pair + together * code_bytes(bits));
    return (Group){pair + second * code_bytes(bits), scales + second * TILE, scales + (together + second) * TILE};
}

INLINE int32_t code_at(const uint8_t *codes, int32_t bits, int64_t output, int64_t input) {
    if (bits == 8) return codes[input / 4 * 64 + output * 4 + input % 4];
    uint8_t both = codes[input % 16 / 4 * 64 + output * 4 + input % 4];
    return input < 16 ? both & 15 : both >> 4;
}

/* Put the codes of a group's 32 inputs, four at a time. */
INLINE void put_codes(uint8_t *to, int32_t bits, int64_t output, const uint8_t *codes) {
    for (int64_t i = 0; i < (bits == 8 ? 32 : 16); i += 4) {
        uint32_t four_codes, others;
        memcpy(&four_codes, codes + i, 4);
        if (bits == 4) memcpy(&others, codes + i + 16, 4), four_codes |= others << 4;
        memcpy(to + i * TILE + output * 4, &four_codes, 4);
    }
}

static int32_t bad_matrix(int64_t outputs, int64_t inputs, int32_t bits, int32_t zero) {
    int known = bits == 32 || ((bits == 4 || bits == 8) && zero >= MINIMA && zero < 1 << bits);
    return !known || outputs < 1 || inputs < 1 || outputs > 1 << 26 || inputs > 1 << 20;
}

/* How a group is coded: weight = scale * (code - zero) + minimum, both in half precision. */
typedef struct {
    float scale, minimum, zero, most;
} Coding;

INLINE vf code_of(const Coding *c, float inverse, vf w) {
    vf code = v_add(v_round(v_mul(v_sub(w, v_set(c->minimum)), v_set(inverse))), v_set(c->zero));
    return v_max(v_min(code, v_set(c->most)), v_set(0.0f));
}

INLINE float inverse_of(float x) { return x != 0.0f ? 1.0f / x : 0.0f; }

/* Sum of squared errors of a group. */
static float error_of(const Coding *c, const float *w) {
    vf sum = v_set(0.0f);
    for (int i = 0; i < GROUP; i += W) {
        vf code = v_sub(code_of(c, inverse_of(c->scale), v_load(w + i)), v_set(c->zero));
        vf off = v_sub(v_load(w + i), v_fma(code, v_set(c->scale), v_set(c->minimum)));
        sum = v_fma(off, off, sum);
    }
    return v_sum(sum);
}

typedef struct {
    Coding coding;
    float error;
} Choice;

static void attempt(const float *w, float scale, float minimum, Choice *best) {
    Coding coding = {half_to_float(float_to_half(scale)), half_to_float(float_to_half(minimum)), best->coding.zero, best->coding.most};
    if (best->error == 0.0f) return;
    float error = error_of(&coding, w);
    if (error < best->error) *best = (Choice){coding, error};
}

/* The scale, and with ``fitted`` minimum, of the least squares for the codes of the best so far. */
static void attempt_fit(const float *w, int fitted, Choice *best) {
    float count = GROUP, codes = 0.0f, squares = 0.0f, weights = 0.0f, products = 0.0f;
    for (int i = 0; i < GROUP; i += W) {
        float code[W];
        v_store(code, v_sub(code_of(&best->coding, inverse_of(best->coding.scale), v_load(w + i)), v_set(best->coding.zero)));
        for (int j = 0; j < W; j++) codes += code[j], squares += code[j] * code[j], weights += w[i + j], products += code[j] * w[i + j];
    }
    if (!fitted) {
        attempt(w, products * inverse_of(squares), 0.0f, best);
        return;
    }
    float scale = (count * products - codes * weights) * inverse_of(count * squares - codes * codes);
    attempt(w, scale, (weights - scale * codes) / count, best);
}

/* The best of several codings around that of the extreme values. */
static Coding coding_of(const float *w, int32_t bits, int32_t zero) {
    int32_t most = (1 << bits) - 1;
    float low = w[0], high = w[0];
    for (int i = 1; i < GROUP; i++) low = w[i] < low ? w[i] : low, high = w[i] > high ? w[i] : high;
    float largest = -low > high ? -low : high;
    Choice best = {{0.0f, 0.0f, zero == MINIMA ? 0.0f : (float)zero, (float)most}, INFINITY};
    if (zero != MINIMA && bits == 8) {
        attempt(w, largest / (float)(most - zero), 0.0f, &best);
    } else if (zero != MINIMA) {
        float extreme = -low > high ? low : high; /* gets the farther end */
        for (int step = 0; step < 13; step++) attempt(w, -extreme / (float)zero * (1.18f - 0.03f * (float)step), 0.0f, &best);
        attempt_fit(w, 0, &best);
    } else {
        float span = high - low;
        for (int step = 0; step < 8; step++) {
            float cut = 0.02f * (float)step * span;
            attempt(w, (span - cut) / (float)most, low, &best);
            attempt(w, (span - cut) / (float)most, low + cut, &best);
            attempt(w, (span - cut) / (float)most, low + 0.5f * cut, &best);
        }
        for (int step = 0; step < 2; step++) attempt_fit(w, 1, &best);
    }
    return best.coding;
}

typedef struct {
    uint16_t scale, minimum;
    uint8_t codes[GROUP];
} Encoded;

static void encode_group(const float *w, int32_t bits, int32_t zero, Encoded *found) {
    Coding coding = coding_of(w, bits, zero);
    found->scale = float_to_half(coding.scale), found->minimum = float_to_half(coding.minimum);
    for (int i = 0; i < GROUP; i += W) {
        float codes[W];
        v_store(codes, code_of(&coding, inverse_of(coding.scale), v_load(w + i)));
        for (int j = 0; j < W; j++) found->codes[i + j] = codes[j] >= 0.0f && codes[j] <= coding.most ? (uint8_t)codes[j] : 0;
    }
}

static void put_group(uint8_t *block, int64_t groups, int32_t bits, int32_t zero, int64_t output, int64_t group, const Encoded *found) {
    Group at = group_at(block, groups, group, bits, zero == MINIMA);
    ((uint16_t *)at.scales)[output] = found->scale;
    if (zero == MINIMA) ((uint16_t *)at.minima)[output] = found->minimum;
    put_codes((uint8_t *)at.codes, bits, output, found->codes);
}

int64_t fd_matrix_bytes(int64_t outputs, int64_t inputs, int32_t bits, int32_t zero) {
    return bad_matrix(outputs, inputs, bits, zero) ? -1 : tiles_of(outputs) * block_bytes(inputs, bits, zero);
}

int32_t fd_pack_floats(const float *weight, int64_t outputs, int64_t inputs, int32_t bits, int32_t zero, uint8_t *data) {
    if (bad_matrix(outputs, inputs, bits, zero)) return BAD_SHAPE;
    int64_t size = block_bytes(inputs, bits, zero), groups = groups_of(inputs);
    memset(data, 0, (size_t)(tiles_of(outputs) * size));
    for (int64_t output = 0; output < outputs; output++) {
        uint8_t *block = data + output / TILE * size;
        const float *row = weight + output * inputs;
        for (int64_t i = 0; bits == 32 && i < inputs; i++) ((float *)block)[i * TILE + output % TILE] = row[i];
        for (int64_t group = 0; bits != 32 && group < groups; group++) {
            float w[GROUP] = {0};
            int64_t count = inputs - group * GROUP < GROUP ? inputs - group * GROUP : GROUP;
            memcpy(w, row + group * GROUP, (size_t)count * 4);
            Encoded found;
            encode_group(w, bits, zero, &found);
            put_group(block, groups, bits, zero, output % TILE, group, &found);
        }
    }
    return OK;
}

int32_t fd_pack_codes(
    const uint8_t *codes, const uint16_t *scales, const uint16_t *minima, int64_t outputs, int64_t inputs, int32_t bits,
    int32_t zero, uint8_t *data) {
    int32_t has_minima = zero == MINIMA;
    if (bad_matrix(outputs, inputs, bits, zero) || bits == 32 || inputs % GROUP || has_minima != (minima != NULL)) return BAD_SHAPE;
    int64_t size = block_bytes(inputs, bits, zero), groups = groups_of(inputs);
    for (int64_t i = 0; i < outputs * inputs; i++)
        if (codes[i] >> bits) return BAD_SHAPE;
    memset(data, 0, (size_t)(tiles_of(outputs) * size));
    for (int64_t output = 0; output < outputs; output++) {
        for (int64_t group = 0; group < groups; group++) {
            int64_t place = output * groups + group;
            Encoded found = {scales[place], has_minima ? minima[place] : 0, {0}};
            memcpy(found.codes, codes + place * GROUP, GROUP);
            put_group(data + output / TILE * size, groups, bits, zero, output % TILE, group, &found);
        }
    }
    return OK;
}

/* The weights of one output as floats. */
static void unpack_row(const Matrix *m, int64_t output, float *out) {
    int64_t groups = groups_of(m->inputs), o = output % TILE;
    const uint8_t *block = m->data + output / TILE * block_bytes(m->inputs, m->bits, m->zero);
    for (int64_t i = 0; i < m->inputs; i++) {
        if (m->bits == 32) {
            out[i] = ((const float *)block)[i * TILE + o];
            continue;
        }
        Group group = group_at(block, groups, i / GROUP, m->bits, m->zero == MINIMA);
        float scale = half_to_float(group.scales[o]), code = (float)code_at(group.codes, m->bits, o, i % GROUP);
        float minimum = m->zero == MINIMA ? half_to_float(group.minima[o]) : 0.0f;
        out[i] = m->zero == MINIMA ? scale * code + minimum : scale * (code - (float)m->zero);
    }
}

int32_t fd_unpack(const Matrix *m, const int64_t *rows, int64_t count, float *out, int64_t stride) {
    if (bad_matrix(m->outputs, m->inputs, m->bits, m->zero) || stride < m->inputs) return BAD_SHAPE;
    for (int64_t i = 0; i < count; i++)
        if (rows[i] < 0 || rows[i] >= m->outputs) return BAD_TOKEN;
    for (int64_t i = 0; i < count; i++) unpack_row(m, rows[i], out + i * stride);
    return OK;
}

/* The codes of a whole matrix, as fd_pack_codes takes them; minima only where they are stored. */
int32_t fd_unpack_codes(const Matrix *m, uint8_t *codes, uint16_t *scales, uint16_t *minima) {
    if (bad_matrix(m->outputs, m->inputs, m->bits, m->zero) || m->bits == 32 || m->inputs % GROUP) return BAD_SHAPE;
    if ((m->zero == MINIMA) != (minima != NULL)) return BAD_SHAPE;
    int64_t groups = groups_of(m->inputs), size = block_bytes(m->inputs, m->bits, m->zero);
    for (int64_t place = 0; place < m->outputs * groups; place++) {
        int64_t o = place / groups % TILE;
        Group group = group_at(m->data + place / groups / TILE * size, groups, place % groups, m->bits, minima != NULL);
        for (int i = 0; i < GROUP; i++) codes[place * GROUP + i] = (uint8_t)code_at(group.codes, m->bits, o, i);
        scales[place] = group.scales[o];
        if (minima) minima[place] = group.minima[o];
    }
    return OK;
}

#endif

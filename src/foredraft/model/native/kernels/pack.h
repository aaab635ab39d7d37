/* Weights into tiles of 16 outputs by 32 inputs, and back.
 *
 * A block of 16 outputs is one stream. With HALF_SCALES: for each pair of groups their codes, their scales and their minima,
 * if any; the last group may be alone. With SMALL_SCALES: for each 8 groups their codes; for each group 2 x 16 small
 * integers (the scales and the minima of the outputs, or, of symmetric codes, the scales of inputs 0 to 15 and 16 to 31);
 * the 16 factors of the scales and the 16 of the minima, or, of symmetric codes, nothing. Either is padded to 64 bytes.
 *
 * Codes k of a group, for k below 8, are those of inputs 4 k to 4 k + 3: byte 4 o + j is input 4 k + j of output o. Codes of
 * 8 bits: the 64 bytes at 64 k. Of 4 bits: for k < 4 the low halves of the bytes at 64 k, else the high ones of those at
 * 64 (k - 4). Of 5 and 6 bits: the low four bits like that, and behind these 256 bytes the rest: of 5 bits, bit k of 64
 * bytes; of 6 bits, bits 2 (k % 4) and the next one of 64 bytes for k < 4, and of 64 others. Float weights: for each input,
 * those of the 16 outputs.
 */
#ifndef FOREDRAFT_PACK_H
#define FOREDRAFT_PACK_H

#include "engine.h"
#include "vector.h"

#define SMALL (2 * TILE) /* small integers of a group */

INLINE int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }
INLINE int64_t tiles_of(int64_t outputs) { return (outputs + TILE - 1) / TILE; }
INLINE int64_t padded(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

/* What a kernel knows of a form when it is compiled. */
typedef struct {
    int bits, minima, small;
} Kind;

INLINE Kind kind_of(Form form) { return (Kind){form.bits, form.zero == MINIMA, form.scales == SMALL_SCALES}; }

INLINE int64_t code_bytes(int bits) { return bits == 8 ? 512 : 256 + (bits - 4) * 64; }

/* Bytes of a group with HALF_SCALES, and of 8 groups with SMALL_SCALES. */
INLINE int64_t group_bytes(Kind kind) { return code_bytes(kind.bits) + (kind.minima ? 4 : 2) * TILE; }
INLINE int64_t eight_bytes(Kind kind) { return BLOCK_GROUPS * (code_bytes(kind.bits) + SMALL) + 64; }

/* Bytes that a group adds to a block, on average. */
INLINE int64_t group_share(Kind kind) { return kind.small ? eight_bytes(kind) / BLOCK_GROUPS : group_bytes(kind); }

/* Bytes of a block of 16 outputs. */
INLINE int64_t block_bytes(int64_t inputs, Form form) {
    if (form.bits == 32) return padded(inputs, GROUP) * TILE * 4;
    if (form.scales == SMALL_SCALES) return groups_of(inputs) / BLOCK_GROUPS * eight_bytes(kind_of(form));
    return padded(groups_of(inputs) * group_bytes(kind_of(form)), 64);
}

/* All outputs of a matrix and the next ones. */
INLINE int64_t outputs_of(const Matrix *m) {
    int64_t outputs = 0;
    for (; m; m = m->next) outputs += m->outputs;
    return outputs;
}

INLINE int32_t four(const int8_t *p) { /* codes as a number */
    int32_t value;
    memcpy(&value, p, 4);
    return value;
}

/* What a block holds of a group. ``scales``: of it, or of its 8 groups; ``minima`` and ``small`` mean nothing where there are
 * none.
 */
typedef struct {
    const uint8_t *codes;
    const uint16_t *scales, *minima;
    const int8_t *small;
} Group;

INLINE Group group_at(const uint8_t *block, int64_t groups, int64_t group, Kind kind) {
    if (kind.small) {
        int64_t place = group % BLOCK_GROUPS;
        const uint8_t *eight = block + group / BLOCK_GROUPS * eight_bytes(kind);
        const uint8_t *small = eight + BLOCK_GROUPS * code_bytes(kind.bits);
        const uint16_t *factors = (const uint16_t *)(small + BLOCK_GROUPS * SMALL);
        return (Group){eight + place * code_bytes(kind.bits), factors, factors + TILE, (const int8_t *)small + place * SMALL};
    }
    int64_t second = group % 2, together = second || group + 1 < groups ? 2 : 1;
    const uint8_t *pair = block + (group - second) * group_bytes(kind);
    const uint16_t *scales = (const uint16_t *)(pair + together * code_bytes(kind.bits));
    return (Group){pair + second * code_bytes(kind.bits), scales + second * TILE, scales + (together + second) * TILE, NULL};
}

/* Scales, and minima, of a whole group for W outputs from ``output`` on; a small integer times a half is exact. */
INLINE vf scales_at(const Group *at, Kind kind, int output) {
    vf scale = v_load_half(at->scales + output);
    return kind.small ? v_mul(scale, v_load_unsigned((const uint8_t *)at->small + output)) : scale;
}

INLINE vf minima_at(const Group *at, Kind kind, int output) {
    vf minimum = v_load_half(at->minima + output);
    return kind.small ? v_mul(minimum, v_load_unsigned((const uint8_t *)at->small + TILE + output)) : minimum;
}

INLINE int32_t code_at(const uint8_t *codes, int bits, int64_t output, int64_t input) {
    int64_t k = input / 4, byte = output * 4 + input % 4;
    if (bits == 8) return codes[64 * k + byte];
    int32_t code = codes[64 * (k % 4) + byte] >> (k < 4 ? 0 : 4) & 15;
    if (bits == 5) code |= (codes[256 + byte] >> k & 1) << 4;
    if (bits == 6) code |= (codes[256 + 64 * (k / 4) + byte] >> 2 * (k % 4) & 3) << 4;
    return code;
}

/* Put the codes of a group's 32 inputs, four at a time. */
INLINE void put_codes(uint8_t *to, int bits, int64_t output, const uint8_t *codes) {
    const uint32_t low = 0x0f0f0f0f;
    uint32_t fours[8], high = 0;
    memcpy(fours, codes, sizeof fours);
    for (int k = 0; k < (bits == 8 ? 8 : 4); k++) {
        uint32_t both = bits == 8 ? fours[k] : (fours[k] & low) | (fours[k + 4] & low) << 4;
        memcpy(to + 64 * k + output * 4, &both, 4);
    }
    for (int k = 0; k < 8 && (bits == 5 || bits == 6); k++) {
        high |= (fours[k] >> 4 & (bits == 6 ? 0x03030303 : 0x01010101)) << (bits == 6 ? 2 * (k % 4) : k);
        if (k < 7 && (bits == 5 || k != 3)) continue;
        memcpy(to + 256 + (bits == 6 ? 64 * (k / 4) : 0) + output * 4, &high, 4);
        high = 0;
    }
}

static int32_t bad_form(Form form) {
    if (form.bits == 32) return form.zero != 0 || form.scales != HALF_SCALES;
    int known = form.bits == 4 || form.bits == 5 || form.bits == 6 || form.bits == 8;
    int scales = form.scales == HALF_SCALES || form.scales == SMALL_SCALES;
    return !known || !scales || form.zero < MINIMA || form.zero >= 1 << form.bits;
}

static int32_t bad_matrix(int64_t outputs, int64_t inputs, Form form) {
    if (bad_form(form) || outputs < 1 || inputs < 1 || outputs > 1 << 26 || inputs > 1 << 20) return 1;
    return form.scales == SMALL_SCALES && inputs % (BLOCK_GROUPS * GROUP);
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

static void put_group(uint8_t *block, int64_t groups, Kind kind, int64_t output, int64_t group, const Encoded *found) {
    Group at = group_at(block, groups, group, kind);
    ((uint16_t *)at.scales)[output] = found->scale;
    if (kind.minima) ((uint16_t *)at.minima)[output] = found->minimum;
    put_codes((uint8_t *)at.codes, kind.bits, output, found->codes);
}

int64_t fd_matrix_bytes(int64_t outputs, int64_t inputs, const Form *form) {
    return bad_matrix(outputs, inputs, *form) ? -1 : tiles_of(outputs) * block_bytes(inputs, *form);
}

int32_t fd_pack_floats(const float *weight, int64_t outputs, int64_t inputs, const Form *form, uint8_t *data) {
    if (bad_matrix(outputs, inputs, *form) || form->scales != HALF_SCALES) return BAD_SHAPE;
    int64_t size = block_bytes(inputs, *form), groups = form->bits == 32 ? 0 : groups_of(inputs);
    memset(data, 0, (size_t)(tiles_of(outputs) * size));
    for (int64_t output = 0; output < outputs; output++) {
        uint8_t *block = data + output / TILE * size;
        const float *row = weight + output * inputs;
        for (int64_t i = 0; form->bits == 32 && i < inputs; i++) ((float *)block)[i * TILE + output % TILE] = row[i];
        for (int64_t group = 0; group < groups; group++) {
            float w[GROUP] = {0};
            int64_t count = inputs - group * GROUP < GROUP ? inputs - group * GROUP : GROUP;
            memcpy(w, row + group * GROUP, (size_t)count * 4);
            Encoded found;
            encode_group(w, form->bits, form->zero, &found);
            put_group(block, groups, kind_of(*form), output % TILE, group, &found);
        }
    }
    return OK;
}

int32_t fd_pack_codes(
    const uint8_t *codes, const uint16_t *scales, const uint16_t *minima, int64_t outputs, int64_t inputs, const Form *form,
    uint8_t *data) {
    int32_t bits = form->bits, has_minima = form->zero == MINIMA;
    if (bad_matrix(outputs, inputs, *form) || form->scales != HALF_SCALES || bits == 32 || inputs % GROUP) return BAD_SHAPE;
    if (has_minima != (minima != NULL)) return BAD_SHAPE;
    int64_t size = block_bytes(inputs, *form), groups = groups_of(inputs);
    for (int64_t i = 0; i < outputs * inputs; i++)
        if (codes[i] >> bits) return BAD_SHAPE;
    memset(data, 0, (size_t)(tiles_of(outputs) * size));
    for (int64_t output = 0; output < outputs; output++) {
        for (int64_t group = 0; group < groups; group++) {
            int64_t place = output * groups + group;
            Encoded found = {scales[place], has_minima ? minima[place] : 0, {0}};
            memcpy(found.codes, codes + place * GROUP, GROUP);
            put_group(data + output / TILE * size, groups, kind_of(*form), output % TILE, group, &found);
        }
    }
    return OK;
}

/* The weights of one output of a matrix, or of the next ones, as floats. */
static void unpack_row(const Matrix *m, int64_t output, float *out) {
    for (; output >= m->outputs; m = m->next) output -= m->outputs;
    Kind kind = kind_of(m->form);
    int64_t groups = groups_of(m->inputs), o = output % TILE;
    const uint8_t *block = m->data + output / TILE * block_bytes(m->inputs, m->form);
    for (int64_t i = 0; kind.bits == 32 && i < m->inputs; i++) out[i] = ((const float *)block)[i * TILE + o];
    for (int64_t g = 0; kind.bits != 32 && g < groups; g++) {
        Group at = group_at(block, groups, g, kind);
        float scale = half_to_float(at.scales[o]), minimum = kind.minima ? half_to_float(at.minima[o]) : 0.0f;
        float scales[2] = {scale, scale};
        if (kind.small && kind.minima) {
            scales[0] = scales[1] = scale * (float)(uint8_t)at.small[o], minimum *= (float)(uint8_t)at.small[TILE + o];
        } else if (kind.small) {
            scales[0] = scale * (float)at.small[o], scales[1] = scale * (float)at.small[TILE + o];
        }
        int64_t count = m->inputs - g * GROUP < GROUP ? m->inputs - g * GROUP : GROUP;
        for (int64_t i = 0; i < count; i++) {
            float code = (float)(code_at(at.codes, kind.bits, o, i) - (kind.minima ? 0 : m->form.zero));
            out[g * GROUP + i] = kind.minima ? scales[0] * code + minimum : scales[i / 16] * code;
        }
    }
}

static int32_t bad_matrices(const Matrix *m) {
    for (const Matrix *each = m; each; each = each->next)
        if (bad_matrix(each->outputs, each->inputs, each->form) || each->inputs != m->inputs || (each->next && each->outputs % TILE))
            return 1;
    return 0;
}

int32_t fd_unpack(const Matrix *m, const int64_t *rows, int64_t count, float *out, int64_t stride) {
    if (bad_matrices(m) || stride < m->inputs) return BAD_SHAPE;
    int64_t outputs = outputs_of(m);
    for (int64_t i = 0; i < count; i++)
        if (rows[i] < 0 || rows[i] >= outputs) return BAD_TOKEN;
    for (int64_t i = 0; i < count; i++) unpack_row(m, rows[i], out + i * stride);
    return OK;
}

/* The codes of a whole matrix, as fd_pack_codes takes them; minima only where they are stored. */
int32_t fd_unpack_codes(const Matrix *m, uint8_t *codes, uint16_t *scales, uint16_t *minima) {
    if (bad_matrix(m->outputs, m->inputs, m->form) || m->form.bits == 32 || m->inputs % GROUP || m->next) return BAD_SHAPE;
    if (m->form.scales != HALF_SCALES || (m->form.zero == MINIMA) != (minima != NULL)) return BAD_SHAPE;
    int64_t groups = groups_of(m->inputs), size = block_bytes(m->inputs, m->form);
    for (int64_t place = 0; place < m->outputs * groups; place++) {
        int64_t o = place / groups % TILE;
        Group group = group_at(m->data + place / groups / TILE * size, groups, place % groups, kind_of(m->form));
        for (int i = 0; i < GROUP; i++) codes[place * GROUP + i] = (uint8_t)code_at(group.codes, m->form.bits, o, i);
        scales[place] = group.scales[o];
        if (minima) minima[place] = group.minima[o];
    }
    return OK;
}

#endif

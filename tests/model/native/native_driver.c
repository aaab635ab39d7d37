/* Tests of the kernels without Python: for sanitizers, and for processors that are emulated.
 *
 * Random models of several shapes are decoded token by token; then the same tokens go through chains, trees, batches and
 * several threads, and all logits must be the same bits. Products are compared with sums in double precision, and calls
 * with sizes or indices out of range must be refused. Prints the instruction set; exits with 1 at the first failure.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);     \
            exit(1);                                                            \
        }                                                                       \
    } while (0)

static uint64_t state = 88172645463325252ull;

static uint64_t next_random(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

static int64_t below(int64_t limit) { return (int64_t)(next_random() % (uint64_t)limit); }

static float uniform(void) { return (float)(int64_t)(next_random() >> 40) / (float)(1 << 23) - 1.0f; }

static float *uniforms(int64_t count, float scale) {
    float *x = malloc((size_t)count * 4);
    for (int64_t i = 0; i < count; i++) x[i] = uniform() * scale;
    return x;
}

static Matrix random_matrix(int64_t outputs, int64_t inputs, int32_t bits, int32_t zero, int biased) {
    float *weight = uniforms(outputs * inputs, 2.0f / sqrtf((float)inputs));
    Form form = {bits, zero, HALF_SCALES};
    int64_t bytes = fd_matrix_bytes(outputs, inputs, &form), whole = (outputs + TILE - 1) / TILE * TILE;
    CHECK(bytes > 0);
    uint8_t *data = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
    CHECK(fd_pack_floats(weight, outputs, inputs, &form, data) == OK);
    free(weight);
    return (Matrix){data, biased ? uniforms(whole, 0.5f) : NULL, outputs, inputs, form, NULL};
}

static void free_matrix(Matrix *m) { free((void *)m->data), free((void *)m->bias); }

/* ---- products ---- */

static void check_product(int64_t outputs, int64_t inputs, int64_t rows, int32_t bits, int32_t zero) {
    Matrix m = random_matrix(outputs, inputs, bits, zero, rows % 2);
    int64_t stride = (outputs + TILE - 1) / TILE * TILE;
    float *x = uniforms(rows * inputs, 3.0f), *y = malloc((size_t)(rows * stride) * 4);
    float *weight = malloc((size_t)(outputs * inputs) * 4);
    int64_t *all = malloc((size_t)outputs * 8);
    for (int64_t o = 0; o < outputs; o++) all[o] = o;
    CHECK(fd_unpack(&m, all, outputs, weight, inputs) == OK);
    Engine *engine = fd_engine_new();
    CHECK(fd_product(engine, &m, x, rows, y, stride, 1 + (int32_t)(rows % 3)) == OK);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < outputs; o++) {
            double sum = m.bias ? m.bias[o] : 0.0, size = 1.0;
            for (int64_t i = 0; i < inputs; i++) {
                double part = (double)x[r * inputs + i] * weight[o * inputs + i];
                sum += part, size += fabs(part);
            }
            CHECK(fabs(sum - y[r * stride + o]) <= (bits == 32 ? 1e-5 : 1e-2) * size);
        }
    CHECK(fd_product(engine, &m, x, rows, y, stride - 1, 1) == BAD_SHAPE);
    m.form.bits = 7;
    CHECK(fd_product(engine, &m, x, rows, y, stride, 1) == BAD_SHAPE);
    fd_engine_free(engine);
    free_matrix(&m), free(x), free(y), free(weight), free(all);
}

/* ---- models ---- */

typedef struct {
    Model model;
    Layer *layers;
    float *ones;
    float *rotary;
    int64_t positions;
} Random;

static Random random_model(int64_t dim, int64_t share, int32_t bits, int32_t zero, int32_t kv, int odd) {
    Model m = {
        .layers = 2, .hidden = odd ? 70 : 64, .kv_heads = 2, .head_dim = dim, .inner = odd ? 90 : 96, .vocabulary = odd ? 101 : 96, .outputs = odd ? 101 : 96,
        .rotary_dim = dim / 2 / 2 * 2, .rotary_tables = 1, .kinds = 1, .activation = odd ? GELU_TANH : SILU, .gated = 1,
        .head_norm = odd ? EACH_HEAD : NO_HEAD_NORM, .kv = kv, .eps = 1e-5f, .embedding_scale = 4.0f, .residual_scale = 1.0f,
        .attention_scale = 1.0f / sqrtf((float)dim), .attention_cap = odd ? 3.0f : 0.0f, .logit_scale = odd ? 2.0f : 1.0f,
        .logit_cap = odd ? 5.0f : 0.0f};
    Random made = {m, calloc(2, sizeof(Layer)), uniforms(256, 1.0f), NULL, 192};
    int64_t heads = made.model.heads = 2 * share;
    made.rotary = uniforms(made.positions * m.rotary_dim, 1.0f);
    for (int i = 0; i < 2; i++) {
        Layer *layer = &made.layers[i];
        layer->qkv = random_matrix((heads + 4) * dim, m.hidden, bits, zero, 1);
        layer->out = random_matrix(m.hidden, heads * dim, bits, zero, 0);
        layer->up = random_matrix(2 * m.inner, m.hidden, bits, zero, 0);
        layer->down = random_matrix(m.hidden, m.inner, bits, zero, odd);
        layer->before_attention = layer->before_mlp = layer->query_norm = layer->key_norm = made.ones;
        layer->after_mlp = odd ? made.ones : NULL;
    }
    made.model.layer = made.layers;
    made.model.embedding = random_matrix(m.vocabulary, m.hidden, bits, zero, 0);
    made.model.head = random_matrix(m.vocabulary, m.hidden, bits, zero, 0);
    made.model.final_norm = made.ones;
    return made;
}

static void free_model(Random *made) {
    for (int i = 0; i < 2; i++) {
        Layer *layer = &made->layers[i];
        free_matrix(&layer->qkv), free_matrix(&layer->out), free_matrix(&layer->up), free_matrix(&layer->down);
    }
    free_matrix(&made->model.embedding), free_matrix(&made->model.head);
    free(made->layers), free(made->ones), free(made->rotary);
}

#define SLOTS 192
#define ROWS 3

typedef struct {
    LayerCache layers[2];
    size_t bytes;
} Cache;

static Cache new_cache(const Model *m) {
    Cache cache = {.bytes = (size_t)(ROWS * m->kv_heads * SLOTS * fd_state_bytes(m->kv, m->head_dim))};
    for (int i = 0; i < 2; i++) cache.layers[i] = (LayerCache){malloc(cache.bytes), malloc(cache.bytes)};
    for (int i = 0; i < 2; i++) memset(cache.layers[i].keys, 0x7b, cache.bytes), memset(cache.layers[i].values, 0x7b, cache.bytes);
    return cache;
}

static void free_cache(Cache *cache) {
    for (int i = 0; i < 2; i++) free(cache->layers[i].keys), free(cache->layers[i].values);
}

/* A forward of ``nodes`` nodes in each of ``rows`` rows behind ``base`` tokens; parents NULL: a chain. */
static void forward(
    Engine *engine, const Random *made, Cache *cache, int64_t rows, int64_t nodes, const int64_t *base,
    const int64_t *tokens, const int64_t *parents, float *logits, int32_t threads) {
    int64_t count = rows * nodes, stride = (made->model.vocabulary + TILE - 1) / TILE * TILE;
    int64_t *positions = calloc((size_t)count, 8), *slots = calloc((size_t)count, 8), *end = calloc((size_t)count, 8);
    int64_t *lines = calloc((size_t)rows, 8);
    uint8_t *tree = parents ? calloc((size_t)(count * nodes), 1) : NULL;
    for (int64_t b = 0; b < rows; b++) {
        lines[b] = rows - 1 - b; /* not in order */
        for (int64_t n = 0; n < nodes; n++) {
            int64_t i = b * nodes + n, depth = 0;
            slots[i] = base[b] + n, end[i] = parents ? base[b] : slots[i] + 1;
            for (int64_t up = n; parents && up >= 0; up = parents[b * nodes + up]) tree[i * nodes + up] = 1, depth++;
            positions[i] = parents ? base[b] + depth - 1 : slots[i];
        }
    }
    Visible visible = {NULL, end, base, tree, nodes, parents ? nodes : 0};
    const float *tables[] = {made->rotary};
    Step step = {
        .rows = rows, .nodes = nodes, .tokens = tokens, .positions = positions, .slots = slots, .buffer_rows = lines,
        .visible = &visible, .cache = cache->layers, .cache_rows = ROWS, .cache_slots = SLOTS, .rotary = tables,
        .rotary_positions = made->positions, .logits = logits, .logits_stride = stride};
    CHECK(fd_forward(engine, &made->model, &step, threads) == OK);
    free(positions), free(slots), free(end), free(lines), free(tree);
}

static int same(const Random *made, const float *a, const float *b) {
    return !memcmp(a, b, (size_t)made->model.vocabulary * 4);
}

#define TEXT 140
#define NODES 11

static void check_model_bits(const Random *made, Engine *engine) {
    int64_t stride = (made->model.vocabulary + TILE - 1) / TILE * TILE, zero = 0;
    int64_t text[TEXT], tokens[ROWS * NODES], parents[ROWS * NODES], bases[ROWS] = {7, 66, 131};
    float *plain = malloc((size_t)(TEXT * stride) * 4), *found = malloc((size_t)(ROWS * TEXT * stride) * 4);
    float *path_logits = malloc((size_t)stride * 4);
    for (int i = 0; i < TEXT; i++) text[i] = below(made->model.vocabulary);
    Cache cache = new_cache(&made->model);
    for (int64_t i = 0; i < TEXT; i++) forward(engine, made, &cache, 1, 1, &i, text + i, NULL, plain + i * stride, 1);
    for (int32_t threads = 1; threads <= 3; threads++) { /* all at once */
        forward(engine, made, &cache, 1, TEXT, &zero, text, NULL, found, threads);
        for (int i = 0; i < TEXT; i++) CHECK(same(made, found + i * stride, plain + i * stride));
    }
    for (int64_t b = 0; b < ROWS; b++) /* the beginnings of the text, and a tree behind each */
        for (int64_t i = 0; i < bases[b]; i++) {
            Cache line = cache;
            size_t row = cache.bytes / ROWS;
            for (int k = 0; k < 2; k++) {
                line.layers[k].keys = (uint8_t *)cache.layers[k].keys + (size_t)(ROWS - 1 - b) * row;
                line.layers[k].values = (uint8_t *)cache.layers[k].values + (size_t)(ROWS - 1 - b) * row;
            }
            forward(engine, made, &line, 1, 1, &i, text + i, NULL, path_logits, 1);
        }
    for (int64_t i = 0; i < ROWS * NODES; i++) {
        int64_t n = i % NODES;
        tokens[i] = below(made->model.vocabulary), parents[i] = n ? below(n) : -1;
    }
    forward(engine, made, &cache, ROWS, NODES, bases, tokens, parents, found, 2);
    Cache own = new_cache(&made->model);
    for (int64_t i = 0; i < TEXT; i++) forward(engine, made, &own, 1, 1, &i, text + i, NULL, path_logits, 1);
    for (int64_t b = ROWS - 1; b >= 0; b--) /* from the longest text on, so that each finds its own in the cache */
        for (int64_t n = 0; n < NODES; n++) {
            int64_t path[NODES], depth = 0;
            for (int64_t up = n; up >= 0; up = parents[b * NODES + up]) path[depth++] = tokens[b * NODES + up];
            for (int64_t i = 0; i < depth; i++) {
                int64_t place = bases[b] + i;
                forward(engine, made, &own, 1, 1, &place, &path[depth - 1 - i], NULL, path_logits, 1);
            }
            CHECK(same(made, found + (b * NODES + n) * stride, path_logits));
        }
    free_cache(&cache), free_cache(&own), free(plain), free(found), free(path_logits);
}

/* Each change of a valid step must be refused, before anything is read or written. */
static void check_refusals(const Random *made, Engine *engine) {
    int64_t token = 1, position = 0, slot = 0, line = 0, end = 1, base = 0, keep = 0;
    uint8_t tree = 1;
    Cache cache = new_cache(&made->model);
    const float *tables[] = {made->rotary};
    float logits[256];
    for (int change = 0; change < 12; change++) {
        Visible visible = {NULL, &end, &base, &tree, 1, 1};
        Step step = {
            .rows = 1, .nodes = 1, .tokens = &token, .positions = &position, .slots = &slot, .buffer_rows = &line,
            .visible = &visible, .cache = cache.layers, .cache_rows = ROWS, .cache_slots = SLOTS, .rotary = tables,
            .rotary_positions = made->positions, .keep = &keep, .kept = 1, .logits = logits, .logits_stride = 128};
        token = 1, position = 0, slot = 0, line = 0, end = 0, base = 0, keep = 0;
        int32_t expected = OK;
        switch (change) {
            case 1: token = made->model.vocabulary, expected = BAD_TOKEN; break;
            case 2: token = -1, expected = BAD_TOKEN; break;
            case 3: position = made->positions, expected = BAD_POSITION; break;
            case 4: slot = SLOTS, expected = BAD_SLOT; break;
            case 5: line = ROWS, expected = BAD_ROW; break;
            case 6: end = SLOTS + 1, expected = BAD_VISIBLE; break;
            case 7: base = SLOTS, expected = BAD_VISIBLE; break;
            case 8: base = -1, expected = BAD_VISIBLE; break;
            case 9: keep = 1, expected = BAD_NODE; break;
            case 10: step.logits_stride = 16, expected = BAD_SHAPE; break;
            case 11: step.rows = 0, expected = BAD_SHAPE; break;
        }
        CHECK(fd_forward(engine, &made->model, &step, 1) == expected);
    }
    Random other = *made;
    token = 1, position = 0, slot = 0, line = 0, end = 1, keep = 0;
    Step step = {.rows = 1, .nodes = 1};
    other.model.hidden++;
    CHECK(fd_forward(engine, &other.model, &step, 1) == BAD_SHAPE);
    other = *made, other.model.kv_heads = 3;
    CHECK(fd_forward(engine, &other.model, &step, 1) == BAD_SHAPE);
    other = *made, other.model.kv = 3;
    CHECK(fd_forward(engine, &other.model, &step, 1) == BAD_SHAPE);
    CHECK(fd_state_bytes(KV_I8, 0) == -1 && fd_state_bytes(3, 64) == -1 && fd_state_bytes(KV_I8, 64) == 68);
    free_cache(&cache);
}

/* Without the attention of one layer and the MLP of the other, bits are the same as well; half of a part is refused. */
static void check_skips(const Random *made, Engine *engine) {
    Layer layers[] = {made->layers[0], made->layers[1]};
    Random other = *made;
    other.model.layer = other.layers = layers;
    layers[0].qkv.data = layers[0].out.data = layers[1].up.data = layers[1].down.data = NULL;
    check_model_bits(&other, engine);
    Step step = {.rows = 1, .nodes = 1};
    layers[0].out.data = made->layers[0].out.data;
    CHECK(fd_forward(engine, &other.model, &step, 1) == BAD_SHAPE);
    layers[0].qkv.data = made->layers[0].qkv.data, layers[1].up.data = made->layers[1].up.data;
    CHECK(fd_forward(engine, &other.model, &step, 1) == BAD_SHAPE);
}

static void check_codes(void) {
    uint8_t codes[2 * 32], data[1024] __attribute__((aligned(64)));
    uint16_t scales[2] = {0x3c00, 0x4000}, minima[2] = {0xbc00, 0};
    float out[32];
    int64_t row = 1, bad = 2;
    for (int i = 0; i < 64; i++) codes[i] = (uint8_t)(i % 16);
    const Form form = {4, MINIMA, HALF_SCALES}, symmetric = {4, 8, HALF_SCALES}, small = {4, 8, SMALL_SCALES};
    CHECK(fd_pack_codes(codes, scales, minima, 2, 32, &form, data) == OK);
    Matrix m = {data, NULL, 2, 32, form, NULL};
    CHECK(fd_unpack(&m, &row, 1, out, 32) == OK);
    for (int i = 0; i < 32; i++) CHECK(out[i] == 2.0f * (float)(i % 16));
    CHECK(fd_unpack(&m, &bad, 1, out, 32) == BAD_TOKEN);
    uint8_t again[2 * 32];
    uint16_t same_scales[2], same_minima[2];
    CHECK(fd_unpack_codes(&m, again, same_scales, same_minima) == OK && !memcmp(again, codes, sizeof codes));
    CHECK(!memcmp(same_scales, scales, sizeof scales) && !memcmp(same_minima, minima, sizeof minima));
    CHECK(fd_unpack_codes(&m, again, same_scales, NULL) == BAD_SHAPE);
    codes[5] = 16;
    CHECK(fd_pack_codes(codes, scales, minima, 2, 32, &form, data) == BAD_SHAPE);
    CHECK(fd_pack_codes(codes, scales, NULL, 2, 32, &form, data) == BAD_SHAPE);
    CHECK(fd_matrix_bytes(-1, 32, &symmetric) == -1 && fd_matrix_bytes(1, (int64_t)1 << 40, &symmetric) == -1);
    CHECK(fd_matrix_bytes(1, 128, &small) == -1 && fd_matrix_bytes(1, 256, &small) > 0);
}

/* Codes of several blocks, the last one not full, and an odd number of groups; packed again they are the same bytes. */
static void check_unpacking(int32_t bits, int32_t zero) {
    int64_t outputs = 37, inputs = 96, groups = 3, size;
    const Form form = {bits, zero, HALF_SCALES};
    size = fd_matrix_bytes(outputs, inputs, &form);
    Matrix m = random_matrix(outputs, inputs, bits, zero, 0);
    uint8_t *codes = malloc((size_t)(outputs * inputs)), *again = aligned_alloc(64, (size_t)(size + 63) / 64 * 64);
    uint16_t *scales = malloc((size_t)(outputs * groups) * 2), *minima = zero == MINIMA ? malloc((size_t)(outputs * groups) * 2) : NULL;
    CHECK(fd_unpack_codes(&m, codes, scales, minima) == OK);
    CHECK(fd_pack_codes(codes, scales, minima, outputs, inputs, &form, again) == OK);
    CHECK(!memcmp(again, m.data, (size_t)size));
    m.form.bits = 32, m.form.zero = 0;
    CHECK(fd_unpack_codes(&m, codes, scales, minima) == BAD_SHAPE);
    m.form = form, m.inputs = 95;
    CHECK(fd_unpack_codes(&m, codes, scales, minima) == BAD_SHAPE);
    free_matrix(&m), free(codes), free(again), free(scales), free(minima);
}

/* ---- blocks of files ---- */

typedef struct {
    int32_t type, bytes, values, halves, first_half; /* of a block; its halves lie next to each other */
} BlockKind;

static const BlockKind block_kinds[] = {
    {2, 18, 32, 1, 0}, {3, 20, 32, 2, 0}, {6, 22, 32, 1, 0}, {7, 24, 32, 2, 0}, {8, 34, 32, 1, 0}, {11, 110, 256, 1, 108},
    {12, 144, 256, 2, 0}, {13, 176, 256, 2, 0}, {14, 210, 256, 1, 208}, {20, 18, 32, 1, 0}, {23, 136, 256, 1, 0}};
enum { BLOCK_KINDS = sizeof block_kinds / sizeof *block_kinds };

/* Blocks of random bytes, whose halves are small numbers of both signs; ``rows`` get their addresses in another order. */
static uint8_t *random_blocks(const BlockKind *kind, int64_t outputs, int64_t inputs, const uint8_t **rows) {
    int64_t size = inputs / kind->values * kind->bytes;
    uint8_t *blocks = malloc((size_t)(outputs * size));
    for (int64_t i = 0; i < outputs * size; i++) blocks[i] = (uint8_t)next_random();
    for (int64_t i = 0; i < outputs * inputs / kind->values; i++)
        for (int h = 0; h < kind->halves; h++) {
            uint16_t half = (uint16_t)(0x2000 + below(0x400)) ^ (below(2) ? 0x8000 : 0);
            memcpy(blocks + i * kind->bytes + kind->first_half + 2 * h, &half, 2);
        }
    for (int64_t o = 0; o < outputs; o++) rows[o] = blocks + (o * 11 + 3) % outputs * size;
    return blocks;
}

static Matrix block_matrix(const BlockKind *kind, int64_t outputs, int64_t inputs) {
    const uint8_t **rows = malloc((size_t)outputs * sizeof *rows);
    uint8_t *blocks = random_blocks(kind, outputs, inputs, rows);
    Matrix m = {NULL, NULL, outputs, inputs, {0, 0, 0}, NULL};
    CHECK(fd_block_form(kind->type, &m.form) == OK);
    int64_t size = fd_matrix_bytes(outputs, inputs, &m.form);
    CHECK(size > 0);
    uint8_t *data = aligned_alloc(64, (size_t)(size + 63) / 64 * 64), *again = malloc((size_t)size);
    CHECK(fd_pack_blocks(kind->type, rows, outputs, inputs, data, 1) == OK);
    CHECK(fd_pack_blocks(kind->type, rows, outputs, inputs, again, 3) == OK && !memcmp(data, again, (size_t)size));
    CHECK(fd_pack_blocks(kind->type, rows, outputs, inputs + 16, data, 1) == BAD_SHAPE);
    const uint8_t damaged[] = {0x00, 0x7c}; /* an infinite scale */
    memcpy(blocks + (inputs / kind->values - 1) * kind->bytes + kind->first_half, damaged, 2);
    CHECK(fd_pack_blocks(kind->type, rows, outputs, inputs, again, 1) == BAD_NUMBER);
    m.data = data;
    free(rows), free(blocks), free(again);
    return m;
}

/* Products of two matrices as one are those of each alone, and those of many rows those of each, bit by bit. */
static void check_blocks(const BlockKind *kind, const BlockKind *other) {
    enum { INPUTS = 512, ROWS_OF_X = 15, FIRST = 48, SECOND = 21, ALL = FIRST + SECOND, STRIDE = 80 };
    Matrix first = block_matrix(kind, FIRST, INPUTS), second = block_matrix(other, SECOND, INPUTS), both = first;
    float *x = uniforms(ROWS_OF_X * INPUTS, 3.0f), *bias = uniforms(STRIDE, 1.0f), *weight = malloc(ALL * INPUTS * 4);
    float *y = malloc(ROWS_OF_X * STRIDE * 4), *alone = malloc(STRIDE * 4);
    int64_t all[ALL];
    for (int64_t o = 0; o < ALL; o++) all[o] = o;
    first.bias = both.bias = bias, second.bias = bias + FIRST, both.next = &second;
    CHECK(fd_unpack(&both, all, ALL, weight, INPUTS) == OK);
    Engine *engine = fd_engine_new();
    CHECK(fd_product(engine, &both, x, ROWS_OF_X, y, STRIDE, 3) == OK);
    for (int64_t r = 0; r < ROWS_OF_X; r++) {
        for (int64_t o = 0; o < ALL; o++) {
            double sum = bias[o], size = 1.0;
            for (int64_t i = 0; i < INPUTS; i++) {
                double part = (double)x[r * INPUTS + i] * weight[o * INPUTS + i];
                sum += part, size += fabs(part);
            }
            CHECK(fabs(sum - y[r * STRIDE + o]) <= 1e-2 * size);
        }
        CHECK(fd_product(engine, &first, x + r * INPUTS, 1, alone, STRIDE, 1) == OK);
        CHECK(!memcmp(alone, y + r * STRIDE, FIRST * 4));
        CHECK(fd_product(engine, &second, x + r * INPUTS, 1, alone, STRIDE, 1) == OK);
        CHECK(!memcmp(alone, y + r * STRIDE + FIRST, SECOND * 4));
    }
    CHECK(fd_product(engine, &both, x, ROWS_OF_X, y, 64, 1) == BAD_SHAPE);
    both.outputs = FIRST - 1; /* no whole tiles before the next ones */
    CHECK(fd_product(engine, &both, x, ROWS_OF_X, y, STRIDE, 1) == BAD_SHAPE);
    both.outputs = FIRST, second.inputs = 256;
    CHECK(fd_product(engine, &both, x, ROWS_OF_X, y, STRIDE, 1) == BAD_SHAPE);
    second.inputs = INPUTS;
    uint16_t halves[SECOND * INPUTS / GROUP];
    if (second.form.scales == SMALL_SCALES) CHECK(fd_unpack_codes(&second, (uint8_t *)weight, halves, halves) == BAD_SHAPE);
    fd_engine_free(engine);
    free((void *)first.data), free((void *)second.data), free(x), free(bias), free(weight), free(y), free(alone);
}

static void check_races(void) {
    int64_t bits[3] = {0, -1, 0x123456789abcdef}, count = 2 * 256 + 3;
    float *times = malloc((size_t)(3 * count) * 4), *one = malloc((size_t)count * 4);
    fd_exponentials(bits, 3, count, times);
    double sum = 0.0;
    for (int64_t i = 0; i < 3 * count; i++) {
        CHECK(times[i] > 0.0f && times[i] < 38.0f);
        sum += times[i];
    }
    CHECK(sum > 0.9 * 3 * (double)count && sum < 1.1 * 3 * (double)count);
    fd_exponentials(bits + 1, 1, count, one);
    CHECK(!memcmp(one, times + count, (size_t)count * 4));
    fd_exponentials(bits + 1, 1, 1, one);
    CHECK(one[0] == times[count]);
    for (int64_t size = 1; size <= count; size += 37) { /* scores that all are in a race are its times alone */
        memset(one, 0, (size_t)size * 4);
        int64_t soonest = 0;
        for (int64_t i = 1; i < size; i++) soonest = times[count + i] < times[count + soonest] ? i : soonest;
        CHECK(fd_choose(one, size, 1.0f, bits[1]) == soonest && fd_choose(one, size, 0.0f, 0) == 0);
        one[size - 1] = 99.0f;
        CHECK(fd_choose(one, size, 1.0f, bits[1]) == size - 1 && fd_choose(one, size, 0.0f, 0) == size - 1);
        one[size / 2] = NAN;
        CHECK(fd_choose(one, size, 1.0f, bits[1]) == -1 && fd_choose(one, size, 0.0f, 0) == -1);
    }
    free(times), free(one);
}

/* ---- drafts ---- */

static void check_ranking(void) {
    enum { COUNT = 37, WANTED = 5 };
    float logits[2 * 2 * 48], times[2 * COUNT], temperatures[2] = {0.8f, 1.5f}, shares[4 * WANTED], wrong[WANTED];
    uint8_t raced[2] = {0, 1};
    int64_t tokens[4 * WANTED];
    Engine *engine = fd_engine_new();
    for (int i = 0; i < 4 * 48; i++) logits[i] = 4.0f * uniform();
    for (int i = 0; i < 2 * COUNT; i++) times[i] = fabsf(uniform()) + 0.01f;
    logits[5] = NAN, logits[6] = -INFINITY, logits[48] = logits[60] = 9.0f; /* equal ones in their order */
    Ranking ranking = {2, 2, COUNT, WANTED, logits, 48, temperatures, times, raced, tokens, shares};
    CHECK(fd_rank(engine, &ranking) == OK);
    CHECK(tokens[WANTED] == 0 && tokens[WANTED + 1] == 12);
    for (int n = 0; n < 4; n++) {
        double scores[COUNT], sum = 0.0;
        for (int i = 0; i < COUNT; i++) {
            double x = logits[n * 48 + i];
            scores[i] = isfinite(x) ? x / temperatures[n / 2] - (n / 2 ? log(times[COUNT + i]) : 0.0) : -1e30;
            sum += exp(scores[i]);
        }
        for (int k = 0; k < WANTED; k++) {
            int better = 0;
            for (int i = 0; i < COUNT; i++) better += scores[i] > scores[tokens[n * WANTED + k]] + 1e-5;
            CHECK(better <= k && fabs(shares[n * WANTED + k] - (scores[tokens[n * WANTED + k]] - log(sum))) < 1e-5);
        }
    }
    Ranking bad = ranking;
    bad.wanted = COUNT + 1, bad.shares = wrong;
    CHECK(fd_rank(engine, &bad) == BAD_SHAPE);
    bad = ranking, bad.stride = COUNT - 1;
    CHECK(fd_rank(engine, &bad) == BAD_SHAPE);
    bad = ranking, temperatures[1] = 0.0f;
    CHECK(fd_rank(engine, &bad) == BAD_SHAPE);
    fd_engine_free(engine);
}

enum { LENGTH = 40, TREE = 9, DEEP = 4, WIDE = 3 };

typedef struct {
    int64_t tokens[ROWS * (1 + TREE)], parents[ROWS * (1 + TREE)], drafted[2];
    float scores[ROWS * (1 + TREE)];
} Drafted;

/* Drafts of ``rows`` rows from number ``first`` on, of several lengths, which first read all of their entries. fresh: has the
 * states that are made before, or NULL.
 */
static void draft(Engine *engine, const Random *made, Cache *cache, int64_t first, int64_t rows, const int64_t *history,
                  float *states, const Draft *fresh, const int64_t *ids, Drafted *out, int32_t expected) {
    const int64_t all_lengths[ROWS] = {LENGTH, 3, 17}, all_lines[ROWS] = {2, 0, 1}, all[ROWS] = {DEEP, 2, DEEP}, numbers[ROWS] = {5, 6, 7};
    const int64_t window = 6, seeds[ROWS] = {11, 12, 13};
    const float temperatures[ROWS] = {0.8f, 1.0f, 1.3f};
    const uint8_t raced[ROWS] = {0, 1, 1};
    const float *tables[] = {made->rotary};
    Draft d = {
        .rows = rows, .width = LENGTH, .history = history + first * LENGTH, .history_stride = LENGTH, .lengths = all_lengths + first,
        .buffer_rows = all_lines + first, .ahead = made->model.entry != TOKENS, .states = states, .places = all_lines + first,
        .state_rows = ROWS, .state_slots = LENGTH, .carried = made->model.layers + 1, .cache = cache->layers, .cache_rows = ROWS,
        .cache_slots = SLOTS, .rotary = tables, .rotary_positions = made->positions, .windows = &window, .nodes = TREE,
        .depth = DEEP, .expanded = WIDE, .children = 4, .allowed = all + first, .count = made->model.outputs - 1, .ids = ids,
        .temperatures = temperatures + first, .seeds = seeds + first, .numbers = numbers + first, .raced = raced + first,
        .tokens = out->tokens, .parents = out->parents, .scores = out->scores, .drafted = out->drafted};
    if (fresh) d.fresh = fresh->fresh, d.parts = fresh->parts, d.sources = fresh->sources, d.targets = fresh->targets, d.fused = fresh->fused;
    CHECK(fd_draft(engine, &made->model, &d, 1 + (int32_t)(rows % 2)) == expected);
    if (expected || fresh) return;
    Draft wrong = d;
    int64_t outside = LENGTH + 1;
    wrong.lengths = &outside, wrong.rows = 1;
    CHECK(fd_draft(engine, &made->model, &wrong, 1) == BAD_SHAPE);
    wrong = d, wrong.count = made->model.outputs + 1;
    CHECK(fd_draft(engine, &made->model, &wrong, 1) == BAD_SHAPE);
    wrong = d, wrong.carried = made->model.layers + 2;
    CHECK(fd_draft(engine, &made->model, &wrong, 1) == BAD_TAP);
    wrong = d, wrong.rotary_positions = 2;
    CHECK(fd_draft(engine, &made->model, &wrong, 1) == BAD_POSITION);
    wrong = d, wrong.cache_slots = LENGTH - 1;
    CHECK(fd_draft(engine, &made->model, &wrong, 1) == BAD_SLOT);
    if (states) {
        wrong = d, wrong.state_slots = 20;
        CHECK(fd_draft(engine, &made->model, &wrong, 1) == BAD_SLOT);
        wrong = d, wrong.state_rows = 0;
        CHECK(fd_draft(engine, &made->model, &wrong, 1) == BAD_ROW);
        wrong = d, wrong.states = NULL;
        CHECK(fd_draft(engine, &made->model, &wrong, 1) == BAD_SHAPE);
        const int64_t beyond = ROWS * LENGTH;
        const float *source = states;
        wrong = d, wrong.fresh = 1, wrong.parts = 1, wrong.sources = &source, wrong.targets = &beyond, wrong.fused = NULL;
        CHECK(fd_draft(engine, &made->model, &wrong, 1) == BAD_SLOT);
        wrong.parts = 2;
        CHECK(fd_draft(engine, &made->model, &wrong, 1) == BAD_SHAPE);
    }
}

/* Drafts of a batch are those of each row alone, bit by bit; a node scores less than its parent, which is before it. */
static void check_drafts(const Random *made, Engine *engine) {
    int64_t history[ROWS * LENGTH], ids[128], width = 1 + TREE;
    float *states = made->model.entry == TOKENS ? NULL : uniforms(ROWS * LENGTH * made->model.hidden, 2.0f);
    for (int i = 0; i < ROWS * LENGTH; i++) history[i] = below(made->model.vocabulary);
    for (int i = 0; i < 128; i++) ids[i] = (i * 7 + 3) % made->model.vocabulary;
    Drafted all, own;
    for (int named = 0; named < 2; named++) {
        Cache cache = new_cache(&made->model);
        draft(engine, made, &cache, 0, ROWS, history, states, NULL, named ? ids : NULL, &all, OK);
        CHECK(all.drafted[0] == TREE && all.drafted[1] >= 2 && all.drafted[1] <= DEEP);
        for (int64_t b = 0; b < ROWS; b++) {
            memset(&own, 0, sizeof own);
            draft(engine, made, &cache, b, 1, history, states, NULL, named ? ids : NULL, &own, OK);
            CHECK(own.drafted[0] == all.drafted[0]);
            CHECK(!memcmp(own.tokens, all.tokens + b * width, sizeof(int64_t) * width));
            CHECK(!memcmp(own.parents, all.parents + b * width, sizeof(int64_t) * width));
            CHECK(!memcmp(own.scores, all.scores + b * width, sizeof(float) * width));
            for (int64_t n = 1; n < width; n++) {
                int64_t parent = own.parents[n];
                CHECK(parent == -2 || (parent >= 0 && parent < n && own.scores[n] <= own.scores[parent]));
                CHECK(own.tokens[n] >= 0 && own.tokens[n] < made->model.vocabulary);
            }
        }
        free_cache(&cache);
    }
    free(states);
}

/* States that a draft makes first are those that were there before, bit by bit. fused: see Draft. */
static void check_fresh(const Random *made, Engine *engine, const Matrix *fused) {
    enum { FRESH = 3 };
    int64_t history[ROWS * LENGTH], hidden = made->model.hidden, parts = fused ? 2 : 1, stride = (hidden + TILE - 1) / TILE * TILE;
    const int64_t targets[FRESH] = {2 * LENGTH + LENGTH - 2, LENGTH + 15, 2 * LENGTH + 5};
    float *states = uniforms(ROWS * LENGTH * hidden, 2.0f), *inputs = uniforms(FRESH * parts * hidden, 2.0f);
    float *out = calloc((size_t)(FRESH * stride), 4), *later = malloc((size_t)(ROWS * LENGTH * hidden) * 4);
    const float *sources[FRESH * 2];
    for (int i = 0; i < ROWS * LENGTH; i++) history[i] = below(made->model.vocabulary);
    for (int64_t i = 0; i < FRESH * parts; i++) sources[i] = inputs + i * hidden;
    memcpy(later, states, (size_t)(ROWS * LENGTH * hidden) * 4);
    if (fused) CHECK(fd_product(engine, fused, inputs, FRESH, out, stride, 1) == OK);
    for (int i = 0; i < FRESH; i++)
        memcpy(states + targets[i] * hidden, fused ? out + i * stride : inputs + i * hidden, (size_t)hidden * 4);
    Draft fresh = {.fresh = FRESH, .parts = parts, .sources = sources, .targets = targets, .fused = fused};
    Drafted before = {0}, with = {0};
    Cache cache = new_cache(&made->model);
    draft(engine, made, &cache, 0, ROWS, history, later, NULL, NULL, &before, OK);
    draft(engine, made, &cache, 0, ROWS, history, later, &fresh, NULL, &with, OK);
    CHECK(!memcmp(states, later, (size_t)(ROWS * LENGTH * hidden) * 4) && memcmp(&before, &with, sizeof with));
    draft(engine, made, &cache, 0, ROWS, history, states, NULL, NULL, &before, OK);
    CHECK(!memcmp(&before, &with, sizeof with));
    free_cache(&cache);
    free(states), free(inputs), free(out), free(later);
}

/* The layers of heads: with given states, alone, beside embeddings, or multiplied with them. */
static void check_heads(const Random *made, Engine *engine, int32_t bits, int32_t zero) {
    int64_t hidden = made->model.hidden, all = (made->model.heads + 4) * made->model.head_dim;
    Layer layers[] = {made->layers[0], made->layers[1]};
    Random head = *made;
    head.model.layer = head.layers = layers;
    head.model.token_norm = head.model.state_norm = made->ones;
    head.model.fusion = random_matrix(hidden, 2 * hidden, bits, zero, 1);
    Matrix wide = random_matrix(all, 2 * hidden, bits, zero, 0), own = layers[0].qkv;
    for (int32_t entry = FUSED; entry <= BESIDE; entry++) {
        head.model.entry = entry, layers[0].qkv = entry == BESIDE ? wide : own;
        head.model.final_norm = entry == BESIDE ? made->ones : NULL;
        head.model.normed_residual = bits == 4;
        check_drafts(&head, engine);
        check_fresh(&head, engine, &head.model.fusion);
        check_fresh(&head, engine, NULL);
        Step step = {.rows = 1, .nodes = 1};
        layers[0].qkv = entry == BESIDE ? own : wide;
        CHECK(fd_forward(engine, &head.model, &step, 1) == BAD_SHAPE);
    }
    free_matrix(&wide), free_matrix(&head.model.fusion);
}

int main(void) {
    if (!fd_runs_here()) return 77;
    const int32_t kinds[][2] = {{4, MINIMA}, {4, 8}, {8, 128}, {8, MINIMA}, {32, 0}, {5, 16}, {6, MINIMA}};
    for (int kind = 0; kind < 7; kind++) {
        for (int64_t rows = 1; rows <= 19; rows += 1 + rows / 4) check_product(33 + rows, 31 + 5 * rows, rows, kinds[kind][0], kinds[kind][1]);
        check_product(64, 64, 70, kinds[kind][0], kinds[kind][1]);
        for (int odd = 0; odd < 2; odd++) {
            const int32_t states[] = {KV_F16, KV_F32, KV_I8};
            int64_t dim = (odd ? (int64_t[]){20, 40, 72, 20, 24, 20, 40} : (int64_t[]){64, 16, 96, 32, 16, 32, 64})[kind];
            Random made = random_model(dim, odd ? (kind == 4 ? 27 : 5) : 3, kinds[kind][0], kinds[kind][1], states[(kind + odd) % 3], odd);
            Engine *engine = fd_engine_new();
            check_model_bits(&made, engine);
            check_skips(&made, engine);
            check_refusals(&made, engine);
            check_drafts(&made, engine);
            check_heads(&made, engine, kinds[kind][0], kinds[kind][1]);
            fd_engine_free(engine);
            free_model(&made);
        }
    }
    check_codes();
    for (int kind = 0; kind < 7; kind++)
        if (kinds[kind][0] != 32) check_unpacking(kinds[kind][0], kinds[kind][1]);
    for (int kind = 0; kind < BLOCK_KINDS; kind++) check_blocks(&block_kinds[kind], &block_kinds[(kind + 3) % BLOCK_KINDS]);
    Form form;
    CHECK(fd_block_form(10, &form) == BAD_SHAPE);
    check_races();
    check_ranking();
    printf("%s\n", fd_isa());
    return 0;
}

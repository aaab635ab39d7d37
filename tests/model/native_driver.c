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
    int64_t bytes = fd_matrix_bytes(outputs, inputs, bits, zero), whole = (outputs + TILE - 1) / TILE * TILE;
    CHECK(bytes > 0);
    uint8_t *data = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
    CHECK(fd_pack_floats(weight, outputs, inputs, bits, zero, data) == OK);
    free(weight);
    return (Matrix){data, biased ? uniforms(whole, 0.5f) : NULL, outputs, inputs, bits, zero};
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
    m.bits = 5;
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
        .layers = 2, .hidden = odd ? 70 : 64, .kv_heads = 2, .head_dim = dim, .inner = odd ? 90 : 96, .vocabulary = odd ? 101 : 96,
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
        .rows = rows, .nodes = nodes, .tokens = tokens, .positions = positions, .slots = slots, .lines = lines,
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
            .rows = 1, .nodes = 1, .tokens = &token, .positions = &position, .slots = &slot, .lines = &line,
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
    CHECK(fd_pack_codes(codes, scales, minima, 2, 32, 4, MINIMA, data) == OK);
    Matrix m = {data, NULL, 2, 32, 4, MINIMA};
    CHECK(fd_unpack(&m, &row, 1, out, 32) == OK);
    for (int i = 0; i < 32; i++) CHECK(out[i] == 2.0f * (float)(i % 16));
    CHECK(fd_unpack(&m, &bad, 1, out, 32) == BAD_TOKEN);
    uint8_t again[2 * 32];
    uint16_t same_scales[2], same_minima[2];
    CHECK(fd_unpack_codes(&m, again, same_scales, same_minima) == OK && !memcmp(again, codes, sizeof codes));
    CHECK(!memcmp(same_scales, scales, sizeof scales) && !memcmp(same_minima, minima, sizeof minima));
    CHECK(fd_unpack_codes(&m, again, same_scales, NULL) == BAD_SHAPE);
    codes[5] = 16;
    CHECK(fd_pack_codes(codes, scales, minima, 2, 32, 4, MINIMA, data) == BAD_SHAPE);
    CHECK(fd_pack_codes(codes, scales, NULL, 2, 32, 4, MINIMA, data) == BAD_SHAPE);
    CHECK(fd_matrix_bytes(-1, 32, 4, 8) == -1 && fd_matrix_bytes(1, (int64_t)1 << 40, 4, 8) == -1);
}

/* Codes of several blocks, the last one not full, and an odd number of groups; packed again they are the same bytes. */
static void check_unpacking(int32_t bits, int32_t zero) {
    int64_t outputs = 37, inputs = 96, groups = 3, size = fd_matrix_bytes(outputs, inputs, bits, zero);
    Matrix m = random_matrix(outputs, inputs, bits, zero, 0);
    uint8_t *codes = malloc((size_t)(outputs * inputs)), *again = aligned_alloc(64, (size_t)(size + 63) / 64 * 64);
    uint16_t *scales = malloc((size_t)(outputs * groups) * 2), *minima = zero == MINIMA ? malloc((size_t)(outputs * groups) * 2) : NULL;
    CHECK(fd_unpack_codes(&m, codes, scales, minima) == OK);
    CHECK(fd_pack_codes(codes, scales, minima, outputs, inputs, bits, zero, again) == OK);
    CHECK(!memcmp(again, m.data, (size_t)size));
    m.bits = 32;
    CHECK(fd_unpack_codes(&m, codes, scales, minima) == BAD_SHAPE);
    m.bits = bits, m.inputs = 95;
    CHECK(fd_unpack_codes(&m, codes, scales, minima) == BAD_SHAPE);
    free_matrix(&m), free(codes), free(again), free(scales), free(minima);
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
    free(times), free(one);
}

int main(void) {
    if (!fd_runs_here()) return 77;
    const int32_t kinds[][2] = {{4, MINIMA}, {4, 8}, {8, 128}, {8, MINIMA}, {32, 0}};
    for (int kind = 0; kind < 5; kind++) {
        for (int64_t rows = 1; rows <= 19; rows += 1 + rows / 4) check_product(33 + rows, 31 + 5 * rows, rows, kinds[kind][0], kinds[kind][1]);
        check_product(64, 64, 70, kinds[kind][0], kinds[kind][1]);
        for (int odd = 0; odd < 2; odd++) {
            const int32_t states[] = {KV_F16, KV_F32, KV_I8};
            int64_t dim = (odd ? (int64_t[]){20, 40, 72, 20, 24} : (int64_t[]){64, 16, 96, 32, 16})[kind];
            Random made = random_model(dim, odd ? (kind == 4 ? 27 : 5) : 3, kinds[kind][0], kinds[kind][1], states[(kind + odd) % 3], odd);
            Engine *engine = fd_engine_new();
            check_model_bits(&made, engine);
            check_skips(&made, engine);
            check_refusals(&made, engine);
            fd_engine_free(engine);
            free_model(&made);
        }
    }
    check_codes();
    for (int kind = 0; kind < 4; kind++) check_unpacking(kinds[kind][0], kinds[kind][1]);
    check_races();
    printf("%s\n", fd_isa());
    return 0;
}

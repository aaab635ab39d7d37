/* A decoder's forward over a slot cache: the whole of it, from tokens to logits.
 *
 * A row's result depends on its own history alone: products have one order of floats for every width, and all else is
 * computed per row. Threads share outputs, rows and heads, never a sum.
 */
#include "attention.h"
#include "blocks.h"
#include "engine.h"
#include "pack.h"
#include "pool.h"
#include "product.h"
#include "race.h"
#include "rank.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#define TOGETHER 256 /* most nodes that go through the layers together */
#define MOST_SCORES (1 << 19) /* bytes of scores of nodes that attend together */
#define CLAIMED 24576 /* bytes of weights that a thread claims at a time, at least */

typedef struct {
    uint8_t *memory;
    size_t size;
} Buffer;

struct Engine {
    Pool pool;
    Buffer forward, drafts;
};

Engine *fd_engine_new(void) {
    Engine *engine = calloc(1, sizeof *engine);
    if (engine) pool_begin(&engine->pool);
    return engine;
}

void fd_engine_free(Engine *engine) {
    if (!engine) return;
    pool_end(&engine->pool);
    free(engine->forward.memory);
    free(engine->drafts.memory);
    free(engine);
}

const char *fd_isa(void) { return ISA; }

void fd_advise_huge(void *memory, int64_t bytes) {
#if defined(__linux__)
    madvise(memory, (size_t)bytes, MADV_HUGEPAGE); /* a hint: failure costs speed alone */
#else
    (void)memory, (void)bytes;
#endif
}

/* Rows of activations of one product; see ``Activations``. */
typedef struct {
    int8_t *codes;
    float *scales, *sums;
    int32_t *counts;
} Rounded;

/* Buffers of a forward of so many nodes at a time. */
typedef struct {
    const Model *model;
    const Step *step;
    Pool *pool;
    int64_t first, width, rows;        /* nodes [first, first + width) of each of B rows; B * width */
    int64_t across;                    /* rows that there is space for */
    int64_t state_width, input_width, output_width, head_width, score_width;
    float *states, *inputs, *outputs;
    Rounded given, next; /* activations of the product that runs, and of the one after it where that makes them */
    int64_t *places;
    int64_t state_bytes, tree_width, nodes_together, queries_together; /* of attention */
    uint8_t *spaces, *nothing;                       /* of attention: for each thread, and zeros */
    int64_t space_bytes;
    const Layer *layer;
    int64_t number;
    const Matrix *matrix; /* of the product that runs */
    Output out;
} Run;

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static void *take(uint8_t **next, int64_t count, int64_t bytes) {
    void *taken = *next;
    *next += padded(count * bytes, 64);
    return taken;
}

/* What a thread needs for attention. */
typedef struct {
    float *queries, *scores, *results, *scales, *state_scales;
    int32_t *offsets, *others;
    int8_t *codes;
    uint8_t *states;
    Slots *slots;
    int64_t bytes;
} Space;

static Space lay_out_space(const Run *run, uint8_t *memory) {
    int64_t dim = run->model->head_dim, groups = groups_of(dim);
    uint8_t *next = memory;
    Space space;
    space.queries = take(&next, run->queries_together * run->head_width, 4);
    space.scores = take(&next, run->queries_together * run->score_width, 4);
    space.results = take(&next, run->queries_together * result_width(dim), 4);
    space.scales = take(&next, run->queries_together * groups, 4);
    space.state_scales = take(&next, (groups + 1) * PLACES, 4);
    space.offsets = take(&next, run->queries_together * groups, 4);
    space.others = take(&next, run->nodes_together * run->tree_width, 4);
    space.codes = take(&next, run->queries_together * run->head_width, 1);
    space.states = take(&next, PLACES * result_width(dim), 1);
    space.slots = take(&next, run->nodes_together, sizeof(Slots));
    space.bytes = next - memory;
    return space;
}

static Space space_of(const Run *run, int thread) { return lay_out_space(run, run->spaces + thread * run->space_bytes); }

/* ---- rows ---- */

static float mean_square(const float *x, int64_t count) {
    vf sum = v_set(0.0f);
    int64_t i = 0;
    for (; i + W <= count; i += W) sum = v_fma(v_load(x + i), v_load(x + i), sum);
    float total = v_sum(sum);
    for (; i < count; i++) total = s_fma(x[i], x[i], total);
    return total / (float)count;
}

static void rms_norm(const float *x, const float *weight, int64_t count, float eps, float *out) {
    float scale = 1.0f / sqrtf(mean_square(x, count) + eps);
    for (int64_t i = 0; i < count; i++) out[i] = x[i] * scale * weight[i];
}

static void clear_end(float *x, int64_t count) {
    for (int64_t i = count; i < padded(count, GROUP); i++) x[i] = 0.0f;
}

/* Quantise these groups of a row of x for a product with the matrix. */
static void quantise_groups(const Run *run, const Matrix *matrix, const Rounded *to, const float *x, int64_t row, int64_t first, int64_t last) {
    if (matrix->form.bits == 32) return;
    for (int64_t group = first; group < last; group++) {
        int64_t place = group * run->across + row;
        quantise_group(x + group * GROUP, to->codes + place * GROUP, to->scales + place, to->counts + 2 * place, to->sums + place);
    }
}

static void quantise(Run *run, int64_t row) {
    const float *x = run->inputs + row * run->input_width;
    quantise_groups(run, run->matrix, &run->given, x, row, 0, groups_of(run->matrix->inputs));
}

/* The outputs in these blocks of the matrix times the quantised inputs. */
static void multiply(const Run *run, int64_t first, int64_t last) {
    const Rounded *x = &run->given;
    Activations a = {x->codes, x->scales, x->counts, x->sums, run->across, run->inputs, run->input_width};
    product_blocks(run->matrix, &a, run->rows, &run->out, first, last);
}

static void blocks_of_product(void *context, int64_t first, int64_t last, int thread) {
    (void)thread;
    multiply(context, first, last);
}

/* How many blocks of outputs, ``each`` times as many, a thread claims at a time. */
static int64_t claimed_blocks(const Matrix *m, int64_t each) {
    return larger(CLAIMED / (each * block_bytes(m->inputs, m->form)), 1);
}

/* The matrix times the quantised inputs, into ``outputs``. */
static void product(Run *run) {
    parallel(run->pool, blocks_of_product, run, tiles_of(outputs_of(run->matrix)), claimed_blocks(run->matrix, 1));
}

static void rows_in_parallel(Run *run, Work work, const Matrix *matrix) {
    run->matrix = matrix;
    int64_t enough = 8; /* a few rows take less time than another thread's start */
    parallel(run->pool, work, run, run->rows, run->rows < enough ? run->rows : 2);
}

/* The node that is in a row of the buffers. */
INLINE int64_t node_of(const Run *run, int64_t row) {
    return row / run->width * run->step->nodes + run->first + row % run->width;
}

static void tap(Run *run, int64_t number, int64_t row, const float *x) {
    const Step *step = run->step;
    int64_t node = node_of(run, row), hidden = run->model->hidden;
    for (int64_t i = 0; i < step->tap_count; i++)
        if (step->taps[i].layer == number) memcpy(step->taps[i].states + node * hidden, x, (size_t)hidden * 4);
}

/* The state that a row begins with; where the first layer, or what is before it, also reads the embedding, that is the
 * first part of its input. */
static void embed(void *context, int64_t first, int64_t last, int thread) {
    Run *run = context;
    (void)thread;
    const Model *model = run->model;
    int64_t hidden = model->hidden;
    for (int64_t row = first; row < last; row++) {
        float *state = run->states + row * run->state_width, *input = run->inputs + row * run->input_width;
        int64_t node = node_of(run, row);
        float *embedded = model->entry == TOKENS ? state : input;
        if (model->entry != STATES) {
            unpack_row(&model->embedding, run->step->tokens[node], embedded);
            for (int64_t i = 0; i < hidden; i++) embedded[i] *= model->embedding_scale;
        }
        if (model->entry == BESIDE) rms_norm(input, model->token_norm, hidden, model->eps, input);
        if (model->entry == FUSED) {
            memcpy(input + hidden, run->step->states + node * hidden, (size_t)hidden * 4);
            clear_end(input, 2 * hidden);
            quantise(run, row);
        } else if (model->entry != TOKENS) {
            memcpy(state, run->step->states + node * hidden, (size_t)hidden * 4);
        }
        if (model->entry != FUSED) tap(run, 0, row, state);
    }
}

static void begin(Run *run) {
    rows_in_parallel(run, embed, &run->model->fusion);
    if (run->model->entry != FUSED) return;
    run->out = (Output){run->states, run->state_width, NULL};
    product(run);
    for (int64_t row = 0; row < run->rows; row++) tap(run, 0, row, run->states + row * run->state_width);
}

/* The input of a part of a layer: normalised if the model does. */
static void enter(Run *run, int64_t row, const float *norm) {
    const Model *model = run->model;
    const float *state = run->states + row * run->state_width;
    float *input = run->inputs + row * run->input_width;
    if (norm)
        rms_norm(state, norm, model->hidden, model->eps, input);
    else
        memcpy(input, state, (size_t)model->hidden * 4);
    clear_end(input, model->hidden);
    quantise(run, row);
}

/* The input of the first attention beside the embedding, whose norm is in place. */
static void enter_beside(Run *run, int64_t row) {
    const Model *model = run->model;
    float *state = run->states + row * run->state_width, *input = run->inputs + row * run->input_width;
    rms_norm(state, model->state_norm, model->hidden, model->eps, input + model->hidden);
    if (model->normed_residual) memcpy(state, input + model->hidden, (size_t)model->hidden * 4);
    clear_end(input, 2 * model->hidden);
    quantise(run, row);
}

/* Add the output of a part of a layer, normalised if the model does. */
static void leave(Run *run, int64_t row, const float *norm) {
    const Model *model = run->model;
    float *state = run->states + row * run->state_width, *output = run->outputs + row * run->output_width;
    if (norm) rms_norm(output, norm, model->hidden, model->eps, output);
    for (int64_t i = 0; i < model->hidden; i++) state[i] = s_fma(output[i], model->residual_scale, state[i]);
}

static void before_attention(void *context, int64_t first, int64_t last, int thread) {
    Run *run = context;
    (void)thread;
    int beside = run->model->entry == BESIDE && run->number == 0;
    for (int64_t row = first; row < last; row++) beside ? enter_beside(run, row) : enter(run, row, run->layer->before_attention);
}

/* ---- attention ---- */

static void rotate(float *x, const float *table, int64_t dim) {
    int64_t half = dim / 2;
    const float *cosines = table, *sines = table + half;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = s_fma(a, cosines[i], -(b * sines[i]));
        x[i + half] = s_fma(b, cosines[i], a * sines[i]);
    }
}

static uint8_t *state_at(const Run *run, void *states, int64_t buffer_row, int64_t head, int64_t slot) {
    int64_t first = (buffer_row * run->model->kv_heads + head) * run->step->cache_slots;
    return (uint8_t *)states + (first + slot) * run->state_bytes;
}

/* A head of a row of outputs, up to the padded width; queries and keys with their norm, if each head has one, and their
 * position. */
static void take_head(const Run *run, int64_t row, int64_t head, const float *norm, float *to) {
    const Model *model = run->model;
    int64_t dim = model->head_dim;
    memcpy(to, run->outputs + row * run->output_width + head * dim, (size_t)dim * 4);
    for (int64_t i = dim; i < run->head_width; i++) to[i] = 0.0f;
    if (head >= model->heads + model->kv_heads) return;
    if (model->head_norm == EACH_HEAD) rms_norm(to, norm, dim, model->eps, to);
    rotate(to, run->step->rotary[run->layer->rotary] + run->step->positions[node_of(run, row)] * model->rotary_dim, model->rotary_dim);
}

/* Keys and values go to the cache. */
static void store_heads(void *context, int64_t first, int64_t last, int thread) {
    Run *run = context;
    const Model *model = run->model;
    const Layer *layer = run->layer;
    const LayerCache *cache = &run->step->cache[run->number];
    int64_t queries = model->heads * model->head_dim, keys = model->kv_heads * model->head_dim;
    float *own = space_of(run, thread).results;
    for (int64_t row = first; row < last; row++) {
        int64_t slot = run->step->slots[node_of(run, row)], buffer_row = run->step->buffer_rows[row / run->width];
        if (model->head_norm == ALL_HEADS) {
            float *x = run->outputs + row * run->output_width;
            rms_norm(x, layer->query_norm, queries, model->eps, x);
            rms_norm(x + queries, layer->key_norm, keys, model->eps, x + queries);
        }
        for (int64_t head = 0; head < 2 * model->kv_heads; head++) {
            int is_key = head < model->kv_heads;
            take_head(run, row, model->heads + head, layer->key_norm, own);
            uint8_t *slot_state = state_at(run, is_key ? cache->keys : cache->values, buffer_row, head % model->kv_heads, slot);
            store_state(model->kv, slot_state, own, model->head_dim, is_key);
        }
    }
}

static Slots visible_slots(const Run *run, int64_t b, int64_t n, int32_t *others) {
    const Step *step = run->step;
    const Visible *visible = &step->visible[run->layer->kind];
    int64_t begin = visible->begin ? larger(visible->begin[b * step->nodes + n], 0) : 0;
    int64_t end = visible->ends == 1 ? visible->end[b] : visible->end[b * step->nodes + n], count = 0;
    int64_t run_length = end > begin ? end - begin : 0;
    const uint8_t *tree = visible->tree ? visible->tree + (b * step->nodes + n) * visible->nodes : NULL;
    for (int64_t j = 0; tree && j < visible->nodes; j++)
        if (tree[j]) others[count++] = (int32_t)(visible->base[b] + j);
    return (Slots){begin, run_length, run_length + count, others};
}

INLINE int64_t node_blocks(const Run *run) { return (run->width + run->nodes_together - 1) / run->nodes_together; }

/* Attention of these heads of so many nodes, from ``row`` on. */
static void attend_nodes(const Run *run, const Space *space, int64_t row, int nodes, int64_t head, int heads) {
    const Model *model = run->model;
    const LayerCache *cache = &run->step->cache[run->number];
    int64_t dim = model->head_dim, group = head / (model->heads / model->kv_heads);
    int64_t buffer_row = run->step->buffer_rows[row / run->width];
    Head keys = {state_at(run, cache->keys, buffer_row, group, 0), run->state_bytes, run->nothing};
    Head values = {state_at(run, cache->values, buffer_row, group, 0), run->state_bytes, run->nothing};
    Together together = {
        model->kv, nodes, heads, dim, space->slots, keys, values, model->attention_scale, model->attention_cap};
    Query queries[MOST_QUERIES];
    for (int i = 0; i < nodes * heads; i++) {
        float *x = space->queries + i * run->head_width;
        take_head(run, row + i / heads, head + i % heads, run->layer->query_norm, x);
        queries[i] = (Query){
            x, space->scores + i * run->score_width, space->results + i * result_width(dim), 0.0f,
            space->codes + i * run->head_width, space->scales + i * groups_of(dim), space->offsets + i * groups_of(dim)};
    }
    Int8Space states = {space->states, space->state_scales};
    attend(&together, queries, &states);
    for (int i = 0; i < nodes * heads; i++)
        memcpy(run->inputs + (row + i / heads) * run->input_width + (head + i % heads) * dim, queries[i].out, (size_t)dim * 4);
}

/* Whether heads end where groups of activations do, so that each can be quantised alone. */
INLINE int whole_heads(const Model *model) { return model->head_dim % GROUP == 0; }

/* Items: for each head of keys, the blocks of nodes, with the heads that read these keys. */
static void attend_heads(void *context, int64_t first, int64_t last, int thread) {
    const Run *run = context;
    const Model *model = run->model;
    int64_t share = model->heads / model->kv_heads, trees = run->tree_width, groups = share * model->head_dim / GROUP;
    int64_t blocks = node_blocks(run), each = run->step->rows * blocks;
    Space space = space_of(run, thread);
    for (int64_t item = first; item < last; item++) {
        int64_t group = item / each, block = item % each, b = block / blocks, n = block % blocks * run->nodes_together;
        int nodes = (int)(run->width - n < run->nodes_together ? run->width - n : run->nodes_together);
        for (int i = 0; i < nodes; i++) space.slots[i] = visible_slots(run, b, run->first + n + i, space.others + i * trees);
        int64_t row = b * run->width + n;
        for (int64_t h = 0; h < share; h += MOST_QUERIES) {
            int heads = (int)(share - h < MOST_QUERIES ? share - h : MOST_QUERIES);
            attend_nodes(run, &space, row, nodes, group * share + h, heads);
        }
        for (int i = 0; i < nodes && whole_heads(model); i++) {
            const float *x = run->inputs + (row + i) * run->input_width;
            quantise_groups(run, &run->layer->out, &run->given, x, row + i, group * groups, (group + 1) * groups);
        }
    }
}

static void after_attention(void *context, int64_t first, int64_t last, int thread) {
    Run *run = context;
    (void)thread;
    for (int64_t row = first; row < last; row++) {
        clear_end(run->inputs + row * run->input_width, run->model->heads * run->model->head_dim);
        quantise(run, row);
    }
}

/* ---- MLP ---- */

INLINE int has_attention(const Layer *layer) { return layer->qkv.data != NULL; }
INLINE int has_mlp(const Layer *layer) { return layer->up.data != NULL; }

static void before_mlp(void *context, int64_t first, int64_t last, int thread) {
    Run *run = context;
    (void)thread;
    for (int64_t row = first; row < last; row++) {
        if (has_attention(run->layer)) leave(run, row, run->layer->after_attention);
        if (has_mlp(run->layer)) enter(run, row, run->layer->before_mlp);
    }
}

INLINE vf activated(int activation, vf x) {
    const vf half = v_set(0.5f), one = v_set(1.0f);
    switch (activation) {
        case SILU: return v_mul(x, v_sigmoid(x));
        case GELU_TANH: {
            vf inner = v_mul(v_set(0.797884561f), v_fma(v_mul(v_set(0.044715f), v_mul(x, x)), x, x));
            return v_mul(v_mul(half, x), v_add(one, v_tanh(inner)));
        }
        case GELU: {
            float parts[W];
            v_store(parts, x);
            for (int i = 0; i < W; i++) parts[i] = 0.5f * parts[i] * (1.0f + erff(parts[i] * 0.707106781f));
            return v_load(parts);
        }
        case RELU: return v_max(x, v_set(0.0f));
        default: {
            vf positive = v_max(x, v_set(0.0f));
            return v_mul(positive, positive);
        }
    }
}

INLINE void activate_part(int activation, const float *x, const float *factor, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i += W) { /* buffers have room for whole vectors */
        vf y = activated(activation, v_load(x + i));
        v_store(out + i, factor ? v_mul(y, v_load(factor + i)) : y);
    }
}

/* Activations of these inner states of a row, times the rest if the MLP is gated. */
static void activate_states(const Run *run, int64_t row, int64_t first, int64_t count, float *out) {
    const float *x = run->outputs + row * run->output_width + first, *factor = run->model->gated ? x + run->model->inner : NULL;
    switch (run->model->activation) { /* so that each is a loop of its own */
        case SILU: activate_part(SILU, x, factor, count, out); break;
        case GELU_TANH: activate_part(GELU_TANH, x, factor, count, out); break;
        default: activate_part(run->model->activation, x, factor, count, out);
    }
}

static void activate(void *context, int64_t first, int64_t last, int thread) {
    Run *run = context;
    (void)thread;
    int64_t inner = run->model->inner;
    for (int64_t row = first; row < last; row++) {
        float *out = run->inputs + row * run->input_width;
        activate_states(run, row, 0, inner, out);
        clear_end(out, inner);
        quantise(run, row);
    }
}

/* Whether the thread that computes inner states can also activate and quantise them: a whole group at a time. */
INLINE int activates_at_once(const Model *model, const Layer *layer) {
    return model->inner % GROUP == 0 && layer->up.form.bits != 32 && layer->down.form.bits != 32;
}

/* Items: groups of inner states, from the first product to the input of the second. */
static void up_and_activate(void *context, int64_t first, int64_t last, int thread) {
    Run *run = context;
    (void)thread;
    int64_t inner = run->model->inner, most = claimed_blocks(&run->layer->up, tiles_of(GROUP));
    for (int64_t end; first < last; first = end) {
        end = last - first < most ? last : first + most;
        for (int64_t part = 0; part < (run->model->gated ? 2 : 1); part++)
            multiply(run, tiles_of(part * inner + first * GROUP), tiles_of(part * inner + end * GROUP));
        for (int64_t row = 0; row < run->rows; row++) {
            float *x = run->outputs + row * run->output_width;
            activate_states(run, row, first * GROUP, (end - first) * GROUP, x + first * GROUP);
            quantise_groups(run, &run->layer->down, &run->next, x, row, first, end);
        }
    }
}

/* The MLP's products; its input is in place. */
static void run_mlp(Run *run) {
    const Layer *layer = run->layer;
    if (activates_at_once(run->model, layer)) {
        parallel(run->pool, up_and_activate, run, run->model->inner / GROUP, claimed_blocks(&layer->up, 2 * tiles_of(GROUP)));
        Rounded before = run->given;
        run->given = run->next, run->next = before;
        run->matrix = &layer->down;
    } else {
        product(run);
        rows_in_parallel(run, activate, &layer->down);
    }
    product(run);
}

static void after_mlp(void *context, int64_t first, int64_t last, int thread) {
    Run *run = context;
    (void)thread;
    for (int64_t row = first; row < last; row++) {
        if (has_mlp(run->layer)) leave(run, row, run->layer->after_mlp);
        tap(run, run->number + 1, row, run->states + row * run->state_width);
    }
}

/* ---- the whole ---- */

static void run_layer(Run *run, int64_t number) {
    const Layer *layer = run->layer = &run->model->layer[number];
    run->number = number;
    run->out = (Output){run->outputs, run->output_width, NULL};
    if (has_attention(layer)) {
        rows_in_parallel(run, before_attention, &layer->qkv);
        product(run);
        rows_in_parallel(run, store_heads, &layer->qkv);
        run->matrix = &layer->out;
        parallel(run->pool, attend_heads, run, run->model->kv_heads * run->step->rows * node_blocks(run), 1);
        if (!whole_heads(run->model)) rows_in_parallel(run, after_attention, &layer->out);
        product(run);
    }
    rows_in_parallel(run, before_mlp, &layer->up);
    if (has_mlp(layer)) run_mlp(run);
    rows_in_parallel(run, after_mlp, &layer->down);
}

static void scale_logits(void *context, int64_t first, int64_t last, int thread) {
    Run *run = context;
    (void)thread;
    vf scale = v_set(run->model->logit_scale), cap = v_set(run->model->logit_cap);
    for (int64_t row = first; row < last; row++) {
        float *logits = output_row(&run->out, row);
        for (int64_t i = 0; i < padded(run->model->outputs, TILE); i += W) {
            vf x = v_mul(v_load(logits + i), scale);
            v_store(logits + i, run->model->logit_cap > 0.0f ? v_mul(v_tanh(v_div(x, cap)), cap) : x);
        }
    }
}

/* The logits of the rows that were collected in the inputs. */
static void put_logits(Run *run, int64_t count) {
    const Model *model = run->model;
    int64_t rows = run->rows;
    if (!count) return;
    run->rows = count;
    run->matrix = &model->head;
    run->out = (Output){run->step->logits, run->step->logits_stride, run->places};
    product(run);
    if (model->logit_scale != 1.0f || model->logit_cap > 0.0f) parallel(run->pool, scale_logits, run, count, 1);
    run->rows = rows;
}

static void finish(Run *run) {
    const Model *model = run->model;
    const Step *step = run->step;
    int64_t kept = step->keep ? step->kept : run->width, count = 0;
    for (int64_t row = 0; row < run->rows; row++) { /* the norm of each, in place of its output */
        const float *state = run->states + row * run->state_width;
        float *last = run->outputs + row * run->output_width;
        if (model->final_norm)
            rms_norm(state, model->final_norm, model->hidden, model->eps, last);
        else
            memcpy(last, state, (size_t)model->hidden * 4);
        tap(run, model->layers + 1, row, last);
    }
    run->matrix = &model->head;
    for (int64_t b = 0; step->logits && b < step->rows; b++)
        for (int64_t k = 0; k < kept; k++) {
            int64_t n = (step->keep ? step->keep[b * step->keep_stride + k] : run->first + k) - run->first;
            if (n < 0 || n >= run->width) continue;
            int64_t row = b * run->width + n;
            const float *from = run->outputs + row * run->output_width;
            float *input = run->inputs + count * run->input_width;
            memcpy(input, from, (size_t)model->hidden * 4);
            clear_end(input, model->hidden);
            quantise(run, count);
            run->places[count++] = step->keep ? b * step->kept + k : b * step->nodes + run->first + k;
            if (count == run->rows) put_logits(run, count), count = 0;
        }
    put_logits(run, count);
}

/* ---- checks ---- */

static int32_t bad_data(const Matrix *m) {
    for (const Matrix *each = m; each; each = each->next)
        if (!each->data || (uintptr_t)each->data % 64) return 1;
    return bad_matrices(m);
}

int64_t fd_state_bytes(int32_t kv, int64_t head_dim) {
    int known = kv == KV_F16 || kv == KV_F32 || kv == KV_I8;
    return known && head_dim > 0 && head_dim <= 1 << 16 ? state_bytes(kv, head_dim) : -1;
}

static int not_matrix(const Matrix *m, int64_t outputs, int64_t inputs) {
    return outputs_of(m) != outputs || m->inputs != inputs || bad_data(m);
}

static int32_t check_model(const Model *m) {
    int64_t width = m->heads * m->head_dim, both = (m->heads + 2 * m->kv_heads) * m->head_dim, up = m->gated ? 2 * m->inner : m->inner;
    int sizes = m->layers > 0 && m->hidden > 0 && m->heads > 0 && m->kv_heads > 0 && m->head_dim > 0 && m->inner > 0;
    if (!sizes || m->heads % m->kv_heads || m->rotary_dim < 0 || m->rotary_dim > m->head_dim || m->rotary_dim % 2)
        return BAD_SHAPE;
    if (fd_state_bytes(m->kv, m->head_dim) < 0) return BAD_SHAPE;
    if (m->kinds < 1 || m->rotary_tables < 1 || m->entry < TOKENS || m->entry > BESIDE) return BAD_SHAPE;
    if (m->entry != STATES && not_matrix(&m->embedding, m->vocabulary, m->hidden)) return BAD_SHAPE;
    if (m->head.data && not_matrix(&m->head, m->outputs, m->hidden)) return BAD_SHAPE;
    if (m->entry == FUSED && not_matrix(&m->fusion, m->hidden, 2 * m->hidden)) return BAD_SHAPE;
    if (m->entry == BESIDE && (!m->token_norm || !m->state_norm || !m->layer[0].qkv.data)) return BAD_SHAPE;
    for (int64_t i = 0; i < m->layers; i++) {
        const Layer *l = &m->layer[i];
        const Matrix *each[] = {&l->qkv, &l->out, &l->up, &l->down};
        int64_t inputs = i == 0 && m->entry == BESIDE ? 2 * m->hidden : m->hidden;
        const int64_t shapes[][2] = {{both, inputs}, {m->hidden, width}, {up, m->hidden}, {m->hidden, m->inner}};
        for (int k = 0; k < 4; k++) {
            if (outputs_of(each[k]) != shapes[k][0] || each[k]->inputs != shapes[k][1]) return BAD_SHAPE;
            if (each[k]->data != NULL ? bad_data(each[k]) : each[k ^ 1]->data != NULL) return BAD_SHAPE; /* k ^ 1: of the same part */
        }
        if (l->kind < 0 || l->kind >= m->kinds || l->rotary < 0 || l->rotary >= m->rotary_tables) return BAD_SHAPE;
        if (m->head_norm != NO_HEAD_NORM && (!l->query_norm || !l->key_norm)) return BAD_SHAPE;
    }
    return OK;
}

static int32_t check_visible(const Step *s, const Visible *v) {
    if ((v->ends != 1 && v->ends != s->nodes) || (v->tree && v->nodes < 1)) return BAD_VISIBLE;
    for (int64_t i = 0; i < s->rows * v->ends; i++)
        if (v->end[i] < 0 || v->end[i] > s->cache_slots) return BAD_VISIBLE;
    for (int64_t b = 0; v->tree && b < s->rows; b++)
        if (v->base[b] < 0 || v->base[b] + v->nodes > s->cache_slots) return BAD_VISIBLE;
    return OK;
}

static int32_t check_step(const Model *m, const Step *s) {
    if (s->rows < 1 || s->nodes < 1 || s->cache_rows < 1 || s->cache_slots < 1 || s->cache_slots > INT32_MAX) return BAD_SHAPE;
    if (s->logits && (!m->head.data || s->logits_stride < padded(m->outputs, TILE))) return BAD_SHAPE;
    if (s->kept < 0 || (s->keep_stride && s->keep_stride != s->kept) || (m->entry != TOKENS && !s->states)) return BAD_SHAPE;
    for (int64_t i = 0; i < s->rows * s->nodes; i++) {
        if (m->entry != STATES && (s->tokens[i] < 0 || s->tokens[i] >= m->vocabulary)) return BAD_TOKEN;
        if (s->positions[i] < 0 || s->positions[i] >= s->rotary_positions) return BAD_POSITION;
        if (s->slots[i] < 0 || s->slots[i] >= s->cache_slots) return BAD_SLOT;
    }
    for (int64_t b = 0; b < s->rows; b++)
        if (s->buffer_rows[b] < 0 || s->buffer_rows[b] >= s->cache_rows) return BAD_ROW;
    for (int64_t k = 0; s->keep && k < (s->keep_stride ? s->rows : 1) * s->kept; k++)
        if (s->keep[k] < 0 || s->keep[k] >= s->nodes) return BAD_NODE;
    for (int64_t i = 0; i < s->tap_count; i++)
        if (s->taps[i].layer < 0 || s->taps[i].layer > m->layers + 1) return BAD_TAP;
    for (int64_t kind = 0; kind < m->kinds; kind++) {
        int32_t bad = check_visible(s, &s->visible[kind]);
        if (bad) return bad;
    }
    return OK;
}

/* ---- memory ---- */

/* Assign the buffers; returns their size. With no memory yet, only the size counts. */
static size_t lay_out(Run *run, uint8_t *memory, int64_t rows, int64_t threads) {
    const uint8_t *start = memory ? memory : (uint8_t *)64;
    uint8_t *next = (uint8_t *)start;
    int64_t groups = run->input_width / GROUP;
    run->across = rows;
    run->states = take(&next, rows * run->state_width, 4);
    run->inputs = take(&next, rows * run->input_width + GROUP, 4);
    run->outputs = take(&next, rows * run->output_width + GROUP, 4);
    for (int i = 0; i < 2; i++) {
        Rounded *to = i ? &run->next : &run->given;
        to->codes = take(&next, rows * run->input_width, 1);
        to->scales = take(&next, rows * groups, 4);
        to->sums = take(&next, rows * groups, 4);
        to->counts = take(&next, rows * groups, 8);
    }
    run->places = take(&next, rows, 8);
    run->nothing = take(&next, run->state_bytes, 1);
    run->spaces = take(&next, threads * run->space_bytes, 1);
    return (size_t)(next - start);
}

/* Make a buffer of this size at least; it holds nothing then. */
static int32_t enlarge(Buffer *buffer, size_t size) {
    if (size <= buffer->size) return OK;
    free(buffer->memory);
    buffer->size = 0;
    buffer->memory = aligned_alloc(64, (size + 63) / 64 * 64);
    if (!buffer->memory) return NO_MEMORY;
    buffer->size = size;
    return OK;
}

static int32_t reserve(Engine *engine, Run *run, int64_t rows, int64_t threads) {
    int32_t bad = enlarge(&engine->forward, lay_out(run, NULL, rows, threads));
    if (bad) return bad;
    lay_out(run, engine->forward.memory, rows, threads);
    if (run->state_bytes) memset(run->nothing, 0, (size_t)run->state_bytes);
    return OK;
}

/* How many nodes of a row attend together: as many as there are queries for, but so few that all threads have work and
 * scores stay in the caches.
 */
static void share_attention(Run *run, int64_t width) {
    const Model *model = run->model;
    int64_t share = model->heads / model->kv_heads, threads = run->pool->workers + 1, nodes = larger(MOST_QUERIES / share, 1);
    while (nodes > 1 && nodes * share * run->score_width * 4 > MOST_SCORES) nodes--;
    while (nodes > 1 && threads > 1 && run->step->rows * ((width + nodes - 1) / nodes) * model->kv_heads < 3 * threads) nodes--;
    int64_t blocks = (width + nodes - 1) / nodes;
    run->nodes_together = (width + blocks - 1) / blocks; /* about equal ones */
    run->queries_together = run->nodes_together * (share < MOST_QUERIES ? share : MOST_QUERIES);
    run->space_bytes = lay_out_space(run, (uint8_t *)64).bytes;
}

int32_t fd_forward(Engine *engine, const Model *model, const Step *step, int32_t threads) {
    int32_t bad = check_model(model);
    if (!bad) bad = check_step(model, step);
    if (bad) return bad;
    pool_resize(&engine->pool, threads);
    int64_t all = model->heads + 2 * model->kv_heads, inner = model->gated ? 2 * model->inner : model->inner, trees = 0;
    for (int64_t kind = 0; kind < model->kinds; kind++) trees = larger(trees, step->visible[kind].nodes);
    Run run = {.model = model, .step = step, .pool = &engine->pool};
    run.head_width = padded(model->head_dim, GROUP);
    run.state_bytes = state_bytes(model->kv, model->head_dim);
    run.state_width = padded(model->hidden, GROUP);
    int64_t entry = model->entry == FUSED || model->entry == BESIDE ? 2 * model->hidden : model->hidden;
    run.input_width = padded(larger(larger(entry, model->heads * model->head_dim), model->inner), GROUP);
    run.output_width = padded(larger(larger(all * model->head_dim, model->hidden), inner), TILE);
    run.score_width = padded(step->cache_slots + trees, BLOCK);
    run.tree_width = trees;
    int64_t width = larger(TOGETHER / step->rows, 1);
    width = width < step->nodes ? width : step->nodes;
    share_attention(&run, width);
    bad = reserve(engine, &run, step->rows * width, engine->pool.workers + 1);
    if (bad) return bad;
    FloatMode before = default_float_mode();
    for (run.first = 0; run.first < step->nodes; run.first += width) {
        run.width = step->nodes - run.first < width ? step->nodes - run.first : width;
        run.rows = step->rows * run.width;
        begin(&run);
        for (int64_t number = 0; number < model->layers; number++) run_layer(&run, number);
        finish(&run);
    }
    restore_float_mode(before);
    return OK;
}

/* One product, for measurements and heads. */
int32_t fd_product(Engine *engine, const Matrix *matrix, const float *x, int64_t rows, float *y, int64_t stride, int32_t threads) {
    if (bad_data(matrix) || rows < 0) return BAD_SHAPE;
    if (stride < padded(outputs_of(matrix), TILE)) return BAD_SHAPE;
    pool_resize(&engine->pool, threads);
    Model none = {0};
    Run run = {.model = &none, .pool = &engine->pool, .matrix = matrix};
    run.input_width = padded(matrix->inputs, GROUP);
    int32_t bad = reserve(engine, &run, rows < TOGETHER ? rows : TOGETHER, 1);
    if (bad) return bad;
    FloatMode before = default_float_mode();
    for (int64_t first = 0; first < rows; first += run.rows) {
        run.rows = rows - first < TOGETHER ? rows - first : TOGETHER;
        run.out = (Output){y + first * stride, stride, NULL};
        for (int64_t row = 0; row < run.rows; row++) {
            float *input = run.inputs + row * run.input_width;
            memcpy(input, x + (first + row) * matrix->inputs, (size_t)matrix->inputs * 4);
            clear_end(input, matrix->inputs);
            quantise(&run, row);
        }
        product(&run);
    }
    restore_float_mode(before);
    return OK;
}

int32_t fd_rank(Engine *engine, const Ranking *r) {
    int32_t bad = check_ranking(r);
    int64_t width = padded(r->count, TILE);
    if (!bad) bad = enlarge(&engine->drafts, (size_t)(2 * width * 4));
    if (bad) return bad;
    float *scores = (float *)engine->drafts.memory, *leads = scores + width;
    FloatMode before = default_float_mode();
    for (int64_t b = 0; b < r->rows; b++) {
        int raced = r->times && (!r->raced || r->raced[b]);
        if (raced) leads_of(r->times + b * r->count, r->count, leads);
        for (int64_t n = b * r->nodes; n < (b + 1) * r->nodes; n++)
            rank_node(
                r->logits + n * r->stride, r->count, r->temperatures[b], raced ? leads : NULL, r->wanted, scores,
                r->tokens + n * r->wanted, r->shares + n * r->wanted);
    }
    restore_float_mode(before);
    return OK;
}

#include "draft.h"

/* A draft of several levels in one call: the entries that were committed since the last draft, then the best nodes level by
 * level, then the best nodes of all levels. The rules are those of drafters/trees/dynamic.py, which is the reference.
 */
#ifndef FOREDRAFT_DRAFT_H
#define FOREDRAFT_DRAFT_H

#include "rank.h"

enum { NO_PARENT = -1, PADDING = -2 }; /* parents of the root, and of a node that does not exist */

/* A draft while it grows. The nodes that were read are numbered from the row's last committed entry, 0, whose slot those of
 * the others follow; candidates are all tokens that were scored, those of a row ``most`` places after those of another.
 */
typedef struct {
    Engine *engine;
    const Model *model;
    const Draft *draft;
    int32_t threads;
    int64_t most, stride, width; /* candidates; floats of logits; nodes of a row in a forward: at most so many */
    int64_t level, nodes, frontier; /* nodes that were read, and those on the last level */
    int64_t level_start, count;     /* candidates before this level, and all */
    Step step;
    Tap tap;
    Visible *visible;
    int64_t *tokens, *positions, *slots, *ends, *begins, *base, *last, *levels; /* of nodes */
    int64_t *places, *numbers; /* of the frontier: of its parents on the level above, and as candidates */
    int64_t *ids, *parents, *depths;              /* of candidates */
    float *states, *read, *logits, *paths, *scores; /* paths: scores of the frontier */
    float *leads, *work, *joined, *fused; /* joined: sources of products */
    uint8_t *family, *spare, *seen; /* [B, frontier, nodes]: what the frontier attends to; within a kind's window */
    uint8_t *kept;
} Growing;

INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

/* Committed entries of a row; an entry reads the token ``ahead`` places after its own. */
INLINE int64_t entries(const Draft *d, int64_t b) { return larger(d->lengths[b] - d->ahead, 0); }

INLINE int64_t known(const Model *m, int64_t token) { return lesser(token, m->vocabulary - 1); } /* padding is beyond */

static int32_t read_nodes(Growing *g, int64_t nodes) {
    const Draft *d = g->draft;
    g->step.nodes = nodes;
    for (int64_t kind = 0; kind < g->model->kinds; kind++) {
        int64_t *begins = g->begins + kind * d->rows * g->width;
        for (int64_t i = 0; i < d->rows * nodes; i++) begins[i] = d->windows[kind] ? g->positions[i] - d->windows[kind] + 1 : 0;
        g->visible[kind].begin = begins;
    }
    return fd_forward(g->engine, g->model, &g->step, g->threads);
}

/* Make the fresh states: products of what each is made of, or copies. */
static int32_t make_states(Growing *g) {
    const Draft *d = g->draft;
    int64_t hidden = g->model->hidden, stride = padded(hidden, TILE), part = d->fused ? d->fused->inputs / d->parts : hidden;
    for (int64_t i = 0; i < d->fresh * d->parts; i++) {
        float *place = d->fused ? g->joined + i * part : d->states + d->targets[i] * hidden;
        memcpy(place, d->sources[i], (size_t)part * 4);
    }
    if (!d->fused) return OK;
    int32_t bad = fd_product(g->engine, d->fused, g->joined, d->fresh, g->fused, stride, g->threads);
    for (int64_t i = 0; !bad && i < d->fresh; i++)
        memcpy(d->states + d->targets[i] * hidden, g->fused + i * stride, (size_t)hidden * 4);
    return bad;
}

/* Read the entries that were committed since the last draft, the row's last one among them. */
static int32_t read_committed(Growing *g) {
    const Draft *d = g->draft;
    int64_t hidden = g->model->hidden;
    for (int64_t b = 0; b < d->rows; b++) {
        int64_t own = entries(d, b), first = larger(own - d->width, 0);
        g->base[b] = larger(own - 1, 0), g->last[b] = larger(lesser(own, d->width) - 1, 0);
        for (int64_t n = 0; n < d->width; n++) {
            int64_t i = b * d->width + n, slot = first + n, place = lesser(slot + d->ahead, d->lengths[b] - 1);
            g->tokens[i] = known(g->model, d->history[b * d->history_stride + place]);
            g->positions[i] = g->slots[i] = slot, g->ends[i] = slot + 1;
            const float *state = d->states + (d->places[b] * d->state_slots + slot) * hidden;
            if (d->states) memcpy(g->states + i * hidden, state, (size_t)hidden * 4);
        }
    }
    for (int64_t kind = 0; kind < g->model->kinds; kind++) g->visible[kind] = (Visible){NULL, g->ends, g->base, NULL, d->width, 0};
    g->step.keep = g->last, g->step.kept = g->step.keep_stride = 1;
    int32_t bad = read_nodes(g, d->width);
    for (int64_t b = 0; !bad && b < d->rows; b++)
        memmove(g->read + b * hidden, g->read + (b * d->width + g->last[b]) * hidden, (size_t)hidden * 4);
    memset(g->family, 1, (size_t)d->rows); /* node 0 attends to itself */
    g->step.keep = NULL, g->step.kept = g->step.keep_stride = 0;
    g->frontier = g->nodes = 1, g->levels[0] = 0;
    return bad;
}

/* The new frontier attends to what its parents do, and to itself; within a window, not to nodes of early levels. */
static void grow_family(Growing *g, int64_t frontier) {
    const Draft *d = g->draft;
    int64_t before = g->nodes, now = before + frontier, rows = d->rows;
    uint8_t *family = g->spare;
    memset(family, 0, (size_t)(rows * frontier * now));
    for (int64_t i = 0; i < rows * frontier; i++) {
        int64_t parent = i / frontier * g->frontier + g->places[i / frontier * d->expanded + i % frontier];
        memcpy(family + i * now, g->family + parent * before, (size_t)before);
        family[i * now + before + i % frontier] = 1;
    }
    g->spare = g->family, g->family = family;
    for (int64_t j = before; j < now; j++) g->levels[j] = g->level;
    for (int64_t kind = 0; kind < g->model->kinds; kind++) {
        uint8_t *seen = g->seen + kind * rows * d->expanded * (1 + d->expanded * d->depth);
        int64_t first = d->windows[kind] ? g->level - d->windows[kind] + 1 : 0;
        for (int64_t i = 0; i < rows * frontier * now; i++) seen[i] = family[i] && g->levels[i % now] >= first;
        g->visible[kind] = (Visible){NULL, g->base, g->base, seen, 1, now};
    }
}

/* Read the frontier, whose numbers and places of parents are set; its nodes read their parents' states. */
static int32_t read_level(Growing *g, int64_t frontier) {
    const Draft *d = g->draft;
    int64_t hidden = g->model->hidden;
    grow_family(g, frontier);
    for (int64_t i = 0; i < d->rows * frontier; i++) {
        int64_t b = i / frontier, n = i % frontier, from = b * g->frontier + g->places[b * d->expanded + n];
        g->tokens[i] = known(g->model, g->ids[b * g->most + g->numbers[b * d->expanded + n] - 1]);
        g->positions[i] = g->base[b] + g->level, g->slots[i] = g->base[b] + g->nodes + n;
        memcpy(g->states + i * hidden, g->read + from * hidden, (size_t)hidden * 4);
    }
    g->frontier = frontier, g->nodes += frontier;
    return read_nodes(g, frontier);
}

/* The children of the frontier become candidates. */
static void rank_frontier(Growing *g) {
    const Draft *d = g->draft;
    int64_t wanted = lesser(d->children, d->count);
    for (int64_t b = 0; b < d->rows; b++) {
        int raced = d->seeds && (!d->raced || d->raced[b]);
        if (raced) {
            times_of(race_bits(d->seeds[b], d->numbers[b] + g->level), d->ids, d->count, g->leads);
            leads_of(g->leads, d->count, g->leads);
        }
        for (int64_t n = 0; n < g->frontier; n++) {
            int64_t at = b * g->most + g->count + n * wanted, own = b * d->expanded + n;
            const float *logits = g->logits + (b * g->frontier + n) * g->stride;
            rank_node(
                logits, d->count, d->temperatures[b], raced ? g->leads : NULL, wanted, g->work, g->ids + at, g->scores + at);
            for (int64_t i = at; i < at + wanted; i++) {
                if (d->ids) g->ids[i] = d->ids[g->ids[i]];
                g->scores[i] += g->level ? g->paths[own] : 0.0f;
                g->parents[i] = g->level ? g->numbers[own] : 0;
            }
        }
    }
    g->level_start = g->count, g->count += g->frontier * wanted, g->level++;
    for (int64_t c = g->level_start; c < g->count; c++) g->depths[c] = g->level;
}

/* Mark the ``wanted`` best of a row's candidates from ``first`` on, the earlier of equals first; those deeper than
 * ``allowed`` come last. Returns the score of the last one. */
static float mark_best(Growing *g, int64_t b, int64_t first, int64_t wanted, int64_t allowed, int64_t *order) {
    const float *scores = g->scores + b * g->most;
    float value = 0.0f;
    memset(g->kept, 0, (size_t)g->count);
    for (int64_t k = 0; k < wanted; k++) {
        int64_t best = -1;
        float highest = -INFINITY;
        for (int64_t c = first; c < g->count; c++) {
            float score = g->depths[c] > allowed ? -INFINITY : scores[c];
            if (!g->kept[c] && (best < 0 || score > highest)) best = c, highest = score;
        }
        g->kept[best] = 1, value = highest;
        if (order) order[k] = best;
    }
    return value;
}

/* The best candidates of the last level become the frontier, but for those whose children cannot be worth a node. Returns
 * their number, or 0 if no further level is worth it. */
static int64_t choose_frontier(Growing *g) {
    const Draft *d = g->draft;
    int64_t wanted = lesser(d->children, d->count), available = lesser(d->expanded, d->nodes - g->level);
    int64_t frontier = lesser(available, g->count - g->level_start), full = g->count >= d->nodes;
    int64_t useful = d->node_price > 0.0f ? 1 : frontier;
    float worth = 0.0f;
    for (int64_t b = 0; b < d->rows; b++) {
        int64_t *chosen = g->numbers + b * d->expanded, *places = g->places + b * d->expanded;
        mark_best(g, b, g->level_start, frontier, INT64_MAX, chosen);
        for (int64_t n = 0; n < frontier; n++) {
            g->paths[b * d->expanded + n] = g->scores[b * g->most + chosen[n]];
            float chance = expf(g->paths[b * d->expanded + n]) - d->node_price;
            if (d->allowed[b] > g->level && chance > 0.0f) worth += chance;
            if (chance > 0.0f) useful = larger(useful, n + 1);
            places[n] = (chosen[n] - g->level_start) / wanted;
            chosen[n]++; /* 0 is the root */
        }
    }
    for (int64_t b = 0; full && b < d->rows; b++)
        full = g->paths[b * d->expanded] < mark_best(g, b, 0, d->nodes, INT64_MAX, NULL);
    return full || worth < d->level_price ? 0 : lesser(frontier, useful);
}

/* The tree of the best candidates; a parent never scores less than its child and comes before it. */
static void keep_best(Growing *g) {
    const Draft *d = g->draft;
    int64_t nodes = lesser(d->nodes, g->count);
    for (int64_t b = 0; b < d->rows; b++) {
        int64_t *tokens = d->tokens + b * (1 + d->nodes), *parents = d->parents + b * (1 + d->nodes), drafted = 0;
        float *scores = d->scores + b * (1 + d->nodes);
        int64_t *number = g->places; /* of each candidate in the tree; the root is 0 */
        tokens[0] = d->history[b * d->history_stride + d->lengths[b] - 1], parents[0] = NO_PARENT, scores[0] = 0.0f;
        mark_best(g, b, 0, nodes, d->allowed[b], NULL);
        number[0] = 0;
        for (int64_t c = 0; c < g->count; c++) {
            int64_t from = b * g->most + c;
            number[c + 1] = g->kept[c] ? ++drafted : 0;
            if (!g->kept[c]) continue;
            tokens[drafted] = g->ids[from], scores[drafted] = g->scores[from];
            parents[drafted] = g->depths[c] <= d->allowed[b] ? number[g->parents[from]] : PADDING;
        }
    }
    d->drafted[0] = nodes, d->drafted[1] = lesser(g->level, nodes);
}

/* Whether the entries of a row and a whole tree after them have slots, positions and states. */
static int32_t check_row(const Draft *d, int64_t b) {
    int64_t own = entries(d, b), read = larger(own, d->width), last = larger(own - 1, 0);
    if (d->states && (d->places[b] < 0 || d->places[b] >= d->state_rows)) return BAD_ROW;
    if (read > d->cache_slots || last + 1 + d->expanded * (d->depth - 1) > d->cache_slots) return BAD_SLOT;
    if (d->states && read > d->state_slots) return BAD_SLOT;
    return larger(read, last + d->depth) > d->rotary_positions ? BAD_POSITION : OK;
}

static int32_t check_draft(const Model *m, const Draft *d) {
    int sizes = d->rows > 0 && d->width > 0 && d->nodes > 0 && d->depth > 0 && d->expanded > 0 && d->children > 0 && d->count > 0;
    if (!sizes || d->rows > 1 << 20 || d->width > 1 << 20 || d->nodes > 1 << 16 || d->depth > 1 << 12) return BAD_SHAPE;
    if (d->expanded > 1 << 10 || d->children > 1 << 10 || d->ahead < 0 || !m->head.data || d->count > m->outputs) return BAD_SHAPE;
    if (m->entry == STATES || (m->entry != TOKENS) != (d->states != NULL)) return BAD_SHAPE;
    if (d->fresh < 0 || d->fresh > 1 << 20 || (d->fresh && (!d->states || d->parts < 1 || d->parts > 64))) return BAD_SHAPE;
    if (d->fresh && d->fused && (d->fused->outputs != m->hidden || d->fused->inputs % d->parts)) return BAD_SHAPE;
    if (d->fresh && !d->fused && d->parts != 1) return BAD_SHAPE;
    for (int64_t i = 0; i < d->fresh; i++)
        if (d->targets[i] < 0 || d->targets[i] >= d->state_rows * d->state_slots) return BAD_SLOT;
    if (d->carried < 0 || d->carried > m->layers + 1) return BAD_TAP;
    for (int64_t b = 0; b < d->rows; b++) {
        if (d->lengths[b] < 1 || d->lengths[b] > d->history_stride || !(d->temperatures[b] > 0.0f)) return BAD_SHAPE;
        int32_t bad = check_row(d, b);
        if (bad) return bad;
    }
    return OK;
}

/* Assign the buffers; returns their size. With no memory yet, only the size counts. */
static size_t lay_out_draft(Growing *g, uint8_t *memory) {
    const Draft *d = g->draft;
    const uint8_t *start = memory ? memory : (uint8_t *)64;
    uint8_t *next = (uint8_t *)start;
    int64_t kinds = g->model->kinds, hidden = g->model->hidden, read = 1 + d->expanded * d->depth;
    int64_t in_forward = d->rows * g->width, on_level = d->rows * d->expanded, all = d->rows * g->most;
    g->visible = take(&next, kinds, sizeof *g->visible);
    int64_t **whole[] = {&g->tokens, &g->positions, &g->slots, &g->ends};
    for (int i = 0; i < 4; i++) *whole[i] = take(&next, in_forward, 8);
    g->begins = take(&next, kinds * in_forward, 8);
    g->base = take(&next, d->rows, 8), g->last = take(&next, d->rows, 8), g->levels = take(&next, read, 8);
    g->places = take(&next, larger(on_level, 1 + g->most), 8), g->numbers = take(&next, on_level, 8);
    g->ids = take(&next, all, 8), g->parents = take(&next, all, 8), g->depths = take(&next, g->most, 8);
    g->states = take(&next, in_forward * hidden, 4), g->read = take(&next, in_forward * hidden, 4);
    g->logits = take(&next, on_level * g->stride, 4), g->paths = take(&next, on_level, 4), g->scores = take(&next, all, 4);
    g->leads = take(&next, padded(d->count, TILE), 4), g->work = take(&next, padded(d->count, TILE), 4);
    g->joined = take(&next, d->fused ? d->fresh * d->fused->inputs : 0, 4);
    g->fused = take(&next, d->fused ? d->fresh * padded(hidden, TILE) : 0, 4);
    g->family = take(&next, on_level * read, 1), g->spare = take(&next, on_level * read, 1);
    g->seen = take(&next, kinds * on_level * read, 1), g->kept = take(&next, g->most, 1);
    return (size_t)(next - start);
}

int32_t fd_draft(Engine *engine, const Model *model, const Draft *d, int32_t threads) {
    int32_t bad = check_model(model);
    if (!bad) bad = check_draft(model, d);
    if (bad) return bad;
    Growing g = {.engine = engine, .model = model, .draft = d, .threads = threads};
    g.most = lesser(d->children, d->count) * (1 + d->expanded * d->depth);
    g.stride = padded(model->outputs, TILE), g.width = larger(d->width, d->expanded);
    bad = enlarge(&engine->drafts, lay_out_draft(&g, NULL));
    if (bad) return bad;
    lay_out_draft(&g, engine->drafts.memory);
    g.tap = (Tap){d->carried, g.read};
    g.step = (Step){
        .rows = d->rows, .tokens = g.tokens, .positions = g.positions, .slots = g.slots, .states = g.states,
        .buffer_rows = d->buffer_rows,
        .visible = g.visible, .cache = d->cache, .cache_rows = d->cache_rows, .cache_slots = d->cache_slots,
        .rotary = d->rotary, .rotary_positions = d->rotary_positions, .logits = g.logits, .logits_stride = g.stride,
        .taps = &g.tap, .tap_count = 1};
    FloatMode before = default_float_mode();
    bad = d->fresh ? make_states(&g) : OK;
    if (!bad) bad = read_committed(&g);
    while (!bad) {
        rank_frontier(&g);
        int64_t frontier = g.level < lesser(d->depth, d->nodes) ? choose_frontier(&g) : 0;
        if (!frontier) break;
        bad = read_level(&g, frontier);
    }
    if (!bad) keep_best(&g);
    restore_float_mode(before);
    return bad;
}

#endif

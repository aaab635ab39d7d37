/* The narrow interface of the native engine: plain structs and raw pointers, no torch.
 *
 * A matrix holds its outputs in tiles of 16. A tile has, for each group of 32 inputs, the codes of its 16 outputs so that
 * one 64-byte load holds four inputs of each, and the scales of these codes. Scales are of one of two kinds. HALF_SCALES: a
 * half-precision scale per group and output, and, unless the codes are symmetric, a half-precision minimum. SMALL_SCALES,
 * those of K-quants: for each block of 256 inputs one half-precision factor of its scales (and one of its minima), which
 * are integers of 8 bits: a scale per 16 inputs if the codes are symmetric, else a scale and a minimum per 32. See pack.h.
 */
#ifndef FOREDRAFT_ENGINE_H
#define FOREDRAFT_ENGINE_H

#include <stdint.h>

#define TILE 16
#define GROUP 32
#define BLOCK_GROUPS 8 /* groups of a block with SMALL_SCALES */
#define MINIMA (-1) /* Form.zero where minima are stored */

enum { HALF_SCALES, SMALL_SCALES };

/* How weights are stored. */
typedef struct {
    int32_t bits; /* of a code: 4, 5, 6 or 8; 32: float weights */
    int32_t zero; /* weight = scale * (code - zero), or scale * code + minimum if MINIMA */
    int32_t scales;
} Form;

typedef struct Matrix {
    const uint8_t *data; /* tiles, aligned to 64 bytes */
    const float *bias;   /* [outputs rounded up to TILE], or NULL */
    int64_t outputs, inputs;
    Form form;
    const struct Matrix *next; /* the outputs after these, which fill whole tiles then; or NULL */
} Matrix;

typedef struct {
    Matrix qkv, out, up, down; /* up: gates, then the rest, if gated; attention or MLP without data is skipped */
    const float *before_attention, *after_attention; /* weights of RMS norms, or NULL */
    const float *before_mlp, *after_mlp;
    const float *query_norm, *key_norm;
    int32_t kind; /* which Visible and which rotary table */
    int32_t rotary;
} Layer;

enum { SILU, GELU_TANH, GELU, RELU, RELU_SQUARED };
enum { NO_HEAD_NORM, EACH_HEAD, ALL_HEADS };
enum { KV_F16, KV_F32, KV_I8 };

/* What the first layer reads: embeddings of tokens; given states; both, multiplied by ``fusion``; or given states, beside
 * whose norm its attention reads that of the embedding (EAGLE-3). */
enum { TOKENS, STATES, FUSED, BESIDE };

/* A decoder, or the decoder layers of a draft head. */
typedef struct {
    int64_t layers, hidden, heads, kv_heads, head_dim, inner, vocabulary, outputs; /* outputs: of the output layer */
    int64_t rotary_dim, rotary_tables, kinds;
    int32_t activation, gated, head_norm, kv, entry;
    int32_t normed_residual; /* BESIDE: the first layer adds to the norm of the given states */
    float eps, embedding_scale, residual_scale, attention_scale, attention_cap, logit_scale, logit_cap;
    const Layer *layer;
    Matrix embedding, head; /* without data: no tokens; no logits */
    Matrix fusion;          /* FUSED */
    const float *token_norm, *state_norm; /* BESIDE */
    const float *final_norm;              /* or NULL */
} Model;

/* What the nodes of B rows attend to in layers of one kind: slots [begin, end), then base + j where tree[b, i, j]. */
typedef struct {
    const int64_t *begin;  /* [B, N], or NULL for 0 */
    const int64_t *end;    /* [B, N], or [B, 1] */
    const int64_t *base;   /* [B] */
    const uint8_t *tree;   /* [B, N, T], or NULL */
    int64_t ends, nodes;   /* columns of end; T */
} Visible;

typedef struct {
    void *keys, *values; /* [cache rows, kv_heads, slots], each slot fd_state_bytes */
} LayerCache;

typedef struct {
    int64_t layer; /* 0: embedding, i: after i layers; layers + 1: after the final norm */
    float *states; /* [B * N, hidden] */
} Tap;

typedef struct {
    int64_t rows, nodes;
    const int64_t *tokens, *positions, *slots; /* [B, N] */
    const float *states;                       /* [B * N, hidden], if the first layer reads any */
    const int64_t *buffer_rows;                /* [B]: of the rows in the cache */
    const Visible *visible;                    /* one for each kind of layer */
    const LayerCache *cache;                   /* one for each layer */
    int64_t cache_rows, cache_slots;
    const float *const *rotary; /* for each table: [positions, 2, rotary_dim / 2], cosines and sines */
    int64_t rotary_positions;
    const int64_t *keep; /* nodes whose logits are returned, or NULL for all */
    int64_t kept;
    int64_t keep_stride; /* from a row's to the next one's; 0: the same nodes of all rows */
    float *logits;       /* [B * kept, logits_stride], or NULL */
    int64_t logits_stride;
    const Tap *taps;
    int64_t tap_count;
} Step;

/* The best guesses after N nodes of each of B rows, by their logits. */
typedef struct {
    int64_t rows, nodes, count, wanted; /* B, N; logits of a node; guesses */
    const float *logits;                /* [B, N, stride] */
    int64_t stride;
    const float *temperatures; /* [B] */
    const float *times;        /* [B, count]: arrival times of the tokens, or NULL */
    const uint8_t *raced;      /* [B]: whether a row's guesses race, or NULL: all, if there are times */
    int64_t *tokens;           /* [B, N, wanted] */
    float *shares;             /* [B, N, wanted]: their logs */
} Ranking;

/* A dynamic tree for each of B rows: see draft.h. */
typedef struct {
    int64_t rows, width;    /* B; committed entries to read first, each row's last ones */
    const int64_t *history; /* [B, history_stride]: committed tokens */
    int64_t history_stride;
    const int64_t *lengths; /* [B]: committed tokens */
    const int64_t *buffer_rows; /* [B]: of the rows in the cache */
    int64_t ahead;          /* entry j reads token j + ahead */
    float *states;          /* [state_rows, state_slots, hidden]: what entry j of the row in places[b] reads, if any */
    const int64_t *places;  /* [B] */
    int64_t state_rows, state_slots;
    int64_t fresh, parts;        /* states that are made first, and what each is made of */
    const float *const *sources; /* [fresh, parts]: fused->inputs / parts floats, or hidden ones */
    const int64_t *targets;      /* [fresh]: row * state_slots + slot */
    const Matrix *fused;         /* of the parts of a state next to each other; NULL: the state is its only part */
    int64_t carried; /* the tap whose states a node's children read: Tap.layer */
    const LayerCache *cache;
    int64_t cache_rows, cache_slots;
    const float *const *rotary;
    int64_t rotary_positions;
    const int64_t *windows;                  /* of each kind of layer, 0: all */
    int64_t nodes, depth, expanded, children; /* limits: of the tree, its levels, a level's nodes that are read, their children */
    float level_price, node_price;            /* of a further level, and of a node of it: Plan.level_price */
    const int64_t *allowed;                   /* [B]: levels of the row */
    int64_t count;                            /* logits that are tokens */
    const int64_t *ids;                       /* [count]: the target's ids, or NULL: the same */
    const float *temperatures;                /* [B] */
    const int64_t *seeds, *numbers; /* [B]: of the race at each row's position, or NULL: none */
    const uint8_t *raced;           /* [B]: whether a row's guesses race, or NULL: all */
    int64_t *tokens, *parents;      /* [B, 1 + nodes]: the tree */
    float *scores;                  /* [B, 1 + nodes] */
    int64_t *drafted;               /* [2]: nodes of the tree, and levels */
} Draft;

/* Every function that returns int32_t returns 0, or one of these; nothing has been written then, but for BAD_NUMBER. */
enum { OK, BAD_SHAPE, BAD_TOKEN, BAD_POSITION, BAD_SLOT, BAD_ROW, BAD_VISIBLE, BAD_NODE, NO_MEMORY, BAD_TAP, BAD_NUMBER };

int32_t fd_runs_here(void);
const char *fd_isa(void);

int64_t fd_state_bytes(int32_t kv, int64_t head_dim); /* of a key, or a value, of one head; -1: there are none such */
int64_t fd_matrix_bytes(int64_t outputs, int64_t inputs, const Form *form); /* -1: there is no such matrix */
int32_t fd_pack_floats(const float *weight, int64_t outputs, int64_t inputs, const Form *form, uint8_t *data);
int32_t fd_pack_codes(
    const uint8_t *codes, const uint16_t *scales, const uint16_t *minima, int64_t outputs, int64_t inputs, const Form *form,
    uint8_t *data);
int32_t fd_block_form(int32_t type, Form *form); /* of a type of GGUF files, by its number; BAD_SHAPE: not stored as it is */
int32_t fd_pack_blocks(
    int32_t type, const uint8_t *const *rows, int64_t outputs, int64_t inputs, uint8_t *data, int32_t threads);
int32_t fd_unpack_codes(const Matrix *matrix, uint8_t *codes, uint16_t *scales, uint16_t *minima);
int32_t fd_unpack(const Matrix *matrix, const int64_t *rows, int64_t count, float *out, int64_t stride);

typedef struct Engine Engine;
Engine *fd_engine_new(void);
void fd_engine_free(Engine *engine);
int32_t fd_product(Engine *engine, const Matrix *matrix, const float *x, int64_t rows, float *y, int64_t stride, int32_t threads);
int32_t fd_forward(Engine *engine, const Model *model, const Step *step, int32_t threads);
int32_t fd_draft(Engine *engine, const Model *model, const Draft *draft, int32_t threads);
int32_t fd_rank(Engine *engine, const Ranking *ranking);
void fd_advise_huge(void *memory, int64_t bytes);
void fd_exponentials(const int64_t *bits, int64_t rows, int64_t count, float *out); /* out: [rows, count] */

/* The best token, or, at a temperature above 0, the one that is drawn with these bits; -1 if a score is NaN or none is finite. */
int64_t fd_choose(const float *scores, int64_t count, float temperature, int64_t bits);

#endif

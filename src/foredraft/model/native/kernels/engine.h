/* The narrow interface of the native engine: plain structs and raw pointers, no torch.
 *
 * A matrix holds its outputs in tiles of 16. A tile has, for each group of 32 inputs, the codes of its 16 outputs so that
 * one 64-byte load holds four inputs of each; then a half-precision scale per group and output, and, unless the codes are
 * symmetric, a half-precision minimum. See pack.c.
 */
#ifndef FOREDRAFT_ENGINE_H
#define FOREDRAFT_ENGINE_H

#include <stdint.h>

#define TILE 16
#define GROUP 32
#define MINIMA (-1) /* Matrix.zero where minima are stored */

typedef struct {
    const uint8_t *data; /* tiles, aligned to 64 bytes */
    const float *bias;   /* [outputs rounded up to TILE], or NULL */
    int64_t outputs, inputs;
    int32_t bits; /* 4 or 8; 32: float weights */
    int32_t zero; /* weight = scale * (code - zero), or scale * code + minimum if MINIMA */
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

typedef struct {
    int64_t layers, hidden, heads, kv_heads, head_dim, inner, vocabulary;
    int64_t rotary_dim, rotary_tables, kinds;
    int32_t activation, gated, head_norm, kv;
    float eps, embedding_scale, residual_scale, attention_scale, attention_cap, logit_scale, logit_cap;
    const Layer *layer;
    Matrix embedding, head;
    const float *final_norm;
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
    const int64_t *lines;                      /* [B]: of the rows in the cache */
    const Visible *visible;                    /* one for each kind of layer */
    const LayerCache *cache;                   /* one for each layer */
    int64_t cache_rows, cache_slots;
    const float *const *rotary; /* for each table: [positions, 2, rotary_dim / 2], cosines and sines */
    int64_t rotary_positions;
    const int64_t *keep; /* nodes whose logits are returned, or NULL for all */
    int64_t kept;
    float *logits; /* [B * kept, logits_stride] */
    int64_t logits_stride;
    const Tap *taps;
    int64_t tap_count;
} Step;

/* Every function that returns int32_t returns 0, or one of these; nothing has been written then. */
enum { OK, BAD_SHAPE, BAD_TOKEN, BAD_POSITION, BAD_SLOT, BAD_ROW, BAD_VISIBLE, BAD_NODE, NO_MEMORY, BAD_TAP };

int32_t fd_runs_here(void);
const char *fd_isa(void);

int64_t fd_state_bytes(int32_t kv, int64_t head_dim); /* of a key, or a value, of one head; -1: there are none such */
int64_t fd_matrix_bytes(int64_t outputs, int64_t inputs, int32_t bits, int32_t zero);
int32_t fd_pack_floats(const float *weight, int64_t outputs, int64_t inputs, int32_t bits, int32_t zero, uint8_t *data);
int32_t fd_pack_codes(
    const uint8_t *codes, const uint16_t *scales, const uint16_t *minima, int64_t outputs, int64_t inputs, int32_t bits,
    int32_t zero, uint8_t *data);
int32_t fd_unpack_codes(const Matrix *matrix, uint8_t *codes, uint16_t *scales, uint16_t *minima);
int32_t fd_unpack(const Matrix *matrix, const int64_t *rows, int64_t count, float *out, int64_t stride);

typedef struct Engine Engine;
Engine *fd_engine_new(void);
void fd_engine_free(Engine *engine);
int32_t fd_product(Engine *engine, const Matrix *matrix, const float *x, int64_t rows, float *y, int64_t stride, int32_t threads);
int32_t fd_forward(Engine *engine, const Model *model, const Step *step, int32_t threads);
void fd_advise_huge(void *memory, int64_t bytes);
void fd_exponentials(const int64_t *bits, int64_t rows, int64_t count, float *out); /* out: [rows, count] */

#endif

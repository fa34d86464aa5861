/* Products of few rows with a large matrix, as decoding makes them: every weight is read once, so what counts is to
 * read it as fast as memory gives it, in as few bits as it is stored in. Sums are in float32 whatever the storage.
 *
 * One source for every processor: vectors of 16 floats, which the compiler maps to what the machine has; instructions
 * are named only where it does not find them itself. `-march=native` and OpenMP (of the process: torch's own) expected.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define MANY 8 /* rows of x in one tile */
#define EACH(i, n) _Pragma("GCC unroll 8") for (int i = 0; i < (n); i++)
typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));
typedef int8_t bvec __attribute__((vector_size(16)));

enum kind { F32, BF16, F16, INT8, INT4 };

/* A matrix `rows` × `columns`, stored row by row.
 * F32, BF16, F16   the numbers themselves
 * INT8, INT4       whole numbers or places in a table of 16, in groups of `group` columns that share a bfloat16 scale;
 *                  rows are filled up with zeros to `padded` columns. INT4: a run of 128 columns is 16 words of 32 bits,
 *                  in which word i holds columns i, 16 + i, …, 112 + i from the lowest four bits up. */
typedef struct {
    int64_t kind, shift, rows, columns, padded; /* a group is 2^shift columns */
    const void *values;
    const uint16_t *scales;
    const float *table;
} matrix;

INLINE vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, vec v) { memcpy(p, &v, sizeof v); }

INLINE vec all(float x) { return (vec){0} + x; }

INLINE float bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE float f16(uint16_t half) {
#if defined(__F16C__)
    return _cvtsh_ss(half);
#else
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff, bits;
    float x;
    if (rest >= 0x7c00) bits = 0x7f800000 | (rest & 0x3ff) << 13; /* infinities and NaN */
    else if (rest >= 0x400) bits = (rest << 13) + 0x38000000;
    else { /* below the normal numbers: a multiple of 2^-24 */
        x = (float)rest * 0x1p-24f;
        memcpy(&bits, &x, sizeof bits);
    }
    bits |= sign;
    memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

INLINE float sum(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s = 0;
    for (int i = 0; i < LANES; i++) s += v[i];
    return s;
#endif
}

/* 16 numbers of a float matrix from place `at`. */
INLINE vec load_float(int kind, const void *values, int64_t at) {
    if (kind == F32) return load((const float *)values + at);
    hvec half;
    memcpy(&half, (const uint16_t *)values + at, sizeof half);
    if (kind == BF16) return (vec)(__builtin_convertvector(half, uvec) << 16);
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps((__m256i)half);
#else
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = f16(half[i]);
    return v;
#endif
}

INLINE float load_one(int kind, const void *values, int64_t at) {
    if (kind == F32) return ((const float *)values)[at];
    uint16_t half = ((const uint16_t *)values)[at];
    return kind == BF16 ? bf16(half) : f16(half);
}

/* 16 entries of a table of 16, chosen by the lowest four bits of each word. */
INLINE vec look_up(vec table, uvec words) {
#if defined(__AVX512F__)
    return (vec)_mm512_permutexvar_ps((__m512i)words, (__m512)table);
#elif defined(__AVX2__)
    union { vec v; __m256 half[2]; } t = {table}, out;
    union { uvec v; __m256i half[2]; } place = {words};
    for (int i = 0; i < 2; i++) {
        __m256 low = _mm256_permutevar8x32_ps(t.half[0], place.half[i]);
        __m256 high = _mm256_permutevar8x32_ps(t.half[1], place.half[i]);
        out.half[i] = _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(place.half[i], 28)));
    }
    return out.v;
#else
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = table[words[i] & 15];
    return v;
#endif
}

/* 16 codes, not yet scaled, from column `k` + 16·`i` of a row, where k begins a run of RUN columns. */
INLINE vec load_code(int kind, const uint8_t *row, int64_t k, int i, vec table) {
    if (kind == INT4) {
        uvec words;
        memcpy(&words, row + k / 2, sizeof words);
        return look_up(table, words >> (uint32_t)(4 * i));
    }
    bvec bytes;
    memcpy(&bytes, row + k + LANES * i, sizeof bytes);
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#else
    return __builtin_convertvector(bytes, vec);
#endif
}

INLINE int64_t row_bytes(const matrix *w) { return w->kind == INT4 ? w->padded / 2 : w->padded; }

/* y[m, r] = Σ_k x[m, k] W[r, k] for R rows from `row` and M rows of x: all M·R sums stay in registers. */
INLINE void float_tile(int kind, int M, int R, const matrix *w, int64_t row, const float *x, int64_t stride, float *y,
                       int64_t y_stride) {
    const int64_t columns = w->columns, whole = columns / LANES * LANES;
    vec acc[MANY][4];
    EACH(m, M) EACH(r, R) acc[m][r] = (vec){0};
    for (int64_t k = 0; k < whole; k += LANES) {
        vec b[4];
        EACH(r, R) b[r] = load_float(kind, w->values, (row + r) * columns + k);
        EACH(r, R) __builtin_prefetch((const uint8_t *)w->values + ((row + R + r) * columns + k) * (kind == F32 ? 4 : 2));
        EACH(m, M) {
            vec a = load(x + m * stride + k);
            EACH(r, R) acc[m][r] += a * b[r];
        }
    }
    EACH(m, M)
        EACH(r, R) {
            float s = sum(acc[m][r]);
            for (int64_t k = whole; k < columns; k++)
                s += x[m * stride + k] * load_one(kind, w->values, (row + r) * columns + k);
            y[m * y_stride + r] = s;
        }
}

/* The same for groups: Σ_g scale_g Σ_{k in g} x_k code_k. One row of x sums 32 columns and scales the sum; several
 * rows share the scaled numbers. */
INLINE void group_tile(int kind, int M, int R, const matrix *w, int64_t row, const float *x, int64_t stride, float *y,
                       int64_t y_stride) {
    const int64_t groups = w->padded >> w->shift, bytes = row_bytes(w);
    const uint8_t *values = (const uint8_t *)w->values + row * bytes;
    const uint16_t *scales = w->scales + row * groups;
    const vec table = kind == INT4 ? load(w->table) : (vec){0};
    const int run = kind == INT4 ? 8 : 4; /* vectors in 64 bytes of a row */
    vec acc[MANY][4];
    EACH(m, M) EACH(r, R) acc[m][r] = (vec){0};
    for (int64_t k = 0; k < w->padded; k += run * LANES) {
        EACH(r, R) __builtin_prefetch(values + (R + r) * bytes + (kind == INT4 ? k / 2 : k));
        EACH(pair, run / 2) {
            const int64_t at = k + pair * 2 * LANES;
            vec scale[4];
            EACH(r, R) scale[r] = all(bf16(scales[r * groups + (at >> w->shift)]));
            if (M == 1) {
                const vec a = load(x + at), b = load(x + at + LANES);
                EACH(r, R) {
                    vec part = a * load_code(kind, values + r * bytes, k, 2 * pair, table);
                    part += b * load_code(kind, values + r * bytes, k, 2 * pair + 1, table);
                    acc[0][r] += scale[r] * part;
                }
            } else EACH(i, 2) {
                vec b[4];
                EACH(r, R) b[r] = scale[r] * load_code(kind, values + r * bytes, k, 2 * pair + i, table);
                EACH(m, M) {
                    const vec a = load(x + m * stride + at + LANES * i);
                    EACH(r, R) acc[m][r] += a * b[r];
                }
            }
        }
    }
    EACH(m, M) EACH(r, R) y[m * y_stride + r] = sum(acc[m][r]);
}

INLINE void tile(int kind, int M, int R, const matrix *w, int64_t row, const float *x, int64_t stride, float *y,
                 int64_t y_stride) {
    if (kind == INT8 || kind == INT4) group_tile(kind, M, R, w, row, x, stride, y, y_stride);
    else float_tile(kind, M, R, w, row, x, stride, y, y_stride);
}

/* Rows `from` to `to` of the matrix with M rows of x, R at a time as long as there are that many. */
INLINE void strip(int kind, int M, const matrix *w, int64_t from, int64_t to, const float *x, int64_t stride, float *y,
                  int64_t y_stride) {
    const int R = M > 4 ? 2 : 4;
    int64_t row = from;
    for (; row + R <= to; row += R) tile(kind, M, R, w, row, x, stride, y + row - from, y_stride);
    for (; row < to; row++) tile(kind, M, 1, w, row, x, stride, y + row - from, y_stride);
}

#define STRIPS(kind)                                                                                               \
    static void strip_##kind(int M, const matrix *w, int64_t from, int64_t to, const float *x, int64_t stride,        \
                             float *y, int64_t y_stride) {                                                            \
        switch (M) {                                                                                                  \
        case 1: strip(kind, 1, w, from, to, x, stride, y, y_stride); break;                                           \
        case 2: strip(kind, 2, w, from, to, x, stride, y, y_stride); break;                                           \
        case 4: strip(kind, 4, w, from, to, x, stride, y, y_stride); break;                                           \
        default: strip(kind, 8, w, from, to, x, stride, y, y_stride);                                                 \
        }                                                                                                             \
    }
STRIPS(F32) STRIPS(BF16) STRIPS(F16) STRIPS(INT8) STRIPS(INT4)

static void (*const STRIP[])(int, const matrix *, int64_t, int64_t, const float *, int64_t, float *, int64_t) = {
    strip_F32, strip_BF16, strip_F16, strip_INT8, strip_INT4};

/* eˣ to 1e-7 for x ≤ 0: 2ⁿ times a polynomial for the rest, which is within ±½ ln 2. */
INLINE vec exponential(vec x) {
    const ivec low = x < -87.0f;
    x = (vec)((low & (ivec)all(-87.0f)) | (~low & (ivec)x)); /* a NaN stays */
    const vec shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    const vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)(((ivec)shifted + (127 - 0x4b400000)) << 23);
}

/* eˣ of any x, by e^−|x|. */
INLINE vec power(vec x) {
    const vec small = exponential((vec)((ivec)x | INT32_MIN));
    const ivec positive = x > 0;
    return (vec)((positive & (ivec)(1.0f / small)) | (~positive & (ivec)small));
}

/* x / (1 + e^−x), by e^−|x|. */
INLINE vec silu(vec x) {
    const vec small = exponential((vec)((ivec)x | INT32_MIN));
    const ivec positive = x > 0;
    return x * (vec)((positive & (ivec)all(1.0f)) | (~positive & (ivec)small)) / (small + 1.0f);
}

/* Rows `from` to `to` of W with `many` rows of x, 8, 4, 2 or 1 of them in a tile; y begins with row `from`. */
static void strips(const matrix *w, int64_t from, int64_t to, const float *x, int64_t stride, float *y,
                   int64_t y_stride, int64_t many) {
    for (int64_t m = 0, step; m < many; m += step) {
        for (step = MANY; step > many - m;) step /= 2;
        STRIP[w->kind]((int)step, w, from, to, x + m * stride, stride, y + m * y_stride, y_stride);
    }
}

#define BLOCK 16 /* rows of W done together, so that they are still in the cache for the next rows of x */

/* y = x Wᵀ, for x of `many` rows, in `threads` shares of the rows of W. */
void linear(const matrix *w, const float *x, int64_t stride, float *y, int64_t many, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t from = 0; from < w->rows; from += BLOCK) {
        const int64_t to = from + BLOCK < w->rows ? from + BLOCK : w->rows;
        strips(w, from, to, x, stride, y + from, w->rows, many);
    }
}

/* y = silu(x Gᵀ) ∘ x Uᵀ: what a gated feed-forward layer passes down; for up to 32 rows. */
void gated(const matrix *gate, const matrix *up, const float *x, int64_t stride, float *y, int64_t many, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t from = 0; from < gate->rows; from += BLOCK) {
        const int64_t to = from + BLOCK < gate->rows ? from + BLOCK : gate->rows;
        float opened[32][BLOCK] = {{0}}, passed[32][BLOCK] = {{0}};
        strips(gate, from, to, x, stride, opened[0], BLOCK, many);
        strips(up, from, to, x, stride, passed[0], BLOCK, many);
        for (int64_t m = 0; m < many; m++) {
            const vec out = silu(load(opened[m])) * load(passed[m]);
            memcpy(y + m * gate->rows + from, &out, (size_t)(to - from) * sizeof(float));
        }
    }
}

/* x / √(mean(x²) + eps) · weight, for each of `many` rows. */
void rms_norm(const float *x, const float *weight, float eps, float *y, int64_t dim, int64_t many) {
    for (int64_t m = 0; m < many; m++, x += dim, y += dim) {
        vec squares = {0};
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) squares += load(x + i) * load(x + i);
        float total = sum(squares);
        for (; i < dim; i++) total += x[i] * x[i];
        const float factor = 1 / sqrtf(total / (float)dim + eps);
        for (i = 0; i < dim; i++) y[i] = x[i] * factor * weight[i];
    }
}

/* The matrix itself in float32, for products with many rows, which other libraries make best. */
void expand(const matrix *w, float *out, int threads) {
    const int64_t bytes = row_bytes(w), groups = w->padded >> w->shift;
    const vec table = w->kind == INT4 ? load(w->table) : (vec){0};
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < w->rows; row++) {
        const uint8_t *values = (const uint8_t *)w->values + row * bytes;
        float *to = out + row * w->columns;
        for (int64_t k = 0; k < w->columns; k += LANES) {
            vec v = all(bf16(w->scales[row * groups + (k >> w->shift)]));
            if (w->kind == INT4) v *= load_code(INT4, values, k / 128 * 128, (int)(k % 128 / LANES), table);
            else v *= load_code(INT8, values, k, 0, table);
            if (k + LANES <= w->columns) store(to + k, v);
            else memcpy(to + k, &v, (size_t)(w->columns - k) * sizeof(float));
        }
    }
}

/* Attention of the newest tokens of every row of a batch, from their queries, keys and values side by side. */
typedef struct {
    int64_t batch, length, heads, groups, key, value; /* length: new tokens of each row; key, value: widths */
    int64_t size, filled;                             /* slots of the cache, and how many of them are read */
    int64_t pairs, interleaved;                       /* coordinates turned by the rotary positions, in pairs */
    int64_t angle_stride, slot_stride, allowed_stride; /* from a row of the batch to the next; 0: all alike */
    float scale;
    float *qkv;               /* B T (H·K + G·K + G·U) */
    const float *cos, *sin;   /* B T pairs */
    const int64_t *slots;     /* B T: where each new token is kept */
    const uint8_t *allowed;   /* B T S, or NULL where all may be read */
    float *keys, *values;     /* B G N K and B G N U */
    float *out;               /* B T H·U */
} step;

INLINE void turn(float *x, const float *cos, const float *sin, int64_t pairs, int64_t interleaved) {
    for (int64_t i = 0; i < pairs; i++) {
        float *a = x + (interleaved ? 2 * i : i), *b = interleaved ? a + 1 : a + pairs;
        const float p = *a, q = *b;
        *a = p * cos[i] - q * sin[i];
        *b = p * sin[i] + q * cos[i];
    }
}

INLINE float dot(const float *a, const float *b, int64_t n) {
    vec acc = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) acc += load(a + i) * load(b + i);
    float s = sum(acc);
    for (; i < n; i++) s += a[i] * b[i];
    return s;
}

INLINE void add_scaled(float *y, float a, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(y + i, load(y + i) + a * load(x + i));
    for (; i < n; i++) y[i] += a * x[i];
}

#define CHUNK 64   /* keys whose scores are kept at once */
#define WIDEST 256 /* floats of a value */

/* softmax(scale·q·kᵀ)·v for one query, over the keys a chunk at a time; zeros where nothing may be read. */
static void attend_one(const step *s, const float *q, const float *keys, const float *values, const uint8_t *allowed,
                       float *out) {
    float acc[WIDEST] = {0}, top = -INFINITY, total = 0;
    for (int64_t first = 0; first < s->filled; first += CHUNK) {
        const int64_t count = s->filled - first < CHUNK ? s->filled - first : CHUNK;
        float scores[CHUNK], best = top;
        for (int64_t i = 0; i < CHUNK; i++) {
            const int read = i < count && (!allowed || allowed[first + i]);
            scores[i] = read ? s->scale * dot(q, keys + (first + i) * s->key, s->key) : -INFINITY;
            best = scores[i] > best || scores[i] != scores[i] ? scores[i] : best;
        }
        if (best == -INFINITY) continue;
        if (best != top) {
            const float shrink = expf(top - best);
            total *= shrink;
            for (int64_t i = 0; i < s->value; i++) acc[i] *= shrink;
            top = best;
        }
        for (int64_t i = 0; i < CHUNK; i += LANES) {
            const vec x = load(scores + i), weights = exponential(x - top);
            const ivec hidden = x == all(-INFINITY);
            store(scores + i, (vec)(~hidden & (ivec)weights));
        }
        for (int64_t i = 0; i < count; i++) {
            if (allowed && !allowed[first + i]) continue;
            total += scores[i];
            add_scaled(acc, scores[i], values + (first + i) * s->value, s->value);
        }
    }
    for (int64_t i = 0; i < s->value; i++) out[i] = total == 0 ? 0 : acc[i] / total;
}

/* Turn the new queries and keys, keep keys and values in their slots, attend. */
void attend(const step *s, int threads) {
    const int64_t row = s->heads * s->key + s->groups * (s->key + s->value), repeats = s->heads / s->groups;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t task = 0; task < s->batch * s->groups; task++) {
            const int64_t b = task / s->groups, g = task % s->groups;
            for (int64_t t = 0; t < s->length; t++) {
                float *qkv = s->qkv + (b * s->length + t) * row, *k = qkv + (s->heads + g) * s->key;
                const float *v = qkv + (s->heads + s->groups) * s->key + g * s->value;
                const float *cos = s->cos + b * s->angle_stride + t * s->pairs;
                const float *sin = s->sin + b * s->angle_stride + t * s->pairs;
                const int64_t slot = (b * s->groups + g) * s->size + s->slots[b * s->slot_stride + t];
                for (int64_t h = g * repeats; h < (g + 1) * repeats; h++)
                    turn(qkv + h * s->key, cos, sin, s->pairs, s->interleaved);
                turn(k, cos, sin, s->pairs, s->interleaved);
                memcpy(s->keys + slot * s->key, k, (size_t)s->key * sizeof(float));
                memcpy(s->values + slot * s->value, v, (size_t)s->value * sizeof(float));
            }
        }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < s->batch * s->heads * s->length; task++) {
            const int64_t b = task / (s->heads * s->length), h = task / s->length % s->heads, t = task % s->length;
            const int64_t at = b * s->length + t, first = (b * s->groups + h / repeats) * s->size;
            attend_one(s, s->qkv + at * row + h * s->key, s->keys + first * s->key, s->values + first * s->value,
                       s->allowed ? s->allowed + b * s->allowed_stride + t * s->filled : NULL,
                       s->out + (at * s->heads + h) * s->value);
        }
    }
}

/* One new token for each row of a batch of a selective state space: all but its products with matrices. */
typedef struct {
    int64_t batch, inner, states, reach;           /* reach: earlier inputs that the filter reads */
    int64_t stride, selected;                      /* from a row of `input` and of `write` and `read` to the next */
    const float *input;                            /* B 2·I: x, then the gate */
    const float *filter, *filter_bias;             /* reach+1 I, the newest last; I or NULL */
    const float *step, *write, *read;              /* B I; B Z; B Z */
    const float *decay, *skip;                     /* Z I: log(−A); I */
    float *recent, *memory;                        /* B reach I; B Z I */
    float *conv, *out;                             /* B I; B I */
} space;

/* 16 numbers, or the `count` that there are, zeros beside them. */
INLINE vec load_some(const float *p, int64_t count) {
    vec v = {0};
    if (count >= LANES) return load(p);
    memcpy(&v, p, (size_t)count * sizeof(float));
    return v;
}

INLINE void store_some(float *p, vec v, int64_t count) {
    memcpy(p, &v, (size_t)(count < LANES ? count : LANES) * sizeof(float));
}

/* conv = silu(bias + Σ_k filter_k ∘ x_{t−k}); the new x takes its place among the recent ones. */
void filter(const space *s) {
    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t i = 0; i < s->inner; i += LANES) {
            const int64_t n = s->inner - i;
            float *recent = s->recent + b * s->reach * s->inner + i;
            vec y = s->filter_bias ? load_some(s->filter_bias + i, n) : (vec){0};
            for (int64_t k = 0; k <= s->reach; k++) {
                const vec x = load_some(k < s->reach ? recent + k * s->inner : s->input + b * s->stride + i, n);
                y += x * load_some(s->filter + k * s->inner + i, n);
                if (k) store_some(recent + (k - 1) * s->inner, x, n);
            }
            store_some(s->conv + b * s->inner + i, silu(y), n);
        }
}

/* h = exp(step·A)∘h + step·conv·write;  out = (h·read + skip∘conv)∘silu(gate). */
void scan(const space *s, int threads) {
    const int64_t blocks = (s->inner + LANES - 1) / LANES;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t task = 0; task < s->batch * blocks; task++) {
        const int64_t b = task / blocks, i = task % blocks * LANES, n = s->inner - i, at = b * s->inner + i;
        const float *write = s->write + b * s->selected, *read = s->read + b * s->selected;
        const vec step = load_some(s->step + at, n), x = load_some(s->conv + at, n);
        vec y = x * load_some(s->skip + i, n);
        for (int64_t z = 0; z < s->states; z++) {
            float *memory = s->memory + (b * s->states + z) * s->inner + i;
            const vec kept = exponential(-step * power(load_some(s->decay + z * s->inner + i, n)));
            const vec h = kept * load_some(memory, n) + step * x * write[z];
            store_some(memory, h, n);
            y += h * read[z];
        }
        store_some(s->out + at, y * silu(load_some(s->input + b * s->stride + s->inner + i, n)), n);
    }
}

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

/* float16 and float32, 16 numbers at a time; what is too large for float16 becomes the largest that it has. */
#if defined(__AVX512F__)
INLINE vec widen(hvec half) { return (vec)_mm512_cvtph_ps((__m256i)half); }
INLINE hvec nearest(vec x) { return (hvec)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__F16C__)
INLINE vec widen(hvec half) {
    union { hvec v; __m128i half[2]; } in = {half};
    union { __m256 half[2]; vec v; } out = {{_mm256_cvtph_ps(in.half[0]), _mm256_cvtph_ps(in.half[1])}};
    return out.v;
}
INLINE hvec nearest(vec x) {
    union { vec v; __m256 half[2]; } in = {x};
    union { __m128i half[2]; hvec v; } out = {{_mm256_cvtps_ph(in.half[0], 0), _mm256_cvtps_ph(in.half[1], 0)}};
    return out.v;
}
#else
typedef _Float16 fvec __attribute__((vector_size(32)));
INLINE vec widen(hvec half) { return __builtin_convertvector((fvec)half, vec); }
INLINE hvec nearest(vec x) { return (hvec)__builtin_convertvector(x, fvec); }
#endif

INLINE hvec narrow(vec x) {
    const ivec high = x > 65504.0f, low = x < -65504.0f;
    return nearest((vec)((high & (ivec)all(65504.0f)) | (low & (ivec)all(-65504.0f)) | (~(high | low) & (ivec)x)));
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

#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#define FOLD(a, b, SOME, OTHERS) (PICK(a, b, SOME) + PICK(a, b, OTHERS))
#define EVEN 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define ODD 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define EVEN_PAIRS 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define ODD_PAIRS 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define EVEN_FOURS 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define ODD_FOURS 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31

/* Lane i of the result is the sum of all lanes of v[i]: vectors are folded into each other, two by two. */
INLINE vec sum_each(const vec *v) {
    vec a[8], b[4], c[2];
    EACH(i, 8) a[i] = FOLD(v[2 * i], v[2 * i + 1], EVEN, ODD);
    EACH(i, 4) b[i] = FOLD(a[2 * i], a[2 * i + 1], EVEN_PAIRS, ODD_PAIRS);
    EACH(i, 2) c[i] = FOLD(b[2 * i], b[2 * i + 1], EVEN_FOURS, ODD_FOURS);
    return FOLD(c[0], c[1], LOW, HIGH);
}

/* 16 numbers of a float matrix from place `at`. */
INLINE vec load_float(int kind, const void *values, int64_t at) {
    if (kind == F32) return load((const float *)values + at);
    hvec half;
    memcpy(&half, (const uint16_t *)values + at, sizeof half);
    return kind == BF16 ? (vec)(__builtin_convertvector(half, uvec) << 16) : widen(half);
}

/* 16 numbers from place `at`, or the `count` that there are, zeros beside them. */
INLINE vec load_some(int kind, const void *values, int64_t at, int64_t count) {
    if (count >= LANES) return load_float(kind, values, at);
    const int64_t size = kind == F32 ? 4 : 2;
    float held[LANES] = {0};
    memcpy(held, (const uint8_t *)values + at * size, (size_t)(count * size));
    return load_float(kind, held, 0);
}

INLINE void store_some(float *p, vec v, int64_t count) {
    memcpy(p, &v, (size_t)(count < LANES ? count : LANES) * sizeof(float));
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

/* Σ_k x[m, k] W[row + r, k] for R rows of W and M rows of x, each still in 16 parts, which stay in registers. */
INLINE void float_tile(int kind, int M, int R, const matrix *w, int64_t row, const float *x, int64_t stride, vec *sums) {
    const int64_t columns = w->columns, whole = columns / LANES * LANES, rest = columns - whole;
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
    if (rest) EACH(r, R) {
        const vec b = load_some(kind, w->values, (row + r) * columns + whole, rest);
        EACH(m, M) acc[m][r] += load_some(F32, x, m * stride + whole, rest) * b;
    }
    EACH(r, R) EACH(m, M) sums[r * M + m] = acc[m][r];
}

#define SPAN 4096 /* columns whose scales are widened together: from memory, a float is broadcast at no cost */

/* The same for groups: Σ_g scale_g Σ_{k in g} x_k code_k. One row of x sums 32 columns and scales the sum; several
 * rows share the scaled numbers. */
INLINE void group_tile(int kind, int M, int R, const matrix *w, int64_t row, const float *x, int64_t stride, vec *sums) {
    const int64_t groups = w->padded >> w->shift, bytes = row_bytes(w);
    const uint8_t *values = (const uint8_t *)w->values + row * bytes;
    const vec table = kind == INT4 ? load(w->table) : (vec){0};
    const int run = kind == INT4 ? 8 : 4; /* vectors in 64 bytes of a row */
    float scales[4][SPAN / 32 + LANES];
    vec acc[MANY][4];
    EACH(m, M) EACH(r, R) acc[m][r] = (vec){0};
    for (int64_t k = 0; k < w->padded; k += run * LANES) {
        const int64_t inside = k % SPAN;
        if (inside == 0) {
            const int64_t first = k >> w->shift, count = groups - first < SPAN / 32 ? groups - first : SPAN / 32;
            EACH(r, R)
                for (int64_t i = 0; i < count; i += LANES)
                    store(scales[r] + i, load_some(BF16, w->scales, (row + r) * groups + first + i, count - i));
        }
        EACH(r, R) __builtin_prefetch(values + (R + r) * bytes + (kind == INT4 ? k / 2 : k));
        EACH(pair, run / 2) {
            const int64_t at = k + pair * 2 * LANES, group = (inside + pair * 2 * LANES) >> w->shift;
            if (M == 1) {
                const vec a = load(x + at), b = load(x + at + LANES);
                EACH(r, R) {
                    vec part = a * load_code(kind, values + r * bytes, k, 2 * pair, table);
                    part += b * load_code(kind, values + r * bytes, k, 2 * pair + 1, table);
                    acc[0][r] += scales[r][group] * part;
                }
            } else EACH(i, 2) {
                vec b[4];
                EACH(r, R) b[r] = scales[r][group] * load_code(kind, values + r * bytes, k, 2 * pair + i, table);
                EACH(m, M) {
                    const vec a = load(x + m * stride + at + LANES * i);
                    EACH(r, R) acc[m][r] += a * b[r];
                }
            }
        }
    }
    EACH(r, R) EACH(m, M) sums[r * M + m] = acc[m][r];
}

INLINE void tile(int kind, int M, int R, const matrix *w, int64_t row, const float *x, int64_t stride, vec *sums) {
    if (kind == INT8 || kind == INT4) group_tile(kind, M, R, w, row, x, stride, sums);
    else float_tile(kind, M, R, w, row, x, stride, sums);
}

/* Rows `from` to `to` of the matrix with M rows of x; 16 sums, of M by 16/M rows, are added up together. */
INLINE void strip(int kind, int M, const matrix *w, int64_t from, int64_t to, const float *x, int64_t stride, float *y,
                  int64_t y_stride) {
    const int R = M > 4 ? 2 : 4;
    for (int64_t row = from, count; row < to; row += count) {
        vec sums[LANES] = {{0}};
        float out[LANES];
        int64_t r = 0;
        count = to - row < LANES / M ? to - row : LANES / M;
        for (; r + R <= count; r += R) tile(kind, M, R, w, row + r, x, stride, sums + r * M);
        for (; r < count; r++) tile(kind, M, 1, w, row + r, x, stride, sums + r * M);
        store(out, sum_each(sums));
        for (int64_t m = 0; m < M; m++)
            for (r = 0; r < count; r++) y[m * y_stride + row - from + r] = out[r * M + m];
    }
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

/* What follows is done by all threads of a parallel region, each its share; all meet at the end. */

/* y = x Wᵀ + bias + plus, for x of `many` rows; either may be missing. */
static void share_linear(const matrix *w, const float *bias, const float *plus, const float *x, int64_t stride,
                         float *y, int64_t many) {
#pragma omp for schedule(static)
    for (int64_t from = 0; from < w->rows; from += BLOCK) {
        const int64_t to = from + BLOCK < w->rows ? from + BLOCK : w->rows;
        strips(w, from, to, x, stride, y + from, w->rows, many);
        if (bias || plus)
            for (int64_t m = 0; m < many; m++)
                for (int64_t i = from; i < to; i++)
                    y[m * w->rows + i] += (bias ? bias[i] : 0) + (plus ? plus[m * w->rows + i] : 0);
    }
}

/* y = silu(x Gᵀ) ∘ x Uᵀ: what a gated feed-forward layer passes down; for up to 32 rows. */
static void share_gated(const matrix *gate, const matrix *up, const float *x, int64_t stride, float *y,
                        int64_t y_stride, int64_t many) {
#pragma omp for schedule(static)
    for (int64_t from = 0; from < gate->rows; from += BLOCK) {
        const int64_t to = from + BLOCK < gate->rows ? from + BLOCK : gate->rows;
        float opened[32][BLOCK] = {{0}}, passed[32][BLOCK] = {{0}};
        strips(gate, from, to, x, stride, opened[0], BLOCK, many);
        strips(up, from, to, x, stride, passed[0], BLOCK, many);
        for (int64_t m = 0; m < many; m++)
            store_some(y + m * y_stride + from, silu(load(opened[m])) * load(passed[m]), to - from);
    }
}

/* x / √(mean(x²) + eps) · weight, for each of `many` rows. */
static void share_norm(const float *x, const float *weight, float eps, float *y, int64_t stride, int64_t dim,
                       int64_t many) {
#pragma omp for schedule(static)
    for (int64_t m = 0; m < many; m++) {
        vec squares = {0};
        for (int64_t i = 0; i < dim; i += LANES) {
            const vec some = load_some(F32, x, m * dim + i, dim - i);
            squares += some * some;
        }
        const float factor = 1 / sqrtf(sum(squares) / (float)dim + eps);
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES)
            store(y + m * stride + i, load(x + m * dim + i) * factor * load(weight + i));
        for (; i < dim; i++) y[m * stride + i] = x[m * dim + i] * factor * weight[i];
    }
}

void linear(const matrix *w, const float *bias, const float *x, int64_t stride, float *y, int64_t many, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    share_linear(w, bias, NULL, x, stride, y, many);
}

void gated(const matrix *gate, const matrix *up, const float *x, int64_t stride, float *y, int64_t many, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    share_gated(gate, up, x, stride, y, gate->rows, many);
}

void rms_norm(const float *x, const float *weight, float eps, float *y, int64_t dim, int64_t many, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    share_norm(x, weight, eps, y, dim, dim, many);
}

/* gate = silu(gate) ∘ up, number by number. */
void silu_product(float *gate, const float *up, int64_t count, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t at = 0; at < count; at += LANES) {
        const int64_t n = count - at;
        store_some(gate + at, silu(load_some(F32, gate, at, n)) * load_some(F32, up, at, n), n);
    }
}

/* y = max(y + bias, 0) for each of `many` rows; bias may be NULL. What is not a number stays. */
void relu(float *y, const float *bias, int64_t width, int64_t many, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t m = 0; m < many; m++) {
        float *mine = y + m * width;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            const vec some = bias ? load(mine + i) + load(bias + i) : load(mine + i);
            store(mine + i, (vec)(~(some < 0) & (ivec)some));
        }
        for (; i < width; i++) {
            const float one = bias ? mine[i] + bias[i] : mine[i];
            mine[i] = one < 0 ? 0 : one;
        }
    }
}

/* weight · (s − mean(s)) / √(mean((s − mean(s))²) + eps) + bias with s = x + y, for each of `many` rows; bias may be
 * NULL. */
void add_norm(const float *x, const float *y, const float *weight, const float *bias, float eps, float *out,
              int64_t dim, int64_t many, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t m = 0; m < many; m++) {
        const float *mine = x + m * dim, *other = y + m * dim;
        float *to = out + m * dim, rest = 0;
        const int64_t whole = dim / LANES * LANES;
        vec sums = {0}, squares = {0};
        for (int64_t i = 0; i < whole; i += LANES) {
            const vec some = load(mine + i) + load(other + i);
            store(to + i, some);
            sums += some;
        }
        for (int64_t i = whole; i < dim; i++) rest += to[i] = mine[i] + other[i];
        const float mean = (sum(sums) + rest) / (float)dim;
        rest = 0;
        for (int64_t i = 0; i < whole; i += LANES) {
            const vec off = load(to + i) - mean;
            squares += off * off;
        }
        for (int64_t i = whole; i < dim; i++) rest += (to[i] - mean) * (to[i] - mean);
        const float factor = 1 / sqrtf((sum(squares) + rest) / (float)dim + eps);
        for (int64_t i = 0; i < whole; i += LANES) {
            const vec normed = (load(to + i) - mean) * factor * load(weight + i);
            store(to + i, bias ? normed + load(bias + i) : normed);
        }
        for (int64_t i = whole; i < dim; i++) to[i] = (to[i] - mean) * factor * weight[i] + (bias ? bias[i] : 0);
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

/* Attention of the newest tokens of every row of a batch, from their queries, keys and values side by side; or from
 * their queries alone, where the keys and values are a source's and nothing is kept. */
typedef struct {
    int64_t batch, length, heads, groups, key, value; /* length: new tokens of each row; key, value: widths */
    int64_t size, filled;                             /* slots of the cache, and how many of them are read */
    int64_t pairs, interleaved;                       /* coordinates turned by the rotary positions, in pairs */
    int64_t kind;                                     /* of the cache: F32 or F16 */
    int64_t shared;                                   /* so many rows in a row read one row of the cache */
    int64_t row, stride;                              /* from a row of `qkv`, and of `out`, to the next */
    int64_t angle_stride, slot_stride;                /* from a row of the batch to the next; 0: all alike */
    int64_t allowed_stride;                           /* from a row of the cache to the next; 0: all alike */
    float scale;
    float *qkv;               /* B T rows: H·K, or H·K + G·K + G·U */
    const float *cos, *sin;   /* B T pairs */
    const int64_t *slots;     /* B T: where each new token is kept; NULL where none is */
    const uint8_t *allowed;   /* of each row of the cache, for the queries of all who share it, S; NULL: all is read */
    int64_t *owners;          /* B N: the row of the cache that holds each slot; NULL: its own */
    void *keys, *values;      /* rows of the cache: G N K and G N U */
    float *out;               /* B T H·U, in rows of `stride` */
} step;

INLINE void turn(float *x, const float *cos, const float *sin, int64_t pairs, int64_t interleaved) {
    int64_t i = 0;
    for (; !interleaved && i + LANES <= pairs; i += LANES) {
        const vec p = load(x + i), q = load(x + pairs + i), c = load(cos + i), s = load(sin + i);
        store(x + i, p * c - q * s);
        store(x + pairs + i, p * s + q * c);
    }
    for (; i < pairs; i++) {
        float *a = x + (interleaved ? 2 * i : i), *b = interleaved ? a + 1 : a + pairs;
        const float p = *a, q = *b;
        *a = p * cos[i] - q * sin[i];
        *b = p * sin[i] + q * cos[i];
    }
}

/* Keep n numbers of a new token from place `at` of a cache. */
INLINE void keep(int64_t kind, void *cache, int64_t at, const float *x, int64_t n) {
    if (kind == F32) memcpy((float *)cache + at, x, (size_t)n * sizeof(float));
    else for (int64_t i = 0; i < n; i += LANES) {
        const int64_t count = n - i < LANES ? n - i : LANES;
        const hvec half = narrow(load_some(F32, x, i, count));
        memcpy((uint16_t *)cache + at + i, &half, (size_t)count * sizeof(uint16_t));
    }
}

#define CHUNK 64   /* keys whose scores are kept at once */
#define WIDEST 256 /* floats of a key or a value */

/* softmax(scale·q·kᵀ)·v for one query, over the keys a chunk at a time; zeros where nothing may be read. Slot i is the
 * i-th of `keys`, or, where slots have owners, as many rows further on as its owner's number. */
INLINE void attend_one(int kind, int64_t key, int64_t value, const step *s, const float *query, const void *keys,
                       const void *values, const uint8_t *allowed, const int64_t *owners, float *out) {
    const int64_t apart = s->groups * s->size;
    vec q[WIDEST / LANES], acc[WIDEST / LANES];
    float top = -INFINITY, total = 0;
    EACH(w, (key + LANES - 1) / LANES) q[w] = s->scale * load_some(F32, query, w * LANES, key - w * LANES);
    EACH(w, (value + LANES - 1) / LANES) acc[w] = (vec){0};
    for (int64_t first = 0; first < s->filled; first += CHUNK) {
        const int64_t count = s->filled - first < CHUNK ? s->filled - first : CHUNK;
        const int64_t lanes = (count + LANES - 1) / LANES * LANES;
        float scores[CHUNK], best = top;
        for (int64_t i = 0; i < lanes; i += LANES) {
            vec sums[LANES] = {{0}};
            for (int64_t j = i; j < count && j < i + LANES; j++) {
                const int64_t at = first + j + (owners ? owners[first + j] * apart : 0);
                EACH(w, (key + LANES - 1) / LANES)
                    sums[j - i] += q[w] * load_some(kind, keys, at * key + w * LANES, key - w * LANES);
            }
            store(scores + i, sum_each(sums));
        }
        for (int64_t i = 0; i < lanes; i++) {
            if (i >= count || (allowed && !allowed[first + i])) scores[i] = -INFINITY;
            best = scores[i] > best || scores[i] != scores[i] ? scores[i] : best;
        }
        if (best == -INFINITY) continue;
        if (best != top && top != -INFINITY) {
            const float shrink = expf(top - best);
            total *= shrink;
            EACH(w, (value + LANES - 1) / LANES) acc[w] *= shrink;
        }
        top = best;
        vec weights = {0};
        for (int64_t i = 0; i < lanes; i += LANES) {
            const vec x = load(scores + i);
            const ivec hidden = x == all(-INFINITY);
            const vec some = (vec)(~hidden & (ivec)exponential(x - top));
            weights += some;
            store(scores + i, some);
        }
        total += sum(weights);
        for (int64_t i = 0; i < count; i++) {
            if (allowed && !allowed[first + i]) continue;
            const int64_t at = first + i + (owners ? owners[first + i] * apart : 0);
            EACH(w, (value + LANES - 1) / LANES)
                acc[w] += scores[i] * load_some(kind, values, at * value + w * LANES, value - w * LANES);
        }
    }
    const float share = total == 0 ? 0 : 1 / total;
    EACH(w, (value + LANES - 1) / LANES) store_some(out + w * LANES, acc[w] * share, value - w * LANES);
}

/* Known widths keep the query and the sums in registers. */
#define ATTENDS(kind)                                                                                                 \
    static void attend_##kind(const step *s, const float *q, const void *keys, const void *values,                    \
                              const uint8_t *allowed, const int64_t *owners, float *out) {                            \
        switch (s->key == s->value ? s->key : 0) {                                                                    \
        case 32: attend_one(kind, 32, 32, s, q, keys, values, allowed, owners, out); break;                           \
        case 48: attend_one(kind, 48, 48, s, q, keys, values, allowed, owners, out); break;                           \
        case 64: attend_one(kind, 64, 64, s, q, keys, values, allowed, owners, out); break;                           \
        case 96: attend_one(kind, 96, 96, s, q, keys, values, allowed, owners, out); break;                           \
        case 128: attend_one(kind, 128, 128, s, q, keys, values, allowed, owners, out); break;                        \
        default: attend_one(kind, s->key, s->value, s, q, keys, values, allowed, owners, out);                        \
        }                                                                                                             \
    }
ATTENDS(F32) ATTENDS(F16)

/* Turn the new queries and keys, keep keys and values in their slots. */
static void share_keep(const step *s) {
    const int64_t repeats = s->heads / s->groups;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < s->batch * s->groups; task++) {
        const int64_t b = task / s->groups, g = task % s->groups;
        for (int64_t t = 0; t < s->length; t++) {
            float *qkv = s->qkv + (b * s->length + t) * s->row, *k = qkv + (s->heads + g) * s->key;
            const float *v = qkv + (s->heads + s->groups) * s->key + g * s->value;
            const float *cos = s->cos + b * s->angle_stride + t * s->pairs;
            const float *sin = s->sin + b * s->angle_stride + t * s->pairs;
            const int64_t place = s->slots[b * s->slot_stride + t], slot = (b * s->groups + g) * s->size + place;
            for (int64_t h = g * repeats; h < (g + 1) * repeats; h++)
                turn(qkv + h * s->key, cos, sin, s->pairs, s->interleaved);
            turn(k, cos, sin, s->pairs, s->interleaved);
            keep(s->kind, s->keys, slot * s->key, k, s->key);
            keep(s->kind, s->values, slot * s->value, v, s->value);
            if (s->owners && g == 0) s->owners[b * s->size + place] = b;
        }
    }
}

static void share_attend(const step *s) {
    const int64_t repeats = s->heads / s->groups, size = s->kind == F32 ? 4 : 2;
    if (s->slots) share_keep(s);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < s->batch * s->heads * s->length; task++) {
        const int64_t b = task / (s->heads * s->length), h = task / s->length % s->heads, t = task % s->length;
        const int64_t read = b / s->shared, asked = b % s->shared * s->length + t; /* row of the cache, and its query */
        const int64_t first = ((s->owners ? 0 : read * s->groups) + h / repeats) * s->size;
        const void *keys = (const uint8_t *)s->keys + first * s->key * size;
        const void *values = (const uint8_t *)s->values + first * s->value * size;
        const uint8_t *allowed = s->allowed ? s->allowed + read * s->allowed_stride + asked * s->filled : NULL;
        const int64_t *owners = s->owners ? s->owners + b * s->size : NULL;
        const float *q = s->qkv + (b * s->length + t) * s->row + h * s->key;
        float *out = s->out + (b * s->length + t) * s->stride + h * s->value;
        (s->kind == F32 ? attend_F32 : attend_F16)(s, q, keys, values, allowed, owners, out);
    }
}

/* For prompts, whose attention other libraries compute best. */
void keep_new(const step *s, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    share_keep(s);
}

void attend(const step *s, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    share_attend(s);
}

/* A block of attention and a gated feed-forward layer, each after a norm and added to what it read:
 * h = x + out(attend(qkv(norm(x)))),  y = h + down(silu(gate(norm(h))) ∘ up(norm(h))). */
typedef struct {
    const matrix *qkv, *out, *gate, *up, *down;
    const float *qkv_bias, *out_bias, *first_norm, *second_norm; /* biases may be missing */
    float first_eps, second_eps;
    const float *x;
    float *y, *normed, *middle, *hidden; /* B·T rows: D; D of qkv's width; D; of down's width */
    step attention;
} layer;

void block(const layer *l, int threads) {
    const int64_t many = l->attention.batch * l->attention.length, dim = l->out->rows;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        share_norm(l->x, l->first_norm, l->first_eps, l->normed, l->qkv->padded, dim, many);
        share_linear(l->qkv, l->qkv_bias, NULL, l->normed, l->qkv->padded, l->attention.qkv, many);
        share_attend(&l->attention);
        share_linear(l->out, l->out_bias, l->x, l->attention.out, l->attention.stride, l->middle, many);
        share_norm(l->middle, l->second_norm, l->second_eps, l->normed, l->gate->padded, dim, many);
        share_gated(l->gate, l->up, l->normed, l->gate->padded, l->hidden, l->down->padded, many);
        share_linear(l->down, NULL, l->middle, l->hidden, l->down->padded, l->y, many);
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

/* conv = silu(bias + Σ_k filter_k ∘ x_{t−k}); the new x takes its place among the recent ones. */
void filter(const space *s) {
    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t i = 0; i < s->inner; i += LANES) {
            const int64_t n = s->inner - i;
            float *recent = s->recent + b * s->reach * s->inner + i;
            vec y = s->filter_bias ? load_some(F32, s->filter_bias, i, n) : (vec){0};
            for (int64_t k = 0; k <= s->reach; k++) {
                const vec x = load_some(F32, k < s->reach ? recent + k * s->inner : s->input + b * s->stride + i, 0, n);
                y += x * load_some(F32, s->filter, k * s->inner + i, n);
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
        const vec step = load_some(F32, s->step, at, n), x = load_some(F32, s->conv, at, n);
        vec y = x * load_some(F32, s->skip, i, n);
        for (int64_t z = 0; z < s->states; z++) {
            float *memory = s->memory + (b * s->states + z) * s->inner + i;
            const vec kept = exponential(-step * power(load_some(F32, s->decay, z * s->inner + i, n)));
            const vec h = kept * load_some(F32, memory, 0, n) + step * x * write[z];
            store_some(memory, h, n);
            y += h * read[z];
        }
        store_some(s->out + at, y * silu(load_some(F32, s->input, b * s->stride + s->inner + i, n)), n);
    }
}

/* Of each row of x: the largest number of every run of `run`, and log Σ e^x. */
void peaks(const float *x, int64_t rows, int64_t width, int64_t run, float *largest, float *total, int threads) {
    const int64_t runs = (width + run - 1) / run;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * width;
        float top = -INFINITY, *tops = largest + row * runs;
        for (int64_t i = 0; i < runs; i++) {
            const int64_t end = (i + 1) * run < width ? (i + 1) * run : width;
            int64_t at = i * run;
            vec best = all(-INFINITY);
            for (; at + LANES <= end; at += LANES) {
                const vec some = load(from + at);
                const ivec less = best > some;
                best = (vec)((less & (ivec)best) | (~less & (ivec)some));
            }
            float most = -INFINITY;
            for (int lane = 0; lane < LANES; lane++) most = most > best[lane] ? most : best[lane];
            for (; at < end; at++) most = most > from[at] ? most : from[at];
            tops[i] = most;
            top = top > most ? top : most;
        }
        vec sums = {0};
        float rest = 0;
        int64_t at = 0;
        for (; at + LANES <= width; at += LANES) sums += exponential(load(from + at) - top);
        for (; at < width; at++) rest += expf(from[at] - top);
        total[row] = top + logf(sum(sums) + rest);
    }
}

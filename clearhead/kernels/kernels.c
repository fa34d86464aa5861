/* The kernels of decoding: products of rows with large matrices, attention over a cache of pages, norms, and whole
 * blocks in one call. Matrices are read in the bits they are stored in; every sum is in float32.
 *
 * One source for every processor. Vectors are as wide as the machine's registers (WIDTH bytes), and a tile of a product
 * keeps TILE_X × TILE_W sums in registers. Intrinsics are used only where compilers do not find the instruction.
 *
 * A row of x gives the same bits alone and among others: every sum runs over the columns in the same order.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(PORTABLE)
#define WIDTH 16
#define REGISTERS 16
#elif defined(__AVX512F__)
#include <immintrin.h>
#define WIDTH 64
#define REGISTERS 32
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define AVX2
#define WIDTH 32
#define REGISTERS 16
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#define NEON
#define WIDTH 16
#define REGISTERS 32
#else
#define WIDTH 16
#define REGISTERS 16
#endif

#define TILE_X (REGISTERS == 32 ? 6 : 3) /* rows of x in one tile */
#define TILE_W 4                         /* rows of W in one tile */
#define ROWS_W 8                         /* rows of W that one thread takes at a time; a multiple of TILE_W */
#define ROWS_X 64                        /* rows of x that share one pass over W */
#define LANES (WIDTH / 4)
#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__) /* it takes GCC's pragma as a hint only, and arrays of sums would stay in memory */
#define EACH(i, n) _Pragma("clang loop unroll(full)") for (int i = 0; i < (n); i++)
#else
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)
#endif
typedef float vec __attribute__((vector_size(WIDTH)));
typedef int32_t ivec __attribute__((vector_size(WIDTH)));
typedef uint32_t uvec __attribute__((vector_size(WIDTH)));
typedef uint8_t bytes __attribute__((vector_size(WIDTH)));
typedef uint16_t hvec __attribute__((vector_size(WIDTH / 2)));
typedef int8_t bvec __attribute__((vector_size(WIDTH / 4)));

/* ---- threads
 *
 * Threads come from the OpenMP library that torch has loaded: a second one would compete for the cores. Its entry points
 * are called by name, so that GCC and Clang build the same code; without them one thread does all the work. Functions
 * named team_… are called by all threads of a team: each does its share, and all meet at the end. */
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern void GOMP_barrier(void) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));

typedef struct {
    int64_t thread, threads;
} team;

typedef struct {
    void (*work)(team, const void *);
    const void *data;
} job;

static void take_part(void *given) {
    const job *j = given;
    j->work((team){omp_get_thread_num(), omp_get_num_threads()}, j->data);
}

static void run(void (*work)(team, const void *), const void *data, int threads) {
    job j = {work, data};
    if (threads > 1 && GOMP_parallel) GOMP_parallel(take_part, &j, (unsigned)threads, 0);
    else work((team){0, 1}, data);
}

INLINE void meet(team t) {
    if (t.threads > 1) GOMP_barrier();
}

/* This thread's share of `count` tasks: from first_of to last_of. */
INLINE int64_t first_of(team t, int64_t count) { return count * t.thread / t.threads; }
INLINE int64_t last_of(team t, int64_t count) { return count * (t.thread + 1) / t.threads; }

/* ---- matrices */

enum kind { F32, BF16, F16, INT8, INT4, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, JOINED };

/* A matrix `rows` × `columns`, row by row.
 * F32, BF16, F16   the numbers themselves
 * INT8, INT4       codes (integers, or indices into a table of 16) in groups of columns that share a bfloat16 scale.
 *                  Rows are padded with zeros to `padded` columns. INT4: 128 columns are 16 words of 32 bits; word i
 *                  holds columns i, 16 + i, …, 112 + i from the lowest four bits up.
 * Q8_0 … IQ4_XS    blocks of llama.cpp, as in a GGUF file
 * JOINED           the rows of `shift` other matrices under each other, none of them INT4, which are at `parts` */
typedef struct matrix {
    int64_t kind, shift, rows, columns, padded; /* a group is 2^shift columns */
    const void *values;
    const uint16_t *scales;
    const float *table;
    const struct matrix *parts;
} matrix;
_Static_assert(sizeof(matrix) == 72, "build.py: Matrix");

/* The columns and the bytes of a block of llama.cpp. */
static const struct {
    int64_t columns, bytes;
} BLOCKS[] = {[Q8_0] = {32, 34},   [Q4_0] = {32, 18},   [Q4_1] = {32, 20},   [Q5_0] = {32, 22},
              [Q5_1] = {32, 24},   [IQ4_NL] = {32, 18}, [Q2_K] = {256, 84},  [Q3_K] = {256, 110},
              [Q4_K] = {256, 144}, [Q5_K] = {256, 176}, [Q6_K] = {256, 210}, [IQ4_XS] = {256, 136}};

INLINE vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, vec v) { memcpy(p, &v, sizeof v); }

INLINE vec all(float x) { return (vec){0} + x; }

/* a·b + c, rounded once if the processor can. Written out, so that every tile and every compiler gives the same bits;
 * compilers must not contract other expressions (-ffp-contract=off). */
INLINE vec madd(vec a, vec b, vec c) {
#if defined(AVX2)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif WIDTH == 64
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(NEON)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* acc += a·b, with all three in registers: left alone, GCC loads an operand again for every use and moves sums to the
 * stack, where the next addition waits for them. */
INLINE void accumulate(vec *acc, vec a, vec b) {
#if defined(AVX2) || WIDTH == 64
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(*acc) : "v"(a), "v"(b));
#else
    *acc = madd(a, b, *acc);
#endif
}

/* The same with a in memory. */
INLINE void accumulate_from(vec *acc, const float *a, vec b) {
#if defined(AVX2) || WIDTH == 64
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(*acc) : "v"(b), "m"(*(const float(*)[LANES])a));
#else
    *acc = madd(load(a), b, *acc);
#endif
}

INLINE vec choose(ivec which, vec yes, vec no) { return (vec)((which & (ivec)yes) | (~which & (ivec)no)); }

INLINE float bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* float16 to float32 and back, LANES numbers at a time. */
#if defined(AVX2)
INLINE vec widen_half(hvec half) { return (vec)_mm256_cvtph_ps((__m128i)half); }
INLINE hvec nearest_half(vec x) { return (hvec)_mm256_cvtps_ph((__m256)x, 0); }
#elif WIDTH == 64
INLINE vec widen_half(hvec half) { return (vec)_mm512_cvtph_ps((__m256i)half); }
INLINE hvec nearest_half(vec x) { return (hvec)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(NEON)
INLINE vec widen_half(hvec half) { return (vec)vcvt_f32_f16((float16x4_t)half); }
INLINE hvec nearest_half(vec x) { return (hvec)vcvt_f16_f32((float32x4_t)x); }
#else
INLINE vec widen_half(hvec half) { /* by exponent arithmetic; subnormal numbers by a subtraction */
    const uvec word = __builtin_convertvector(half, uvec) << 16, twice = word + word;
    const vec normal = (vec)((twice >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
    const vec small = (vec)((twice >> 17) | (126u << 23)) - 0.5f;
    return (vec)((word & 0x80000000u) | (uvec)choose((ivec)(twice < (1u << 27)), small, normal));
}
INLINE hvec nearest_half(vec x) {
    const uvec word = (uvec)x, twice = word + word;
    const vec base = (vec)(word & 0x7FFFFFFFu) * 0x1.0p+112f * 0x1.0p-110f;
    uvec bias = twice & 0xFF000000u;
    bias = (uvec)choose((ivec)(bias < 0x71000000u), (vec)((uvec){0} + 0x71000000u), (vec)bias);
    const uvec bits = (uvec)((vec)((bias >> 1) + 0x07800000u) + base);
    const uvec number = ((bits >> 13) & 0x7C00u) + (bits & 0x0FFFu);
    const uvec nan = (uvec){0} + 0x7E00u;
    const uvec half = ((word >> 16) & 0x8000u) | (uvec)choose((ivec)(twice > 0xFF000000u), (vec)nan, (vec)number);
    return __builtin_convertvector(half, hvec);
}
#endif

/* To float16; numbers beyond its range become the largest that it has, and a NaN stays. */
INLINE hvec narrow(vec x) {
    const vec low = choose(x > 65504.0f, all(65504.0f), x);
    return nearest_half(choose(low < -65504.0f, all(-65504.0f), low));
}

/* Lane i of the result is the sum of all lanes of v[i]. Every sum is the same tree of pairs, wherever v[i] stands. */
#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#if WIDTH == 64
#define PAIRS(a, b)                                                                                                   \
    (PICK(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +                                          \
     PICK(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31))
#define FOURS(a, b)                                                                                                   \
    (PICK(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +                                           \
     PICK(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
#define EIGHTS(a, b)                                                                                                  \
    (PICK(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +                                             \
     PICK(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#elif WIDTH == 32
#define PAIRS(a, b) (PICK(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + PICK(a, b, 1, 3, 9, 11, 5, 7, 13, 15))
#define FOURS(a, b) (PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15))
#else
#define PAIRS(a, b) (PICK(a, b, 0, 2, 4, 6) + PICK(a, b, 1, 3, 5, 7))
#endif

INLINE vec sum_each(const vec *v) {
    vec a[LANES / 2], b[LANES / 4];
    EACH(i, LANES / 2) a[i] = PAIRS(v[2 * i], v[2 * i + 1]);
    EACH(i, LANES / 4) b[i] = PAIRS(a[2 * i], a[2 * i + 1]);
#if WIDTH == 64
    return EIGHTS(FOURS(b[0], b[1]), FOURS(b[2], b[3]));
#elif WIDTH == 32
    return FOURS(b[0], b[1]);
#else
    return b[0];
#endif
}

INLINE float sum(vec v) {
    float lanes[LANES];
    store(lanes, v);
    for (int step = 1; step < LANES; step *= 2)
        for (int i = 0; i < LANES; i += 2 * step) lanes[i] += lanes[i + step];
    return lanes[0];
}

/* LANES numbers of a float array, from index `at` on. */
INLINE vec load_float(int kind, const void *values, int64_t at) {
    if (kind == F32) return load((const float *)values + at);
    hvec half;
    memcpy(&half, (const uint16_t *)values + at, sizeof half);
    if (kind == F16) return widen_half(half);
#if defined(AVX2)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)half), 16);
#else
    return (vec)(__builtin_convertvector(half, uvec) << 16);
#endif
}

/* The same, or only `count` numbers and zeros behind them. */
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

/* The bytes of some columns of a row, whole blocks. */
INLINE int64_t bytes_of(int64_t kind, int64_t columns) {
    if (kind > INT4) return columns * BLOCKS[kind].bytes / BLOCKS[kind].columns;
    return columns * (kind == F32 ? 8 : kind == INT8 ? 2 : kind == INT4 ? 1 : 4) / 2;
}

INLINE int64_t row_bytes(const matrix *w) { return bytes_of(w->kind, w->padded); }

/* ---- from codes to floats */

#define RUN 128  /* columns of INT4 that are stored together */
#define STEP 4   /* vectors that are widened and multiplied together */
#define SPAN 512 /* columns of W that are widened together: ROWS_W rows of them stay in the first cache */

/* The table of INT4, each entry rounded to bfloat16: its upper and its lower bytes, or the floats themselves. */
typedef struct {
#if WIDTH == 64
    vec floats;
#else
    uint8_t upper[WIDTH < 32 ? 16 : 32], lower[WIDTH < 32 ? 16 : 32];
#endif
} codebook;

INLINE codebook read_table(const matrix *w) {
    codebook c = {0};
    if (w->kind != INT4) return c;
    uint32_t bits[16];
    memcpy(bits, w->table, sizeof bits);
    for (int i = 0; i < 16; i++) bits[i] = (bits[i] + 0x7FFF + (bits[i] >> 16 & 1)) & 0xFFFF0000u;
#if WIDTH == 64
    memcpy(&c.floats, bits, sizeof bits);
#else
    for (int i = 0; i < (int)sizeof c.upper; i++) {
        c.upper[i] = (uint8_t)(bits[i % 16] >> 24);
        c.lower[i] = (uint8_t)(bits[i % 16] >> 16);
    }
#endif
    return c;
}

#if WIDTH < 64
/* The bytes table[i] for every byte i < 16. */
INLINE bytes look_up(const uint8_t *table, bytes i) {
#if defined(AVX2)
    return (bytes)_mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)table), (__m256i)i);
#elif defined(NEON) && defined(__aarch64__)
    return (bytes)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)i);
#else
    uint8_t from[WIDTH], to[WIDTH];
    memcpy(from, &i, sizeof from);
    for (int j = 0; j < WIDTH; j++) to[j] = table[from[j]];
    memcpy(&i, to, sizeof to);
    return i;
#endif
}
#endif

INLINE vec load_int8(const uint8_t *values, int64_t at) {
    bvec some;
    memcpy(&some, values + at, sizeof some);
#if WIDTH == 64
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)some));
#elif defined(AVX2)
    __m128i low = _mm_loadl_epi64((const __m128i *)(values + at));
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low));
#else
    return __builtin_convertvector(some, vec);
#endif
}

/* ---- blocks of llama.cpp: 32 columns are `codes`, and each 16 of them have a scale and an offset */

typedef uint8_t sixteen __attribute__((vector_size(16)));

INLINE sixteen load_bytes(const uint8_t *p) {
    sixteen v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store_codes(int8_t *codes, sixteen v) { memcpy(codes, &v, sizeof v); }

INLINE float half_at(const uint8_t *p) {
    hvec half = {0};
    uint16_t one;
    memcpy(&one, p, sizeof one);
    half[0] = one;
    return widen_half(half)[0];
}

/* Sixteen bytes of low nibbles, sixteen of high ones, plus bits 4 and up, minus `middle`. */
INLINE void nibbles(const uint8_t *p, int8_t *codes, uint8_t middle) {
    const sixteen q = load_bytes(p);
    store_codes(codes, (q & 15) - middle);
    store_codes(codes + 16, (q >> 4) - middle);
}

INLINE void fifth_bits(const uint8_t *p, int8_t *codes) {
    uint32_t high;
    memcpy(&high, p, sizeof high);
    for (int i = 0; i < 32; i++) codes[i] = (int8_t)(codes[i] + (int8_t)((high >> i & 1) << 4));
}

static const int8_t IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

/* Columns `at` to `at` + 31 of the block at b; `at` is a multiple of 32. */
INLINE void unpack(int kind, const uint8_t *b, int64_t at, int8_t *codes, float *scales, float *offsets) {
    const int64_t part = at / 32, half = at / 128, shift = at % 128 / 32 * 2; /* used by the types of 256 columns */
    scales[0] = half_at(b);
    offsets[0] = offsets[1] = 0;
    switch (kind) {
    case Q8_0: memcpy(codes, b + 2, 32); break;
    case Q4_0: nibbles(b + 2, codes, 8); break;
    case Q4_1:
        nibbles(b + 4, codes, 0);
        offsets[0] = offsets[1] = half_at(b + 2);
        break;
    case Q5_0:
        nibbles(b + 6, codes, 16);
        fifth_bits(b + 2, codes);
        break;
    case Q5_1:
        nibbles(b + 8, codes, 0);
        fifth_bits(b + 4, codes);
        offsets[0] = offsets[1] = half_at(b + 2);
        break;
    case IQ4_NL:
        nibbles(b + 2, codes, 0);
        for (int i = 0; i < 32; i++) codes[i] = IQ4[codes[i]];
        break;
    case IQ4_XS: {
        const int low = b[4 + part / 2] >> (4 * (part % 2)) & 15, high = b[2 + part / 4] >> (2 * (part % 4)) & 3;
        nibbles(b + 8 + 16 * part, codes, 0);
        for (int i = 0; i < 32; i++) codes[i] = IQ4[codes[i]];
        scales[0] *= (float)((low | high << 4) - 32);
        break;
    }
    case Q4_K:
    case Q5_K: {
        const uint8_t *s = b + 4, *q = b + (kind == Q4_K ? 16 : 48) + 32 * (part / 2), *h = b + 16;
        const int scale = part < 4 ? s[part] & 63 : (s[part + 4] & 15) | s[part - 4] >> 6 << 4;
        const int offset = part < 4 ? s[part + 4] & 63 : s[part + 4] >> 4 | s[part] >> 6 << 4;
        for (int i = 0; i < 32; i += 16) {
            sixteen code = part % 2 ? load_bytes(q + i) >> 4 : load_bytes(q + i) & 15;
            if (kind == Q5_K) code += (load_bytes(h + i) >> (uint8_t)part & 1) << 4;
            store_codes(codes + i, code);
        }
        scales[0] *= (float)scale;
        offsets[0] = offsets[1] = -(half_at(b + 2) * (float)offset);
        break;
    }
    case Q6_K: {
        const uint8_t *q = b + 64 * half + at % 64, *h = b + 128 + 32 * half, *s = b + 192 + 8 * half + shift;
        for (int i = 0; i < 32; i += 16) {
            const sixteen low = at % 128 < 64 ? load_bytes(q + i) & 15 : load_bytes(q + i) >> 4;
            store_codes(codes + i, (low | (load_bytes(h + i) >> (uint8_t)shift & 3) << 4) - 32);
            scales[i / 16] = half_at(b + 208) * (float)(int8_t)s[i / 16];
        }
        return;
    }
    case Q3_K: {
        const uint8_t *q = b + 32 + 32 * half, *s = b + 96;
        for (int i = 0; i < 32; i += 16) {
            const int64_t group = 2 * part + i / 16;
            const int low = group < 8 ? s[group] & 15 : s[group - 8] >> 4, high = s[8 + group % 4] >> (2 * (group / 4)) & 3;
            const sixteen bit = load_bytes(b + i) >> (uint8_t)part & 1;
            store_codes(codes + i, (load_bytes(q + i) >> (uint8_t)shift & 3) + 4 * bit - 4);
            scales[i / 16] = half_at(b + 108) * (float)((low | high << 4) - 32);
        }
        return;
    }
    case Q2_K: {
        const uint8_t *q = b + 16 + 32 * half, *s = b + 2 * part;
        for (int i = 0; i < 32; i += 16) {
            store_codes(codes + i, load_bytes(q + i) >> (uint8_t)shift & 3);
            scales[i / 16] = half_at(b + 80) * (float)(s[i / 16] & 15);
            offsets[i / 16] = -(half_at(b + 82) * (float)(s[i / 16] >> 4));
        }
        return;
    }
    }
    scales[1] = scales[0];
}

/* Columns k to k + 31 of a row of blocks, in float32. */
INLINE void decode_block(int kind, const uint8_t *row, int64_t k, vec *to) {
    int8_t codes[32];
    float scales[2], offsets[2];
    unpack(kind, row + k / BLOCKS[kind].columns * BLOCKS[kind].bytes, k % BLOCKS[kind].columns, codes, scales, offsets);
    EACH(i, 32 / LANES) {
        const int half = i * LANES / 16;
        to[i] = scales[half] * load_int8((const uint8_t *)codes, LANES * i) + offsets[half];
    }
}

/* ---- steps */

/* Rows are widened and multiplied in steps of a few vectors. `steps_of` steps, from column k on, are decoded together: a
 * step of INT4 takes the columns that share four bits of LANES words. Step i has the vectors from first_column on, each
 * column_stride after the one before. */
INLINE int64_t vectors_of(int kind) { return kind > INT4 ? 32 / LANES : STEP; }
INLINE int64_t steps_of(int kind) { return kind == INT4 ? RUN / (STEP * LANES) : 1; }
INLINE int64_t first_column(int kind, int64_t k, int64_t i) {
    return kind == INT4 ? k + i / 2 * LANES + i % 2 * 16 : k + i * STEP * LANES;
}
INLINE int64_t column_stride(int kind) { return kind == INT4 ? 32 : LANES; }
#define MOST (32 / LANES > STEP ? 32 / LANES : STEP) /* vectors of a step at most */

/* Step i from column k on in float32; scales[i] is that of columns 32 i to 32 i + 31. A code times a scale is exact. */
INLINE void decode(int kind, const uint8_t *values, const codebook *c, const float *scales, int64_t k, int i, vec *to) {
    if (kind > INT4) {
        decode_block(kind, values, k, to);
    } else if (kind == INT4) {
        uvec word;
        memcpy(&word, values + k / 2 + i / 2 * LANES * 4, sizeof word);
        if (i % 2) word >>= 4;
#if WIDTH == 64
        EACH(j, STEP) to[j] = (vec)_mm512_permutexvar_ps((__m512i)(word >> (8 * j)), (__m512)c->floats);
#else
        typedef uint16_t words __attribute__((vector_size(WIDTH)));
        const bytes code = (bytes)(word & 0x0F0F0F0Fu);
        const words upper = (words)look_up(c->upper, code), lower = (words)look_up(c->lower, code);
#if defined(AVX2)
        const __m256i second = _mm256_set1_epi16((int16_t)0xFF00);
        const uvec even = (uvec)_mm256_blendv_epi8((__m256i)lower, (__m256i)(upper << 8), second);
        const uvec odd = (uvec)_mm256_blendv_epi8((__m256i)(lower >> 8), (__m256i)upper, second);
#else
        const uvec even = (uvec)(upper << 8 | (lower & 0x00FF)), odd = (uvec)((upper & 0xFF00) | lower >> 8);
#endif
        to[0] = (vec)(even << 16), to[1] = (vec)(odd << 16);
        to[2] = (vec)(even & 0xFFFF0000u), to[3] = (vec)(odd & 0xFFFF0000u);
#endif
        EACH(j, STEP) to[j] *= scales[k / 32 + j];
    } else if (kind == INT8) {
        EACH(j, STEP) to[j] = scales[k / 32 + LANES * j / 32] * load_int8(values, k + LANES * j);
    } else {
        EACH(j, STEP) to[j] = load_float(kind, values, k + LANES * j);
    }
}

/* The scales of columns `from` to from + count of a row, one for every 32 columns. */
INLINE void read_scales(const matrix *w, int64_t row, int64_t from, int64_t count, float *to) {
    const uint16_t *scales = w->scales + row * (w->padded >> w->shift);
    if (w->shift == 5) for (int64_t i = 0; i < count / 32; i += LANES)
        store(to + i, load_some(BF16, scales, from / 32 + i, count / 32 - i));
    else for (int64_t i = 0; i < count / 32; i++)
        to[i] = bf16(scales[(from + 32 * i) >> w->shift]);
}

/* Columns `from` to from + count of a row in float32: at most SPAN, from a multiple of SPAN on. They are written in the
 * order of the columns, or, if `apart` is not 0, in that of the steps, `apart` floats from one vector to the next. */
INLINE void widen_span(int kind, const matrix *w, const codebook *c, int64_t row, int64_t from, int64_t count, float *to,
                       int64_t apart) {
    const uint8_t *values = (const uint8_t *)w->values + row * row_bytes(w) + bytes_of(kind, from);
    const int64_t vectors = vectors_of(kind), steps = steps_of(kind);
    float scales[SPAN / 32 + LANES];
    int64_t k = 0;
    if (kind == INT8 || kind == INT4) read_scales(w, row, from, count, scales);
    for (; k + vectors * LANES <= count; k += steps * vectors * LANES) EACH(i, steps) {
        vec some[MOST];
        decode(kind, values, c, scales, k, i, some);
        float *ordered = to + first_column(kind, k, i), *packed = to + (k / LANES + i * vectors) * apart;
        EACH(j, vectors) store(apart ? packed + j * apart : ordered + j * column_stride(kind), some[j]);
    }
    for (; k < count; k += LANES) store(to + k / LANES * (apart ? apart : LANES), load_some(kind, values, k, count - k));
}

/* ---- products */

/* Memory that is read soon: `each` cache lines are fetched with every step of a tile. */
typedef struct {
    const uint8_t *next;
    int64_t each;
} fetch;

/* sums[r·M + m] += Σ_k x[m, k] w[r, k] in LANES partial sums, for M rows of x and R rows of w, whose vectors take turns:
 * one of each of M rows in x, and of TILE_W rows in w. */
INLINE void tile(int M, int R, const float *w, const float *x, int64_t vectors, fetch f, vec *sums) {
    const float *last = x + vectors / STEP * STEP * M * LANES;
    vec acc[TILE_X][TILE_W];
    EACH(m, M) EACH(r, R) acc[m][r] = sums[r * M + m];
#define MULTIPLY(j)                                                                                                   \
    do {                                                                                                              \
        vec a[TILE_X];                                                                                                \
        EACH(m, M) a[m] = load(x + ((j) * M + m) * LANES);                                                            \
        EACH(r, R) {                                                                                                  \
            const vec b = load(w + ((j) * TILE_W + r) * LANES);                                                       \
            EACH(m, M) accumulate(&acc[m][r], a[m], b);                                                               \
        }                                                                                                             \
    } while (0)
    for (; x < last; x += STEP * M * LANES, w += STEP * TILE_W * LANES) {
        for (int64_t i = 0; i < f.each; i++) __builtin_prefetch(f.next + 64 * i, 0, 2);
        f.next += 64 * f.each;
        EACH(j, STEP) MULTIPLY(j);
    }
    for (int64_t v = vectors % STEP; v > 0; v--, x += M * LANES, w += TILE_W * LANES) MULTIPLY(0);
#undef MULTIPLY
    EACH(r, R) EACH(m, M) sums[r * M + m] = acc[m][r];
}

/* Rows of x as tiles read them: SPAN columns after SPAN columns, TILE_X rows after TILE_X rows, and in these vector after
 * vector, one of each row in turn, in the order of the steps. The last vector is filled with zeros. */
static void pack_rows(int kind, const float *x, int64_t stride, int64_t columns, int64_t many, float *to) {
    for (int64_t from = 0; from < columns; from += SPAN) {
        const int64_t count = columns - from < SPAN ? columns - from : SPAN, vectors = (count + LANES - 1) / LANES;
        for (int64_t m = 0; m < many; m++) {
            const int64_t first = m / TILE_X * TILE_X, M = many - first < TILE_X ? many - first : TILE_X;
            float *mine = to + from * many + first * vectors * LANES + (m - first) * LANES;
            for (int64_t v = 0; v < vectors; v++) {
                const int64_t step = v / STEP, whole = step / steps_of(kind) * steps_of(kind);
                const int64_t k = first_column(kind, whole * STEP * LANES, step - whole) + v % STEP * column_stride(kind);
                store(mine + v * M * LANES, load_some(F32, x, m * stride + from + k, count - k));
            }
        }
    }
}

/* The same for one row of x and R rows of a stored matrix from `row` on, without a copy in float32. */
INLINE void tile_of_one(int kind, int R, const matrix *w, const codebook *c, int64_t row, const float *x, vec *sums) {
    const int64_t vectors = vectors_of(kind), steps = steps_of(kind), wide = steps * vectors * LANES;
    const int64_t bytes_each = row_bytes(w), columns = w->padded, whole = columns / wide * wide;
    const int64_t bytes_of_step = R * bytes_of(kind, wide);
    const uint8_t *values = (const uint8_t *)w->values + row * bytes_each, *next = values + R * bytes_each;
    vec acc[ROWS_W];
    EACH(r, R) acc[r] = (vec){0};
    for (int64_t from = 0; from < whole; from += SPAN) {
        const int64_t count = whole - from < SPAN ? whole - from : SPAN;
        float scales[ROWS_W][SPAN / 32 + LANES];
        if (kind == INT8 || kind == INT4) EACH(r, R) read_scales(w, row + r, from, count, scales[r]);
        for (int64_t k = 0; k < count; k += wide, next += bytes_of_step) {
            EACH(line, (bytes_of_step + 63) / 64) __builtin_prefetch(next + 64 * line, 0, 2);
            EACH(r, R) EACH(i, steps) {
                const float *a = x + from + first_column(kind, k, i);
                vec b[MOST];
                decode(kind, values + r * bytes_each + bytes_of(kind, from), c, scales[r], k, i, b);
                EACH(j, vectors) accumulate_from(&acc[r], a + j * column_stride(kind), b[j]);
            }
        }
    }
    for (int64_t k = whole; k < columns; k += LANES) EACH(r, R) {
        const vec b = load_some(kind, values + r * bytes_each, k, columns - k);
        acc[r] = madd(load_some(F32, x, k, columns - k), b, acc[r]);
    }
    EACH(r, R) sums[r] = acc[r];
}

/* Memory of this thread that grows and is never given back. */
static float *scratch(int64_t count) {
    static __thread float *memory;
    static __thread int64_t size;
    if (count > size) {
        free(memory);
        memory = aligned_alloc(64, (size_t)((count * 4 + 63) / 64 * 64));
        if (!memory) abort();
        size = count;
    }
    return memory;
}

/* y[m, r] for the sums of R rows of W by M rows of x. */
INLINE void add_up(int M, int R, const vec *sums, float *y, int64_t y_stride) {
    EACH(m, M) {
        vec each[LANES] = {{0}};
        EACH(r, R) each[r] = sums[r * M + m];
        const vec all_of_them = sum_each(each);
        memcpy(y + m * y_stride, &all_of_them, (size_t)R * sizeof(float));
    }
}

/* Some columns of W by x: `count` rows of w, as `tile` reads them. */
typedef struct {
    const float *w, *x;
    int64_t vectors, count;
    fetch f;
    vec *sums; /* of the columns before these */
    float *y;
    int64_t y_stride, begins, ends; /* whether these columns are the first, the last */
} part;

/* M rows of x; the sums of R rows of W begin at sums[r·M]. */
INLINE void strip(int M, const part *p) {
    fetch f = p->f;
    for (int64_t r = 0; r < p->count; r += TILE_W) {
        const float *w = p->w + r * SPAN;
        vec *sums = p->sums + r * M;
        if (p->begins) memset(sums, 0, sizeof(vec) * (size_t)(M * TILE_W));
        if (r + TILE_W <= p->count) {
            tile(M, TILE_W, w, p->x, p->vectors, f, sums);
            if (p->ends) add_up(M, TILE_W, sums, p->y + r, p->y_stride);
            f.next += p->vectors / STEP * 64 * f.each;
        } else for (int64_t i = 0; r + i < p->count; i++) {
            tile(M, 1, w + i * LANES, p->x, p->vectors, (fetch){0}, sums + i * M);
            if (p->ends) add_up(M, 1, sums + i * M, p->y + r + i, p->y_stride);
        }
    }
}

static void strip_by_rows(int64_t M, const part *p) {
    switch (M) {
    case 1: strip(1, p); break;
    case 2: strip(2, p); break;
#if REGISTERS == 32
    case 3: strip(3, p); break;
    case 4: strip(4, p); break;
    case 5: strip(5, p); break;
#endif
    default: strip(TILE_X, p);
    }
}

#define ONE_ROWS (WIDTH == 64 ? 8 : 4) /* rows of W by one row of x in one tile */

/* Rows `from` to `to` of W with one row of x. */
INLINE void strip_of_one(int kind, const matrix *w, const codebook *c, int64_t from, int64_t to, const float *x, float *y) {
    int64_t r = from;
    for (; r + ONE_ROWS <= to; r += ONE_ROWS) {
        vec sums[ONE_ROWS + LANES] = {{0}};
        float out[ONE_ROWS + LANES];
        tile_of_one(kind, ONE_ROWS, w, c, r, x, sums);
        EACH(i, (ONE_ROWS + LANES - 1) / LANES) store(out + LANES * i, sum_each(sums + LANES * i));
        memcpy(y + r - from, out, ONE_ROWS * sizeof(float));
    }
    for (; r < to; r++) {
        vec sums[LANES] = {{0}};
        tile_of_one(kind, 1, w, c, r, x, sums);
        y[r - from] = sum_each(sums)[0];
    }
}

#define STRIPS(kind)                                                                                                  \
    static void one_##kind(const matrix *w, const codebook *c, int64_t from, int64_t to, const float *x, float *y) {  \
        strip_of_one(kind, w, c, from, to, x, y);                                                                     \
    }                                                                                                                 \
    static void widen_##kind(const matrix *w, const codebook *c, int64_t row, int64_t from, int64_t n, float *out,    \
                             int64_t apart) {                                                                         \
        widen_span(kind, w, c, row, from, n, out, apart);                                                             \
    }
STRIPS(F32) STRIPS(BF16) STRIPS(F16) STRIPS(INT8) STRIPS(INT4)
STRIPS(Q8_0) STRIPS(Q4_0) STRIPS(Q4_1) STRIPS(Q5_0) STRIPS(Q5_1) STRIPS(IQ4_NL)
STRIPS(Q2_K) STRIPS(Q3_K) STRIPS(Q4_K) STRIPS(Q5_K) STRIPS(Q6_K) STRIPS(IQ4_XS)
static void (*const ONE[])(const matrix *, const codebook *, int64_t, int64_t, const float *, float *) = {
    one_F32, one_BF16, one_F16, one_INT8, one_INT4,
    one_Q8_0, one_Q4_0, one_Q4_1, one_Q5_0, one_Q5_1, one_IQ4_NL,
    one_Q2_K, one_Q3_K, one_Q4_K, one_Q5_K, one_Q6_K, one_IQ4_XS};
static void (*const WIDEN[])(const matrix *, const codebook *, int64_t, int64_t, int64_t, float *, int64_t) = {
    widen_F32, widen_BF16, widen_F16, widen_INT8, widen_INT4,
    widen_Q8_0, widen_Q4_0, widen_Q4_1, widen_Q5_0, widen_Q5_1, widen_IQ4_NL,
    widen_Q2_K, widen_Q3_K, widen_Q4_K, widen_Q5_K, widen_Q6_K, widen_IQ4_XS};

/* Rows of x for the products of one call, packed if there are several. */
typedef struct {
    const float *rows, *packed;
    int64_t stride, many;
    codebook book;
    float *wide; /* ROWS_W rows of SPAN columns of W */
    vec *sums;
} inputs;

INLINE inputs read_rows(const matrix *w, const float *x, int64_t stride, int64_t many) {
    inputs in = {.rows = x, .stride = stride, .many = many, .book = read_table(w)};
    if (many > 1) {
        const int64_t size = many * ((w->padded + LANES - 1) / LANES) * LANES;
        float *packed = scratch(size + ROWS_W * SPAN + ROWS_X * ROWS_W * LANES);
        pack_rows(w->kind, x, stride, w->padded, many, packed);
        in.packed = packed, in.wide = packed + size, in.sums = (vec *)(in.wide + ROWS_W * SPAN);
    }
    return in;
}

/* Rows `from` to `to` of W, at most ROWS_W, with at most ROWS_X rows of x; y begins with row `from`. Several rows of x
 * share one copy of SPAN columns of these rows in float32. The next rows of W are fetched meanwhile. */
static void strips(const matrix *w, const inputs *in, int64_t from, int64_t to, float *y, int64_t y_stride) {
    if (w->kind == JOINED) {
        for (int64_t i = 0, first = 0; i < w->shift; first += w->parts[i++].rows) {
            const matrix *part = w->parts + i;
            const int64_t low = from > first ? from : first, high = to < first + part->rows ? to : first + part->rows;
            if (low < high) strips(part, in, low - first, high - first, y + low - from, y_stride);
        }
        return;
    }
    const int64_t many = in->many, lines = to < w->rows ? (to - from) * row_bytes(w) / 64 : 0;
    if (many == 1) {
        ONE[w->kind](w, &in->book, from, to, in->rows, y);
        return;
    }
    const int64_t tiles = (many + TILE_X - 1) / TILE_X * ROWS_W / TILE_W;
    const int64_t steps = tiles * (w->padded / (STEP * LANES) + 1);
    const uint8_t *next = (const uint8_t *)w->values + to * row_bytes(w), *last = next + 64 * lines;
    for (int64_t k = 0; k < w->padded; k += SPAN) {
        const int64_t columns = w->padded - k < SPAN ? w->padded - k : SPAN, vectors = (columns + LANES - 1) / LANES;
        part p = {.w = in->wide, .x = in->packed + k * many, .vectors = vectors, .count = to - from, .sums = in->sums,
                  .y = y, .y_stride = y_stride, .begins = k == 0, .ends = k + columns == w->padded};
        for (int64_t r = 0; r < to - from; r++) {
            float *wide = in->wide + r / TILE_W * TILE_W * SPAN + r % TILE_W * LANES;
            WIDEN[w->kind](w, &in->book, from + r, k, columns, wide, TILE_W * LANES);
        }
        for (int64_t m = 0; m < many; m += TILE_X) {
            p.f = (fetch){next, next < last ? (lines + steps - 1) / steps : 0};
            next += vectors / STEP * ROWS_W / TILE_W * 64 * p.f.each;
            strip_by_rows(many - m, &p);
            p.x += TILE_X * vectors * LANES;
            p.y += TILE_X * y_stride;
            p.sums += TILE_X * ROWS_W;
        }
    }
}

/* ---- functions of numbers */

/* eˣ to 1e-7 for x ≤ 0: 2ⁿ times a polynomial of the rest, which is within ±½ ln 2. A NaN stays. */
INLINE vec exponential(vec x) {
    x = choose(x < -87.0f, all(-87.0f), x);
    const vec shifted = madd(x, all(1.44269504f), all(12582912.0f)), n = shifted - 12582912.0f;
    const vec r = madd(n, all(2.12194440e-4f), madd(n, all(-0.693359375f), x));
    vec p = madd(r, all(1.9875691500e-4f), all(1.3981999507e-3f));
    p = madd(p, r, all(8.3334519073e-3f));
    p = madd(p, r, all(4.1665795894e-2f));
    p = madd(p, r, all(1.6666665459e-1f));
    p = madd(p, r, all(5.0000001201e-1f));
    p = madd(p * r, r, r) + 1.0f;
    return p * (vec)(((ivec)shifted + (127 - 0x4b400000)) << 23);
}

/* eˣ of any x, by e^−|x|. */
INLINE vec power(vec x) {
    const vec small = exponential((vec)((ivec)x | INT32_MIN));
    return choose(x > 0, 1.0f / small, small);
}

/* x / (1 + e^−x), by e^−|x|. */
INLINE vec silu(vec x) {
    const vec small = exponential((vec)((ivec)x | INT32_MIN));
    return x * choose(x > 0, all(1.0f), small) / (small + 1.0f);
}

/* y = x Wᵀ + bias + plus for `many` rows of x; bias and plus may be NULL. */
static void team_linear(team t, const matrix *w, const float *bias, const float *plus, const float *x, int64_t stride,
                        float *y, int64_t many) {
    const int64_t blocks = (w->rows + ROWS_W - 1) / ROWS_W;
    for (int64_t first = 0; first < many; first += ROWS_X) {
        const int64_t end = first + ROWS_X < many ? first + ROWS_X : many;
        const inputs in = read_rows(w, x + first * stride, stride, end - first);
        for (int64_t block = first_of(t, blocks), last = last_of(t, blocks); block < last; block++) {
            const int64_t from = block * ROWS_W, to = from + ROWS_W < w->rows ? from + ROWS_W : w->rows;
            strips(w, &in, from, to, y + first * w->rows + from, w->rows);
            if (bias || plus)
                for (int64_t m = first; m < end; m++)
                    for (int64_t i = from; i < to; i++)
                        y[m * w->rows + i] += (bias ? bias[i] : 0) + (plus ? plus[m * w->rows + i] : 0);
        }
    }
    meet(t);
}

/* y = silu(x Gᵀ) ∘ x Uᵀ: the hidden values of a gated feed-forward layer. Both matrices are INT4, or neither is. */
static void team_gated(team t, const matrix *gate, const matrix *up, const float *x, int64_t stride, float *y,
                       int64_t y_stride, int64_t many) {
    const int64_t blocks = (gate->rows + ROWS_W - 1) / ROWS_W;
    for (int64_t first = 0; first < many; first += ROWS_X) {
        const int64_t count = many - first < ROWS_X ? many - first : ROWS_X;
        const inputs in = read_rows(gate, x + first * stride, stride, count);
        inputs in_up = in;
        in_up.book = read_table(up);
        for (int64_t block = first_of(t, blocks), last = last_of(t, blocks); block < last; block++) {
            const int64_t from = block * ROWS_W, to = from + ROWS_W < gate->rows ? from + ROWS_W : gate->rows;
            float gates[ROWS_X][ROWS_W + LANES], ups[ROWS_X][ROWS_W + LANES];
            strips(gate, &in, from, to, gates[0], ROWS_W + LANES);
            strips(up, &in_up, from, to, ups[0], ROWS_W + LANES);
            for (int64_t m = 0; m < count; m++)
                for (int64_t i = 0; i < to - from; i += LANES)
                    store_some(y + (first + m) * y_stride + from + i, silu(load(gates[m] + i)) * load(ups[m] + i), to - from - i);
        }
    }
    meet(t);
}

/* x / √(mean(x²) + eps) · weight, for each of `many` rows. */
static void team_rms_norm(team t, const float *x, const float *weight, float eps, float *y, int64_t stride, int64_t dim,
                          int64_t many) {
    for (int64_t m = first_of(t, many), last = last_of(t, many); m < last; m++) {
        vec squares = {0};
        for (int64_t i = 0; i < dim; i += LANES) {
            const vec some = load_some(F32, x, m * dim + i, dim - i);
            squares = madd(some, some, squares);
        }
        const float factor = 1 / sqrtf(sum(squares) / (float)dim + eps);
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES)
            store(y + m * stride + i, load(x + m * dim + i) * factor * load(weight + i));
        for (; i < dim; i++) y[m * stride + i] = x[m * dim + i] * factor * weight[i];
    }
    meet(t);
}

/* What a call hands to its threads. */
typedef struct {
    const matrix *w, *up;
    const float *x, *other, *weight, *bias;
    float *y;
    int64_t stride, width, many;
    float eps;
} call;

static void linear_work(team t, const void *given) {
    const call *c = given;
    team_linear(t, c->w, c->bias, NULL, c->x, c->stride, c->y, c->many);
}

void linear(const matrix *w, const float *bias, const float *x, int64_t stride, float *y, int64_t many, int threads) {
    run(linear_work, &(call){.w = w, .bias = bias, .x = x, .stride = stride, .y = y, .many = many}, threads);
}

static void gated_work(team t, const void *given) {
    const call *c = given;
    team_gated(t, c->w, c->up, c->x, c->stride, c->y, c->w->rows, c->many);
}

void gated(const matrix *gate, const matrix *up, const float *x, int64_t stride, float *y, int64_t many, int threads) {
    run(gated_work, &(call){.w = gate, .up = up, .x = x, .stride = stride, .y = y, .many = many}, threads);
}

static void rms_norm_work(team t, const void *given) {
    const call *c = given;
    team_rms_norm(t, c->x, c->weight, c->eps, c->y, c->width, c->width, c->many);
}

void rms_norm(const float *x, const float *weight, float eps, float *y, int64_t dim, int64_t many, int threads) {
    run(rms_norm_work, &(call){.x = x, .weight = weight, .eps = eps, .y = y, .width = dim, .many = many}, threads);
}

static void silu_product_work(team t, const void *given) {
    const call *c = given;
    const int64_t vectors = (c->many + LANES - 1) / LANES;
    for (int64_t i = first_of(t, vectors), last = last_of(t, vectors); i < last; i++) {
        const int64_t at = i * LANES, n = c->many - at;
        store_some(c->y + at, silu(load_some(F32, c->y, at, n)) * load_some(F32, c->x, at, n), n);
    }
}

/* gate = silu(gate) ∘ up, of `count` numbers. */
void silu_product(float *gate, const float *up, int64_t count, int threads) {
    run(silu_product_work, &(call){.y = gate, .x = up, .many = count}, threads);
}

static void relu_work(team t, const void *given) {
    const call *c = given;
    for (int64_t m = first_of(t, c->many), last = last_of(t, c->many); m < last; m++) {
        float *mine = c->y + m * c->width;
        for (int64_t i = 0; i < c->width; i += LANES) {
            const int64_t n = c->width - i;
            vec some = load_some(F32, mine, i, n);
            if (c->bias) some += load_some(F32, c->bias, i, n);
            store_some(mine + i, (vec)(~(some < 0) & (ivec)some), n);
        }
    }
}

/* y = max(y + bias, 0) for each of `many` rows; bias may be NULL. A NaN stays. */
void relu(float *y, const float *bias, int64_t width, int64_t many, int threads) {
    run(relu_work, &(call){.y = y, .bias = bias, .width = width, .many = many}, threads);
}

static void add_norm_work(team t, const void *given) {
    const call *c = given;
    const int64_t dim = c->width, whole = dim / LANES * LANES;
    for (int64_t m = first_of(t, c->many), last = last_of(t, c->many); m < last; m++) {
        const float *mine = c->x + m * dim, *other = c->other + m * dim;
        float *to = c->y + m * dim, rest = 0;
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
            squares = madd(off, off, squares);
        }
        for (int64_t i = whole; i < dim; i++) rest += (to[i] - mean) * (to[i] - mean);
        const float factor = 1 / sqrtf((sum(squares) + rest) / (float)dim + c->eps);
        for (int64_t i = 0; i < dim; i += LANES) {
            const int64_t n = dim - i;
            vec y = (load_some(F32, to, i, n) - mean) * factor * load_some(F32, c->weight, i, n);
            if (c->bias) y += load_some(F32, c->bias, i, n);
            store_some(to + i, y, n);
        }
    }
}

/* LayerNorm of s = x + y: weight · (s − mean(s)) / √(mean((s − mean(s))²) + eps) + bias; bias may be NULL. */
void add_norm(const float *x, const float *y, const float *weight, const float *bias, float eps, float *out,
              int64_t dim, int64_t many, int threads) {
    const call c = {.x = x, .other = y, .weight = weight, .bias = bias, .eps = eps, .y = out, .width = dim, .many = many};
    run(add_norm_work, &c, threads);
}

static void expand_work(team t, const void *given) {
    const call *c = given;
    const matrix *w = c->w;
    const codebook book = read_table(w);
    float wide[SPAN];
    for (int64_t row = first_of(t, w->rows), last = last_of(t, w->rows); row < last; row++)
        for (int64_t k = 0; k < w->columns; k += SPAN) {
            const int64_t columns = w->padded - k < SPAN ? w->padded - k : SPAN, wanted = w->columns - k;
            WIDEN[w->kind](w, &book, row, k, columns, wide, 0);
            memcpy(c->y + row * w->columns + k, wide, (size_t)(wanted < SPAN ? wanted : SPAN) * sizeof(float));
        }
}

/* The whole matrix in float32. */
void expand(const matrix *w, float *out, int threads) { run(expand_work, &(call){.w = w, .y = out}, threads); }

/* ---- attention */

/* Attention of new tokens over a cache of pages. Each token is a row of its own: tokens of one text, of many texts, or
 * queries over a source are the same case. A page holds `page` slots of every key head: G, page, K and G, page, U.
 * Slot i of a text is slot i mod `page` of page table[row][i / page]; `page` is a multiple of CHUNK, or the only page. */
typedef struct {
    int64_t tokens, heads, groups, key, value; /* key, value: widths of a head */
    int64_t page, table_stride, mask_stride;   /* table_stride, mask_stride: from one row to the next */
    int64_t pairs, interleaved, angles;        /* rotary pairs; token i has the angles of row i mod `angles` */
    int64_t kind;                              /* of the cache: F32 or F16 */
    int64_t qkv_stride, out_stride;            /* from one token to the next */
    float scale;
    float *qkv;             /* each token: H·K, or H·K + G·K + G·U if it is written to the cache */
    const float *cos, *sin; /* `angles` rows of `pairs` */
    const int64_t *rows;    /* each token's row of the page table */
    const int64_t *slots;   /* the slot that each token is written to, -1 for none; NULL: nothing is written */
    const int64_t *lengths; /* how many slots each token reads */
    const uint8_t *mask;    /* each token: 1 for a slot that it may read; NULL: all below its length */
    const int64_t *table;   /* rows of page numbers */
    void *keys, *values;    /* pages */
    float *out;             /* each token: H·U */
} attention;
_Static_assert(sizeof(attention) == 14 * 8 + 8 + 11 * 8, "build.py: Attention");

INLINE void rotate(float *x, const float *cos, const float *sin, int64_t pairs, int64_t interleaved) {
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

/* Write n numbers to a cache, from index `at` on. */
INLINE void write_cache(int64_t kind, void *cache, int64_t at, const float *x, int64_t n) {
    if (kind == F32) memcpy((float *)cache + at, x, (size_t)n * sizeof(float));
    else for (int64_t i = 0; i < n; i += LANES) {
        const int64_t count = n - i < LANES ? n - i : LANES;
        const hvec half = narrow(load_some(F32, x, i, count));
        memcpy((uint16_t *)cache + at + i, &half, (size_t)count * sizeof(uint16_t));
    }
}

#define CHUNK 32   /* keys whose scores are computed together; never from two pages */
#define WIDEST 256 /* floats of a key or a value */

/* softmax(scale·q·kᵀ)·v for one query of key head g, a chunk of keys at a time; zeros if it may read nothing. */
INLINE void attend_one(int kind, int64_t key, int64_t value, const attention *a, int64_t token, int64_t g,
                       const float *query, float *out) {
    const int64_t length = a->lengths[token], *pages = a->table + a->rows[token] * a->table_stride;
    const uint8_t *mask = a->mask ? a->mask + token * a->mask_stride : NULL;
    vec q[WIDEST / LANES], acc[WIDEST / LANES];
    float top = -INFINITY, total = 0;
    EACH(w, (key + LANES - 1) / LANES) q[w] = a->scale * load_some(F32, query, w * LANES, key - w * LANES);
    EACH(w, (value + LANES - 1) / LANES) acc[w] = (vec){0};
    for (int64_t first = 0; first < length; first += CHUNK) {
        const int64_t slot = (pages[first / a->page] * a->groups + g) * a->page + first % a->page;
        const int64_t count = length - first < CHUNK ? length - first : CHUNK;
        const int64_t lanes = (count + LANES - 1) / LANES * LANES;
        float scores[CHUNK], best = top;
        for (int64_t i = 0; i < lanes; i += LANES) {
            vec sums[LANES] = {{0}};
            for (int64_t j = i; j < count && j < i + LANES; j++)
                EACH(w, (key + LANES - 1) / LANES)
                    sums[j - i] = madd(q[w], load_some(kind, a->keys, (slot + j) * key + w * LANES, key - w * LANES), sums[j - i]);
            store(scores + i, sum_each(sums));
        }
        for (int64_t i = 0; i < lanes; i++) {
            if (i >= count || (mask && !mask[first + i])) scores[i] = -INFINITY;
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
            if (mask && !mask[first + i]) continue;
            EACH(w, (value + LANES - 1) / LANES)
                acc[w] = madd(all(scores[i]), load_some(kind, a->values, (slot + i) * value + w * LANES, value - w * LANES), acc[w]);
        }
    }
    const float share = total == 0 ? 0 : 1 / total;
    EACH(w, (value + LANES - 1) / LANES) store_some(out + w * LANES, acc[w] * share, value - w * LANES);
}

/* Constant widths keep the query and the sums in registers. */
#define ATTENDS(kind)                                                                                                 \
    static void attend_##kind(const attention *a, int64_t token, int64_t g, const float *q, float *out) {             \
        switch (a->key == a->value ? a->key : 0) {                                                                    \
        case 32: attend_one(kind, 32, 32, a, token, g, q, out); break;                                                \
        case 48: attend_one(kind, 48, 48, a, token, g, q, out); break;                                                \
        case 64: attend_one(kind, 64, 64, a, token, g, q, out); break;                                                \
        case 96: attend_one(kind, 96, 96, a, token, g, q, out); break;                                                \
        case 128: attend_one(kind, 128, 128, a, token, g, q, out); break;                                             \
        default: attend_one(kind, a->key, a->value, a, token, g, q, out);                                             \
        }                                                                                                             \
    }
ATTENDS(F32) ATTENDS(F16)

/* Rotate the new queries and keys, and write keys and values to their slots. */
static void team_write_cache(team t, const attention *a) {
    const int64_t repeats = a->heads / a->groups, tasks = a->tokens * a->groups;
    for (int64_t task = first_of(t, tasks), last = last_of(t, tasks); task < last; task++) {
        const int64_t token = task / a->groups, g = task % a->groups, slot = a->slots[token];
        float *qkv = a->qkv + token * a->qkv_stride, *k = qkv + (a->heads + g) * a->key;
        const float *v = qkv + (a->heads + a->groups) * a->key + g * a->value;
        const float *cos = a->cos + token % a->angles * a->pairs, *sin = a->sin + token % a->angles * a->pairs;
        for (int64_t h = g * repeats; h < (g + 1) * repeats; h++)
            rotate(qkv + h * a->key, cos, sin, a->pairs, a->interleaved);
        rotate(k, cos, sin, a->pairs, a->interleaved);
        if (slot < 0) continue;
        const int64_t page = a->table[a->rows[token] * a->table_stride + slot / a->page];
        const int64_t at = (page * a->groups + g) * a->page + slot % a->page;
        write_cache(a->kind, a->keys, at * a->key, k, a->key);
        write_cache(a->kind, a->values, at * a->value, v, a->value);
    }
    meet(t);
}

static void team_attend(team t, const attention *a) {
    if (a->slots) team_write_cache(t, a);
    const int64_t repeats = a->heads / a->groups, tasks = a->tokens * a->heads;
    for (int64_t task = first_of(t, tasks), last = last_of(t, tasks); task < last; task++) {
        const int64_t token = task / a->heads, h = task % a->heads;
        const float *q = a->qkv + token * a->qkv_stride + h * a->key;
        float *out = a->out + token * a->out_stride + h * a->value;
        (a->kind == F32 ? attend_F32 : attend_F16)(a, token, h / repeats, q, out);
    }
    meet(t);
}

static void write_kv_work(team t, const void *a) { team_write_cache(t, a); }
static void attend_work(team t, const void *a) { team_attend(t, a); }

/* Rotate and write only: torch computes the attention of long prompts. */
void write_kv(const attention *a, int threads) { run(write_kv_work, a, threads); }
void attend(const attention *a, int threads) { run(attend_work, a, threads); }

/* A block of attention and a gated feed-forward layer, each after an RMSNorm and added to its input:
 * h = x + out(attend(qkv(norm(x)))),  y = h + down(silu(gate(norm(h))) ∘ up(norm(h))). */
typedef struct {
    matrix qkv, out, gate, up, down;
    const float *qkv_bias, *out_bias, *first_norm, *second_norm; /* biases may be NULL */
    float first_eps, second_eps;
    const float *x;
    float *y, *normed, *middle, *hidden; /* rows as wide as x; the padded width of qkv or gate; x; the padded width of down */
    attention attention;
} layer;
_Static_assert(sizeof(layer) == 5 * 72 + 4 * 8 + 8 + 5 * 8 + sizeof(attention), "build.py: Layer");

static void block_work(team t, const void *given) {
    const layer *l = given;
    const int64_t many = l->attention.tokens, dim = l->out.rows;
    team_rms_norm(t, l->x, l->first_norm, l->first_eps, l->normed, l->qkv.padded, dim, many);
    team_linear(t, &l->qkv, l->qkv_bias, NULL, l->normed, l->qkv.padded, l->attention.qkv, many);
    team_attend(t, &l->attention);
    team_linear(t, &l->out, l->out_bias, l->x, l->attention.out, l->attention.out_stride, l->middle, many);
    team_rms_norm(t, l->middle, l->second_norm, l->second_eps, l->normed, l->gate.padded, dim, many);
    team_gated(t, &l->gate, &l->up, l->normed, l->gate.padded, l->hidden, l->down.padded, many);
    team_linear(t, &l->down, NULL, l->middle, l->hidden, l->down.padded, l->y, many);
}

void block(const layer *l, int threads) { run(block_work, l, threads); }

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
_Static_assert(sizeof(space) == 18 * 8, "build.py: Space");

/* conv = silu(bias + Σ_k filter_k ∘ x_{t−k}); the new x joins the recent ones. */
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

static void scan_work(team t, const void *given) {
    const space *s = given;
    const int64_t blocks = (s->inner + LANES - 1) / LANES, tasks = s->batch * blocks;
    for (int64_t task = first_of(t, tasks), last = last_of(t, tasks); task < last; task++) {
        const int64_t b = task / blocks, i = task % blocks * LANES, n = s->inner - i, at = b * s->inner + i;
        const float *write = s->write + b * s->selected, *read = s->read + b * s->selected;
        const vec step = load_some(F32, s->step, at, n), x = load_some(F32, s->conv, at, n);
        vec y = x * load_some(F32, s->skip, i, n);
        for (int64_t z = 0; z < s->states; z++) {
            float *memory = s->memory + (b * s->states + z) * s->inner + i;
            const vec decay = exponential(-step * power(load_some(F32, s->decay, z * s->inner + i, n)));
            const vec h = decay * load_some(F32, memory, 0, n) + step * x * write[z];
            store_some(memory, h, n);
            y += h * read[z];
        }
        store_some(s->out + at, y * silu(load_some(F32, s->input, b * s->stride + s->inner + i, n)), n);
    }
}

/* h = exp(step·A)∘h + step·conv·write;  out = (h·read + skip∘conv)∘silu(gate). */
void scan(const space *s, int threads) { run(scan_work, s, threads); }

typedef struct {
    const float *x;
    int64_t rows, width, run;
    float *largest, *total;
} survey;

static void peaks_work(team t, const void *given) {
    const survey *s = given;
    const int64_t runs = (s->width + s->run - 1) / s->run;
    for (int64_t row = first_of(t, s->rows), last = last_of(t, s->rows); row < last; row++) {
        const float *from = s->x + row * s->width;
        float top = -INFINITY, *tops = s->largest + row * runs;
        for (int64_t i = 0; i < runs; i++) {
            const int64_t end = (i + 1) * s->run < s->width ? (i + 1) * s->run : s->width;
            int64_t at = i * s->run;
            vec best = all(-INFINITY);
            for (; at + LANES <= end; at += LANES) {
                const vec some = load(from + at);
                best = choose(best > some, best, some);
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
        for (; at + LANES <= s->width; at += LANES) sums += exponential(load(from + at) - top);
        for (; at < s->width; at++) rest += expf(from[at] - top);
        s->total[row] = top + logf(sum(sums) + rest);
    }
}

/* For each row of x: the largest number of every run of `run`, and log Σ eˣ. */
void peaks(const float *x, int64_t rows, int64_t width, int64_t run_, float *largest, float *total, int threads) {
    run(peaks_work, &(survey){x, rows, width, run_, largest, total}, threads);
}

/* ---- rounding to int4: the search of clearhead/precision/rounding.py ---- */

typedef struct {
    const float *weight, *table, *shares;
    int64_t groups, group, many;
    float *scales;
    uint8_t *codes;
} rounding;

static vec nearest_entry(vec x, const float *table) {
    vec entry = all(table[0]);
    for (int i = 1; i < 16; i++) entry = choose(x > all((table[i - 1] + table[i]) / 2), all(table[i]), entry);
    return entry;
}

static void scales_work(team t, const void *given) {
    const rounding *r = given;
    for (int64_t g = first_of(t, r->groups), last = last_of(t, r->groups); g < last; g++) {
        const float *w = r->weight + g * r->group;
        float largest = 0, best = -1, found = 0;
        for (int64_t j = 0; j < r->group; j++) largest = fabsf(w[j]) > fabsf(largest) ? w[j] : largest;
        for (int64_t n = 0; n < 2 * r->many; n++) {
            const float scale = largest / r->table[n < r->many ? 15 : 0] * r->shares[n % r->many];
            vec products = {0}, squares = {0};
            for (int64_t j = 0; j < r->group; j += LANES) {
                const vec some = load(w + j), entry = nearest_entry(some / all(scale == 0 ? 1 : scale), r->table);
                products += some * entry;
                squares += entry * entry;
            }
            const float product = sum(products), square = sum(squares);
            const float gain = square == 0 ? 0 : product * product / square;
            if (gain > best) best = gain, found = square == 0 ? 0 : product / square;
        }
        r->scales[g] = found;
    }
}

/* The best scale of each group, a multiple of LANES numbers, as `best_scales` finds it with these shares. */
void int4_scales(const float *weight, int64_t groups, int64_t group, const float *table, const float *shares,
                 int64_t many, float *scales, int threads) {
    run(scales_work, &(rounding){weight, table, shares, groups, group, many, scales, NULL}, threads);
}

static void codes_work(team t, const void *given) {
    const rounding *r = given;
    for (int64_t g = first_of(t, r->groups), last = last_of(t, r->groups); g < last; g++) {
        const float scale = r->scales[g] == 0 ? 1 : r->scales[g];
        for (int64_t j = g * r->group; j < (g + 1) * r->group; j += LANES) {
            const vec x = load(r->weight + j) / all(scale);
            ivec code = {0};
            for (int i = 1; i < 16; i++) code -= (ivec)(x > all((r->table[i - 1] + r->table[i]) / 2));
            for (int lane = 0; lane < LANES; lane++) r->codes[j + lane] = (uint8_t)code[lane];
        }
    }
}

/* The index of the table entry nearest to each number divided by its group's scale, as `places` finds it. */
void int4_codes(const float *weight, int64_t groups, int64_t group, const float *table, const float *scales,
                uint8_t *codes, int threads) {
    run(codes_work, &(rounding){weight, table, NULL, groups, group, 0, (float *)scales, codes}, threads);
}

/* The sizes of the structs above, for build.py to compare with its own, and the vector width in bytes. */
void describe(int64_t *sizes) {
    const int64_t known[] = {sizeof(matrix), sizeof(attention), sizeof(layer), sizeof(space), WIDTH};
    memcpy(sizes, known, sizeof known);
}

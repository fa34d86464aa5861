/* Compiled together with kernels.c for a processor of another kind and run in an emulator: products of every kind of
 * storage and attention over pages, against plain loops. Prints the largest relative error of each. */
#include "kernels.c"
#include <stdio.h>

static uint32_t seed = 1;
static float random_number(void) { /* in −1 … 1 */
    seed = seed * 1664525u + 1013904223u;
    return (float)(int32_t)seed / 2147483648.0f;
}

static uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)(bits >> 16);
}

enum { ROWS = 21, COLUMNS = 256, MANY = 9 };

static double product_error(int kind) {
    static float x[MANY * COLUMNS], y[MANY * ROWS], alone[ROWS], plain[ROWS * COLUMNS], table[16];
    static uint8_t values[ROWS * COLUMNS * 4];
    static uint16_t scales[ROWS * COLUMNS / 32];
    for (int i = 0; i < MANY * COLUMNS; i++) x[i] = random_number();
    for (int i = 0; i < 16; i++) table[i] = bf16(to_bf16(random_number()));
    for (int i = 0; i < ROWS * COLUMNS / 32; i++) scales[i] = to_bf16(random_number());
    for (int row = 0; row < ROWS; row++)
        for (int k = 0; k < COLUMNS; k++) {
            const int at = row * COLUMNS + k;
            const float number = random_number(), scale = bf16(scales[at / 32]);
            if (kind == F32) plain[at] = ((float *)values)[at] = number;
            if (kind == BF16) plain[at] = bf16(((uint16_t *)values)[at] = to_bf16(number));
            if (kind == F16) {
                const hvec half = nearest_half(all(number));
                ((uint16_t *)values)[at] = half[0];
                plain[at] = widen_half(half)[0];
                if (fabsf(plain[at] - number) > 1e-3f) return 1;
            }
            if (kind == INT8) plain[at] = scale * (float)(int8_t)(values[at] = (uint8_t)(int8_t)(100 * number));
            if (kind == INT4) {
                const uint32_t code = (uint32_t)(8 + 7.9f * number);
                uint32_t *word = (uint32_t *)values + (row * COLUMNS + k / 128 * 128) / 8 + k % 16;
                *word = (k % 128 < 16 ? 0 : *word) | code << 4 * (k % 128 / 16);
                plain[at] = scale * table[code];
            }
        }
    const matrix w = {kind, 5, ROWS, COLUMNS, COLUMNS, values, scales, table};
    linear(&w, NULL, x, COLUMNS, y, MANY, 1);
    linear(&w, NULL, x, COLUMNS, alone, 1, 1);
    if (memcmp(alone, y, sizeof alone)) return 2; /* a row alone gives the same bits */
    double error = 0, size = 0;
    for (int m = 0; m < MANY; m++)
        for (int row = 0; row < ROWS; row++) {
            double exact = 0;
            for (int k = 0; k < COLUMNS; k++) exact += (double)x[m * COLUMNS + k] * plain[row * COLUMNS + k];
            error = fmax(error, fabs(exact - y[m * ROWS + row]));
            size = fmax(size, fabs(exact));
        }
    return error / size;
}

static double attention_error(int kind) {
    enum { HEADS = 4, GROUPS = 2, WIDE = 24, TOKENS = 3, PAGES = 5, PAGE_SLOTS = 32 };
    static float qkv[TOKENS][(HEADS + 2 * GROUPS) * WIDE], out[TOKENS][HEADS * WIDE], before[TOKENS][HEADS * WIDE];
    static float keys[PAGES * GROUPS * PAGE_SLOTS * WIDE], values[PAGES * GROUPS * PAGE_SLOTS * WIDE];
    const int64_t rows[] = {0, 1, 0}, slots[] = {40, 7, 41}, lengths[] = {41, 8, 42}, table[] = {3, 1, 4, 0};
    const float cos = 1, sin = 0;
    for (int i = 0; i < PAGES * GROUPS * PAGE_SLOTS * WIDE; i++) keys[i] = random_number(), values[i] = random_number();
    for (int t = 0; t < TOKENS; t++)
        for (int i = 0; i < (HEADS + 2 * GROUPS) * WIDE; i++) qkv[t][i] = random_number();
    static uint16_t half_keys[PAGES * GROUPS * PAGE_SLOTS * WIDE], half_values[PAGES * GROUPS * PAGE_SLOTS * WIDE];
    for (int i = 0; i < PAGES * GROUPS * PAGE_SLOTS * WIDE; i++) {
        half_keys[i] = nearest_half(all(keys[i]))[0];
        half_values[i] = nearest_half(all(values[i]))[0];
    }
    void *k = kind == F32 ? (void *)keys : half_keys, *v = kind == F32 ? (void *)values : half_values;
    const attention a = {TOKENS, HEADS, GROUPS, WIDE, WIDE, PAGE_SLOTS, 2, 0, 0, 0, 1, kind, (HEADS + 2 * GROUPS) * WIDE,
                         HEADS * WIDE, 0.2f, qkv[0], &cos, &sin, rows, slots, lengths, NULL, table, k, v, out[0]};
    attend(&a, 1);
    memcpy(before, out, sizeof out);
    double error = 0;
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HEADS; h++) {
            double total = 0, mixed[WIDE] = {0};
            for (int64_t i = 0; i < lengths[t]; i++) {
                const int64_t at = ((table[rows[t] * 2 + i / 32] * GROUPS + h / 2) * PAGE_SLOTS + i % 32) * WIDE;
                double score = 0;
                for (int j = 0; j < WIDE; j++)
                    score += 0.2 * qkv[t][h * WIDE + j] * load_some(kind, k, at + j, 1)[0];
                total += exp(score);
                for (int j = 0; j < WIDE; j++) mixed[j] += exp(score) * load_some(kind, v, at + j, 1)[0];
            }
            for (int j = 0; j < WIDE; j++) error = fmax(error, fabs(mixed[j] / total - out[t][h * WIDE + j]));
        }
    return error;
}

int main(void) {
    const char *names[] = {"float32", "bfloat16", "float16", "int8", "int4"};
    for (int kind = F32; kind <= INT4; kind++) printf("%s %g\n", names[kind], product_error(kind));
    printf("attention %g\nattention_float16 %g\nwidth %d\n", attention_error(F32), attention_error(F16), WIDTH);
}

/* Vectors of W floats with what the engine needs of them, for each instruction set that it is compiled for.
 *
 * Every function gives the same bits in every lane, and horizontal sums have one fixed order. Fused multiply-add is
 * explicit; the compiler must not contract others (-ffp-contract=off).
 */
#ifndef FOREDRAFT_VECTOR_H
#define FOREDRAFT_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff, bits;
    if (magnitude >= 0x7c00) {
        bits = 0x7f800000u | (magnitude & 0x3ff) << 13;
    } else if (magnitude >= 0x400) {
        bits = (magnitude << 13) + (112u << 23);
    } else { /* subnormal: exact in float */
        float value = (float)magnitude * 0x1p-24f;
        memcpy(&bits, &value, 4);
    }
    bits |= sign;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint16_t float_to_half(float value) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);
    if (magnitude >= 0x38800000u) {
        uint32_t odd = magnitude >> 13 & 1;
        return (uint16_t)(sign | (magnitude - (112u << 23) + 0xfff + odd) >> 13);
    }
    float absolute;
    memcpy(&absolute, &magnitude, 4);
    return (uint16_t)(sign | (uint32_t)rintf(absolute * 0x1p24f));
}

#if defined(__AVX512F__) && defined(__AVX512VNNI__)

#include <immintrin.h>
#define W 16
#define ISA "avx512"
typedef __m512 vf;
INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf v_set(float a) { return _mm512_set1_ps(a); }
INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf v_abs(vf a) { return _mm512_abs_ps(a); }
INLINE vf v_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf v_power_of_two(vf n) { /* of whole numbers in [-126, 127] */
    __m512i bits = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
}
INLINE vf v_load_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf v_load_unsigned(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE vf v_load_signed(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE void v_store_half(uint16_t *p, vf a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE float v_sum(vf a) {
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
INLINE float v_highest(vf a) { return _mm512_reduce_max_ps(a); }
/* Store round(a * inverse) as bytes; return their sum. */
INLINE int32_t v_quantise(vf a, float inverse, int8_t *p) {
    __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(a, _mm512_set1_ps(inverse)));
    _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(q));
    return _mm512_reduce_add_epi32(q);
}
/* Store round(a) for a in [0, 255] as bytes. */
INLINE void v_store_codes(vf a, uint8_t *p) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtusepi32_epi8(_mm512_cvtps_epu32(a)));
}
/* Sums of four vectors. */
INLINE void v_sums(vf a, vf b, vf c, vf d, float *p) {
    vf ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    vf cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
    vf all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>
#define W 8
#define ISA "avx2"
typedef __m256 vf;
INLINE vf v_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
INLINE vf v_set(float a) { return _mm256_set1_ps(a); }
INLINE vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf v_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE vf v_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf v_power_of_two(vf n) {
    __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
INLINE vf v_load_half(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf v_load_unsigned(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE vf v_load_signed(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE void v_store_half(uint16_t *p, vf a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE __m128 fold(vf a) { return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)); }
INLINE float v_sum(vf a) {
    __m128 c = fold(a);
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
INLINE float v_highest(vf a) {
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
INLINE int32_t v_quantise(vf a, float inverse, int8_t *p) {
    __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(a, _mm256_set1_ps(inverse)));
    __m128i low = _mm256_castsi256_si128(q), high = _mm256_extracti128_si256(q, 1);
    __m128i words = _mm_packs_epi32(low, high);
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
    __m128i sum = _mm_add_epi32(low, high);
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}
INLINE void v_store_codes(vf a, uint8_t *p) {
    __m256i q = _mm256_cvtps_epi32(a);
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(words, words));
}
INLINE void v_sums(vf a, vf b, vf c, vf d, float *p) {
    vf all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(p, fold(all));
}

#elif defined(__ARM_FEATURE_DOTPROD)

#include <arm_neon.h>
#define W 4
#define ISA "dotprod"
typedef float32x4_t vf;
INLINE vf v_load(const float *p) { return vld1q_f32(p); }
INLINE void v_store(float *p, vf a) { vst1q_f32(p, a); }
INLINE vf v_set(float a) { return vdupq_n_f32(a); }
INLINE vf v_add(vf a, vf b) { return vaddq_f32(a, b); }
INLINE vf v_sub(vf a, vf b) { return vsubq_f32(a, b); }
INLINE vf v_mul(vf a, vf b) { return vmulq_f32(a, b); }
INLINE vf v_div(vf a, vf b) { return vdivq_f32(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
INLINE vf v_max(vf a, vf b) { return vmaxq_f32(a, b); }
INLINE vf v_min(vf a, vf b) { return vminq_f32(a, b); }
INLINE vf v_abs(vf a) { return vabsq_f32(a); }
INLINE vf v_round(vf a) { return vrndnq_f32(a); }
INLINE vf v_power_of_two(vf n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
INLINE vf v_load_half(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE vf v_load_unsigned(const uint8_t *p) {
    uint32_t four;
    memcpy(&four, p, 4);
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
}
INLINE vf v_load_signed(const int8_t *p) {
    uint32_t four;
    memcpy(&four, p, 4);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four)))));
}
INLINE void v_store_half(uint16_t *p, vf a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
INLINE float v_sum(vf a) { return vaddvq_f32(a); }
INLINE float v_highest(vf a) { return vmaxvq_f32(a); }
INLINE int32_t v_quantise(vf a, float inverse, int8_t *p) {
    int32x4_t q = vcvtnq_s32_f32(vmulq_n_f32(a, inverse));
    int16x4_t words = vqmovn_s32(q);
    int8x8_t bytes = vqmovn_s16(vcombine_s16(words, words));
    vst1_lane_s32((int32_t *)p, vreinterpret_s32_s8(bytes), 0);
    return vaddvq_s32(q);
}
INLINE void v_store_codes(vf a, uint8_t *p) {
    uint16x4_t words = vqmovn_u32(vcvtnq_u32_f32(a));
    uint8x8_t bytes = vqmovn_u16(vcombine_u16(words, words));
    vst1_lane_u32((uint32_t *)p, vreinterpret_u32_u8(bytes), 0);
}
INLINE void v_sums(vf a, vf b, vf c, vf d, float *p) {
    vst1q_f32(p, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}

#else

#define W 1
#define ISA "portable"
typedef float vf;
INLINE vf v_load(const float *p) { return *p; }
INLINE void v_store(float *p, vf a) { *p = a; }
INLINE vf v_set(float a) { return a; }
INLINE vf v_add(vf a, vf b) { return a + b; }
INLINE vf v_sub(vf a, vf b) { return a - b; }
INLINE vf v_mul(vf a, vf b) { return a * b; }
INLINE vf v_div(vf a, vf b) { return a / b; }
INLINE vf v_fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf v_max(vf a, vf b) { return a > b ? a : b; }
INLINE vf v_min(vf a, vf b) { return a < b ? a : b; }
INLINE vf v_abs(vf a) { return fabsf(a); }
INLINE vf v_round(vf a) { return rintf(a); }
INLINE vf v_power_of_two(vf n) {
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
INLINE vf v_load_half(const uint16_t *p) { return half_to_float(*p); }
INLINE vf v_load_unsigned(const uint8_t *p) { return (float)*p; }
INLINE vf v_load_signed(const int8_t *p) { return (float)*p; }
INLINE void v_store_half(uint16_t *p, vf a) { *p = float_to_half(a); }
INLINE float v_sum(vf a) { return a; }
INLINE float v_highest(vf a) { return a; }
INLINE int32_t v_quantise(vf a, float inverse, int8_t *p) {
    float scaled = rintf(a * inverse);
    int32_t q = scaled >= -127.0f && scaled <= 127.0f ? (int32_t)scaled : -128; /* NaN and infinities, as on x86 */
    *p = (int8_t)q;
    return q;
}
INLINE void v_store_codes(vf a, uint8_t *p) { *p = a >= 0.0f && a <= 255.0f ? (uint8_t)rintf(a) : 255; }
INLINE void v_sums(vf a, vf b, vf c, vf d, float *p) { p[0] = a, p[1] = b, p[2] = c, p[3] = d; }

#endif

/* a * b + c as in the lanes of v_fma. */
INLINE float s_fma(float a, float b, float c) {
#if W == 1
    return a * b + c;
#else
    return fmaf(a, b, c);
#endif
}

/* e^a for a in [-87, 88], within 2 units in the last place; beyond, that of the nearer end. */
INLINE vf v_exp(vf a) {
    vf x = v_max(v_min(a, v_set(88.0f)), v_set(-87.0f));
    vf n = v_round(v_mul(x, v_set(1.44269504f)));
    vf r = v_fma(n, v_set(-0.693145752f), x);
    r = v_fma(n, v_set(-1.42860677e-6f), r);
    vf p = v_fma(r, v_set(1.9875691500e-4f), v_set(1.3981999507e-3f));
    p = v_fma(p, r, v_set(8.3334519073e-3f));
    p = v_fma(p, r, v_set(4.1665795894e-2f));
    p = v_fma(p, r, v_set(1.6666665459e-1f));
    p = v_fma(p, r, v_set(5.0000001201e-1f));
    p = v_add(v_fma(p, v_mul(r, r), r), v_set(1.0f));
    return v_mul(p, v_power_of_two(n));
}

INLINE vf v_sigmoid(vf a) { return v_div(v_set(1.0f), v_add(v_set(1.0f), v_exp(v_sub(v_set(0.0f), a)))); }

INLINE vf v_tanh(vf a) { /* 1 - 2 / (e^2a + 1) */
    return v_sub(v_set(1.0f), v_div(v_set(2.0f), v_add(v_exp(v_add(a, a)), v_set(1.0f))));
}

#endif

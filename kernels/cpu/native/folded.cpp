// The fold of an input and the tiling of an output by sparse sketches, as kernels/reference/folded.py defines them, in
// one pass over each. kernels/cpu/native/__init__.py compiles this file for the processor at hand.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

namespace {

constexpr int64_t LANES = 16, SHORT = 64, LONG = 128;

inline float as_float(float number) { return number; }
inline float as_float(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}
inline void store(float& place, float number) { place = number; }
inline void store(uint16_t& place, float number) {  // to the nearest, and ties to even
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  place = number != number ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// The number of columns that a loop takes at once: a multiple of the rank, not too short, and of whole vectors if it can be.
int64_t period_of(int64_t rank) {
  const int64_t whole = std::lcm<int64_t>(rank, LANES), unit = whole <= LONG ? whole : rank;
  return (SHORT + unit - 1) / unit * unit;
}

template <class Number>
void fold_row(const Number* __restrict x, const float* __restrict signs, float scale, int64_t columns, int64_t rank,
              float* __restrict sums, int64_t period, Number* __restrict out) {
  std::fill(sums, sums + period, 0.0f);
  for (int64_t start = 0; start < columns; start += period) {
    const int64_t count = std::min(period, columns - start);
    for (int64_t i = 0; i < count; ++i) sums[i] += as_float(x[start + i]) * signs[start + i];
  }
  for (int64_t start = rank; start < period; start += rank)
    for (int64_t i = 0; i < rank; ++i) sums[i] += sums[start + i];
  for (int64_t i = 0; i < rank; ++i) store(out[i], scale * sums[i]);
}

template <class Number>
void tile_row(const Number* __restrict h, const float* __restrict factors, const float* __restrict bias,
              int64_t columns, int64_t rank, float* __restrict repeated, int64_t period, Number* __restrict out) {
  for (int64_t start = 0; start < period; start += rank)
    for (int64_t i = 0; i < rank; ++i) repeated[start + i] = as_float(h[i]);
  for (int64_t start = 0; start < columns; start += period) {
    const int64_t count = std::min(period, columns - start);
    for (int64_t i = 0; i < count; ++i) store(out[start + i], repeated[i] * factors[start + i] + bias[start + i]);
  }
}

template <class Number>
void fold_and_tile(const Number* x, int64_t stride, int64_t columns, const Number* in_signs, Number* folded,
                   const Number* h, int64_t outputs, const Number* out_signs, const Number* bias, float scale,
                   Number* out, int64_t rows, int64_t rank, int threads) {
  std::vector<float> signs(columns), factors(outputs), biases(outputs);
  for (int64_t i = 0; i < columns; ++i) signs[i] = as_float(in_signs[i]);
  for (int64_t i = 0; i < outputs; ++i) {
    factors[i] = scale * as_float(out_signs[i]);
    biases[i] = bias ? as_float(bias[i]) : 0.0f;
  }
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> numbers(period_of(rank));
    float* place = numbers.data();
    const int64_t period = numbers.size();
#pragma omp for
    for (int64_t row = 0; row < rows; ++row) {
      fold_row(x + row * stride, signs.data(), scale, columns, rank, place, period, folded + row * rank);
      if (!h) continue;
      tile_row(h + row * rank, factors.data(), biases.data(), outputs, rank, place, period, out + row * outputs);
    }
  }
}

}  // namespace

extern "C" {

// Write scale x U2 to `folded` and, unless h is null, scale h U1 + bias to `out`, in float32.
void panther_fold_and_tile(const float* x, int64_t stride, int64_t columns, const float* in_signs, float* folded,
                           const float* h, int64_t outputs, const float* out_signs, const float* bias, float scale,
                           float* out, int64_t rows, int64_t rank, int threads) {
  fold_and_tile(x, stride, columns, in_signs, folded, h, outputs, out_signs, bias, scale, out, rows, rank, threads);
}

// The same in bfloat16, with sums in float32.
void panther_half_fold_and_tile(const uint16_t* x, int64_t stride, int64_t columns, const uint16_t* in_signs,
                                uint16_t* folded, const uint16_t* h, int64_t outputs, const uint16_t* out_signs,
                                const uint16_t* bias, float scale, uint16_t* out, int64_t rows, int64_t rank,
                                int threads) {
  fold_and_tile(x, stride, columns, in_signs, folded, h, outputs, out_signs, bias, scale, out, rows, rank, threads);
}

}  // extern "C"

// Products with weights of 2 to 8 bits, of a low-rank correction, or of both, and few rows of input, and the expansion of
// such weights. They read codes as kernels/reference/codes.py packs them. kernels/cpu/native/__init__.py compiles this
// file for the processor at hand.

#include <immintrin.h>
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

#ifdef __AVX512F__
using Floats = __m512;
using Ints = __m512i;
constexpr int64_t LANES = 16;
inline Floats load(const float* address) { return _mm512_loadu_ps(address); }
inline void store(float* address, Floats numbers) { _mm512_storeu_ps(address, numbers); }
inline Floats all(float number) { return _mm512_set1_ps(number); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats as_floats(Ints numbers) { return _mm512_cvtepi32_ps(numbers); }
inline Ints high_halves(Ints numbers) { return _mm512_srli_epi32(numbers, 4); }
inline Ints no_bits() { return _mm512_setzero_si512(); }
inline Ints lanes() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }
inline Ints load(const int8_t* numbers) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
}
inline Ints bits_at(Ints numbers, int place, int mask) {
  return _mm512_and_si512(_mm512_srl_epi32(numbers, _mm_cvtsi32_si128(place)), _mm512_set1_epi32(mask));
}
inline Ints with_bits(Ints numbers, Ints bits, int place) {
  return _mm512_or_si512(numbers, _mm512_slli_epi32(bits, place));
}
inline Ints load_codes(const uint8_t* codes, __m128i flips = _mm_setzero_si128()) {
  return _mm512_cvtepu8_epi32(_mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)), flips));
}
inline float sum_of(Floats numbers) { return _mm512_reduce_add_ps(numbers); }
// Numbers as bfloat16, rounded to the nearest, and ties to even. Weights are finite.
inline void store(uint16_t* address, Floats numbers) {
#ifdef __AVX512BF16__
  const auto halves = (__m256i)_mm512_cvtneps_pbh(numbers);
#else
  const Ints words = _mm512_castps_si512(numbers);
  const Ints odd = _mm512_and_si512(_mm512_srli_epi32(words, 16), _mm512_set1_epi32(1));
  const Ints rounded = _mm512_add_epi32(_mm512_add_epi32(words, odd), _mm512_set1_epi32(0x7fff));
  const auto halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), halves);
}
#else
using Floats = __m256;
using Ints = __m256i;
constexpr int64_t LANES = 8;
inline Floats load(const float* address) { return _mm256_loadu_ps(address); }
inline void store(float* address, Floats numbers) { _mm256_storeu_ps(address, numbers); }
inline Floats all(float number) { return _mm256_set1_ps(number); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats as_floats(Ints numbers) { return _mm256_cvtepi32_ps(numbers); }
inline Ints high_halves(Ints numbers) { return _mm256_srli_epi32(numbers, 4); }
inline Ints no_bits() { return _mm256_setzero_si256(); }
inline Ints load(const int8_t* numbers) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(numbers)));
}
inline Ints bits_at(Ints numbers, int place, int mask) {
  return _mm256_and_si256(_mm256_srl_epi32(numbers, _mm_cvtsi32_si128(place)), _mm256_set1_epi32(mask));
}
inline Ints with_bits(Ints numbers, Ints bits, int place) {
  return _mm256_or_si256(numbers, _mm256_slli_epi32(bits, place));
}
inline Ints load_codes(const uint8_t* codes, __m128i flips = _mm_setzero_si128()) {
  return _mm256_cvtepu8_epi32(_mm_xor_si128(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)), flips));
}
inline float sum_of(Floats numbers) {
  float lanes[LANES], sum = 0;
  store(lanes, numbers);
  for (const float lane : lanes) sum += lane;
  return sum;
}
// Numbers as bfloat16, rounded to the nearest, and ties to even. Weights are finite.
inline void store(uint16_t* address, Floats numbers) {
  const Ints words = _mm256_castps_si256(numbers);
  const Ints odd = _mm256_and_si256(_mm256_srli_epi32(words, 16), _mm256_set1_epi32(1));
  const Ints rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(words, odd), _mm256_set1_epi32(0x7fff)), 16);
  const auto pairs = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(address), pairs);
}
#endif

float from_bfloat16(uint16_t half) {
  const uint32_t word = static_cast<uint32_t>(half) << 16;
  float number;
  std::memcpy(&number, &word, sizeof number);
  return number;
}

void store_one(float* address, float number) { *address = number; }

void store_one(uint16_t* address, float number) {
  uint32_t word;
  std::memcpy(&word, &number, sizeof word);
  // Rounding could carry a NaN over to zero.
  *address = number != number ? 0x7fc0 : static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

struct Weight {
  const uint8_t* packed;   // (outputs, row_bytes), or null for a weight of factors alone
  const uint16_t* scales;  // (outputs, groups), bfloat16
  const uint8_t* zeros;    // (outputs, groups)
  int64_t bits, inputs, outputs, group_size;
  const int8_t* left;             // (outputs, rank), or null for a weight without a correction
  const int8_t* right;            // (rank, inputs)
  const uint16_t* factor_scales;  // (rank), bfloat16
  int64_t rank;

  int64_t groups() const { return (inputs + group_size - 1) / group_size; }
  float scale(int64_t row, int64_t group) const { return from_bfloat16(scales[row * groups() + group]); }
  float zero(int64_t row, int64_t group) const { return zeros[row * groups() + group]; }
  int64_t part_bytes(int64_t width) const { return (inputs * width + 7) / 8; }
  const uint8_t* row(int64_t row) const {
    int64_t bytes = 0;
    for (int64_t width = 1; width <= 8; width *= 2) bytes += bits & width ? part_bytes(width) : 0;
    return packed + row * bytes;
  }
  // Whether readers take whole vectors of every part, each of one group.
  bool has_whole_vectors() const {
    return inputs % (8 * LANES) == 0 && (group_size % (2 * LANES) == 0 || group_size >= inputs);
  }
  bool has_whole_halves() const { return bits == 4 && has_whole_vectors() && inputs % (2 * group_size) == 0; }
};

// The codes of a row as numbers from 0 to 2^bits - 1, one after the other, for any sizes.
void unpack(const Weight& weight, int64_t row, uint8_t* codes) {
  const uint8_t* bytes = weight.row(row);
  std::fill(codes, codes + weight.inputs, weight.bits == 8 ? 128 : 0);
  for (int width = 8, shift = 0; width; width /= 2) {
    if (!(weight.bits & width)) continue;
    const int64_t length = weight.part_bytes(width);
    for (int64_t k = 0; k < weight.inputs; ++k) {
      const int part = (bytes[k % length] >> (k / length * width)) & ((1 << width) - 1);
      codes[k] ^= static_cast<uint8_t>(part << shift);
    }
    bytes += length, shift += width;
  }
}

// Reads a part of WIDTH bits of the codes of a row, LANES columns at a time. Byte k has those of columns k, n + k,
// 2 n + k, ..., from the low bits up.
template <int WIDTH>
struct PartReader {
  const uint8_t* bytes;
  int64_t length, offset = 0;
  int place = 0;

  PartReader(const Weight& weight, const uint8_t*& next) : bytes(next), length(weight.part_bytes(WIDTH)) {
    next += length;
  }

  Ints take() {
    const Ints part = bits_at(load_codes(bytes + offset), place, (1 << WIDTH) - 1);
    offset += LANES;
    if (offset == length) offset = 0, place += WIDTH;
    return part;
  }
};

// Reads the codes of a row, LANES columns at a time, if all sizes are multiples of these.
template <int BITS>
struct RowReader {
  const uint8_t* next;
  PartReader<4> quads;
  PartReader<2> pairs;
  PartReader<1> singles;

  RowReader(const Weight& weight, int64_t row)
      : next(weight.row(row)), quads(part<4>(weight)), pairs(part<2>(weight)), singles(part<1>(weight)) {}

  template <int WIDTH>
  PartReader<WIDTH> part(const Weight& weight) {
    const uint8_t* unused = next;
    return PartReader<WIDTH>(weight, BITS & WIDTH ? next : unused);
  }

  Ints take() {
    if constexpr (BITS == 8) {
      next += LANES;
      return load_codes(next - LANES, _mm_set1_epi8(-128));
    }
    Ints codes = no_bits();
    if constexpr ((BITS & 4) != 0) codes = quads.take();
    if constexpr ((BITS & 2) != 0) codes = with_bits(codes, pairs.take(), BITS & 4);
    if constexpr ((BITS & 1) != 0) codes = with_bits(codes, singles.take(), BITS & 6);
    return codes;
  }
};

// The numbers of a group, scale * (code - zero).
struct Grid {
  float scale, offset;
  Grid(const Weight& weight, int64_t row, int64_t group)
      : scale(weight.scale(row, group)), offset(-scale * weight.zero(row, group)) {}
  Floats operator()(Ints codes) const { return multiply_add(as_floats(codes), all(scale), all(offset)); }
  float operator()(int code) const { return static_cast<float>(code) * scale + offset; }
};

// The numbers of a group of 4 bits; bits of a code above these are ignored.
struct SmallGrid {
#ifdef __AVX512F__
  Floats numbers;
  explicit SmallGrid(const Grid& grid) : numbers(grid(lanes())) {}
  Floats operator()(Ints codes) const { return _mm512_permutexvar_ps(codes, numbers); }
#else
  Grid grid;
  explicit SmallGrid(const Grid& grid) : grid(grid) {}
  Floats operator()(Ints codes) const { return grid(_mm256_and_si256(codes, _mm256_set1_epi32(15))); }
#endif
};

// The products of a row of the weight with ROWS rows of x, from unpacked codes.
template <int ROWS>
void multiply_row(const Weight& weight, int64_t row, const uint8_t* __restrict codes, const float* __restrict x,
                  float* __restrict products) {
  Floats sums[ROWS][2];
  for (auto& pair : sums) pair[0] = pair[1] = all(0);
  float rests[ROWS] = {};
  for (int64_t group = 0, k = 0; k < weight.inputs; ++group) {
    const Grid grid(weight, row, group);
    const int64_t end = std::min(k + weight.group_size, weight.inputs);
    for (; k + 2 * LANES <= end; k += 2 * LANES) {
      for (int half = 0; half < 2; ++half) {
        const Floats numbers = grid(load_codes(codes + k + half * LANES));
        for (int r = 0; r < ROWS; ++r)
          sums[r][half] = multiply_add(numbers, load(x + r * weight.inputs + k + half * LANES), sums[r][half]);
      }
    }
    for (; k < end; ++k)
      for (int r = 0; r < ROWS; ++r) rests[r] += grid(codes[k]) * x[r * weight.inputs + k];
  }
  for (int r = 0; r < ROWS; ++r) products[r] = rests[r] + sum_of(sums[r][0]) + sum_of(sums[r][1]);
}

// The same from the bytes of a row.
template <int BITS, int ROWS>
void multiply_bytes(const Weight& weight, int64_t row, const float* __restrict x, float* __restrict products) {
  RowReader<BITS> reader(weight, row);
  Floats sums[ROWS][2];
  for (auto& pair : sums) pair[0] = pair[1] = all(0);
  for (int64_t group = 0, k = 0; k < weight.inputs; ++group) {
    const Grid grid(weight, row, group);
    for (const int64_t end = std::min(k + weight.group_size, weight.inputs); k < end; k += 2 * LANES) {
      for (int half = 0; half < 2; ++half) {
        const Floats numbers = grid(reader.take());
        for (int r = 0; r < ROWS; ++r)
          sums[r][half] = multiply_add(numbers, load(x + r * weight.inputs + k + half * LANES), sums[r][half]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) products[r] = sum_of(sums[r][0]) + sum_of(sums[r][1]);
}

// The same from bytes with two codes of 4 bits.
template <int ROWS>
void multiply_halves(const Weight& weight, int64_t row, const float* __restrict x, float* __restrict products) {
  const int64_t half = weight.inputs / 2, groups = half / weight.group_size;
  const uint8_t* __restrict bytes = weight.row(row);
  Floats sums[ROWS][2];
  for (auto& pair : sums) pair[0] = pair[1] = all(0);
  for (int64_t group = 0, k = 0; group < groups; ++group) {
    const SmallGrid low{Grid(weight, row, group)}, high{Grid(weight, row, groups + group)};
    for (const int64_t end = k + weight.group_size; k < end; k += LANES) {
      const Ints codes = load_codes(bytes + k);
      const Floats numbers[2] = {low(codes), high(high_halves(codes))};
      for (int r = 0; r < ROWS; ++r)
        for (int part = 0; part < 2; ++part)
          sums[r][part] = multiply_add(numbers[part], load(x + r * weight.inputs + part * half + k), sums[r][part]);
    }
  }
  for (int r = 0; r < ROWS; ++r) products[r] = sum_of(sums[r][0]) + sum_of(sums[r][1]);
}

// A row of the weight, in float32 or bfloat16, from its bytes.
template <int BITS, class Number>
void expand_bytes(const Weight& weight, int64_t row, Number* __restrict numbers) {
  RowReader<BITS> reader(weight, row);
  for (int64_t group = 0, k = 0; k < weight.inputs; ++group) {
    const Grid grid(weight, row, group);
    for (const int64_t end = std::min(k + weight.group_size, weight.inputs); k < end; k += LANES)
      store(numbers + k, grid(reader.take()));
  }
}

#ifdef __AVX512BF16__
// The same in bfloat16 from bytes with two codes of 4 bits, which are places in a table of 16 numbers.
void expand_halves(const Weight& weight, int64_t row, uint16_t* __restrict numbers) {
  const int64_t half = weight.inputs / 2, groups = half / weight.group_size;
  const uint8_t* __restrict bytes = weight.row(row);
  const auto table = [&](int64_t group) {
    const auto halves = (__m256i)_mm512_cvtneps_pbh(SmallGrid(Grid(weight, row, group)).numbers);
    return _mm512_broadcast_i64x4(halves);  // Bits of a code above the fourth then do not count.
  };
  for (int64_t group = 0, k = 0; group < groups; ++group) {
    const Ints low = table(group), high = table(groups + group);
    for (const int64_t end = k + weight.group_size; k < end; k += 2 * LANES) {
      const Ints codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + k)));
      _mm512_storeu_si512(numbers + k, _mm512_permutexvar_epi16(codes, low));
      _mm512_storeu_si512(numbers + half + k, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), high));
    }
  }
}
#endif

// Calls a function template for the number of bits of a weight.
template <class Call>
void with_bits_of(const Weight& weight, Call call) {
  switch (weight.bits) {
    case 2: return call(std::integral_constant<int, 2>());
    case 3: return call(std::integral_constant<int, 3>());
    case 4: return call(std::integral_constant<int, 4>());
    case 5: return call(std::integral_constant<int, 5>());
    case 6: return call(std::integral_constant<int, 6>());
    case 7: return call(std::integral_constant<int, 7>());
    default: return call(std::integral_constant<int, 8>());
  }
}

// The products of a row of the weight with ROWS rows of x; `codes` is the unpacked row where sizes do not fill vectors.
template <int ROWS>
void multiply(const Weight& weight, int64_t row, const uint8_t* codes, const float* x, float* products) {
  if (!weight.has_whole_vectors()) return multiply_row<ROWS>(weight, row, codes, x, products);
  if (weight.has_whole_halves()) return multiply_halves<ROWS>(weight, row, x, products);
  with_bits_of(weight, [&](auto bits) { multiply_bytes<decltype(bits)::value, ROWS>(weight, row, x, products); });
}

// A row of the weight, in float32 or bfloat16; `codes` is memory for a row of codes.
template <class Number>
void expand(const Weight& weight, int64_t row, uint8_t* codes, Number* numbers) {
#ifdef __AVX512BF16__
  if constexpr (std::is_same<Number, uint16_t>::value)
    if (weight.has_whole_halves()) return expand_halves(weight, row, numbers);
#endif
  if (weight.has_whole_vectors())
    return with_bits_of(weight, [&](auto bits) { expand_bytes<decltype(bits)::value>(weight, row, numbers); });
  unpack(weight, row, codes);
  for (int64_t group = 0, k = 0; k < weight.inputs; ++group) {
    const Grid grid(weight, row, group);
    for (const int64_t end = std::min(k + weight.group_size, weight.inputs); k < end; ++k)
      store_one(numbers + k, grid(codes[k]));
  }
}

// The products of 8-bit integers with ROWS rows of x, which are `length` numbers each.
template <int ROWS>
void multiply_integers(const int8_t* __restrict integers, int64_t length, const float* __restrict x,
                       float* __restrict products) {
  Floats sums[ROWS];
  for (auto& sum : sums) sum = all(0);
  int64_t k = 0;
  for (; k + LANES <= length; k += LANES) {
    const Floats numbers = as_floats(load(integers + k));
    for (int r = 0; r < ROWS; ++r) sums[r] = multiply_add(numbers, load(x + r * length + k), sums[r]);
  }
  for (int r = 0; r < ROWS; ++r) products[r] = sum_of(sums[r]);
  for (; k < length; ++k)
    for (int r = 0; r < ROWS; ++r) products[r] += static_cast<float>(integers[k]) * x[r * length + k];
}

constexpr int64_t BLOCK = 4;  // rows of x that are multiplied at once

// Calls a function template for blocks of rows, with the first of each. Two or three rows that are left are a block too.
template <class Call>
void by_blocks(int64_t rows, Call call) {
  int64_t r = 0;
  for (; r + 1 < rows; r += BLOCK) call(std::integral_constant<int, BLOCK>(), r);
  if (r < rows) call(std::integral_constant<int, 1>(), r);
}

// How many rows the blocks read.
int64_t padded(int64_t rows) { return rows % BLOCK > 1 ? (rows / BLOCK + 1) * BLOCK : rows; }

// Calls a function for parts of a range that share no number, each in one thread.
template <class Call>
void in_threads(int64_t count, int threads, Call call) {
  if (threads < 2) return call(0, count);  // OpenMP takes longer to start than a small product takes.
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int thread = 0; thread < threads; ++thread) call(count * thread / threads, count * (thread + 1) / threads);
}

// y (rows, outputs) = x (rows, inputs) W^T + bias; x has padded(rows) rows.
void product(const Weight& weight, const float* bias, const float* x, int64_t rows, float* y, int threads) {
  const int64_t inputs = weight.inputs, outputs = weight.outputs, rank = weight.rank;
  std::vector<float> inner(padded(rows) * rank);  // x R^T diag(c)
  if (rank) in_threads(rank, threads, [&](int64_t first, int64_t last) {
    for (int64_t term = first; term < last; ++term) {
      by_blocks(rows, [&](auto block, int64_t r) {
        float products[BLOCK];
        multiply_integers<block()>(weight.right + term * inputs, inputs, x + r * inputs, products);
        const float scale = from_bfloat16(weight.factor_scales[term]);
        for (int i = 0; i < block(); ++i) inner[(r + i) * rank + term] = products[i] * scale;
      });
    }
  });
  in_threads(outputs, threads, [&](int64_t first, int64_t last) {
    std::vector<uint8_t> codes(weight.has_whole_vectors() ? 0 : inputs);
    for (int64_t row = first; row < last; ++row) {
      if (weight.packed && !codes.empty()) unpack(weight, row, codes.data());
      by_blocks(rows, [&](auto block, int64_t r) {
        float products[BLOCK] = {}, corrections[BLOCK] = {};
        if (weight.packed) multiply<block()>(weight, row, codes.data(), x + r * inputs, products);
        if (rank) multiply_integers<block()>(weight.left + row * rank, rank, inner.data() + r * rank, corrections);
        for (int i = 0; i < block() && r + i < rows; ++i)
          y[(r + i) * outputs + row] = products[i] + corrections[i] + (bias ? bias[row] : 0.0f);
      });
    }
  });
}

// Numbers in float32, and zeros after them.
std::vector<float> floats_of(const uint16_t* halves, int64_t count, int64_t zeros = 0) {
  std::vector<float> numbers(halves ? count + zeros : 0);
  for (int64_t i = 0; halves && i < count; ++i) numbers[i] = from_bfloat16(halves[i]);
  return numbers;
}

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
// Products in bfloat16 by the tiles of AMX: 16 rows of the weight, 32 columns and 16 rows of x in an instruction.
constexpr int64_t TILE = 16, STEP = 32, TILE_NUMBERS = TILE * STEP;

struct alignas(64) Line {  // of a tile, so that none is in two lines of the cache
  uint16_t numbers[STEP];
};

struct alignas(64) TileSizes {
  uint8_t palette = 1, unused[15] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Completes writes to memory, because gcc does not know that loads of tiles read it.
inline void complete(const void* memory) { asm volatile("" ::"r"(memory) : "memory"); }

// x (rows, inputs) as tiles: a line of a tile has two neighbouring columns of 16 rows. `steps` tiles make 16 rows.
std::vector<Line> tiles_of(const uint16_t* x, int64_t rows, int64_t inputs, int64_t steps) {
  std::vector<Line> tiles((rows + TILE - 1) / TILE * steps * TILE);
  const Ints starts = _mm512_mullo_epi32(lanes(), _mm512_set1_epi32(static_cast<int>(inputs / 2)));
  for (int64_t first = 0; first < rows; first += TILE) {
    const auto there = static_cast<__mmask16>((1 << std::min(TILE, rows - first)) - 1);
    Line* line = tiles.data() + first / TILE * steps * TILE;
    for (int64_t k = 0; k < inputs; k += 2, ++line)
      _mm512_store_si512(line, _mm512_mask_i32gather_epi32(no_bits(), there, starts, x + first * inputs + k, 4));
  }
  return tiles;
}

// The columns of 16 lines of 16 numbers.
inline void transpose(const float* numbers, Floats (&columns)[TILE]) {
  Floats a[TILE], b[TILE];
  for (int i = 0; i < TILE; ++i) a[i] = load(numbers + i * TILE);
  for (int i = 0; i < TILE; i += 2)
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  for (int i = 0; i < TILE; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const auto first = _mm512_castps_pd(b[i + j]), second = _mm512_castps_pd(b[i + 2 + j]);
      a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(first, second));
      a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(first, second));
    }
  }
  // Four neighbouring numbers of a[4 i + j] are of lines 4 i to 4 i + 3, and of columns j, 4 + j, 8 + j and 12 + j.
  for (int j = 0; j < 4; ++j) {
    const Floats even[] = {_mm512_shuffle_f32x4(a[j], a[4 + j], 0x88), _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0x88)};
    const Floats odd[] = {_mm512_shuffle_f32x4(a[j], a[4 + j], 0xdd), _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0xdd)};
    columns[j] = _mm512_shuffle_f32x4(even[0], even[1], 0x88);
    columns[4 + j] = _mm512_shuffle_f32x4(odd[0], odd[1], 0x88);
    columns[8 + j] = _mm512_shuffle_f32x4(even[0], even[1], 0xdd);
    columns[12 + j] = _mm512_shuffle_f32x4(odd[0], odd[1], 0xdd);
  }
}

// The products of a matrix, whose rows write(row, numbers) writes, with the first `columns` columns of x as tiles, 32
// rows of the matrix and 16 of x at a time: finish(row, first row of x, products), (32, 16).
template <class Write, class Finish>
void by_tiles(int64_t outputs, int64_t columns, const std::vector<Line>& x, int64_t steps, int threads, Write write,
              Finish finish) {
  in_threads((outputs + 2 * TILE - 1) / (2 * TILE), threads, [&](int64_t start, int64_t end) {
    const TileSizes sizes;
    complete(&sizes);
    complete(x.data());
    _tile_loadconfig(&sizes);
    // Lines of a tile at a distance of a power of two would displace each other in the cache.
    const int64_t stride = columns + STEP, blocks = x.size() / (steps * TILE);
    std::vector<Line> lines(2 * TILE * stride / STEP);
    uint16_t* numbers = lines.data()->numbers;
    alignas(64) float products[4 * TILE * TILE];
    for (int64_t row = 2 * TILE * start; row < std::min(2 * TILE * end, outputs); row += 2 * TILE) {
      for (int64_t i = 0; i < std::min(2 * TILE, outputs - row); ++i) write(row + i, numbers + i * stride);
      complete(numbers);
      for (int64_t block = 0; block < blocks; block += 2) {
        const bool has_two = block + 1 < blocks;
        const uint16_t* tile = x.data()->numbers + block * steps * TILE_NUMBERS;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < columns; k += STEP, tile += TILE_NUMBERS) {
          _tile_loadd(6, tile, 64);
          _tile_loadd(4, numbers + k, 2 * stride);
          _tile_dpbf16ps(0, 4, 6);
          _tile_loadd(5, numbers + TILE * stride + k, 2 * stride);
          _tile_dpbf16ps(1, 5, 6);
          if (!has_two) continue;
          _tile_loadd(7, tile + steps * TILE_NUMBERS, 64);
          _tile_dpbf16ps(2, 4, 7);
          _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, products, 64);
        _tile_stored(1, products + TILE * TILE, 64);
        _tile_stored(2, products + 2 * TILE * TILE, 64);
        _tile_stored(3, products + 3 * TILE * TILE, 64);
        finish(row, block * TILE, products);
        if (has_two) finish(row, (block + 1) * TILE, products + 2 * TILE * TILE);
      }
    }
    _tile_release();
  });
}

// y (rows, outputs) = x (rows, inputs) W^T + bias, of a weight that has whole vectors. The product of x with the right
// factor is rounded to bfloat16, and more columns of x.
void tile_product(const Weight& weight, const uint16_t* bias, const uint16_t* x, int64_t rows, uint16_t* y, int threads) {
  const int64_t inputs = weight.inputs, outputs = weight.outputs, rank = weight.rank;
  const int64_t steps = inputs / STEP + (rank + STEP - 1) / STEP;
  auto tiles = tiles_of(x, rows, inputs, steps);
  const auto biases = floats_of(bias, outputs);
  const auto write_integers = [](const int8_t* integers, int64_t count, uint16_t* numbers) {
    for (int64_t i = 0; i < count; ++i) store_one(numbers + i, integers[i]);
  };
  if (rank) by_tiles(rank, inputs, tiles, steps, threads,
    [&](int64_t term, uint16_t* numbers) { write_integers(weight.right + term * inputs, inputs, numbers); },
    [&](int64_t first, int64_t block, const float* products) {
      for (int64_t term = first; term < std::min(first + 2 * TILE, rank); ++term) {
        uint16_t* line = tiles.data()->numbers + (block / TILE * steps + inputs / STEP + term / STEP) * TILE_NUMBERS;
        line += term % STEP / 2 * 2 * TILE + term % 2;
        const float scale = from_bfloat16(weight.factor_scales[term]);
        for (int64_t i = 0; i < TILE; ++i) store_one(line + 2 * i, scale * products[(term - first) * TILE + i]);
      }
    });
  by_tiles(outputs, steps * STEP, tiles, steps, threads,
    [&](int64_t row, uint16_t* numbers) {
      expand(weight, row, nullptr, numbers);
      write_integers(weight.left + row * rank, rank, numbers + inputs);
    },
    [&](int64_t row, int64_t block, const float* products) {
      for (int64_t first = row; first < std::min(row + 2 * TILE, outputs); first += TILE, products += TILE * TILE) {
        const auto there = static_cast<__mmask16>((1 << std::min(TILE, outputs - first)) - 1);
        const Floats added = bias ? _mm512_maskz_loadu_ps(there, biases.data() + first) : all(0);
        Floats numbers[TILE];
        transpose(products, numbers);
        for (int64_t i = 0; i < std::min(TILE, rows - block); ++i) {
          const auto halves = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(numbers[i], added));
          _mm256_mask_storeu_epi16(y + (block + i) * outputs + first, there, halves);
        }
      }
    });
}
#endif

}  // namespace

extern "C" {

// Whether the system lets this process use tiles, and they take a weight.
int panther_has_tiles(const Weight* weight) {
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
  constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool is_allowed = syscall(SYS_arch_prctl, request, tile_data) == 0;
  return is_allowed && weight->packed && weight->has_whole_vectors();
#else
  return 0;
#endif
}

// The product in bfloat16 by tiles, which rounds the weight to bfloat16.
void panther_tile_product(const Weight* weight, const uint16_t* bias, const uint16_t* x, int64_t rows, uint16_t* y,
                          int threads) {
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
  tile_product(*weight, bias, x, rows, y, threads);
#endif
}

// The product in float32.
void panther_product(const Weight* weight, const float* bias, const float* x, int64_t rows, float* y, int threads) {
  std::vector<float> numbers;
  if (padded(rows) != rows) {
    numbers.assign(x, x + rows * weight->inputs);
    numbers.resize(padded(rows) * weight->inputs);
    x = numbers.data();
  }
  product(*weight, bias, x, rows, y, threads);
}

// The product in bfloat16, with sums in float32.
void panther_half_product(const Weight* weight, const uint16_t* bias, const uint16_t* x, int64_t rows, uint16_t* y,
                          int threads) {
  const int64_t inputs = weight->inputs;
  const auto numbers = floats_of(x, rows * inputs, (padded(rows) - rows) * inputs);
  const auto biases = floats_of(bias, weight->outputs);
  std::vector<float> products(rows * weight->outputs);
  product(*weight, bias ? biases.data() : nullptr, numbers.data(), rows, products.data(), threads);
  for (const float number : products) store_one(y++, number);
}

// Rows of the weight from `first` to `last`, in float32 or bfloat16.
void panther_expand(const Weight* weight, int64_t first, int64_t last, void* numbers, int is_half, int threads) {
  in_threads(last - first, threads, [&](int64_t start, int64_t end) {
    std::vector<uint8_t> codes(weight->has_whole_vectors() ? 0 : weight->inputs);
    for (int64_t row = start; row < end; ++row) {
      const int64_t offset = row * weight->inputs;
      if (is_half) expand(*weight, first + row, codes.data(), static_cast<uint16_t*>(numbers) + offset);
      else expand(*weight, first + row, codes.data(), static_cast<float*>(numbers) + offset);
    }
  });
}

}  // extern "C"

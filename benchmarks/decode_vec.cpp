// A decode step on at::vec: the same pass as src/regard/paths/decode_code.py, float32, one query, up to 4 query heads of
// a key/value head. Built by benchmarks/compilers.py, which compares it.
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/extension.h>

#include <algorithm>
#include <cmath>
#include <limits>

using Vec = at::vec::Vectorized<float>;
constexpr int64_t LANES = Vec::size(), BLOCK = 96;

static float sum(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, x);
}

template <int ROWS, int LENGTH>
static void attend(const float* q, const float* k, int64_t k_token, const float* v, int64_t v_token, int64_t keys,
                   float scale, float* out, float* tops, float* totals) {
  constexpr int WIDTH = LENGTH / LANES;
  float weights[ROWS][BLOCK];
  std::fill(out, out + ROWS * LENGTH, 0.f);
  std::fill(tops, tops + ROWS, std::numeric_limits<float>::lowest());
  std::fill(totals, totals + ROWS, 0.f);
  for (int64_t start = 0; start < keys; start += BLOCK) {
    const int64_t count = std::min(BLOCK, keys - start);
    for (int64_t s = 0; s < count; ++s) {
      const float* key = k + (start + s) * k_token;
      for (int64_t line = 0; line < LENGTH; line += 16) __builtin_prefetch(v + (start + s) * v_token + line);
      Vec products[ROWS];
      for (auto& product : products) product = Vec(0);
#pragma GCC unroll 16
      for (int i = 0; i < WIDTH; ++i) {
        const Vec x = Vec::loadu(key + i * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r)
          products[r] = at::vec::fmadd(Vec::loadu(q + r * LENGTH + i * LANES), x, products[r]);
      }
      for (int r = 0; r < ROWS; ++r) weights[r][s] = sum(products[r]) * scale;
    }
    float fading[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      const float top = std::max(tops[r], *std::max_element(weights[r], weights[r] + count));
      std::fill(weights[r] + count, weights[r] + BLOCK, -std::numeric_limits<float>::infinity());
      Vec total(0);
      for (int64_t s = 0; s < count; s += LANES) {
        const Vec weight = (Vec::loadu(weights[r] + s) - Vec(top)).exp_u20();
        weight.store(weights[r] + s);
        total = total + weight;
      }
      fading[r] = std::exp(tops[r] - top);
      tops[r] = top;
      totals[r] = totals[r] * fading[r] + sum(total);
    }
    constexpr int COLUMNS = std::min<int>(WIDTH, LANES / ROWS);  // as many sums as registers hold
    for (int first = 0; first < WIDTH; first += COLUMNS) {
      Vec sums[ROWS][COLUMNS];
      for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < COLUMNS; ++i)
          sums[r][i] = Vec::loadu(out + r * LENGTH + (first + i) * LANES) * Vec(fading[r]);
      for (int64_t s = 0; s < count; ++s)
#pragma GCC unroll 16
        for (int i = 0; i < COLUMNS; ++i) {
          const Vec x = Vec::loadu(v + (start + s) * v_token + (first + i) * LANES);
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r) sums[r][i] = at::vec::fmadd(Vec(weights[r][s]), x, sums[r][i]);
        }
      for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < COLUMNS; ++i) sums[r][i].store(out + r * LENGTH + (first + i) * LANES);
    }
  }
}

// q (1, H, 1, D), k and v (1, G, S, D), H = 4 G. Every key/value head is one task; G is a multiple of the threads.
at::Tensor decode(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  constexpr int ROWS = 4;
  const int64_t groups = k.size(1), length = q.size(3);
  TORCH_CHECK(q.size(1) == ROWS * groups && (length == 64 || length == 128), "decode: made for 4 heads of 64 or 128");
  auto out = at::empty_like(q), statistics = at::empty({2, groups, ROWS}, q.options());
  at::parallel_for(0, groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      const auto run = length == 64 ? attend<ROWS, 64> : attend<ROWS, 128>;
      float* totals = statistics.data_ptr<float>() + (groups + g) * ROWS;
      float* sums = out.data_ptr<float>() + g * ROWS * length;
      run(q.data_ptr<float>() + g * ROWS * length, k.data_ptr<float>() + g * k.stride(1), k.stride(2),
          v.data_ptr<float>() + g * v.stride(1), v.stride(2), k.size(2), float(scale), sums,
          statistics.data_ptr<float>() + g * ROWS, totals);
      for (int64_t r = 0; r < ROWS; ++r)
        for (int64_t i = 0; i < length; ++i) sums[r * length + i] /= totals[r];
    }
  });
  return out;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("decode", &decode); }

// SPDX-License-Identifier: Apache-2.0
// The emulated CUDA epilogues against plain loops: epilogue_test forward|backward|shuffled [brief]
//
// What is written for an element equals, bit for bit, what a loop over the elements gives with the same activation;
// sums over rows are compared with sums in double. Every matrix lies in a buffer of its own that ends with its last
// element, so that a sanitizer sees any access beyond it; what is not to be written is looked at too.
#define FUSED_OPS_LEVEL reference
#define FUSED_OPS_HAS_FMA 1

#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/activations.h"
#include "core/cuda/epilogue.cuh"
#include "core/cuda/epilogue.h"
#include "core/dtype.h"

namespace {

using namespace fused_ops;

int failures = 0;
int runs = 0;
bool brief = false;                          // only kBriefActivations, and what planted faults need
constexpr int kBriefActivations[] = {3, 8};  // gelu, and sigmoid, which is differentiated from its output

struct Generator {  // splitmix64
  uint64_t state = 1;
  uint64_t operator()() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
} generator;

template <class Storage>
struct Buffer {
  int64_t elements = 0;
  std::unique_ptr<char[]> memory;
  Storage* data = nullptr;  // null: there is no such matrix

  Buffer() = default;
  Buffer(int64_t elements_, int misalignment)  // in elements, from the multiple of 16 that operator new returns
      : elements(elements_), memory(new char[size_t(elements_ + misalignment) * sizeof(Storage)]) {
    data = reinterpret_cast<Storage*>(memory.get()) + misalignment;
    std::memset(data, 0xff, bytes());  // NaN of every type
  }
  size_t bytes() const { return size_t(elements) * sizeof(Storage); }
  std::vector<Storage> copy() const { return {data, data + elements}; }
  void draw(bool special) {
    constexpr double kSpecial[] = {0.0, -0.0, HUGE_VAL, -HUGE_VAL, NAN, 1e-30, -1e-30, 6e4, -6e4, 20, -20, 3, -3};
    for (int64_t i = 0; i < elements; ++i) {
      double value = double(generator() >> 11) * 0x1p-50 - 4;  // -4 to 4
      if (special && generator() % 4 == 0) value = kSpecial[generator() % (sizeof(kSpecial) / sizeof(double))];
      data[i] = narrow<Storage>(value);
    }
  }
};

template <class Storage>
bool same(Storage a, Storage b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0 || (std::isnan(widen(a)) && std::isnan(widen(b)));
}

enum class Alias { kNone, kInput, kGradOut };  // outputs are their inputs; or the gradient is grad_out

struct Case {
  int activation = 3;
  int64_t rows, columns;
  bool gated = false, bias = true, side_by_side = false, store_pre = true, hidden = true, special = false;
  int misalignment = 0;       // of the matrices
  int bias_misalignment = 0;  // of the biases
  Alias alias = Alias::kNone;

  std::string text(DType dtype, const char* pass) const {
    char text[256];
    std::snprintf(
        text, sizeof(text),
        "%s activation %d dtype %d rows %lld columns %lld%s%s%s%s%s%s misaligned by %d, biases by %d, alias %d", pass,
        activation, int(dtype), static_cast<long long>(rows), static_cast<long long>(columns), gated ? " gated" : "",
        bias ? " bias" : "", side_by_side ? " side by side" : "", store_pre ? " stored" : "", hidden ? " hidden" : "",
        special ? " special" : "", misalignment, bias_misalignment, int(alias));
    return text;
  }
};

void fail(const std::string& what, const char* how) {
  std::printf("FAIL %s: %s\n", what.c_str(), how);
  if (++failures > 20 || brief) std::exit(1);
}

constexpr double kParameters[2] = {0.5, 1.25};  // a slope, an alpha, a beta and threshold, a range: any of them

template <class T>
T value_of(int activation, T x) {
  T result{};
  visit_activation(activation, [&]<class Activation>() {
    result = typename Activation::template Function<T>(kParameters).value(x);
  });
  return result;
}

template <class T>
T chained(int activation, T grad, T saved) {
  T result{};
  visit_activation(activation, [&]<class Activation>() {
    result = chain<Activation>(grad, typename Activation::template Function<T>(kParameters).derivative(saved));
  });
  return result;
}

bool saves_output(int activation) {
  bool result = false;
  visit_activation(activation, [&]<class Activation>() { result = Activation::kSaved == Saved::kOutput; });
  return result;
}

char stream;  // any address

bool succeeded(const std::string& what, int error, size_t launches) {
  ++runs;
  if (error) return fail(what, cudaGetErrorString(cudaError_t(error))), false;
  if (emulation::launches.size() > launches) fail(what, "more launches than expected");
  for (const emulation::Launch& launch : emulation::launches)
    if (launch.stream != &stream) fail(what, "a launch into another stream");
  return true;
}

// Compares columns with what they should be; of a strided matrix also that nothing between them has changed.
template <class Storage>
void compare(const std::string& what, const char* name, const Buffer<Storage>& actual,
             const std::vector<Storage>& expected) {
  for (int64_t i = 0; i < actual.elements; ++i)
    if (!same(actual.data[i], expected[size_t(i)]))
      return fail(what, (std::string(name) + " differs at element " + std::to_string(i)).c_str());
}

template <class T, class Storage>
void check_activate(const Case& c, DType dtype) {
  const std::string what = c.text(dtype, "activate");
  const int64_t stride = c.side_by_side ? 2 * c.columns : c.columns;
  Buffer<Storage> pre(c.rows * stride, c.misalignment), up, bias, up_bias, out;
  if (c.gated && !c.side_by_side) up = Buffer<Storage>(c.rows * stride, c.misalignment), up.draw(c.special);
  if (c.bias) bias = Buffer<Storage>(c.columns, c.bias_misalignment), bias.draw(false);
  if (c.bias && c.gated) up_bias = Buffer<Storage>(c.columns, c.bias_misalignment), up_bias.draw(false);
  pre.draw(c.special);
  const bool in_place = c.alias != Alias::kNone;
  if (!in_place) out = Buffer<Storage>(c.rows * c.columns, c.misalignment);
  Storage* const up_data = !c.gated ? nullptr : c.side_by_side ? pre.data + c.columns : up.data;
  Activate pass{c.activation,
                kParameters,
                dtype,
                c.rows,
                c.columns,
                stride,
                pre.data,
                bias.data,
                up_data,
                up_bias.data,
                in_place ? pre.data : out.data,
                c.store_pre};

  std::vector<Storage> expected_pre = pre.copy(), expected_up = up.copy(), expected_out(size_t(c.rows * c.columns));
  for (int64_t row = 0; row < c.rows; ++row)
    for (int64_t column = 0; column < c.columns; ++column) {
      Storage& x = expected_pre[size_t(row * stride + column)];
      T z = T(widen(x));
      if (c.bias) z += T(widen(bias.data[column]));
      T y = value_of(c.activation, z);
      if (c.store_pre) x = narrow<Storage>(z);
      if (c.gated) {
        Storage& gate = c.side_by_side ? expected_pre[size_t(row * stride + c.columns + column)]
                                       : expected_up[size_t(row * stride + column)];
        T u = T(widen(gate));
        if (c.bias) u += T(widen(up_bias.data[column]));
        if (c.store_pre) gate = narrow<Storage>(u);
        y *= u;
      }
      expected_out[size_t(row * c.columns + column)] = narrow<Storage>(y);
    }

  emulation::launches.clear();
  if (!succeeded(what, cuda::activate(pass, &stream), 1)) return;
  compare(what, "out", in_place ? pre : out, expected_out);
  if (!in_place) compare(what, "pre", pre, expected_pre);
  compare(what, "up", up, expected_up);
}

// The sums of what check_differentiate ran last.
std::vector<char> last_sums;

template <class T, class Storage>
void compare_sums(const std::string& what, const char* name, const Buffer<Storage>& actual, const std::vector<T>& terms,
                  int64_t rows) {
  const int64_t columns = actual.elements;
  const double eps = sizeof(T) == 4 ? 0x1p-23 : 0x1p-52;
  const double storage_eps = sizeof(Storage) == 2 ? (std::is_same_v<Storage, Float16> ? 0x1p-10 : 0x1p-7) : eps;
  for (int64_t column = 0; column < columns; ++column) {
    double sum = 0, magnitude = 0;
    for (int64_t row = 0; row < rows; ++row) {
      sum += double(terms[size_t(row * columns + column)]);
      magnitude += std::abs(double(terms[size_t(row * columns + column)]));
    }
    const double found = double(widen(actual.data[column]));
    const double bound = 2 * eps * std::sqrt(double(rows)) * magnitude + storage_eps * std::abs(sum) + 0x1p-24;
    if (std::isfinite(sum) && std::abs(sum) < 6e4 ? !(std::abs(found - sum) <= bound)
                                                  : std::isnan(sum) && !std::isnan(found))
      return fail(what, (std::string(name) + " differs in column " + std::to_string(column)).c_str());
  }
}

template <class T, class Storage>
void check_differentiate(const Case& c, DType dtype) {
  const std::string what = c.text(dtype, "differentiate");
  const int64_t stride = c.side_by_side ? 2 * c.columns : c.columns;
  const bool over_inputs = c.alias == Alias::kInput, over_grad = c.alias == Alias::kGradOut;
  Buffer<Storage> saved(c.rows * stride, c.misalignment), up, grad_out(c.rows * c.columns, c.misalignment);
  Buffer<Storage> grad_pre, grad_up, hidden, grad_bias, grad_up_bias;
  if (c.gated && !c.side_by_side) up = Buffer<Storage>(c.rows * stride, c.misalignment), up.draw(c.special);
  if (!over_inputs && !over_grad) grad_pre = Buffer<Storage>(c.rows * stride, c.misalignment);
  if (!over_inputs && c.gated && !c.side_by_side) grad_up = Buffer<Storage>(c.rows * stride, c.misalignment);
  if (c.bias) grad_bias = Buffer<Storage>(c.columns, c.bias_misalignment);
  if (c.bias && c.gated) grad_up_bias = Buffer<Storage>(c.columns, c.bias_misalignment);
  saved.draw(c.special);
  grad_out.draw(c.special);
  Buffer<Storage>& pre_target = over_inputs ? saved : over_grad ? grad_out : grad_pre;
  Buffer<Storage>& up_target = over_inputs ? up : grad_up;
  // hidden takes the place of grad_out where the gradient takes that of its inputs, or of `saved`.
  if (c.hidden && c.alias == Alias::kNone) hidden = Buffer<Storage>(c.rows * c.columns, c.misalignment);
  Buffer<Storage>& hidden_target = over_inputs ? grad_out : over_grad ? saved : hidden;

  Differentiate pass{};
  pass.activation = c.activation;
  pass.parameters = kParameters;
  pass.dtype = dtype;
  pass.rows = c.rows, pass.columns = c.columns, pass.stride = stride;
  pass.saved = saved.data;
  pass.up = !c.gated ? nullptr : c.side_by_side ? saved.data + c.columns : up.data;
  pass.grad_out = grad_out.data;
  pass.grad_pre = pre_target.data;
  pass.grad_up = !c.gated ? nullptr : c.side_by_side ? pre_target.data + c.columns : up_target.data;
  pass.hidden = c.hidden ? hidden_target.data : nullptr;
  pass.grad_bias = grad_bias.data;
  pass.grad_up_bias = grad_up_bias.data;
  Buffer<T> workspace(cuda::workspace_bytes(pass) / int64_t(sizeof(T)), 0);
  pass.workspace = workspace.data;

  std::vector<Storage> expected_pre = pre_target.copy(), expected_up = up_target.copy();
  std::vector<Storage> expected_hidden(size_t(c.rows * c.columns));
  std::vector<T> terms(size_t(c.rows * c.columns)), up_terms(terms);
  for (int64_t row = 0; row < c.rows; ++row)
    for (int64_t column = 0; column < c.columns; ++column) {
      const size_t strided = size_t(row * stride + column), dense = size_t(row * c.columns + column);
      const T x = T(widen(saved.data[strided]));
      T y = saves_output(c.activation) ? x : value_of(c.activation, x);
      T g = T(widen(grad_out.data[dense]));
      if (c.gated) {
        const T u = T(widen(static_cast<const Storage*>(pass.up)[strided]));
        up_terms[dense] = g * y;
        (c.side_by_side ? expected_pre[strided + size_t(c.columns)]
                        : expected_up[strided]) = narrow<Storage>(up_terms[dense]);
        g *= u;
        y *= u;
      }
      terms[dense] = chained(c.activation, g, x);
      expected_pre[strided] = narrow<Storage>(terms[dense]);
      expected_hidden[dense] = narrow<Storage>(y);
    }

  emulation::launches.clear();
  if (!succeeded(what, cuda::differentiate(pass, &stream), c.bias ? 2 : 1)) return;
  if (workspace.elements == 0 && emulation::launches.size() > 1) fail(what, "a launch that is not needed");
  compare(what, "grad_pre", pre_target, expected_pre);
  compare(what, "grad_up", up_target, expected_up);
  if (c.hidden) compare(what, "hidden", hidden_target, expected_hidden);
  if (c.bias) compare_sums(what, "grad_bias", grad_bias, terms, c.rows);
  if (c.bias && c.gated) compare_sums(what, "grad_up_bias", grad_up_bias, up_terms, c.rows);
  last_sums.clear();
  for (const Buffer<Storage>* sums : {&grad_bias, &grad_up_bias})
    if (sums->data)
      last_sums.insert(last_sums.end(), reinterpret_cast<char*>(sums->data),
                       reinterpret_cast<char*>(sums->data) + sums->bytes());
}

void check(Case c, DType dtype) {
  visit_dtype(dtype, [&]<class Storage>() {
    using T = std::conditional_t<std::is_same_v<Storage, double>, double, float>;
    check_activate<T, Storage>(c, dtype);
    check_differentiate<T, Storage>(c, dtype);
  });
}

std::vector<DType> dtypes() {
  if (brief) return {DType::kFloat32, DType::kBFloat16};
  return {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
}

std::vector<int> activations() {
  if (brief) return {std::begin(kBriefActivations), std::end(kBriefActivations)};
  std::vector<int> all;
  for (int activation = 0; activation < kActivationCount; ++activation) all.push_back(activation);
  return all;
}

// Every activation on ordinary and on special numbers, on aligned and on misaligned matrices.
void check_activations() {
  for (const int activation : activations())
    for (const DType dtype : dtypes())
      for (const bool gated : {false, true})
        for (const bool special : {false, true})
          for (const int64_t columns : {16, 7}) {
            Case c{.activation = activation, .rows = 37, .columns = columns, .gated = gated, .special = special};
            check(c, dtype);
          }
}

// Every layout, alignment and set of operands.
void check_layouts() {
  int turn = 0;
  const std::vector<int> all = activations();
  for (const DType dtype : dtypes())
    for (const int64_t columns : {24, 10})
      for (const bool gated : {false, true})
        for (const bool side_by_side : {false, true})
          for (const int misalignment : {0, 1, 4})
            for (const int bias_misalignment : {0, 1})
              for (const bool bias : {false, true})
                for (const Alias alias : {Alias::kNone, Alias::kInput, Alias::kGradOut}) {
                  if (alias != Alias::kNone && side_by_side) continue;
                  Case c{.activation = all[size_t(turn) % all.size()], .rows = 19 + turn % 3, .columns = columns};
                  ++turn;
                  c.gated = gated, c.side_by_side = side_by_side, c.bias = bias;
                  c.misalignment = misalignment, c.bias_misalignment = bias_misalignment, c.alias = alias;
                  c.hidden = turn % 3 != 0 || alias != Alias::kNone;
                  c.store_pre = turn % 2 && alias == Alias::kNone;
                  check(c, dtype);
                }
}

// Sizes around what a unit, a warp, a block and a set of blocks hold.
void check_sizes() {
  const std::vector<int> all = activations();
  std::vector<std::pair<int64_t, int64_t>> sizes;
  for (int64_t columns : {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 130, 257})
    for (int64_t rows : {0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 15, 16, 17, 33}) sizes.emplace_back(rows, columns);
  for (int64_t columns : {255, 256, 264, 512, 516, 520, 1024, 1032, 2048, 2056})
    for (int64_t rows : {1, 3, 9, 17}) sizes.emplace_back(rows, columns);
  for (int64_t columns : {1, 2, 4, 8})  // blocks of 128 groups and less
    for (int64_t rows : {63, 64, 65, 127, 128, 129, 511, 512, 513, 1023, 1024, 1025, 2048, 2049})
      sizes.emplace_back(rows, columns);
  for (int64_t columns : {12, 40, 100})
    for (int64_t rows : {335, 336, 337, 700}) sizes.emplace_back(rows, columns);
  for (const auto& [rows, columns] : sizes)
    for (const DType dtype : dtypes()) {
      if (generator() % (brief ? 4 : 2)) continue;
      Case c{.activation = all[generator() % all.size()], .rows = rows, .columns = columns};
      c.gated = generator() % 2, c.side_by_side = generator() % 3 == 0, c.misalignment = generator() % 4 ? 0 : 3;
      check(c, dtype);
    }
}

// The order of the sums depends neither on the order of the threads nor on the alignment.
void check_order_of_sums() {
  const emulation::Order order = emulation::settings.order;
  for (const DType dtype : dtypes())
    for (const auto& [rows, columns] : {std::pair{3000, 8}, {700, 40}, {90, 1032}}) {
      std::vector<std::vector<char>> sums;
      for (const emulation::Order each :
           {emulation::Order::kForward, emulation::Order::kBackward, emulation::Order::kShuffled})
        for (const int misalignment : {0, 1}) {
          emulation::settings.order = each;
          generator.state = 42;
          check({.rows = rows, .columns = columns, .gated = true, .misalignment = misalignment}, dtype);
          sums.push_back(last_sums);
        }
      for (const auto& each : sums)
        if (each != sums[0]) fail("order of sums", "sums differ");
    }
  emulation::settings.order = order;
}

// The last block of matrices of more than 2^31 elements, of which only what that block touches exists.
void check_huge() {
  struct Size {
    int64_t rows, columns;
    DType dtype;
  };
  for (const Size& size : {Size{(int64_t(1) << 21) + 3, 1024, DType::kBFloat16},
                           {1, (int64_t(1) << 33) + 40, DType::kBFloat16},
                           {1, (int64_t(1) << 32) + 9, DType::kFloat32},
                           {(int64_t(1) << 31) + 7, 1, DType::kFloat16}}) {
    if (brief && size.rows > 1) continue;
    const std::string what = "huge " + std::to_string(size.rows) + " x " + std::to_string(size.columns);
    Activate forward{};
    Differentiate backward{};
    forward.activation = backward.activation = kBriefActivations[0];
    forward.parameters = backward.parameters = kParameters;
    forward.dtype = backward.dtype = size.dtype;
    forward.rows = backward.rows = size.rows;
    forward.columns = backward.columns = forward.stride = backward.stride = size.columns;
    cuda::Division division{};
    emulation::settings.before_launch = [&](emulation::Launch& launch) {
      cuda::EpilogueParameters<Activate> parameters;
      std::memcpy(static_cast<void*>(&parameters), launch.parameters.data(), sizeof(parameters));
      division = parameters.division;
    };
    emulation::settings.execute = false;
    if (cuda::activate(forward, &stream) != cudaSuccess) fail(what, "not launched");
    emulation::settings.execute = true;
    emulation::settings.before_launch = nullptr;
    const int64_t first_row = (division.row_blocks - 1) * division.block_rows;
    const int64_t first_column = (division.column_blocks - 1) * int64_t(division.lanes) * division.width;
    const int64_t begin = first_row * size.columns + (size.rows == 1 ? first_column : 0);
    const int64_t elements = size.rows * size.columns - begin;
    visit_dtype(size.dtype, [&]<class Storage>() {
      using T = std::conditional_t<std::is_same_v<Storage, double>, double, float>;
      Buffer<Storage> input(elements, 0), grad_out(elements, 0), out(elements, 0), grad_pre(elements, 0);
      input.draw(false);
      grad_out.draw(false);
      const auto whole = [&](const Buffer<Storage>& part) {
        return reinterpret_cast<void*>(reinterpret_cast<intptr_t>(part.data) - begin * int64_t(sizeof(Storage)));
      };
      forward.pre = whole(input);
      forward.out = whole(out);
      backward.saved = whole(input);
      backward.grad_out = whole(grad_out);
      backward.grad_pre = whole(grad_pre);
      emulation::settings.first_block = -division.column_blocks;
      if (size.rows == 1) emulation::settings.first_block = -1;
      if (cuda::activate(forward, &stream) || cuda::differentiate(backward, &stream)) fail(what, "an error");
      emulation::settings.first_block = 0;
      for (int64_t i = 0; i < elements; ++i) {
        const T x = T(widen(input.data[i])), grad = T(widen(grad_out.data[i]));
        if (!same(out.data[i], narrow<Storage>(value_of(forward.activation, x)))) return fail(what, "out differs");
        if (!same(grad_pre.data[i], narrow<Storage>(chained(forward.activation, grad, x))))
          return fail(what, "grad_pre differs");
      }
    });
  }
}

// Sixteen-byte accesses wherever the alignment allows them, but for biases.
void check_widths() {
  for (const DType dtype : dtypes())
    for (const int64_t columns : {64, 1024}) {
      emulation::narrow_accesses = 0;
      check({.rows = 64, .columns = columns, .gated = true, .bias = false}, dtype);
      if (emulation::narrow_accesses != 0) fail("widths", "accesses of fewer than 16 bytes");
    }
}

// The bytes that a forward pass moves: the matrix read and written once without gradients, and with them the
// pre-activation written too.
void check_traffic() {
  constexpr int64_t kRows = 64, kColumns = 1024;
  for (const bool training : {false, true}) {
    std::vector<float> pre(kRows * kColumns, 0.5f), bias(kColumns, 0.25f), out(kRows * kColumns);
    Activate forward{};
    forward.activation = kBriefActivations[0];
    forward.parameters = kParameters;
    forward.rows = kRows, forward.columns = forward.stride = kColumns;
    forward.pre = pre.data(), forward.bias = bias.data();
    forward.out = training ? out.data() : pre.data();
    forward.store_pre = training;
    emulation::wide_accesses = 0;
    if (cuda::activate(forward, &stream)) fail("traffic", "an error");
    const int64_t matrices = 16 * emulation::wide_accesses / (kRows * kColumns * int64_t(sizeof(float)));
    if (matrices != (training ? 3 : 2)) fail("traffic", "another number of bytes moved");
  }
}

// The error of a launch, of whichever launch it is, comes back.
void check_errors() {
  std::vector<float> matrix(64 * 1024), sums(1024), workspace(64 * 1024);
  Activate forward{3,       kParameters, DType::kFloat32, 64,   1024, 1024, matrix.data(), nullptr,
                   nullptr, nullptr,     matrix.data(),   false};
  emulation::settings.fail_with = cudaErrorInvalidConfiguration;
  if (cuda::activate(forward, nullptr) != cudaErrorInvalidConfiguration) fail("activate", "a failure is not reported");
  Differentiate backward{};
  backward.activation = 3;
  backward.parameters = kParameters;
  backward.rows = 64, backward.columns = backward.stride = 1024;
  backward.saved = backward.grad_out = backward.grad_pre = matrix.data();
  backward.grad_bias = sums.data();
  backward.workspace = workspace.data();
  for (int failing = 0; failing < 2; ++failing) {
    emulation::settings.before_launch = [](emulation::Launch&) {
      emulation::settings.fail_with = cudaErrorInvalidConfiguration;  // of the next launch
    };
    if (failing == 0) emulation::settings.fail_with = cudaErrorInvalidConfiguration;
    emulation::launches.clear();
    if (cuda::differentiate(backward, nullptr) != cudaErrorInvalidConfiguration ||
        emulation::launches.size() != size_t(failing))
      fail("differentiate", "a failure is not reported");
    emulation::settings.before_launch = nullptr;
    emulation::settings.fail_with = cudaSuccess;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string order = argc > 1 ? argv[1] : "forward";
  emulation::settings.order = order == "backward"   ? emulation::Order::kBackward
                              : order == "shuffled" ? emulation::Order::kShuffled
                                                    : emulation::Order::kForward;
  brief = argc > 2;
  check_errors();
  check_widths();
  check_traffic();
  check_huge();
  check_activations();
  check_order_of_sums();
  check_layouts();
  check_sizes();
  std::printf("%d passes, %d failures\n", runs, failures);
  return failures != 0;
}
